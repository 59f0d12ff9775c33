"""The simulator: it decides as the engine does, its clock is right, and it shows what a trace does to a pool."""

from __future__ import annotations

import random

import pytest
from tiny_engine import PAGE, engine, prompt

from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.cost import Predictor, StepCost, Work
from sparse_attn.serving.engine import Engine
from sparse_attn.serving.manager import CacheManager, PagedPlane
from sparse_attn.serving.memory import PLANE
from sparse_attn.serving.planner import Request
from sparse_attn.serving.scheduler import Request as EngineRequest
from sparse_attn.serving.scheduler import Scheduler, Steps
from sparse_attn.serving.simulator import Clock, Imitation, Replay, predicted, replay, simulate

COST = StepCost(step=1e-3, token=1e-4, scored=1e-8, attended=1e-7, device="card")


def scheduler(pages: int, budget: float = 0.05, mode: str = "enforce", reserve: float = 0.1, **steps: int) -> Scheduler:
    rule = Admission(Limits(budget), Predictor("smollm2-135m", COST), device="card", mode=mode)  # type: ignore[arg-type]
    manager = CacheManager([PagedPlane(PLANE, PAGE)], pages, reserve=reserve)
    return Scheduler(manager, rule, Steps(**steps) if steps else Steps(), prefixes=False)


def arrivals(count: int, rate: float, seed: int = 0) -> list[Request]:
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append(Request(now, draw.randrange(8, 90), draw.randrange(4, 40)))
    return found


class Decisions(Scheduler):
    """Keeps what each step decided."""

    def plan(self, now: float):  # type: ignore[no-untyped-def]
        plan = super().plan(now)
        parts = [(part.request.name, part.before, part.after) for part in plan.parts]
        verdicts = [(d.request, d.verdict, d.reason) for d in plan.decisions]
        self.__dict__.setdefault("decided", []).append((parts, verdicts, self.preemptions))
        return plan


def test_it_decides_as_the_engine_does_on_a_model() -> None:
    def made() -> Decisions:
        old = scheduler(pages=26, budget=0.02, reserve=0.1)
        return Decisions(old.manager, old.admission, old.steps, prefixes=False)

    requests = arrivals(14, rate=60)
    clock, taken, model = Clock(), [], engine(pages=26).runner

    class Timed:
        """The model's own steps, on a clock that moves by a time of its own for each."""

        def run(self, plan):  # type: ignore[no-untyped-def]
            if plan.parts:
                taken.append(0.02 + 0.003 * (len(taken) % 5))
                clock.now += taken[-1]
            return model.run(plan)

        def forget(self, name: object) -> None:
            model.forget(name)

    real = made()
    found = replay(
        requests,
        Engine(Timed(), real, clock),
        clock,
        lambda n, r: EngineRequest(n, prompt(n, r.prompt), r.output),
    )
    same, steps = made(), iter(taken)
    imitated = simulate(requests, same, lambda plan: next(steps))
    assert same.decided == real.decided
    assert imitated.pages == found.pages and imitated.preemptions == found.preemptions > 0
    assert imitated.seen == found.seen


def test_steps_take_what_is_said() -> None:
    found = simulate([Request(5.0, 10, 4), Request(5.0, 10, 4)], scheduler(100), lambda plan: 0.25)
    # prompts come one after the other beside each other in one step; then 3 tokens each
    assert [seen.arrived for seen in found.seen] == [0, 0]
    assert [seen.times for seen in found.seen] == [[0.25, 0.5, 0.75, 1.0]] * 2
    assert found.seconds == 1.0 and found.seen[0].first == 0.25 and found.seen[0].gap == 0.25
    assert found.goodput(0.25, 0.25) == 8 and found.goodput(0.2, 0.25) == found.goodput(0.25, 0.2) == 0
    late = simulate([Request(5.0, 10, 1), Request(9.0, 10, 1)], scheduler(100), lambda plan: 0.25)
    assert [seen.times for seen in late.seen] == [[0.25], [4.25]]
    assert simulate([], scheduler(100), lambda plan: 0.25) == Replay([], [], 0, 0.0)


def test_what_can_never_run_is_refused_and_the_rest_goes_on() -> None:
    requests = [Request(0.0, 10, 4), Request(0.1, 100 * PAGE, 4), Request(0.2, 10, 4)]
    found = simulate(requests, scheduler(20), lambda plan: 0.25)
    assert [seen.refused for seen in found.seen] == ["", "infeasible", ""]
    assert found.refused == 1 and len(found.seen[2].times) == 4


def test_a_small_reserve_preempts_and_a_large_one_does_not() -> None:
    requests = arrivals(60, rate=200, seed=1)

    def preemptions(reserve: float) -> int:
        seconds = predicted(Predictor("smollm2-135m", COST))
        return simulate(requests, scheduler(40, mode="off", reserve=reserve), seconds).preemptions

    assert preemptions(0.02) > preemptions(0.5) == 0


def test_a_slower_device_corrects_the_profile() -> None:
    slow = scheduler(200)
    truth = Predictor("smollm2-135m", COST)
    simulate(arrivals(30, rate=50), slow, lambda plan: 1.5 * truth.seconds(plan.works))
    predictor = slow.admission.predictor
    assert predictor is not None
    work = [Work.decode(10)]
    assert predictor.seconds(work) == pytest.approx(1.5 * truth.seconds(work), rel=0.05)


def test_the_clock_is_the_engines() -> None:
    clock = Clock()
    assert Imitation(clock, lambda plan: 1.0).run(scheduler(20).plan(0.0)) == {} and clock() == 0
