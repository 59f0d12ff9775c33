"""The best of scores, exactly, on Triton: what ``select`` and ``select_merge`` share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.choose import choose_kernel, count_kernel, histogram_kernel, order_kernel, write_kernel
from .schedule import power_of_two

MOST_PLACES = 4096
"""That a program looks at. A list of no more is the work of one."""

BINS = 256
"""Of a histogram: values of a byte."""

ORDER_BLOCK = 64


class Goals(NamedTuple):
    """How the list of each row is made, int32 ``[rows]`` each: of the places ``[low, high)`` the ``wanted`` best;
    before them the ``first_kept`` numbers from ``first`` on, after them the ``last_kept`` numbers up to ``end``."""

    low: Tensor
    high: Tensor
    wanted: Tensor
    first: Tensor
    first_kept: Tensor
    end: Tensor
    last_kept: Tensor


class Lists(NamedTuple):
    """Where chosen numbers go: ``[rows, lists, k]``, but ``counts`` ``[rows, lists]``."""

    indices: Tensor
    counts: Tensor
    values: Tensor | None


class Candidates(NamedTuple):
    """Blocks ``[rows, lists, count]`` of ``size`` entries, in ascending order; their entries are places."""

    blocks: Tensor
    size: int
    lists: int
    row_blocks: int


def choose(
    scores: Tensor, goals: Goals, to: Lists, numbers: Tensor | None = None, candidates: Candidates | None = None
) -> None:
    """Writes the numbers of the best of ``scores`` (float32 ``[rows, lists, width]``) in the order of their places.

    The number of a place is given (``numbers``, of the same shape, in any order), or lies in candidate blocks, or is
    the place itself. Of equal scores the lowest number is taken.
    """
    rows, lists, width = scores.shape
    k = to.indices.shape[2]
    digits = 4 if numbers is None else 8
    among = (None, 1, 1, 1) if candidates is None else candidates
    kind = dict(LISTS=lists, DIGITS=digits, num_warps=8)
    if width <= MOST_PLACES:
        places = max(power_of_two(width), BINS)
        if numbers is not None and places == MOST_PLACES:
            kind["num_warps"] = 16  # ranks with numbers take twice the registers
        choose_kernel[rows * lists,](scores, numbers, width, goals, among, k, to, BLOCK=places, **kind)
        return
    parts = -(-width // MOST_PLACES)
    grid, kind = (rows * lists, parts), dict(kind, BLOCK=MOST_PLACES)
    histograms = torch.zeros(rows * lists * digits * BINS, dtype=torch.int32, device=scores.device)
    for digit in range(digits):
        histogram_kernel[grid](scores, numbers, width, goals, histograms, DIGIT=digit, **kind)
    found = histograms.new_empty(rows * lists * parts * 2)
    count_kernel[grid](scores, numbers, width, goals, histograms, found, **kind)
    write_kernel[grid](scores, numbers, width, goals, histograms, found, among, k, to, **kind)


def put_in_order(found: Lists, by_score: bool, indices: Tensor, values: Tensor | None) -> None:
    """Writes lists again, by descending score and then number, or by number."""
    rows, lists, k = found.indices.shape
    order_kernel[rows * lists, -(-k // ORDER_BLOCK)](
        found.indices,
        found.values,
        found.counts,
        k,
        indices,
        values,
        BY_SCORE=by_score,
        BLOCK=ORDER_BLOCK,
        num_warps=4,
    )
