"""From which length sparse attention is faster than dense, from measured times. Imports no torch.

Up to K visible entries everything is selected: dense attention gives the same result there, and a dispatcher may take
whichever is faster. Past K the two differ, and to change over is a matter of the model's quality too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, quantiles

CLEAR = 0.05
"""Share by which the times of a length must differ to count as different, at least."""


@dataclass(frozen=True)
class Timing:
    """Measured seconds of a call: visible entries of each query, sequences, the selected share, and the path."""

    length: int
    batch: int
    ratio: float
    path: str
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Of one length, median ``dense`` and ``sparse`` seconds; ``faster`` is a path, or ``""`` where they do not differ
    by more than they spread. ``exact``: everything is selected, so both give the same result."""

    length: int
    dense: float
    sparse: float
    faster: str
    exact: bool

    @property
    def speedup(self) -> float:
        """Dense over sparse time."""
        return self.dense / self.sparse


@dataclass(frozen=True)
class Crossover:
    """Of one batch and ratio: ``cells`` by length, and ``length``, between whose two values sparse becomes the faster
    for good; None where it does not, and from 0 where it always is."""

    batch: int
    ratio: float
    cells: tuple[Cell, ...]
    length: tuple[int, int] | None

    def path(self, length: int) -> str:
        """The path that was faster at the longest measured length up to this one, dense in doubt. ``""`` below all."""
        known = [cell for cell in self.cells if cell.length <= length]
        return (known[-1].faster or "dense") if known else ""


def read(path: str | Path) -> list[Timing]:
    """JSON lines with the fields of ``Timing``. Raises ValueError, naming the line."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.strip():
            try:
                timing = Timing(**json.loads(line))
                if timing.path not in ("dense", "sparse") or not 0 < timing.seconds < inf:
                    raise ValueError
                if timing.length < 1 or timing.batch < 1 or not 0 < timing.ratio < inf:
                    raise ValueError
                found.append(timing)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {number}: expected length, batch, ratio and seconds above 0, and path (dense or "
                    f"sparse), got {line.strip()}"
                ) from None
    return found


def crossovers(timings: Iterable[Timing], k: int) -> list[Crossover]:
    """For each batch and ratio, over the lengths at which both paths were measured. ``k``: entries that are selected
    at least. Raises ValueError if there are none."""
    times: dict[tuple[int, float], dict[int, dict[str, list[float]]]] = {}
    for timing in timings:
        lengths = times.setdefault((timing.batch, timing.ratio), {})
        lengths.setdefault(timing.length, {}).setdefault(timing.path, []).append(timing.seconds)
    found = []
    for (batch, ratio), lengths in sorted(times.items()):
        cells = tuple(
            _cell(length, paths["dense"], paths["sparse"], k)
            for length, paths in sorted(lengths.items())
            if len(paths) == 2
        )
        if cells:
            found.append(Crossover(batch, ratio, cells, _switch(cells)))
    if not found:
        raise ValueError("timings: expected dense and sparse ones of the same length, batch and ratio, got none")
    return found


def _cell(length: int, dense: Sequence[float], sparse: Sequence[float], k: int) -> Cell:
    (low_dense, d, high_dense), (low_sparse, s, high_sparse) = _quartiles(dense), _quartiles(sparse)
    faster = ""
    if high_sparse < low_dense and s < (1 - CLEAR) * d:
        faster = "sparse"
    elif high_dense < low_sparse and d < (1 - CLEAR) * s:
        faster = "dense"
    return Cell(length, d, s, faster, length <= k)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def _switch(cells: Sequence[Cell]) -> tuple[int, int] | None:
    won = [cell.faster == "sparse" for cell in cells]
    if not won[-1]:
        return None
    first = len(won) - won[::-1].index(False) if False in won else 0
    return (cells[first - 1].length if first else 0), cells[first].length
