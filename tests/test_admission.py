"""Admission: the table of states, idle engines, overdue requests, chunks, profiles of other devices; each rule broken
once."""

from __future__ import annotations

from fractions import Fraction
from types import ModuleType

import pytest
from faults import faulty
from test_cost import MODEL, PAIR, predictor

from sparse_attn.serving import admission as rule
from sparse_attn.serving.admission import REASONS, Admission, Limits, Load, Waiting
from sparse_attn.serving.cost import Correction, Predictor, StepCost, Work

DEVICE = "a device"
LONG, SHORT = 1000, 100
RUNNING = (Work.decode(500),)


def waiting(name: str = "r", prompt: int = LONG, pages: int = 10, module: ModuleType = rule, **more: object) -> Waiting:
    return module.Waiting(name, prompt, 0, pages, pages, **more)


def admission(module: ModuleType = rule, mode: str = "enforce", compute: float = 0.5, **limits: object) -> Admission:
    """A rule under which the running request and a long one take ``compute`` of the budget."""
    limits = {"memory": 0.8, "compute": 0.9, "short": SHORT, **limits}
    pairs = predictor().counts([*RUNNING, Work.decode(LONG + 1)]).attended_pairs
    return module.Admission(module.Limits(PAIR * pairs / compute, **limits), predictor(), DEVICE, mode)


def load(module: ModuleType = rule, used: int = 50, **more: object) -> Load:
    return module.Load(**{"pages": 100, "used": used, "reserved": 15, "running": RUNNING, **more})


LOW, HIGH = 50, 75  # pages in use of 100: with 10 more below and above the watermark of 80
TABLE = [
    # compute, pages used, prompt, verdict, reason
    (0.5, LOW, LONG, "admit", "none"),
    (0.5, LOW, SHORT, "admit", "none"),
    (0.95, LOW, LONG, "hold", "compute"),
    (0.5, HIGH, LONG, "hold", "memory"),
    (0.5, HIGH, SHORT, "admit", "short"),
    (0.95, HIGH, LONG, "hold", "memory and compute"),
    (3.0, LOW, SHORT, "hold", "compute"),
    (3.0, HIGH, SHORT, "hold", "memory and compute"),
    (0.5, 76, SHORT, "hold", "room"),
    (0.8999, 70, LONG, "admit", "none"),
]


def table(module: ModuleType) -> None:
    for compute, used, prompt, verdict, reason in TABLE:
        found = admission(module, compute=compute).decide(waiting(prompt=prompt), load(module, used))
        assert (found.verdict, found.reason) == (verdict, reason), (compute, used, prompt)
        assert found.admit == (verdict == "admit") and found.memory == (used + 10) / 100


def modes(module: ModuleType) -> None:
    held, endless = waiting(), waiting(pages=101)
    for mode, verdict in (("off", "admit"), ("observe", "hold"), ("enforce", "hold")):
        it = admission(module, mode, compute=0.95)
        found = it.decide(held, load(module))
        assert (found.verdict, found.admit) == (verdict, mode != "enforce")
        refused = it.decide(endless, load(module, 0, running=()))
        assert (refused.verdict, refused.reason, refused.admit) == ("refuse", "infeasible", False)


def an_idle_engine_admits_one(module: ModuleType) -> None:
    """However far above both watermarks, and into the reserve; the second is held."""
    it = admission(module, compute=1e6)
    whole = [waiting("a", pages=100), waiting("b", pages=1)]
    found = it.admit(whole, load(module, 0, running=()))
    assert [(d.verdict, d.reason) for d in found] == [("admit", "idle"), ("hold", "room")]
    assert it.decide(waiting(pages=60), load(module, 50, running=())).reason == "room"


def no_hold_lasts_for_ever(module: ModuleType) -> None:
    """Short requests come at each step and would keep memory above its watermark. The long one still gets in."""
    it = admission(module, compute=0.1, hold=5.0, memory=0.3)
    finish, running, queue = 3.0, [], []
    for second in range(60):
        running = [(end, request) for end, request in running if end > second]
        if second == 3:
            queue.append((3.0, waiting("long", pages=35)))
        queue += [(float(second), waiting(f"short {second}.{n}", SHORT, 5)) for n in range(4)]
        held = load(module, sum(r.pages for _, r in running), running=tuple(r.work for _, r in running))
        now = [module.Waiting(**{**vars(r), "waited": second - since}) for since, r in queue]
        admitted = {d.request for d in it.admit(now, held) if d.admit}
        running += [(second + finish, r) for _, r in queue if r.name in admitted]
        queue = [(since, r) for since, r in queue if r.name not in admitted]
        if "long" in admitted:
            assert second > 4, "it must have been held"
            return
        assert second <= 3 + 5 + finish + 1
    raise AssertionError("still held")


def the_overdue_are_refused_if_so_told(module: ModuleType) -> None:
    it = admission(module, compute=0.95, hold=5.0, overdue="refuse")
    late = waiting(waited=5.1)
    found = it.decide(late, load(module))
    assert (found.verdict, found.reason, found.admit) == ("refuse", "overdue", False)
    assert it.decide(waiting(waited=5.0), load(module)).verdict == "hold"
    assert admission(module, "observe", hold=5.0, overdue="refuse").decide(late, load(module)).admit


def chunks_keep_to_the_budget(module: ModuleType) -> None:
    it = admission(module, compute=0.2)
    budget = it.limits.budget
    chunk = it.chunk(RUNNING, 0, 10_000, 4096)
    assert 1 < chunk < 4096
    assert it.predictor.seconds([*RUNNING, Work(0, chunk)]) <= budget
    assert it.predictor.seconds([*RUNNING, Work(0, chunk + 1)]) > budget
    later = it.chunk(RUNNING, 2000, 10_000, 4096)
    assert later < chunk, "a token far back in a prompt attends to more"
    assert it.chunk(RUNNING, 0, 5, 4096) == 5 and it.chunk(RUNNING, 0, 9, 7) == 7
    assert it.chunk(tuple(Work.decode(500) for _ in range(100)), 0, 50, 50) == 1, "a prompt always gets on"
    assert admission(module, "observe", compute=0.2).chunk(RUNNING, 0, 10_000, 4096) == 4096


def prompts_are_spread_over_outputs(module: ModuleType) -> None:
    """Of two requests that decode alike, the one with more of its prompt to compute costs more, the shorter its
    output."""
    it = admission(module, compute=0.5)

    def compute(output: int, before: int | None, prompts: float = 0.0) -> float:
        chunk = None if before is None else Work(before, LONG)
        request = module.Waiting("r", LONG, output, 10, 10, chunk=chunk)
        found = it.decide(request, load(module, prompts=prompts)).compute
        (same,) = it.admit([request], load(module, prompts=prompts))
        assert same.compute == pytest.approx(found)
        return found

    alone = compute(10, None)
    chunk = it.predictor.seconds([Work(0, LONG)]) / it.limits.budget
    assert compute(10, 0) == pytest.approx(alone + chunk / 10)
    assert compute(100, 0) == pytest.approx(alone + chunk / 100)
    assert alone < compute(10, 900) < compute(10, 0)
    assert compute(10, None, prompts=it.limits.budget) == pytest.approx(alone + 1)


def some_steps_may_be_late(module: ModuleType) -> None:
    it = admission(module, compute=0.2, late=0.05)
    exact = admission(module, compute=0.2)
    assert it.chunk(RUNNING, 0, 10_000, 4096) == 4096
    for _ in range(5):
        it.observe(RUNNING, 2 * it.limits.budget)
    assert it.chunk(RUNNING, 0, 10_000, 4096) < 4096
    for _ in range(200):
        it.observe(RUNNING, it.predictor.parts(RUNNING).seconds)
    assert it.chunk(RUNNING, 0, 10_000, 4096) == 4096 > exact.chunk(RUNNING, 0, 10_000, 4096)


def dense_and_sparse_are_priced_apart(module: ModuleType) -> None:
    it = admission(module, compute=0.5)
    sparse, dense = (waiting(str(dense), module=module, dense=dense) for dense in (False, True))
    found = {r.name: it.decide(r, load(module)) for r in (sparse, dense)}
    assert found["True"].compute > 1.5 * found["False"].compute
    assert found["True"].memory == found["False"].memory
    assert [found[name].verdict for name in ("False", "True")] == ["admit", "hold"]
    eighth = waiting("eighth", module=module, share=Fraction(1, 8))
    assert found["False"].compute > it.decide(eighth, load(module)).compute
    heavy = load(module, running=(Work.decode(500, dense=True),))
    assert it.decide(sparse, heavy).compute > found["False"].compute


def a_profile_of_another_device_counts_for_nothing(module: ModuleType) -> None:
    limits = module.Limits(1e-9)
    for profile, alarm in ((predictor(), "expected one of 'this device', got one of 'a device'"), (None, "no profile")):
        it = module.Admission(limits, profile, "this device")
        assert alarm in it.alarm and it.compute(RUNNING) is None
        found = it.decide(waiting(), load(module))
        assert (found.verdict, found.compute) == ("admit", None) and "compute unknown" in str(found)
        assert it.decide(waiting(), load(module, HIGH)).reason == "memory"
        assert it.chunk(RUNNING, 0, 10_000, 4096) == 4096
    assert module.Admission(limits, predictor(), DEVICE).alarm is None


def a_queue_is_served_with_the_load_it_makes(module: ModuleType) -> None:
    it = admission(module, compute=0.5)
    queue = [waiting(str(n)) for n in range(100)]
    found = it.admit(queue, load(module, 0))
    assert len(found) == module.LOOK
    admitted = [d for d in found if d.admit]
    running = [*RUNNING, *(Work.decode(LONG + 1) for _ in admitted)]
    assert admitted[-1].compute == pytest.approx(it.compute(running)) and admitted[-1].compute <= 0.9
    assert found[len(admitted)].reason == "compute" and 1 < len(admitted) < 8
    with_each = [it.compute([*running[: n + 1], queue[n].work]) for n in range(3)]
    assert [d.compute for d in found[:3]] == pytest.approx(with_each)


CHECKS = [
    table,
    modes,
    an_idle_engine_admits_one,
    no_hold_lasts_for_ever,
    the_overdue_are_refused_if_so_told,
    chunks_keep_to_the_budget,
    prompts_are_spread_over_outputs,
    some_steps_may_be_late,
    dense_and_sparse_are_priced_apart,
    a_profile_of_another_device_counts_for_nothing,
    a_queue_is_served_with_the_load_it_makes,
]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_the_rule(check) -> None:  # type: ignore[no-untyped-def]
    check(rule)


# (check that must notice, text in the file, what stands there instead)
FAULTS = [
    (table, "high = memory > limits.memory", "high = load.used / load.pages > limits.memory"),
    (table, "compute > limits.compute", "compute > 1"),
    (
        table,
        'return ("admit", "short") if',
        'return ("hold", "short") if',
    ),
    (table, "if request.tokens <= limits.short", "if request.tokens < limits.short"),
    (table, "> load.pages - load.reserved", "> load.pages"),
    (table, 'return "hold", "compute" if', 'return "admit", "compute" if'),
    (modes, 'if self.mode == "off":', "if False:"),
    (modes, 'self.mode == "observe" and', "False and"),
    (modes, 'and reason != "infeasible"', ""),
    (modes, "request.most_pages > load.pages", "request.pages > 2 * load.pages"),
    (an_idle_engine_admits_one, "if not load.running and load.used + request.pages <= load.pages:", "if False:"),
    (an_idle_engine_admits_one, "not load.running and load.used + request.pages <= load.pages", "not load.running"),
    (an_idle_engine_admits_one, "load, running = load.with_request(request), with_it", "pass"),
    (no_hold_lasts_for_ever, "                overdue = True\n", "                pass\n"),
    (no_hold_lasts_for_ever, "        if behind_overdue:", "        if False:"),
    (the_overdue_are_refused_if_so_told, "request.waited > limits.hold and", "request.waited >= limits.hold and"),
    (the_overdue_are_refused_if_so_told, 'and limits.overdue == "refuse"', "and False"),
    (chunks_keep_to_the_budget, "self.predictor.corrected(parts) <= self.limits.budget", "True"),
    (chunks_keep_to_the_budget, "others = self.predictor.parts(running)", "others = Parts()"),
    (chunks_keep_to_the_budget, "Work(before, before + middle, dense)", "Work(0, middle, dense)"),
    (chunks_keep_to_the_budget, 'self.mode != "enforce" or', ""),
    (prompts_are_spread_over_outputs, ".variable / request.output", ".variable"),
    (prompts_are_spread_over_outputs, "Parts(0.0, load.prompts + self.spread(request))", "Parts(0.0, load.prompts)"),
    (
        prompts_are_spread_over_outputs,
        "self._parts(load.running) + Parts(0.0, load.prompts)",
        "self._parts(load.running)",
    ),
    (some_steps_may_be_late, " or self._late < self.limits.late", ""),
    (some_steps_may_be_late, "((seconds > self.limits.budget) - self._late)", "(seconds > self.limits.budget)"),
    (
        dense_and_sparse_are_priced_apart,
        "Work.decode(self.prompt + 1, self.dense, self.share)",
        "Work.decode(self.prompt + 1)",
    ),
    (
        dense_and_sparse_are_priced_apart,
        "Work.decode(self.prompt + 1, self.dense, self.share)",
        "Work.decode(self.prompt + 1, self.dense)",
    ),
    (a_profile_of_another_device_counts_for_nothing, "elif predictor.device != device:", "elif False:"),
    (a_profile_of_another_device_counts_for_nothing, "None if self.alarm else predictor", "predictor"),
    (
        a_queue_is_served_with_the_load_it_makes,
        "load.with_request(request), with_it",
        "load.with_request(request), running",
    ),
    (a_queue_is_served_with_the_load_it_makes, "waiting[:LOOK]", "waiting"),
]


@pytest.mark.parametrize(("check", "old", "new"), FAULTS, ids=[f"{f[0].__name__}: {f[1]}" for f in FAULTS])
def test_the_checks_notice(check, old: str, new: str) -> None:  # type: ignore[no-untyped-def]
    broken = faulty("admission", old, new)
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        check(broken)


def test_every_reason_is_said() -> None:
    for reason, said in REASONS.items():
        assert said in str(rule.Decision("r", True, "admit", reason, 0.5, 0.25))
    said = str(admission(compute=0.95).decide(waiting("r"), load()))
    assert said == (
        "request 'r': hold: compute is above its watermark; with it memory is 60% of the pool, compute 95% of a "
        "step's budget"
    )


def test_a_slower_device_admits_less() -> None:
    correction = Correction(0.5)
    slow = Predictor(MODEL, StepCost(attended=PAIR, device=DEVICE), correction=correction)
    it = Admission(admission(compute=0.7).limits, slow, DEVICE)
    assert it.decide(waiting(), load()).verdict == "admit"
    for _ in range(20):
        slow.observe(RUNNING, 1.5 * slow.parts(RUNNING).seconds)
    assert it.decide(waiting(), load()).reason == "compute"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mode: expected one of off, observe, enforce, got 'on'"):
        Admission(Limits(1.0), None, mode="on")  # type: ignore[arg-type]
    for wrong in ({"budget": 0.0}, {"memory": 0.0}, {"compute": 1.1}, {"hold": -1.0}):
        with pytest.raises(ValueError, match="expected a budget above 0 s, watermarks above 0 and at most 1"):
            Limits(**{"budget": 1.0, **wrong})
    with pytest.raises(ValueError, match="overdue: expected first or refuse, got 'drop'"):
        Limits(1.0, overdue="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk: expected at least 1 token remaining and at most, got 0 and 5"):
        admission().chunk((), 0, 0, 5)
