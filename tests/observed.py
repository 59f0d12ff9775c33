"""An engine's steps as vLLM's scheduler told them in a recorded run, and what was exported of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from queries import Samples
from stubs import LLAMA, V32

from sparse_attn import env
from sparse_attn.serving.exposition import parse

__all__ = ["LLAMA", "V32"]
prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

STEPS = json.loads((Path(__file__).parent / "data" / "vllm_steps.json").read_text())


def outputs() -> list[Any]:
    """``SchedulerOutput`` of each step, as far as it was recorded."""
    return [
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n) for r, n in step["new"]],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r for r, _ in step["cached"]], num_computed_tokens=[n for _, n in step["cached"]]
            ),
            num_scheduled_tokens=step["scheduled"],
            finished_req_ids=set(step["finished"]),
        )
        for step in [*STEPS, dict(new=[], cached=[], scheduled={}, finished=["4", "5", "6"])]
    ]


class Scheduler:
    """What the hook touches of vLLM's."""

    def __init__(self, config: dict[str, Any], cache_dtype: str = "auto", layers: tuple[str, ...] = ()) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(to_dict=lambda: config), served_model_name=["served", "alias"]
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(data_parallel_index=3),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=layers)])
        self.updates: list[Any] = []

    def schedule(self) -> Any:
        return outputs()[len(self.updates)]

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> str:
        self.updates.append((scheduler_output, model_output))
        return "outputs"


INDEXED = ("model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of this test alone, and vLLM's own platform."""
    found = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", found)
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_out_of_tree=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    yield found
    env.reset()


def exported(registry: Any) -> Samples:
    return parse(prometheus_client.generate_latest(registry).decode())


def value(found: Samples, name: str, **labels: str) -> float:
    (number,) = [v for n, had, v in found if n == name and {k: had.get(k) for k in labels} == labels]
    return number


def computed() -> list[tuple[str, int, int]]:
    """Phase, and length with itself, of each token that was computed; by the record alone."""
    found = []
    for number, step in enumerate(STEPS):
        for request, before in [*step["new"], *step["cached"]]:
            tokens = step["scheduled"][request]
            phase = "decode" if before and tokens == 1 else "prefill"
            found += [(phase, number, before + i + 1) for i in range(tokens)]
    return found
