"""The admission rule inside of an engine: what an operator asks for, and vLLM's scheduler with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stubs import V32, engine

from sparse_attn.integrations.admitting import Gate, admission
from sparse_attn.models import PRESETS
from sparse_attn.serving.admission import Load, Waiting
from sparse_attn.serving.cost import StepCost, Work
from sparse_attn.serving.exposition import parse
from sparse_attn.serving.metrics import Exporter

PACKAGE = "sparse_attn.integrations.vllm"
DEVICE = "cpu, deepseek_v32, auto"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(StepCost(step=1e-3, token=1e-5, attended=1e-7, device=DEVICE).to_dict()))
    return str(path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(overdue="refuse"), "expected keys among mode, profile, budget, .* got overdue"),
        (dict(profile="p.json"), "expected budget, seconds that a step may take"),
        (dict(mode="force"), "mode: expected one of off, observe, enforce, got 'force'"),
        (dict(budget=-1), "expected a budget above 0 s"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        admission(asked, PRESETS["deepseek-v3.2"], DEVICE)


def test_a_profile_of_another_machine_counts_for_nothing(profile: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = dict(budget=1.0, profile=profile)
    assert admission(asked, PRESETS["deepseek-v3.2"], DEVICE).predictor is not None
    assert admission(asked, PRESETS["deepseek-v3.2"], "another").predictor is None
    assert "got one of 'cpu, deepseek_v32, auto': admission goes by memory alone" in caplog.text


def test_measured_steps_correct_the_rule(profile: str) -> None:
    rule = admission(dict(mode="enforce", budget=2e-3, profile=profile, late=0.01), PRESETS["llama-3.1-8b"], DEVICE)
    gate, works = Gate(rule, None), [Work.decode(100)]
    before = rule.compute(works)
    assert before is not None
    assert rule.chunk([], 0, 5000, 4000) == 4000  # no step was late yet
    gate.observe(works, 0.0)
    gate.observe([], 1.0)
    assert rule.compute(works) == before
    gate.observe(works, 1.0)
    assert rule.compute(works) > before
    assert rule.chunk([], 0, 5000, 4000) < 4000


def test_a_decision_is_exported_when_it_changes(profile: str) -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    registry = prometheus_client.CollectorRegistry()
    rule = admission(dict(mode="enforce", budget=2e-3, profile=profile), PRESETS["llama-3.1-8b"], DEVICE)
    gate = Gate(rule, Exporter("m", registry=registry))
    busy = Load(100, 10, 0, (Work.decode(4096),))
    request = Waiting("a", prompt=4096, output=100, pages=5, most_pages=6)
    assert [gate.admits(request, load) for load in (busy, busy, Load(100, 0, 0))] == [False, False, True]
    found = {
        (had["verdict"], had["reason"]): v
        for n, had, v in parse(prometheus_client.generate_latest(registry).decode())
        if n == "sparse_attn_admission_verdicts_total"
    }
    assert found == {("hold", "compute"): 1, ("admit", "idle"): 1}


# --- vLLM's scheduler ------------------------------------------------------------------------------------------------


class Manager:
    watermark_blocks = 0

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(num_gpu_blocks=301, get_num_free_blocks=lambda: 300 - self.used)
        self.used = 0

    def allocate_slots(self, request: Any, num_new_tokens: int, **others: Any) -> str:
        return "blocks"


class AsyncScheduler:
    """What the subclass touches of vLLM's."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.kv_cache_manager = vllm_config, Manager()
        spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["0.indexer"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[spec])
        self.max_num_scheduled_tokens, self.max_model_len = 8192, 4096
        self.running: list[Any] = []
        self.waiting: Any = []
        self.allowed: list[int] = []

    def schedule(self) -> Any:
        self.allowed.append(self.max_num_scheduled_tokens)
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        return SimpleNamespace(
            finished_req_ids=set(), scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"


def request(name: str, tokens: int, computed: int = 0, status: str = "waiting") -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        num_computed_tokens=computed,
        max_tokens=100,
        arrival_time=0.0,
        status=status,
    )


class Queue(list):
    def peek_request(self) -> Any:
        return self[0]


@pytest.fixture
def made(profile: str) -> Iterator[Any]:
    modules = {
        "vllm.platforms": dict(
            current_platform=SimpleNamespace(get_device_name=lambda: "cpu", is_out_of_tree=lambda: False)
        ),
        "vllm.v1.core.sched.async_scheduler": dict(AsyncScheduler=AsyncScheduler),
        "vllm.v1.request": dict(RequestStatus=SimpleNamespace(RUNNING="running")),
    }

    def make(**asked: Any) -> Any:
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(to_dict=lambda: V32), served_model_name="served"
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(data_parallel_index=0),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            additional_config={"sparse_attn": {"admission": dict(profile=profile, budget=1.1e-3) | asked}},
        )
        return import_module(f"{PACKAGE}.scheduler").SparseAttnScheduler(config)

    with engine(modules, PACKAGE):
        yield make


@pytest.mark.parametrize(("mode", "second"), [("off", "blocks"), ("observe", "blocks"), ("enforce", None)])
def test_a_request_is_held_while_another_fills_the_budget(made: Any, mode: str, second: str | None) -> None:
    scheduler = made(mode=mode)
    allocate = scheduler.kv_cache_manager.allocate_slots
    assert allocate(request("a", 2000), 2000) == "blocks"  # nothing runs
    scheduler.running = [request("a", 2000, 2000, "running")]
    scheduler.kv_cache_manager.used = 10
    assert allocate(request("b", 2000), 2000, num_new_computed_tokens=0) == second
    assert allocate(scheduler.running[0], 1) == "blocks"  # what runs goes on
    assert allocate(request("c", 2000, computed=16), 1) == "blocks"  # it has pages already


def test_memory_alone_holds_where_no_profile_fits(made: Any) -> None:
    scheduler = made(mode="enforce", memory=0.5, short=64)
    scheduler.gate.rule.predictor = None
    scheduler.running, scheduler.kv_cache_manager.used = [request("a", 800, 800, "running")], 151
    allocate = scheduler.kv_cache_manager.allocate_slots
    assert allocate(request("b", 320), 320) is None
    scheduler.kv_cache_manager.used = 120
    assert allocate(request("b", 320), 320) == "blocks"


def test_a_step_takes_what_leaves_it_in_its_budget(made: Any) -> None:
    scheduler = made(mode="enforce")
    scheduler.schedule()
    scheduler.running = [request("a", 1000, 1000, "running")]
    scheduler.waiting = Queue([request("b", 4000)])
    scheduler.schedule()
    most, chunk = scheduler.allowed
    assert most == 8192
    assert 1 < chunk < 40  # 10 us a token, of 100 us
    scheduler = made(mode="observe")
    scheduler.waiting = Queue([request("b", 4000)])
    scheduler.schedule()
    assert scheduler.allowed == [8192]
