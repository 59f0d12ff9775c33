"""Observe mode for vLLM, on what its scheduler said in a recorded run: chunks, a cached prefix, preemption, finish.

``tests/engines`` has the same on the engine itself.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from observed import INDEXED, LLAMA, STEPS, V32, Scheduler, computed, exported, outputs, registry, value

from sparse_attn import env
from sparse_attn.integrations.vllm import observe as hook

__all__ = ["registry"]


def run(scheduler: Scheduler) -> None:
    hook.attach(scheduler)
    for output in outputs():
        assert scheduler.update_from_output(output, "model") == "outputs"
        assert scheduler.updates[-1] == (output, "model")


def test_the_record_has_what_is_hard() -> None:
    first = {}
    for step in STEPS:
        for request, before in step["new"]:
            first[request] = before
    assert max(first.values()) > 0  # a cached prefix
    again = [before for step in STEPS for request, before in step["cached"] if step["scheduled"][request] > 2]
    assert again  # chunks, and computing anew after preemption


def test_pairs_match_a_count_token_by_token(registry: Any) -> None:
    run(Scheduler(V32, "fp8_ds_mla", INDEXED))
    found = exported(registry)
    assert value(found, "sparse_attn_build_info") == 1
    labels = next(had for n, had, _ in found if n == "sparse_attn_build_info")
    assert (labels["model_name"], labels["engine"], labels["plan"]) == ("served", "3", "deepseek_v32")
    for phase in ("prefill", "decode"):
        lengths = [n for p, _, n in computed() if p == phase]
        expected = {
            "dense": 3 * sum(lengths),
            "effective": 3 * sum(min(n, 16) for n in lengths),
            "scored": 3 * sum(n for n in lengths if n > 16),
        }
        for kind, pairs in expected.items():
            assert value(found, "sparse_attn_kv_pairs_total", kind=kind, phase=phase) == pairs > 0
    every = [n for _, _, n in computed()]
    attend = 2 * 128 * (576 + 512) * 3 * sum(min(n, 16) for n in every)
    assert value(found, "sparse_attn_flops_estimated_total", part="attend") == attend
    read = value(found, "sparse_attn_kv_read_bytes_estimated_total", plane="main")
    assert read == 656 * 3 * sum(min(n, 16) for n in every)
    counts = [value(found, "sparse_attn_effective_kv_ratio_count", crossover=side) for side in ("before", "past")]
    assert sum(counts) == 7 and min(counts) > 0
    assert value(found, "sparse_attn_dispatch_total", path="sparse", reason="plan") == 3 * len(STEPS)


def test_without_index_keys_the_model_runs_dense(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Scheduler(V32, "fp8_ds_mla", INDEXED[:1]))
    assert "the engine has no sparse kernels and runs it dense" in caplog.text
    found = exported(registry)
    assert value(found, "sparse_attn_dispatch_total", path="dense", reason="engine") == 3 * len(STEPS)
    pairs = [value(found, "sparse_attn_kv_pairs_total", kind=kind, phase="decode") for kind in ("dense", "effective")]
    assert pairs[0] == pairs[1] > 0


def test_a_platform_of_others_is_not_judged(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_out_of_tree", lambda: True)
    run(Scheduler(V32, "auto", INDEXED[:1]))
    assert value(exported(registry), "sparse_attn_dispatch_total", path="sparse", reason="plan") == 3 * len(STEPS)


def test_formats_are_the_engines(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(Scheduler(V32, "auto", INDEXED))
    every = [n for _, _, n in computed()]
    read = value(exported(registry), "sparse_attn_kv_read_bytes_estimated_total", plane="main")
    assert read == 2 * 576 * 3 * sum(min(n, 16) for n in every)
    assert "bytes" not in caplog.text


def test_a_format_that_is_not_known_is_said(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Scheduler(LLAMA, "fp8_e4m3"))
    assert "the format of a 'fp8_e4m3' cache is not known" in caplog.text
    found = exported(registry)
    assert not [name for name, _, _ in found if "bytes" in name]
    assert value(found, "sparse_attn_kv_pairs_total", kind="dense", phase="decode") > 0


def test_an_unknown_model_is_said_once(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Scheduler(LLAMA | dict(model_type="new")))
    assert caplog.text.count("model type 'new' is not known: counted as a dense model") == 1


def test_records(registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("SPARSE_ATTN_RECORDS", str(path))
    env.reset()
    run(Scheduler(V32, "auto", INDEXED))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["record"] == "step"]
    for number, line in enumerate(steps):
        dense = line["prefill"]["pairs"].get("dense", 0) + line["decode"]["pairs"].get("dense", 0)
        assert dense == 3 * sum(n for _, step, n in computed() if step == number)
    assert {line["request"] for line in lines if line["record"] == "request"} == set("0123456")


def test_an_error_of_ours_does_not_reach_the_engine(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fails(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("ours")

    monkeypatch.setattr(hook, "note", fails)
    with caplog.at_level(logging.ERROR):
        run(Scheduler(LLAMA))
    assert len(calls) == 1
    assert caplog.text.count("sparse_attn stops observing, the engine goes on") == 1


def test_register_observes_each_scheduler_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(Scheduler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

    module = ModuleType("vllm.v1.core.sched.scheduler")
    module.Scheduler = Fresh  # type: ignore[attr-defined]
    for name in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hook.register()
    hook.register()
    scheduler = Fresh(LLAMA)
    for output in outputs():
        assert scheduler.update_from_output(output, "model") == "outputs"
    dense = 2 * sum(n for p, _, n in computed() if p == "decode")
    assert value(exported(registry), "sparse_attn_kv_pairs_total", kind="dense", phase="decode") == dense
    broken = Fresh({"model_type": "llama"})  # a configuration without fields
    assert broken.update_from_output(outputs()[0], "model") == "outputs"
