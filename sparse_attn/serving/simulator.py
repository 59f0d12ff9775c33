"""The engine on requests of a trace, with steps that take as long as they are said to. Imports no torch.

The scheduler, the cache manager and admission are the engine's own objects, so their decisions are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import quantiles

from . import planner
from .cost import Predictor
from .engine import IDLE, Engine, Listener
from .scheduler import Event, Plan, Refused, Request, Scheduler


class Clock:
    """Seconds that pass when it is said so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Imitation:
    """What an engine runs instead of a model: each step takes ``seconds(plan)``, and every token is 0."""

    def __init__(self, clock: Clock, seconds: Callable[[Plan], float]) -> None:
        self.clock, self.seconds = clock, seconds

    def run(self, plan: Plan) -> Mapping[Hashable, int | None]:
        if plan.parts:
            self.clock.now += self.seconds(plan)
        return {part.request.name: 0 for part in plan.parts if part.samples}

    def forget(self, name: Hashable) -> None:
        pass


@dataclass
class Seen:
    """A request as its client saw it: when it came and when its tokens did, in seconds; why it was refused, if so."""

    arrived: float
    times: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token; endless if there was none."""
        return self.times[0] - self.arrived if self.times else inf

    @property
    def gap(self) -> float:
        """The 90th percentile of the seconds between its tokens."""
        gaps = [after - before for before, after in pairwise(self.times)]
        return quantiles(gaps, n=10, method="inclusive")[-1] if len(gaps) > 1 else sum(gaps)

    def listener(self, clock: Callable[[], float]) -> Listener:
        """What an engine tells of the request, noted."""

        def listen(what: Event | Refused) -> None:
            if isinstance(what, Refused):
                self.refused = what.reason
            elif what.token is not None:
                self.times.append(clock())

        return listen


@dataclass
class Replay:
    """What came of a trace: each request, the pages in use after each step, and preemptions."""

    seen: list[Seen]
    pages: list[int]
    preemptions: int
    seconds: float

    def goodput(self, first: float, gap: float) -> float:
        """Tokens a second of requests that got their first token within ``first`` seconds, and 90 % of the others
        within ``gap`` seconds after the one before."""
        good = (len(seen.times) for seen in self.seen if seen.first <= first and seen.gap <= gap)
        return sum(good) / self.seconds if self.seconds else 0.0

    @property
    def refused(self) -> int:
        return sum(bool(seen.refused) for seen in self.seen)


def predicted(predictor: Predictor) -> Callable[[Plan], float]:
    """Steps take what a profile says."""
    return lambda plan: predictor.seconds(plan.works)


def simulate(
    requests: Sequence[planner.Request],
    scheduler: Scheduler,
    seconds: Callable[[Plan], float],
    dense: Callable[[planner.Request], bool] = lambda request: False,
) -> Replay:
    """``replay`` without a model.

    Args:
        requests: with arrivals in seconds, in any order.
        scheduler: a new one, without prefixes: traces do not tell what their prompts share.
        seconds: of a step, such as ``predicted(predictor)``. The predictor of the scheduler's admission may be another:
            then it is corrected by what steps take, as on a device that is not as its profile says.
        dense: whether a request attends to everything.
    """
    clock = Clock()
    engine = Engine(Imitation(clock, seconds), scheduler, clock)
    return replay(requests, engine, clock, lambda n, r: Request(n, [0] * r.prompt, r.output, dense(r)))


def replay(
    requests: Sequence[planner.Request],
    engine: Engine,
    clock: Clock,
    make: Callable[[int, planner.Request], Request],
) -> Replay:
    """Give ``requests`` to an engine whose steps move ``clock``, each when it arrives, until all have ended. Those that
    can never run are refused. ``make`` gives the engine's request of a number and a request of the trace."""
    found = Replay([], [], 0, 0.0)
    waiting = sorted(requests, key=lambda request: request.arrival)
    for number, request in enumerate(waiting):
        arrival = request.arrival - waiting[0].arrival
        while clock.now < arrival and _step(engine, clock, found):
            pass
        clock.now = max(clock.now, arrival)
        seen = Seen(arrival)
        found.seen.append(seen)
        try:
            engine.submit(make(number, request), seen.listener(clock))
        except Refused as error:
            seen.refused = error.reason
    while _step(engine, clock, found):
        pass
    found.preemptions, found.seconds = engine.scheduler.preemptions, clock.now
    return found


def _step(engine: Engine, clock: Clock, found: Replay) -> bool:
    """False if there was nothing to do."""
    scheduler = engine.scheduler
    if not scheduler.waiting and not scheduler.running:
        return False
    if engine.step().parts:
        found.pages.append(scheduler.manager.used_pages)
    else:
        clock.now += IDLE  # all that wait are held
    return True
