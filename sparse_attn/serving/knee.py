"""The concurrency at which throughput stops rising. Imports no torch.

``docs/serving.md`` says how to measure, and what is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FEWEST = 5
"""Different concurrencies that are needed."""
RISE = 1.2
"""Throughput at the knee over that at the lowest concurrency, at least."""
FLAT = 0.25
"""Slope past the knee over the slope before it, at most."""
BETTER = 0.5
"""Share of a straight line's squared errors that two segments must remove."""
STAYS = 0.9
"""Share of itself that a knee may move when half of what lies past it is left out."""
GRID = 200

Point = tuple[float, float]


class NoKnee(ValueError):
    """The measurements show no knee. The sentence says what to do."""


@dataclass(frozen=True)
class Knee:
    """``at`` this concurrency throughput stops rising; its interval; the ``throughput`` there."""

    at: float
    interval: tuple[float, float]
    throughput: float


@dataclass(frozen=True, order=True)
class _Bend:
    """Two segments that meet at ``at``, the first from ``start`` at concurrency 0, and their squared errors."""

    errors: float
    at: float
    start: float
    before: float
    after: float


def knee(points: Iterable[Point]) -> Knee:
    """Where throughput (y) over concurrency (x) bends: least squares of two segments that meet, over every bend.

    The interval has the bends whose squared errors are not significantly larger, in the normal approximation.

    Raises NoKnee: too few concurrencies, no rise, no bend, or a bend that depends on how far was measured: where costs
    grow smoothly with the batch, throughput has no knee.
    """
    known = sorted(points)
    levels = sorted({x for x, _ in known})
    if len(levels) < FEWEST:
        raise NoKnee(f"no knee: expected at least {FEWEST} different concurrencies, got {len(levels)}; measure more")
    bends = _bends(known)
    best, line = min(bends), _squares(known, [(1.0, x) for x, _ in known])[0]
    throughput = best.start + best.before * best.at
    if throughput < RISE * max(best.start + best.before * levels[0], 0):
        raise NoKnee("no knee: expected throughput that rises with concurrency, got hardly any rise; begin with less")
    if best.after > FLAT * best.before or best.errors > (1 - BETTER) * line:
        share = best.after / best.before if best.before else float("inf")
        raise NoKnee(
            f"no knee: expected throughput to flatten, got a slope of {share:.2f} of the first past {best.at:.3g}; "
            "raise concurrency further"
        )
    limit = best.errors * (1 + 4 / max(len(known) - 4, 1)) + 1e-12 * line
    near = [bend.at for bend in bends if bend.errors <= limit]
    low, high = min(near), max(near)
    if high >= levels[-2]:
        raise NoKnee(
            f"no knee: expected measurements past it, got an interval from {low:.3g} to the last but one, {high:.3g}; "
            "raise concurrency further"
        )
    past = [x for x in levels if x > best.at]
    shorter = [(x, y) for x, y in known if x <= past[(len(past) - 1) // 2]]
    if len({x for x, _ in shorter}) >= FEWEST - 1:
        moved = min(_bends(shorter)).at
        if moved < min(low, STAYS * best.at):
            raise NoKnee(
                f"no knee: expected one that stays, got {best.at:.3g}, and {moved:.3g} up to {shorter[-1][0]:g}: "
                "throughput levels off smoothly; take the batch target of a latency budget"
            )
    return Knee(best.at, (low, high), throughput)


def _bends(points: Sequence[Point]) -> list[_Bend]:
    """The best two segments for each bend of a grid, with two concurrencies or more on either side."""
    levels = sorted({x for x, _ in points})
    low, high = levels[1], levels[-2]
    found = []
    for n in range(GRID + 1):
        at = low + (high - low) * n / GRID
        rows = [(1.0, min(x, at), max(x - at, 0.0)) for x, _ in points]
        errors, (start, before, after) = _squares(points, rows)
        found.append(_Bend(errors, at, start, before, after))
    return found


def _squares(points: Sequence[Point], rows: Sequence[tuple[float, ...]]) -> tuple[float, list[float]]:
    """Squared errors of the least squares of ``rows``, and its coefficients.

    Columns are made orthogonal one after another (Gram-Schmidt), which keeps digits that products of columns lose.
    """
    rest = [y for _, y in points]
    basis: list[list[float]] = []
    upper: list[list[float]] = []
    shares = []
    for values in zip(*rows, strict=True):
        column, above = list(values), []
        for other in basis:
            share = sum(a * b for a, b in zip(column, other, strict=True)) / sum(a * a for a in other)
            column = [a - share * b for a, b in zip(column, other, strict=True)]
            above.append(share)
        size = sum(a * a for a in column)
        share = sum(a * b for a, b in zip(rest, column, strict=True)) / size
        rest = [a - share * b for a, b in zip(rest, column, strict=True)]
        basis.append(column)
        upper.append(above)
        shares.append(share)
    for n in reversed(range(len(shares))):
        for m in range(n):
            shares[m] -= upper[n][m] * shares[n]
    return sum(a * a for a in rest), shares
