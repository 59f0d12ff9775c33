"""Observe mode for SGLang, and through ms_service_metric, against the interfaces that these document."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from importlib import metadata, reload
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from observed import (
    INDEXED,
    LLAMA,
    STEPS,
    V32,
    Scheduler,
    computed,
    exported,
    outputs,
    prometheus_client,
    registry,
    value,
)

from sparse_attn.integrations.sglang import observe as sglang
from sparse_attn.integrations.vllm_ascend import service_metric
from sparse_attn.serving.exposition import parse

__all__ = ["registry"]
ROOT = Path(__file__).parents[1]


# --- SGLang ----------------------------------------------------------------------------------------------------------


class Mode(Enum):
    EXTEND, DECODE, IDLE = range(3)

    def is_extend(self) -> bool:
        return self is Mode.EXTEND

    def is_decode(self) -> bool:
        return self is Mode.DECODE


class Lengths(list):
    """A tensor on the host."""

    def tolist(self) -> list[int]:
        return list(self)


class Request:
    def __init__(self, rid: str) -> None:
        self.rid, self.done = rid, False

    def finished(self) -> bool:
        return self.done


class SGLangScheduler:
    """What the hook touches of SGLang's."""

    def __init__(self, speculative: bool = False) -> None:
        self.server_args = SimpleNamespace(served_model_name="served", kv_cache_dtype="auto")
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: V32))
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not speculative)

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> str:
        return "result"

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            request.done = request.rid in batch.last


@pytest.fixture
def hooks(registry: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry of hooks, applied as its documentation says; and the ranks of the process."""
    found: dict[str, Any] = {}

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any) -> None:
            assert hook_type == "after"
            found[target.removeprefix("sglang.srt.managers.scheduler.Scheduler.")] = hook

    ranks = SimpleNamespace(attn_tp_rank=0, pp_size=1, dp_rank=2)
    modules = {
        "sglang.srt.plugins.hook_registry": dict(HookRegistry=HookRegistry, HookType=SimpleNamespace(AFTER="after")),
        "sglang.srt.runtime_context": dict(get_parallel=lambda: ranks),
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    sglang.register()
    return SimpleNamespace(ranks=ranks, **found)


def after(hook: Any, method: Any, *args: Any) -> Any:
    """A method with a hook that runs after it: what the hook returns replaces the result, unless that is None."""
    result = method(*args)
    changed = hook(result, method.__self__, *args)
    return result if changed is None else changed


def batches() -> list[Any]:
    """The recorded steps as SGLang forms them: a step is all decode, or its decoding requests are in a mixed one."""
    found = []
    for number, step in enumerate(STEPS):
        rows = [(r, before, step["scheduled"][r]) for r, before in [*step["new"], *step["cached"]]]
        ended = STEPS[number + 1]["finished"] if number + 1 < len(STEPS) else ["4", "5", "6"]
        batch = SimpleNamespace(reqs=[Request(r) for r, _, _ in rows], last=ended)
        if all(before and tokens == 1 for _, before, tokens in rows):
            batch.forward_mode, batch.seq_lens_cpu = Mode.DECODE, Lengths(before + 1 for _, before, _ in rows)
        else:
            batch.forward_mode = Mode.EXTEND
            batch.prefix_lens, batch.extend_lens = [b for _, b, _ in rows], [t for _, _, t in rows]
        found.append(batch)
    idle = SimpleNamespace(reqs=[], last=[], forward_mode=Mode.IDLE)
    return [*found, idle]


def run(hooks: Any, scheduler: SGLangScheduler) -> None:
    for batch in batches():
        assert after(hooks.run_batch, scheduler.run_batch, batch) == "result"
        assert after(hooks.process_batch_result, scheduler.process_batch_result, batch, "result") is None


def test_sglang_pairs_match_a_count_token_by_token(registry: Any, hooks: Any) -> None:
    run(hooks, SGLangScheduler())
    found = exported(registry)
    for phase in ("prefill", "decode"):
        lengths = [n for p, _, n in computed() if p == phase]
        for kind, pairs in (("dense", 3 * sum(lengths)), ("effective", 3 * sum(min(n, 16) for n in lengths))):
            labels = dict(kind=kind, phase=phase, model_name="served", engine="2")
            assert value(found, "sparse_attn_kv_pairs_total", **labels) == pairs > 0
    counts = [value(found, "sparse_attn_effective_kv_ratio_count", crossover=side) for side in ("before", "past")]
    assert sum(counts) == 7


def test_sglang_counts_on_one_rank(registry: Any, hooks: Any) -> None:
    hooks.ranks.attn_tp_rank = 1
    run(hooks, SGLangScheduler())
    assert exported(registry) == []


def test_sglang_with_drafts_is_refused(registry: Any, hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(hooks, SGLangScheduler(speculative=True))
    assert exported(registry) == []
    assert caplog.text.count("does not observe SGLang with speculative decoding or pipeline parallelism") == 1


# --- ms_service_metric -----------------------------------------------------------------------------------------------


@dataclass
class MetricProvider:
    """As vllm-ascend's own tests have it."""

    name: str
    config_paths: tuple[str, ...]
    priority: int
    owned_symbol_prefixes: tuple[str, ...]
    framework_package: str | None = None
    handler_module_prefixes: tuple[str, ...] = ()
    ownership_mode: str = "overlay"


class Recorder:
    """Records as ms_service_metric does: a counter takes 0 for 1, and what was not made is left out."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics: dict[str, Any] = {}

    def get_or_create_metric(self, name: str, *, metric_type: str, label_names: list[str]) -> None:
        if name not in self.metrics:
            make = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}[metric_type]
            self.metrics[name] = make(name, name, [*label_names, "dp"], registry=self.registry)

    def record_metric(self, name: str, value: float, labels: dict[str, str]) -> None:
        child = self.metrics[name].labels(**labels, dp="0")
        child.inc(value or 1) if hasattr(child, "inc") and not hasattr(child, "set") else child.set(value)


@pytest.fixture
def recorder(registry: Any, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    api = ModuleType("ms_service_metric.provider_api")
    types = SimpleNamespace(COUNTER="counter", GAUGE="gauge")
    vars(api).update(MetricProvider=MetricProvider, MetricType=types, get_metric_recorder=lambda: found)
    monkeypatch.setitem(sys.modules, "ms_service_metric", ModuleType("ms_service_metric"))
    monkeypatch.setitem(sys.modules, api.__name__, api)
    reload(service_metric)
    return found


def test_the_provider_points_to_its_symbols(recorder: Recorder) -> None:
    yaml = pytest.importorskip("yaml")
    provider = service_metric.get_metric_provider()
    entries = [entry for path in provider.config_paths for entry in yaml.safe_load(Path(path).read_text())]
    assert [entry["symbol"] for entry in entries] == [service_metric.SYMBOL]
    for entry in entries:
        assert entry["symbol"].startswith(provider.owned_symbol_prefixes)
        module, function = entry["handler"].split(":")
        assert module.startswith(provider.handler_module_prefixes)
        assert callable(getattr(sys.modules[module], function))


def test_ms_service_metric_records_the_counts(registry: Any, recorder: Recorder) -> None:
    scheduler = Scheduler(V32, "auto", INDEXED)
    for output in outputs():
        assert service_metric.update_from_output(Scheduler.update_from_output, scheduler, output, "model") == "outputs"
    found = parse(prometheus_client.generate_latest(recorder.registry).decode())
    for phase in ("prefill", "decode"):
        lengths = [n for p, _, n in computed() if p == phase]
        expected = {"dense": sum(lengths), "effective": sum(min(n, 16) for n in lengths)}
        for kind, pairs in expected.items():
            assert value(found, "sparse_attn:kv_pairs_total", kind=kind, phase=phase) == 3 * pairs
    last = [n for p, step, n in computed() if step == len(STEPS) - 1]
    assert value(found, "sparse_attn:effective_kv_ratio") == sum(min(n, 16) for n in last) / sum(last)
    assert 0 < value(found, "sparse_attn:selection_overhead_ratio", source="estimated") < 1
    assert exported(registry) == []  # and nothing is counted twice


def test_ms_service_metric_leaves_the_engine_alone(registry: Any, recorder: Recorder) -> None:
    broken = Scheduler({k: v for k, v in LLAMA.items() if k != "hidden_size"})
    for output in outputs()[:2]:
        assert service_metric.update_from_output(Scheduler.update_from_output, broken, output, "model") == "outputs"


# --- Entry points ----------------------------------------------------------------------------------------------------


def test_engines_find_the_hooks() -> None:
    """What pyproject.toml says is there, whether or not the package is installed."""
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {
        "vllm.general_plugins",
        "vllm.platform_plugins",
        "sglang.srt.plugins",
        "ms_service_metric.providers",
    }
    for group, entries in groups.items():
        for name, target in entries.items():
            assert callable(metadata.EntryPoint(name, target, group).load())
