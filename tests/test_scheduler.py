"""The scheduler without a model: who begins when, chunks, promised pages, preemption, the same again with the same
calls; each rule broken once."""

from __future__ import annotations

from fractions import Fraction
from types import ModuleType

import pytest
from faults import faulty
from test_admission import DEVICE
from test_cost import MODEL, PAIR

from sparse_attn.serving import scheduler as rule
from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.cost import Predictor, StepCost
from sparse_attn.serving.crossover import Switch
from sparse_attn.serving.manager import CacheManager, PagedPlane

PAGE = 16


def scheduler(module: ModuleType, pages: int = 100, admission: Admission | None = None, **steps: int):  # type: ignore[no-untyped-def]
    manager = CacheManager([PagedPlane("kv", PAGE)], pages, reserve=0.1, emergency=0.0)
    chosen = module.Steps(**{"tokens": 64, "running": 8, **steps})
    return module.Scheduler(manager, admission or Admission(Limits(1.0, memory=1.0), None), chosen)


def request(module: ModuleType, name: object, tokens: int, output: int = 4, first: int = 0, **more: object):  # type: ignore[no-untyped-def]
    return module.Request(name, list(range(first, first + tokens)), output, **more)


def run(it, now: float = 0.0, seconds: float = 1.0):  # type: ignore[no-untyped-def]
    """A step, imitated: spans of its parts by request."""
    plan = it.plan(now)
    it.advance(plan, {part.request.name: 7 for part in plan.parts if part.samples}, seconds)
    return {part.request.name: (part.before, part.after) for part in plan.parts}


def prompts_come_in_chunks_beside_those_that_decode(module: ModuleType) -> None:
    it = scheduler(module)
    for n, tokens in enumerate((10, 100, 30)):
        it.submit(request(module, n, tokens, first=1000 * n), 0.0)
    assert run(it) == {0: (0, 10), 1: (0, 54)}
    assert run(it) == {0: (10, 11), 1: (54, 100), 2: (0, 17)}
    assert run(it) == {0: (11, 12), 1: (100, 101), 2: (17, 30)}
    assert run(it) == {0: (12, 13), 1: (101, 102), 2: (30, 31)}
    assert 0 not in it.running and it.manager.used_pages == 9


def one_of_which_a_step_computes_nothing_waits(module: ModuleType) -> None:
    it = scheduler(module)
    for n in range(3):
        it.submit(request(module, n, 64, first=1000 * n), 0.0)
    assert run(it) == {0: (0, 64)} and list(it.waiting) == [1, 2]


def a_prompt_that_began_has_its_pages(module: ModuleType) -> None:
    it = scheduler(module, pages=20, tokens=160)  # 18 beside the reserve
    it.submit(request(module, "a", 150), 0.0)
    it.submit(request(module, "b", 150, first=1000), 0.0)
    assert run(it) == {"a": (0, 150)}
    it = scheduler(module, pages=20)
    it.submit(request(module, "a", 150), 0.0)
    run(it)
    assert (it.manager.used_pages, it.load.used) == (4, 10)
    it.submit(request(module, "b", 150, first=1000), 0.0)
    run(it)
    run(it)  # of "a" 22 tokens are left, and room for 42 of "b", but no pages
    assert list(it.running) == ["a"] and it.preemptions == 0


def requests_that_run_are_bounded(module: ModuleType) -> None:
    it = scheduler(module, running=2, queued=3)
    for n in range(3):
        it.submit(request(module, n, 5, first=1000 * n), 0.0)
    with pytest.raises(module.Refused, match="at most 3 requests that wait"):
        it.submit(request(module, "more", 5), 0.0)
    run(it)
    assert list(it.running) == [0, 1] and list(it.waiting) == [2]


def the_youngest_gives_up_its_pages_and_is_first_again(module: ModuleType) -> None:
    it = scheduler(module, pages=6)
    for n, tokens in enumerate((30, 30, 60)):
        it.submit(request(module, n, tokens, output=36, first=1000 * n), 0.0)
    assert run(it) == {0: (0, 30), 1: (0, 30)} and list(it.waiting) == [2]
    while it.preemptions == 0:
        run(it)
    youngest = next(iter(it.waiting.values()))
    assert youngest.name == 1 and youngest.saved.tokens == youngest.computed
    while it.running or it.waiting:
        plan = it.plan(0.0)
        for move in plan.moves:
            if isinstance(move, module.Restore):
                assert len(move.tables["kv"]) == -(-move.request.computed // PAGE)
        it.advance(plan, {part.request.name: 7 for part in plan.parts if part.samples}, 1.0)
    assert it.manager.used_pages == 0


def chunks_keep_to_the_budget(module: ModuleType) -> None:
    predictor = Predictor(MODEL, StepCost(attended=PAIR, device=DEVICE))
    budget = predictor.seconds([module.Work(0, 120, True)])
    it = scheduler(module, tokens=256, admission=Admission(Limits(budget, memory=1.0), predictor, DEVICE))
    for n in range(2):
        it.submit(request(module, n, 200, first=1000 * n), 0.0)
    assert run(it, seconds=budget) == {0: (0, 120)}, "prompts are dense"
    assert it.load.prompts == pytest.approx(predictor.parts([module.Work(0, 200, True)]).variable / 4)
    late = scheduler(module, tokens=256, admission=Admission(Limits(budget, memory=1.0, late=0.1), predictor, DEVICE))
    late.submit(request(module, 0, 200), 0.0)
    assert run(late) == {0: (0, 200)}


def the_same_calls_give_the_same_decisions(module: ModuleType) -> None:
    def history() -> list[object]:
        it, found = scheduler(module, pages=30), []
        for step in range(60):
            if step < 20:
                it.submit(request(module, step, 20 + 7 * step % 50, output=20, first=100 * step), float(step))
            found.append((run(it, float(step)), it.manager.used_pages, it.preemptions))
        return found

    assert history() == history()
    assert history()[-1][2] > 0


def what_is_below_the_switch_is_dense(module: ModuleType) -> None:
    predictor = Predictor(MODEL, StepCost(scored=PAIR, attended=PAIR, device=DEVICE))
    it = scheduler(module, admission=Admission(Limits(1.0, memory=1.0), predictor, DEVICE))
    it.switches = {None: Switch(12, 14)}
    for n, tokens in enumerate((10, 30)):
        it.submit(request(module, n, tokens, output=9, first=1000 * n), 0.0)
    it.submit(request(module, "dense", 20, output=9, dense=True), 0.0)
    reasons: list[dict[object, str]] = []
    for _ in range(6):
        plan = it.plan(0.0)
        reasons.append({part.request.name: part.reason for part in plan.parts})
        assert [part.dense for part in plan.parts] == [part.reason != "plan" for part in plan.parts]
        assert [work.dense for work in plan.works] == [part.dense for part in plan.parts]
        # what admission prices is what the next step will do
        ahead = {name: work.dense for name, work in zip(it.running, it.load.running, strict=True)}
        it.advance(plan, {part.request.name: 7 for part in plan.parts if part.samples}, 1.0)
        if len(reasons) > 1:
            assert ahead == {part.request.name: part.dense for part in plan.parts}
    assert [each[0] for each in reasons] == ["prompt", "exact", "exact", "approximate", "approximate", "plan"]
    assert [each[1] for each in reasons] == ["prompt"] + ["plan"] * 5
    assert [each["dense"] for each in reasons] == ["prompt"] + ["request"] * 5
    it.submit(request(module, "other", 11, share=Fraction(1, 8)), 0.0)
    assert it._waiting(it.waiting.pop("other"), 0.0).share == Fraction(1, 8)
    it.submit(request(module, "short", 11), 0.0)
    it.submit(request(module, "long", 14), 0.0)
    assert [it._waiting(each, 0.0).dense for each in it.waiting.values()] == [True, False]


CHECKS = [
    what_is_below_the_switch_is_dense,
    prompts_come_in_chunks_beside_those_that_decode,
    one_of_which_a_step_computes_nothing_waits,
    a_prompt_that_began_has_its_pages,
    requests_that_run_are_bounded,
    the_youngest_gives_up_its_pages_and_is_first_again,
    chunks_keep_to_the_budget,
    the_same_calls_give_the_same_decisions,
]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_the_rule(check) -> None:  # type: ignore[no-untyped-def]
    check(rule)


# (check that must notice, text in the file, what stands there instead)
FAULTS = [
    (what_is_below_the_switch_is_dense, "reason(tokens) or", "reason(tokens - 1) or"),
    (
        what_is_below_the_switch_is_dense,
        "if before < request.prompt else self._reason(request, after)",
        "if before < request.prompt else 'plan'",
    ),
    (what_is_below_the_switch_is_dense, 'self._reason(request, request.prompt + 1) != "plan"', "request.dense"),
    (what_is_below_the_switch_is_dense, 'self._reason(request, tokens) != "plan", request.share)', "request.dense)"),
    (prompts_come_in_chunks_beside_those_that_decode, "self.steps.tokens - len(decoding), True", "64, True"),
    (prompts_come_in_chunks_beside_those_that_decode, "return self.after == len(self.request.tokens)", "return True"),
    (
        prompts_come_in_chunks_beside_those_that_decode,
        "        self.manager.free(request.name)\n        return why",
        "        return why",
    ),
    (one_of_which_a_step_computes_nothing_waits, "elif decision.admit and room > 0:", "elif decision.admit:"),
    (a_prompt_that_began_has_its_pages, "self.manager.used_pages + self._promised,", "self.manager.used_pages,"),
    (requests_that_run_are_bounded, "len(self.running) >= self.steps.running or", ""),
    (requests_that_run_are_bounded, "if len(self.waiting) >= self.steps.queued:", "if False:"),
    (
        the_youngest_gives_up_its_pages_and_is_first_again,
        "move_to_end(request.name, last=False)",
        "move_to_end(request.name)",
    ),
    (
        the_youngest_gives_up_its_pages_and_is_first_again,
        "request.computed = request.saved.tokens",
        "request.computed = 0",
    ),
    (chunks_keep_to_the_budget, "request.remaining, room, dense=True)", "request.remaining, room)"),
    (chunks_keep_to_the_budget, "sum(request.spread for request in self.running.values()),", "0.0,"),
]


@pytest.mark.parametrize(("check", "old", "new"), FAULTS, ids=[f"{f[0].__name__}: {f[1]}" for f in FAULTS])
def test_the_checks_notice(check, old: str, new: str) -> None:  # type: ignore[no-untyped-def]
    broken = faulty("scheduler", old, new)
    with pytest.raises(
        (AssertionError, AttributeError, TypeError, KeyError, RuntimeError, ValueError, pytest.fail.Exception)
    ):
        check(broken)


def test_steps_are_checked() -> None:
    with pytest.raises(ValueError, match="expected at least 1 running request, as many tokens"):
        rule.Steps(tokens=4, running=5)
