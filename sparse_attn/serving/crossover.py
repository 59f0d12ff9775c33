"""From which length sparse attention is faster than dense, from measured times, and where an engine changes over.

Up to K visible entries everything is selected: dense attention gives the same result there, and a dispatcher may take
whichever is faster. Past K the two differ, and to change over is a matter of the model's quality too. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

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


# --- Where an engine changes over


@dataclass(frozen=True)
class Switch:
    """Up to how many visible entries a sequence that selects is attended densely after all.

    * ``exact``: where everything is selected, so that results are the same; at most K.
    * ``approximate``: above K, where the selection took no less time though dense attention reads more; 0: nowhere.
      Results differ from the selection's: a model that was trained to select should not be run so.
    """

    exact: int
    approximate: int = 0

    def reason(self, visible: int) -> Literal["", "exact", "approximate"]:
        """Which of the two makes attention to so many visible entries dense; ``""`` if it selects."""
        if visible <= self.exact:
            return "exact"
        return "approximate" if visible <= self.approximate else ""


def switches(found: Iterable[Crossover], k: int) -> dict[float, Switch]:
    """The switch of each ratio: dense where it was faster or as fast in every batch that was measured, so that what a
    sequence gets does not depend on its neighbours. Lengths beyond those measured select."""
    limits: dict[float, int] = {}
    for each in found:
        limits[each.ratio] = min(limits.get(each.ratio, _limit(each, k)), _limit(each, k))
    return {ratio: Switch(min(limit, k), limit if limit > k else 0) for ratio, limit in limits.items()}


def _limit(crossover: Crossover, k: int) -> int:
    if crossover.length is None:
        return crossover.cells[-1].length
    slower, faster = crossover.length
    return faster - 1 if slower else min(faster - 1, k)  # below all that was measured, only what is exact


@dataclass(frozen=True)
class Switches:
    """What was measured on a device, for lists of ``k`` entries at least: a switch by ratio."""

    device: str
    k: int
    by_ratio: Mapping[float, Switch]

    def save(self, path: str | Path) -> None:
        rows = [{"ratio": ratio, **asdict(switch)} for ratio, switch in self.by_ratio.items()]
        Path(path).write_text(json.dumps({"device": self.device, "k": self.k, "switches": rows}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Switches:
        """What ``save`` wrote. Raises ValueError for anything else."""
        try:
            found = json.loads(Path(path).read_text())
            by_ratio = {float(row.pop("ratio")): Switch(**row) for row in found.pop("switches")}
            it = cls(**found, by_ratio=by_ratio)
            if not all(
                0 <= s.exact <= it.k and (s.approximate == 0 or s.approximate > it.k) for s in by_ratio.values()
            ):
                raise ValueError
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: expected switches that crossover --save wrote, got something else") from None
        return it

    def of(self, ratio: float, device: str, k: int) -> tuple[Switch, str]:
        """The switch of a ratio on ``device``, and why it is not the measured one but the default, ``Switch(k)``, if so
        (else ``""``)."""
        if device != self.device:
            return Switch(k), f"expected one of {device!r}, got one of {self.device!r}; measure here"
        if self.k != k:
            return Switch(k), f"expected one for lists of {k} entries at least, got {self.k}; measure again"
        if ratio not in self.by_ratio:
            known = ", ".join(f"{known:g}" for known in self.by_ratio)
            return Switch(k), f"expected one of ratio {ratio:g}, got {known}; measure it"
        return self.by_ratio[ratio], ""
