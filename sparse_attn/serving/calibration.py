"""Coefficients of a step's time, from measured steps. Imports no torch.

``docs/serving.md`` says how to measure, and what is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from .cost import KINDS, TERMS, Profile, StepCost

FEWEST = 12
"""Steps that a fit needs: three for each coefficient."""
BLOCKS = 50
"""Parts of the measurements that are drawn again to find intervals."""
DRAWS = 200
LEVEL = 0.95
"""Share of the draws that an interval holds."""
APART = 1e-6
"""Share of a column of measurements that the others must leave unexplained, of its squares."""


@dataclass(frozen=True)
class Row:
    """A measured step: query tokens, pairs scored and attended, seconds, and sequences if all of them decode.

    ``kinds``: the same of the sequences of each kind (``cost.KINDS``), if the step tells them apart.
    """

    tokens: int
    scored: int
    attended: int
    seconds: float
    decoding: int | None = None
    kinds: Mapping[str, Row] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[float, float, float, float]:
        return (1, self.tokens, self.scored, self.attended)


@dataclass(frozen=True)
class Fit:
    """``intervals`` of each term's coefficient, in seconds. ``error``: the median share by which predictions miss."""

    cost: StepCost
    intervals: Mapping[str, tuple[float, float]]
    error: float
    steps: int


def read(path: str | Path) -> list[Row]:
    """Rows of JSON lines: ``seconds`` of the step, ``prefill`` and ``decode`` as ``StepStats.to_dict`` has them, and
    ``works`` by kind of sequence if it is told.

    Lines whose ``record`` is not ``"step"`` are left out. Raises ValueError, naming the line.
    """
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            step = json.loads(line)
            if step.get("record", "step") == "step":
                found.append(row(step))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path}, line {number}: expected a step with seconds, prefill and decode: {said}"
            ) from None
    return found


def row(step: Mapping[str, Any]) -> Row:
    """A row from a step's dict. Raises KeyError if something is missing, ValueError for times of 0 or less."""
    phases = step["prefill"], step["decode"]
    tokens, attended = (sum(phase[name] for phase in phases) for name in ("tokens", "attended_pairs"))
    scored = sum(phase["pairs"].get("scored", 0) for phase in phases)
    seconds = float(step["seconds"])
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds: expected a number above 0, got {step['seconds']}")
    decoding = None if step["prefill"]["tokens"] else step["decode"]["sequences"]
    works = step.get("works", {})
    if not works.keys() <= set(KINDS):
        raise ValueError(f"works: expected kinds among {', '.join(KINDS)}, got {', '.join(works)}")
    kinds = {kind: Row(work["tokens"], work["scored"], work["attended"], seconds) for kind, work in works.items()}
    return Row(tokens, scored, attended, seconds, decoding, kinds)


def fit(rows: Sequence[Row], device: str = "") -> Fit:
    """The coefficients that are not negative and leave the least squared relative errors, with intervals.

    A step that takes twice as long may be off by twice as much. Of the least squares over
    each choice of terms, the best without a negative coefficient is the exact solution. Intervals hold 95 % of fits to
    blocks of consecutive rows, drawn with replacement: steps of a running service that follow each other are alike.

    A term that no row has, as scored pairs of a dense model, is 0. Raises ValueError if there are too few rows, or if
    they cannot tell terms apart.
    """
    if len(rows) < FEWEST:
        raise ValueError(f"steps: expected at least {FEWEST}, got {len(rows)}; measure more")
    used = [n for n in range(len(TERMS)) if any(row.columns[n] for row in rows)]
    scales = [max(row.columns[n] / row.seconds for row in rows) or 1.0 for n in range(len(TERMS))]
    whole = _sum(_equations(row, scales, row.seconds) for row in rows)
    _refuse_alike(whole, used)
    # Weighing by measured times favours steps that happened to be short, so weigh by what a first fit predicts; but not
    # for a step that took twice as long, which something else delayed.
    first = [x / scale for x, scale in zip(_least(whole, used), scales, strict=True)]
    predicted = [sum(c * x for c, x in zip(first, row.columns, strict=True)) for row in rows]
    equations = [_equations(row, scales, max(p, row.seconds / 2)) for p, row in zip(predicted, rows, strict=True)]
    whole = _sum(equations)
    size = -(-len(rows) // BLOCKS)
    blocks = [_sum(equations[start : start + size]) for start in range(0, len(rows), size)]
    draw = random.Random(0)
    draws = [_least(_sum(draw.choices(blocks, k=len(blocks))), used) for _ in range(DRAWS)]
    found = zip(TERMS, _least(whole, used), scales, strict=True)
    cost = StepCost.from_dict({term: x / scale for term, x, scale in found} | {"device": device})
    intervals = {}
    for n, term in enumerate(TERMS):
        values = sorted(drawn[n] / scales[n] for drawn in draws)
        out = int(DRAWS * (1 - LEVEL) / 2)
        intervals[term] = (values[out], values[-1 - out])
    return Fit(cost, intervals, error(cost, rows), len(rows))


def fits(rows: Sequence[Row], device: str = "") -> tuple[dict[str, Fit], dict[str, str]]:
    """Coefficients by kind of sequence, and why a kind that steps tell of has none.

    Sequences that decode in one way are fitted to the steps of that kind alone. Chunks of prompts are fitted to what is
    left of their steps without the time of those that decode beside them. Where no steps are of sequences that select
    alone, those are fitted to all steps. Raises ValueError if these cannot be fitted.
    """
    found: dict[str, Fit] = {}
    why: dict[str, str] = {}

    def add(kind: str, some: Sequence[Row]) -> None:
        if any(kind in row.kinds for row in rows):
            try:
                found[kind] = fit(some, device)
            except ValueError as error:
                why[kind] = str(error)

    for kind in ("selecting", "dense"):
        add(kind, [row.kinds[kind] for row in rows if [*row.kinds] == [kind]])
    left = (_without_decode(row, {kind: each.cost for kind, each in found.items()}) for row in rows)
    add("chunk", [row for row in left if row])
    if "selecting" not in found:
        found["selecting"] = fit(rows, device)
    return found, why


def _without_decode(row: Row, costs: Mapping[str, StepCost]) -> Row | None:
    """The chunks of a step; None if there are none, or if the time of the others is not known."""
    others = row.kinds.keys() - {"chunk"}
    if "chunk" not in row.kinds or not others <= costs.keys():
        return None
    chunk = row.kinds["chunk"]
    seconds = row.seconds - sum(
        sum(getattr(costs[kind], term) * x for term, x in zip(TERMS[1:], row.kinds[kind].columns[1:], strict=True))
        for kind in others
    )
    return replace(chunk, seconds=seconds) if seconds > 0 else None


def profile(found: Mapping[str, Fit]) -> Profile:
    """Of what ``fits`` found."""
    return Profile(**{kind: each.cost for kind, each in found.items()})


def error(cost: StepCost, rows: Iterable[Row]) -> float:
    """The median of ``|predicted / measured - 1|``."""
    coefficients = [getattr(cost, term) for term in TERMS]
    return median(
        abs(sum(c * x for c, x in zip(coefficients, row.columns, strict=True)) / row.seconds - 1) for row in rows
    )


Equations = tuple[list[list[float]], list[float]]
"""Normal equations of least squares: products of columns with each other, and with the times."""


def _equations(row: Row, scales: Sequence[float], weight: float) -> Equations:
    values = [x / weight / scale for x, scale in zip(row.columns, scales, strict=True)]
    return [[a * b for b in values] for a in values], [a * row.seconds / weight for a in values]


def _sum(parts: Iterable[Equations]) -> Equations:
    terms = range(len(TERMS))
    matrix, right = [[0.0] * len(TERMS) for _ in terms], [0.0] * len(TERMS)
    for some, values in parts:
        for n in terms:
            right[n] += values[n]
            for m in terms:
                matrix[n][m] += some[n][m]
    return matrix, right


def _least(equations: Equations, used: Sequence[int]) -> list[float]:
    """The solution without a negative coefficient that leaves least."""
    matrix, right = equations
    best, most = [0.0] * len(TERMS), 0.0
    for count in range(len(used), 0, -1):
        for chosen in combinations(used, count):
            found = _solve([[matrix[n][m] for m in chosen] for n in chosen], [right[n] for n in chosen])
            if found is None or min(found) < 0:
                continue
            explained = sum(x * right[n] for x, n in zip(found, chosen, strict=True))
            if explained > most:
                best, most = [0.0] * len(TERMS), explained
                for x, n in zip(found, chosen, strict=True):
                    best[n] = x
        if count == len(used) and most:
            break  # no bound is in the way: this is the least there is
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """By elimination without pivoting, as the matrix is positive; None where it has no single solution."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for n in range(size):
        if rows[n][n] <= APART * matrix[n][n]:
            return None
        for m in range(n + 1, size):
            share = rows[m][n] / rows[n][n]
            rows[m] = [b - share * a for a, b in zip(rows[n], rows[m], strict=True)]
    found = [0.0] * size
    for n in reversed(range(size)):
        rest = sum(rows[n][m] * found[m] for m in range(n + 1, size))
        found[n] = (rows[n][size] - rest) / rows[n][n]
    return found


def _refuse_alike(equations: Equations, used: Sequence[int]) -> None:
    matrix, right = equations
    for count in range(2, len(used) + 1):
        for chosen in combinations(used, count):
            if _solve([[matrix[n][m] for m in chosen] for n in chosen], [right[n] for n in chosen]) is None:
                names = " and ".join(TERMS[n] for n in chosen)
                raise ValueError(
                    f"steps: expected some that tell {names} apart, got one that follows from the rest; vary lengths, "
                    "concurrency and chunks"
                )


def throughputs(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Of steps in which all sequences decode: their number, and the median of tokens in a second."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.decoding:
            found.setdefault(row.decoding, []).append(row.tokens / row.seconds)
    return [(float(number), median(values)) for number, values in sorted(found.items())]
