"""The acceptance experiment of admission by memory and compute: ``python -m sparse_attn bench --suite serving``.

A real model decodes under more load than it can serve, in a mix that changes, under four rules:

* A: memory only, with 15 % of the pool in reserve;
* B: A, and the best static number of requests, tuned on a seed of its own;
* C: two watermarks, with a profile that was calibrated before;
* D: A, with the limit of a pool of a quarter of the size.

``docs/serving.md`` says what is counted, what was frozen beforehand, and what was found.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from math import exp, log
from pathlib import Path
from statistics import mean, median

import torch
from serving_arms import (
    DOCUMENT,
    MARGIN,
    MIXES,
    OUTPUT,
    PAGE,
    PROMPT,
    RESERVE,
    STATIC,
    TOKENS,
    WATERMARKS,
    Goodput,
    Limit,
    Replay,
    arm,
    arrivals,
)
from serving_load import Bench, saturated_rate, serve, solo

from sparse_attn import doctor
from sparse_attn.serving import calibration
from sparse_attn.serving.cost import Predictor, Profile, StepCost, Work
from sparse_attn.serving.scheduler import Scheduler, Steps

OVERLOAD = 1.2
"""Offered rate over the saturated one."""
SECONDS = 36.0
SEEDS = (11, 12, 13, 14, 15)
TUNING_SEED, REPEATED = 1, 2
SIMULATED = range(101, 113)
"""Seeds on which arm C's watermark is tuned: in the simulator, as it has a profile."""
FIRST, GAP = 4.0, 2.5
"""Limits: times the solo time to the first token, of its class; times the solo gap of a long request."""
LONGS_IN_OLD_POOL = 2
DEVICE = "this machine, SmolLM2-135M bf16, int8 and int4"


class Experiment:
    """What is measured once, and the arms."""

    def __init__(self, quick: bool, threads: int, say: Callable[[str], None]) -> None:
        self.say, self.quick = say, quick
        self.seconds = 9.0 if quick else SECONDS
        request = -(-(DOCUMENT + PROMPT["long"] + OUTPUT) // PAGE)
        self.old_pages = round(LONGS_IN_OLD_POOL * request / (1 - RESERVE)) + 1
        self.bench = Bench(4 * self.old_pages, threads, say)
        self.costs = self._calibrate()
        self.error = self._error()
        say(f"predictions outside of the fit miss by {self.error:.1%} (median)")
        alone = {kind: solo(self.bench, kind) for kind in ("short", "long")}
        self.solo = {kind: dict(zip(("first", "gap"), found, strict=True)) for kind, found in alone.items()}
        self.limit = Limit({kind: FIRST * found[0] for kind, found in alone.items()}, GAP * alone["long"][1])
        self.rates = {
            name: OVERLOAD * saturated_rate(self.bench, longs, Steps(TOKENS, TOKENS)) for name, longs in MIXES.items()
        }
        say(f"solo {self.solo}, limits {self.limit}, hold {self.limit.hold:.2f} s, offered {self.rates}")

    # --- Times of steps

    def _calibrate(self) -> dict[str, StepCost]:
        """Coefficients: of what selects, of what is dense, and of chunks."""
        plan = Predictor(self.bench.runner.plan, StepCost())
        lengths, batches = (300, 700, 1500, 3000, 6100), (1, 4, 8)
        configurations = {
            "selecting": [[Work.decode(n)] * b for n in lengths for b in batches],
            "dense": [
                [Work.decode(n, True)] * b for n in (130, 600, 2000, 6100) for b in (1, 4, 16, 32) if n * b <= 30_000
            ],
            "chunk": [[Work(at, at + n, True)] for at in (0, 1024, 3072, 6080) for n in (8, 32, 64, 160)],
        }
        found = {}
        for name, some in configurations.items():
            rows = []
            for works in some:
                # one row for each, as a step that something delayed would count like the others
                seconds = self.bench.timed(works)
                counts = plan.counts(works)
                scored = counts.pairs.get("scored", 0)
                rows.append(calibration.Row(counts.tokens, scored, counts.attended_pairs, seconds))
            fit = calibration.fit(rows, DEVICE)
            self.say(f"{name}: {fit.steps} steps, half within {fit.error:.1%}: {fit.cost}")
            found[name] = fit.cost
        return found

    def predictor(self) -> Predictor:
        return Predictor(self.bench.runner.plan, Profile(**self.costs))

    def _error(self) -> float:
        """Of predictions at lengths and batches outside of the fit, and of steps of every kind together."""
        configurations = [
            *([Work.decode(n)] * b for n in (1000, 2200, 4500) for b in (2, 6)),
            *([Work.decode(n, True)] * b for n in (100, 190, 1200) for b in (2, 8, 24)),
            *([Work(at, at + n, True)] for at in (512, 2048, 5120) for n in (24, 96)),
            *([Work.decode(4500)] * b + [Work.decode(170, True)] * d for b, d in ((2, 4), (4, 10))),
            *(
                [Work.decode(5000)] * b + [Work.decode(150, True)] * d + [Work(0, 100, True)]
                for b, d in ((1, 6), (3, 12))
            ),
        ]
        predictor = self.predictor()
        self.errors = [(self.bench.timed(works), predictor.seconds(works)) for works in configurations]
        return median(abs(predicted / measured - 1) for measured, predicted in self.errors)

    # --- Arms

    def arm(self, name: str, tuned: float, old_pool: bool = False) -> Scheduler:
        """A new scheduler under a rule, with the number or watermark that was tuned. ``old_pool``: on a quarter of the
        pages."""
        pages = self.old_pages if old_pool else 4 * self.old_pages
        rule, steps, reserve = arm(name, tuned, self.limit, self.predictor())
        return self.bench.scheduler(rule, steps, reserve, pages)

    def replay(self) -> Replay:
        """The same runs in the simulator, with the coefficients that were measured."""
        plan = self.bench.runner.plan
        return Replay(self.limit, self.rates, 4 * self.old_pages, Profile(**self.costs), plan)

    def run(self, name: str, seed: int, tuned: float = 0.0, old_pool: bool = False, share: float = 1.0) -> Goodput:
        """A run of an arm, or a ``share`` of one."""
        seconds = share * self.seconds
        coming = arrivals(self.rates, seed, seconds)
        served = serve(self.bench, self.arm(name, tuned, old_pool), coming, seconds, seed)
        found = Goodput.of(served, self.limit)
        self.say(f"{name}, seed {seed}, {tuned or 'untuned'}{', old pool' if old_pool else ''}: {found}")
        return found


def geometric(values: Sequence[float]) -> float:
    return exp(mean(log(max(value, 1e-9)) for value in values))


def verdict(goodput: dict[str, list[Goodput]], again: list[Goodput], old: tuple[Goodput, Goodput]) -> dict[str, object]:
    """What the experiment says, by the conditions that were set before it. ``again``: B on its first seeds."""

    def over(name: str, other: str) -> list[float]:
        return [a.tokens / max(b.tokens, 1e-9) for a, b in zip(goodput[name], goodput[other], strict=True)]

    c_b = over("C", "B")
    longs = mean(each.long for each in goodput["C"]) / max(mean(each.long for each in goodput["B"]), 1e-9)
    before = goodput["B"][: len(again)]
    drift = abs(mean(each.tokens for each in again) / max(mean(each.tokens for each in before), 1e-9) - 1)
    ratios = {
        "C/B by seed": c_b,
        "C/B": geometric(c_b),
        "C/A": geometric(over("C", "A")),
        "C/D": geometric(over("C", "D")),
        "long C/B": longs,
        "C/A, old pool": old[1].tokens / max(old[0].tokens, 1e-9),
        "repeat of B differs by": drift,
    }
    holds = {
        "C > B on every seed": min(c_b) > 1,
        "C/B >= 1.10": ratios["C/B"] >= 1.10,
        "C/A >= 1.3": ratios["C/A"] >= 1.3,
        "C/D >= 1.3": ratios["C/D"] >= 1.3,
        "long C/B >= 0.9": longs >= 0.9,
        "C/A on the old pool >= 0.97": ratios["C/A, old pool"] >= 0.97,
    }
    said = "void" if drift > 0.05 else "accepted" if all(holds.values()) else "not accepted"
    return {"verdict": said, "ratios": ratios, "conditions": holds}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn bench --suite serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, one seed: shows that it runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    it = Experiment(options.quick, options.threads, say)
    tuning = {value: it.run("B", TUNING_SEED, value, share=0.5) for value in STATIC}
    tuned = {
        "B": max(STATIC, key=lambda value: tuning[value].tokens),
        "C": it.replay().best("C", WATERMARKS, SIMULATED),
    }
    say(f"tuned {tuned}")
    seeds = SEEDS[:1] if options.quick else SEEDS
    found: dict[str, list[Goodput]] = {name: [] for name in "ABCD"}
    for turn, seed in enumerate(seeds):
        for name in "ABCD"[turn % 4 :] + "ABCD"[: turn % 4]:  # in turns, so that a slow spell favours none
            found[name].append(it.run(name, seed, tuned.get(name, 0.0)))
    again = [it.run("B", seed, tuned["B"]) for seed in seeds[:REPEATED]]
    old = it.run("A", seeds[0], old_pool=True), it.run("C", seeds[0], tuned["C"], old_pool=True)
    results = {
        "date": date.today().isoformat(),
        "machine": doctor.cpu()["model"],
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "quick": options.quick,
        "settings": {
            "mixes": MIXES,
            "overload": OVERLOAD,
            "seconds": it.seconds,
            "tokens": TOKENS,
            "budget": MARGIN * it.limit.gap,
            "hold": it.limit.hold,
            "pages": 4 * it.old_pages,
            "tuned": tuned,
        },
        "solo": it.solo,
        "limits": asdict(it.limit),
        "offered": it.rates,
        "costs": {name: cost.to_dict() for name, cost in it.costs.items()},
        "steps": {"median error": it.error, "measured and predicted": it.errors},
        "tuning": {str(value): asdict(each) for value, each in tuning.items()},
        "goodput": {name: [asdict(each) for each in some] for name, some in found.items()},
        "repeat of B": [asdict(each) for each in again],
        "old pool": {"A": asdict(old[0]), "C": asdict(old[1])},
        **verdict(found, again, old),
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps({key: results[key] for key in ("verdict", "ratios", "conditions")}, indent=2))
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
