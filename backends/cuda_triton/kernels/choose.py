"""Device code that takes the best of scores, exactly: ``select``, its candidate blocks, and ``select_merge``.

Scores stand in a workspace ``[rows, lists, width]``. A score's rank is an integer that orders as (score, then lowest
number) does. The cutoff, the rank of the last one taken, is found a byte at a time from the top: each byte takes one
histogram of the ranks that agree with the bytes found so far. Programs share the work of a list at every step.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(256)
"""Of a histogram: values of a byte."""


@triton.jit
def ranks(scores, numbers, at, mask):
    """Ranks of places, and their scores. 0: never taken, as -inf. Above all others: NaN, which marks an entry whose
    page is not there. Where numbers are given, places are in no order of theirs, and ranks include them."""
    score = tl.load(scores + at, mask=mask, other=float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    rank = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    rank = tl.where(score != score, 0xFFFFFFFF, rank).to(tl.uint32)
    taken = score != float("-inf")
    if numbers is None:
        return tl.where(taken, rank, 0).to(tl.uint32), score
    else:
        number = tl.load(numbers + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
        both = (rank.to(tl.uint64) << 32) | (number ^ 0x7FFFFFFF).to(tl.uint64)  # larger for lower numbers
        return tl.where(taken, both, 0).to(tl.uint64), score


@triton.jit
def next_byte(counts, wanted):
    """The largest byte such that ``wanted`` ranks have it or a larger one, 0 if none, by the counts of each byte; and
    how many ranks with this byte are taken."""
    byte = tl.arange(0, BINS)
    reached = tl.cumsum(counts, 0, reverse=True)
    last = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), 0) - 1, 0)
    return last, wanted - tl.sum(tl.where(byte > last, counts, 0), 0)


@triton.jit
def byte_counts(rank, prefix, digit, DIGITS: tl.constexpr):
    """How many ranks whose first ``digit`` bytes are ``prefix`` have each next byte."""
    first = rank.to(tl.uint64) >> (8 * (DIGITS - 1 - digit))
    return tl.histogram((first & 0xFF).to(tl.int32), BINS, mask=(rank > 0) & (first >> 8 == prefix))


@triton.jit
def cutoff(histograms, cell, wanted, DIGITS: tl.constexpr, OF: tl.constexpr):
    """The first OF bytes of the rank of the last one taken (all DIGITS: that rank), and how many ranks that begin so
    are taken. 0 if fewer than ``wanted`` are there."""
    prefix = (wanted * 0).to(tl.uint64)
    for digit in tl.static_range(0, OF):
        counts = tl.load(histograms + (cell * DIGITS + digit) * BINS + tl.arange(0, BINS))
        byte, wanted = next_byte(counts, wanted)
        prefix = (prefix << 8) | byte.to(tl.uint64)
    return prefix, wanted


@triton.jit(do_not_specialize=["width"])
def histogram_kernel(
    scores,
    numbers,
    width,
    goals,
    histograms,
    LISTS: tl.constexpr,
    DIGITS: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program adds BLOCK places of a list to the histogram of byte DIGIT."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // LISTS
    low = tl.load(goals.low + row)
    high = tl.load(goals.high + row)
    first = tl.program_id(1) * BLOCK
    if (first < high) & (first + BLOCK > low):
        place = first + tl.arange(0, BLOCK)
        rank, _ = ranks(scores, numbers, cell * width + place, (place >= low) & (place < high))
        prefix, _ = cutoff(histograms, cell, tl.load(goals.wanted + row), DIGITS, DIGIT)
        found = byte_counts(rank, prefix, DIGIT, DIGITS)
        at = histograms + (cell * DIGITS + DIGIT) * BINS + tl.arange(0, BINS)
        tl.atomic_add(at, found, mask=found > 0, sem="relaxed")


@triton.jit
def above_and_at(scores, numbers, width, goals, histograms, cell, row, part, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Which of BLOCK places rank above the cutoff and which at it, their scores, and how many at it are taken."""
    low = tl.load(goals.low + row)
    high = tl.load(goals.high + row)
    place = part * BLOCK + tl.arange(0, BLOCK)
    rank, score = ranks(scores, numbers, cell * width + place, (place >= low) & (place < high))
    last, wanted = cutoff(histograms, cell, tl.load(goals.wanted + row), DIGITS, DIGITS)
    return rank > last, (rank == last) & (rank > 0), score, wanted


@triton.jit(do_not_specialize=["width"])
def count_kernel(
    scores, numbers, width, goals, histograms, found, LISTS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """A program counts which of BLOCK places of a list rank above the cutoff, and which at it."""
    cell = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    above, at, _, _ = above_and_at(scores, numbers, width, goals, histograms, cell, cell // LISTS, part, DIGITS, BLOCK)
    to = found + (cell * tl.num_programs(1) + part) * 2
    tl.store(to, tl.sum(above.to(tl.int32), 0))
    tl.store(to + 1, tl.sum(at.to(tl.int32), 0))


@triton.jit
def earlier(x):
    """How many before each element are set."""
    n = x.to(tl.int32)
    return tl.cumsum(n, 0) - n


@triton.jit
def write(
    above,
    at,
    score,
    wanted,
    before,
    total,
    numbers,
    width,
    goals,
    candidates,
    cell,
    row,
    part,
    parts,
    k,
    to,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write which of BLOCK places of a list are taken, in the order of the places, and a share of what is always kept
    and of the places left empty. ``before`` and ``total``: how many places rank above the cutoff, and at it."""
    above_before, at_before = before
    above_all, at_all = total
    indices, counts, values = to
    blocks, block, block_lists, block_count = candidates
    taken = above | (at & (at_before + earlier(at) < wanted))
    first_kept = tl.load(goals.first_kept + row)
    last_kept = tl.load(goals.last_kept + row)
    slot = first_kept + above_before + tl.minimum(at_before, wanted) + earlier(taken)
    place = part * BLOCK + tl.arange(0, BLOCK)
    number = place
    if numbers is not None:
        number = tl.load(numbers + cell * width + place, mask=taken, other=0)
    elif blocks is not None:
        list = blocks + (row * block_lists + cell % LISTS % block_lists) * block_count
        number = tl.load(list + place // block, mask=taken, other=0) * block + place % block
    tl.store(indices + cell * k + slot, number, mask=taken)
    if values is not None:
        tl.store(values + cell * k + slot, score, mask=taken)

    before_last = first_kept + above_all + tl.minimum(at_all, wanted)
    count = before_last + last_kept
    tl.store(counts + cell, count, mask=part == 0)
    first_unit = tl.load(goals.first + row)
    last_unit = tl.load(goals.end + row) - last_kept
    for first in tl.range(part * BLOCK, k, parts * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        number = tl.where(slot < first_kept, first_unit + slot, last_unit + slot - before_last)
        mask = (slot < k) & ((slot < first_kept) | (slot >= before_last))
        tl.store(indices + cell * k + slot, tl.where(slot < count, number, -1), mask=mask)
        if values is not None:
            tl.store(values + cell * k + slot, tl.where(slot < count, float("inf"), float("-inf")), mask=mask)


@triton.jit(do_not_specialize=["width", "k"])
def write_kernel(
    scores,
    numbers,
    width,
    goals,
    histograms,
    found,
    candidates,
    k,
    to,
    LISTS: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes what is taken of BLOCK places of a list."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // LISTS
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    above, at, score, wanted = above_and_at(scores, numbers, width, goals, histograms, cell, row, part, DIGITS, BLOCK)
    above_before, at_before, above_all, at_all = 0, 0, 0, 0
    for first in tl.range(0, parts, 128):
        n = first + tl.arange(0, 128)
        n_above = tl.load(found + (cell * parts + n) * 2, mask=n < parts, other=0)
        n_at = tl.load(found + (cell * parts + n) * 2 + 1, mask=n < parts, other=0)
        above_all += tl.sum(n_above, 0)
        at_all += tl.sum(n_at, 0)
        above_before += tl.sum(tl.where(n < part, n_above, 0), 0)
        at_before += tl.sum(tl.where(n < part, n_at, 0), 0)
    before = above_before, at_before
    total = above_all, at_all
    write(
        above,
        at,
        score,
        wanted,
        before,
        total,
        numbers,
        width,
        goals,
        candidates,
        cell,
        row,
        part,
        parts,
        k,
        to,
        LISTS,
        BLOCK,
    )


@triton.jit(do_not_specialize=["width", "k"])
def choose_kernel(
    scores, numbers, width, goals, candidates, k, to, LISTS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """A program does all of it for a list of at most BLOCK places."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // LISTS
    place = tl.arange(0, BLOCK)
    mask = (place >= tl.load(goals.low + row)) & (place < tl.load(goals.high + row))
    rank, score = ranks(scores, numbers, cell * width + place, mask)
    wanted = tl.load(goals.wanted + row)
    last = (wanted * 0).to(tl.uint64)
    for digit in tl.range(0, DIGITS):  # unrolled, all bytes of all ranks would stand in registers
        byte, wanted = next_byte(byte_counts(rank, last, digit, DIGITS), wanted)
        last = (last << 8) | byte.to(tl.uint64)
    above = rank > last
    at = (rank == last) & (rank > 0)
    before = 0, 0
    total = tl.sum(above.to(tl.int32), 0), tl.sum(at.to(tl.int32), 0)
    write(
        above, at, score, wanted, before, total, numbers, width, goals, candidates, cell, row, 0, 1, k, to, LISTS, BLOCK
    )


@triton.jit(do_not_specialize=["k"])
def order_kernel(numbers, scores, counts, k, indices, values, BY_SCORE: tl.constexpr, BLOCK: tl.constexpr):
    """A program puts BLOCK places of a list where they belong: by descending score, then by number; or by number."""
    cell = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + cell)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = slot < count
    number = tl.load(numbers + cell * k + slot, mask=mine, other=-1)
    score = tl.load(scores + cell * k + slot, mask=mine, other=float("-inf"))
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, tl.where(tl.program_id(1) * BLOCK < count, count, 0), BLOCK):
        n = first + tl.arange(0, BLOCK)
        other = tl.load(numbers + cell * k + n, mask=n < count, other=0)
        before = (other[None, :] < number[:, None]) | (
            (other[None, :] == number[:, None]) & (n[None, :] < slot[:, None])
        )
        if BY_SCORE:
            # NaN, of an entry without a page, counts as what is always kept
            theirs = tl.load(scores + cell * k + n, mask=n < count, other=float("-inf"))
            theirs = tl.where(theirs != theirs, float("inf"), theirs)
            own = tl.where(score != score, float("inf"), score)
            before = (theirs[None, :] > own[:, None]) | ((theirs[None, :] == own[:, None]) & before)
        rank += tl.sum((before & (n < count)[None, :]).to(tl.int32), 1)
    to = cell * k + tl.where(mine, rank, slot)
    tl.store(indices + to, number, mask=slot < k)
    if values is not None:
        tl.store(values + to, score, mask=slot < k)
