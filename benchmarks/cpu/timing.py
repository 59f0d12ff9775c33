"""How a case is timed: its functions in turn, over and over in one process, so that a busy neighbour disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

OURS = "sparse_attn"
MOVED = "the same rows moved"
"""Stands for a loop that reads and writes rows of the same sizes in the same order, and computes nothing."""


def _cached() -> int:
    """Bytes of the largest cache of the first core, 64 MB if the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max([int(size[:-1]) << 10 for size in sizes if size.endswith("K")], default=64 << 20)


CACHE_BYTES = max(128 << 20, 2 * _cached())
"""What the calls of a case read together at least: more than caches hold."""


@dataclass
class Case:
    """One kind of call, and what else computes the same."""

    name: str
    functions: dict[str, Callable[[int], Tensor]]
    """By name, OURS first: functions of the variant's number, which all return the same numbers."""
    variants: int = 4
    """Sets of arguments. Calls take them in turn, each function another, so that caches do not hold the rows."""
    flops: float = 0
    bytes: float = 0
    """What one call must compute, and must read from memory and write there, of paged planes."""
    limit: str = ""
    """Which of the machine's limits binds it (see ``machine.LIMITS``)."""
    check: Callable[[], None] = field(default=lambda: None)
    """Raises if another function computes something else."""


@dataclass(frozen=True)
class Time:
    """Seconds of one function."""

    quartile: float
    """The lower one: what a call takes when nothing disturbs it."""
    median: float
    spread: float
    """Distance of the quartiles over the median."""


def variants_for(bytes_read: float, least: int = 4) -> int:
    return max(least, min(320, int(-(-CACHE_BYTES // max(bytes_read, 1)))))


def measure(case: Case, budget: float, least: int = 6, most: int = 60) -> dict[str, Time]:
    """Times of each function, in rounds that together take about `budget` seconds.

    With one thread CPU time of the process, else wall time.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in case.functions}
    begin = time.perf_counter()
    rounds, turn = most, 0
    while turn < rounds + 2:
        for offset, (name, function) in enumerate(case.functions.items()):
            variant = (turn * len(samples) + offset) % case.variants
            start = clock()
            function(variant)
            if turn >= 2:  # the first rounds warm up
                samples[name].append(clock() - start)
        turn += 1
        if turn == 2:
            round_time = max((time.perf_counter() - begin) / 2, 1e-9)
            rounds = max(least, min(most, int(budget / round_time)))
    return {name: _time(values) for name, values in samples.items()}


def _time(values: list[float]) -> Time:
    low, middle, high = statistics.quantiles(values, n=4)
    return Time(low, middle, (high - low) / middle if middle else 0.0)
