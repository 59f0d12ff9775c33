"""Failures and preemptions against the reserve, and goodput against the watermark, on a public trace.

The engine's own scheduler on requests of a trace, with steps of a made-up device: a decode step of a request costs what
`COST` says, so no figure is a measurement of one. Time is pressed so that the pool is always asked for too much.
Run: python benchmarks/simulation.py TRACE [--requests N] [--faster X] [--plot FILE]
TRACE is a CSV of Azure's LLM inference traces (2023), or JSON lines of Mooncake's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_attn.serving import traces
from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.cost import Predictor, StepCost
from sparse_attn.serving.manager import CacheManager, PagedPlane
from sparse_attn.serving.planner import Request
from sparse_attn.serving.scheduler import Scheduler, Steps
from sparse_attn.serving.simulator import Replay, predicted, simulate

MODEL = "deepseek-v3.2"
COST = StepCost(step=8e-3, token=4e-5, scored=2e-11, attended=4e-10, device="made up")
PAGE, PAGES = 64, 600
FIRST, GAP = 2.0, 0.06
"""Seconds to the first token and between tokens that count as good."""
RESERVES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)
WATERMARKS = (0.5, 0.7, 0.8, 0.9, 1.0)


def replayed(requests: list[Request], reserve: float, limits: Limits, mode: Any) -> Replay:
    rule = Admission(limits, Predictor(MODEL, COST), device=COST.device, mode=mode)
    manager = CacheManager([PagedPlane("main", PAGE)], PAGES, reserve=reserve, emergency=min(0.02, reserve))
    scheduler = Scheduler(manager, rule, Steps(2048, 256, len(requests)), prefixes=False)
    return simulate(requests, scheduler, predicted(Predictor(MODEL, COST)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--faster", type=float, default=2.0, help="by so much closer arrivals than the trace's (2)")
    parser.add_argument("--plot", type=Path, help="draw it into this file")
    options = parser.parse_args()
    found = traces.read(options.trace)[: options.requests]
    requests = [replace(request, arrival=request.arrival / options.faster) for request in found]
    limits = Limits(GAP)
    print("| reserve | preemptions | goodput, tokens/s |\n|---|---|---|")
    by_reserve = []
    for reserve in RESERVES:
        it = replayed(requests, reserve, limits, "off")
        by_reserve.append((reserve, it.preemptions, it.goodput(FIRST, GAP)))
        print(f"| {reserve:.0%} | {it.preemptions} | {it.goodput(FIRST, GAP):.1f} |", flush=True)
    print("\n| compute watermark | preemptions | goodput, tokens/s |\n|---|---|---|")
    by_watermark = []
    for watermark in WATERMARKS:
        it = replayed(requests, 0.15, replace(limits, compute=watermark), "enforce")
        by_watermark.append((watermark, it.preemptions, it.goodput(FIRST, GAP)))
        print(f"| {watermark:.0%} | {it.preemptions} | {it.goodput(FIRST, GAP):.1f} |", flush=True)
    if options.plot:
        plot(options.plot, by_reserve, by_watermark)


def plot(path: Path, by_reserve: list[Any], by_watermark: list[Any]) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    left.plot([row[0] for row in by_reserve], [row[1] for row in by_reserve], marker="o")
    left.set(xlabel="reserve, share of the pool", ylabel="preemptions", ylim=(0, None))
    right.plot([row[0] for row in by_watermark], [row[2] for row in by_watermark], marker="o")
    right.set(xlabel="compute watermark", ylabel="goodput, tokens/s", ylim=(0, None))
    figure.savefig(path)


if __name__ == "__main__":
    main()
