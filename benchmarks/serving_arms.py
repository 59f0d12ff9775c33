"""The rules that the serving suite compares, what it counts, and the same runs in the simulator.

``python benchmarks/serving_arms.py RESULTS`` replays an experiment: with the coefficients that it measured, on the same
arrivals and many more seeds, in seconds. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import exp
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_attn.models import METHODS, Model, gqa, sparse
from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.cost import Predictor, Profile, StepCost
from sparse_attn.serving.engine import Engine
from sparse_attn.serving.manager import CacheManager, PagedPlane, Saved
from sparse_attn.serving.scheduler import Plan, Request, Scheduler, Steps
from sparse_attn.serving.simulator import Clock, Imitation, Seen

DOCUMENT, OUTPUT, PAGE = 6144, 64, 64
PROMPT = {"long": 32, "short": 128}
MIXES = {"short-heavy": 0.05, "long-heavy": 0.7, "mixed": 0.25}
"""Phases of a run, a third of it each: shares of long requests."""
RESERVE = 0.15
STATIC = (4, 8, 16, 32)
"""Requests that arm B may run, of which one is tuned."""
WATERMARKS = (0.7, 0.8, 0.9, 1.0)
"""Of compute, for arm C, of which one is tuned."""
TOKENS = 144
"""Tokens of a step at most, in every arm: a short prompt, and sixteen that decode, take as long as gaps may."""
MARGIN, LATE = 0.85, 0.07
"""Of arm C: share of the limit of gaps that is its budget of a step, and of steps that may take longer."""
NOISE = 0.1
"""Standard deviation of the logarithm of a simulated step's time over the predicted one: half of its square from step
to step, half in spells of about ten steps."""


@dataclass
class Record(Seen):
    """A request of a kind, as its client saw it."""

    kind: str = ""


@dataclass
class Served:
    """A run: what clients saw, and preemptions."""

    records: list[Record]
    preemptions: int
    seconds: float


@dataclass(frozen=True)
class Limit:
    """Seconds that a request may take to its first token, by class, and at the 90th percentile between tokens."""

    first: dict[str, float]
    gap: float

    def met(self, record: Record) -> bool:
        return record.first <= self.first[record.kind] and record.gap <= self.gap

    @property
    def hold(self) -> float:
        """Seconds after which a request that waits cannot have its first token in time; all arms give it up."""
        return max(min(self.first.values()) - 2 * self.gap, 0.1)


@dataclass(frozen=True)
class Goodput:
    """Output tokens a second of requests that met both limits; and why others did not."""

    tokens: float
    short: float
    long: float
    offered: int
    refused: int
    late: int
    slow: int
    preemptions: int

    @classmethod
    def of(cls, served: Served, limit: Limit) -> Goodput:
        good = {"short": 0, "long": 0}
        late = slow = 0
        for record in served.records:
            if limit.met(record):
                good[record.kind] += len(record.times)
            elif record.times:
                late += record.first > limit.first[record.kind]
                slow += record.gap > limit.gap
        return cls(
            sum(good.values()) / served.seconds,
            good["short"] / served.seconds,
            good["long"] / served.seconds,
            len(served.records),
            sum(bool(record.refused) for record in served.records),
            late,
            slow,
            served.preemptions,
        )


Arrival = tuple[float, str]


def poisson(rate: float, begin: float, seconds: float, longs: float, draw: random.Random) -> list[Arrival]:
    """Arrivals in the seconds from ``begin`` on; a share of ``longs`` is long."""
    found, now = [], begin
    while (now := now + draw.expovariate(rate)) < begin + seconds:
        found.append((now, "long" if draw.random() < longs else "short"))
    return found


def arrivals(rates: Mapping[str, float], seed: int, seconds: float) -> list[Arrival]:
    """Of a run: the mixes follow each other, each at its rate."""
    draw, found, third = random.Random(seed), [], seconds / len(MIXES)
    for number, (name, longs) in enumerate(MIXES.items()):
        found += poisson(rates[name], number * third, third, longs, draw)
    return found


def arm(name: str, tuned: float, limit: Limit, predictor: Predictor) -> tuple[Admission, Steps, float]:
    """The rule, the steps and the reserve of an arm, with the number or watermark that was tuned."""
    compute = name == "C"
    limits = Limits(
        MARGIN * limit.gap,
        memory=0.85 if compute else 1.0,
        compute=tuned if compute else 1.0,
        hold=limit.hold,
        late=LATE if compute else 0.0,
        overdue="refuse",
    )
    rule = Admission(limits, predictor if compute else None, predictor.device)
    reserve = 1 - (1 - RESERVE) / 4 if name == "D" else RESERVE
    return rule, Steps(TOKENS, int(tuned) if name == "B" else TOKENS), reserve


# --- The same runs in the simulator


@dataclass(frozen=True)
class Replay:
    """What an experiment measured before its arms ran: ``rates`` of arrivals by mix, limits, pages and coefficients."""

    limit: Limit
    rates: Mapping[str, float]
    pages: int
    profile: Profile
    plan: Model

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> Replay:
        """Of the JSON that the suite saves."""
        profile = Profile(**{kind: StepCost.from_dict(cost) for kind, cost in results["costs"].items()})
        plan = sparse(gqa("smollm2-135m", 30, 9, 3, 64, "int8"), METHODS["tokens"], 256, Fraction(1, 4))
        return cls(Limit(**results["limits"]), results["offered"], results["settings"]["pages"], profile, plan)

    def run(self, name: str, tuned: float, seed: int, seconds: float = 36.0, old_pool: bool = False) -> Goodput:
        """An arm, whose steps take as long as predicted, but for noise."""
        rule, steps, reserve = arm(name, tuned, self.limit, Predictor(self.plan, self.profile))
        manager = CacheManager([PagedPlane("kv", PAGE)], self.pages // 4 if old_pool else self.pages, reserve=reserve)
        scheduler = Scheduler(manager, rule, steps, prefixes=False)
        clock, records = Clock(), []
        engine = Engine(Imitation(clock, _Noisy(Predictor(self.plan, self.profile), seed)), scheduler, clock)
        coming = iter(enumerate(arrivals(self.rates, seed, seconds)))
        following = next(coming, None)
        while clock.now < seconds:
            while following and following[1][0] <= clock.now:
                number, (due, kind) = following
                records.append(Record(due, kind=kind))
                engine.submit(_request(number, kind), records[-1].listener(clock))
                following = next(coming, None)
            if not engine.step().parts:
                clock.now += 0.001
        return Goodput.of(Served(records, scheduler.preemptions, seconds), self.limit)

    def best(self, name: str, choices: Sequence[float], seeds: Sequence[int]) -> float:
        """The choice with the most goodput over the seeds."""
        return max(choices, key=lambda tuned: mean(self.run(name, tuned, seed).tokens for seed in seeds))


def _request(number: int, kind: str) -> Request:
    """A long one begins with a document's pages; a short one is dense."""
    if kind == "short":
        return Request(number, [0] * PROMPT[kind], OUTPUT, dense=True)
    saved = Saved(DOCUMENT, {"kv": list(range(DOCUMENT // PAGE))})
    return Request(number, [0] * (DOCUMENT + PROMPT[kind]), OUTPUT, saved=saved)


@dataclass
class _Noisy:
    """Seconds of a step."""

    predictor: Predictor
    seed: int
    spell: float = 0.0
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(f"noise {self.seed}")

    def __call__(self, plan: Plan) -> float:
        each = NOISE / 2**0.5
        self.spell = 0.9 * self.spell + self.draw.gauss(0, each * (1 - 0.9**2) ** 0.5)
        return self.predictor.seconds(plan.works) * exp(self.spell + self.draw.gauss(0, each))


def table(it: Replay, seeds: Sequence[int]) -> Iterator[str]:
    yield "| arm | tokens/s | short | long | refused | late | slow |"
    yield "|---" * 7 + "|"
    arms = [("A", 0.0), *(("B", float(n)) for n in STATIC), *(("C", share) for share in WATERMARKS), ("D", 0.0)]
    for name, tuned in arms:
        found = [it.run(name, tuned, seed) for seed in seeds]
        cells = [
            mean(getattr(each, field) for each in found)
            for field in ("tokens", "short", "long", "refused", "late", "slow")
        ]
        yield f"| {name}{f' {tuned:g}' if tuned else ''} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=24)
    options = parser.parse_args()
    for line in table(Replay.of(json.loads(options.results.read_text())), range(11, 11 + options.seeds)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
