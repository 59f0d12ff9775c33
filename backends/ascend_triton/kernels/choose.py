"""Device code of ``select``: the best units of a row, of equal ones the lowest. A program takes a list at a time.

Neither sort, prefix sum nor histogram: the least score that is selected is found bit by bit, by counting how many are
at least that large; a tile is then packed by comparing each place with each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .units import entries_of, sequence_of, units_of

PLACES = tl.constexpr(64)


@triton.jit
def float_of(key):
    """The float32 whose place in the order of all numbers is ``key``, as unsigned 32 bits."""
    bits = tl.where(key < 0, key ^ -2147483648, key ^ -1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put_run(indices, values, number, count):
    """Writes ``count`` consecutive numbers, which are always kept."""
    for j in range(0, count, PLACES):
        place = j + tl.arange(0, PLACES)
        tl.store(indices + place, (number + place).to(tl.int32), mask=place < count)
        if values is not None:
            tl.store(values + place, tl.full((PLACES,), float("inf"), tl.float32), mask=place < count)


@triton.jit
def tile_of(scores, begin, stop, SIZE: tl.constexpr):
    """Scores of the columns from ``begin`` on; NaN from ``stop`` on."""
    column = begin + tl.arange(0, SIZE)
    x = tl.load(scores + column, mask=column < stop, other=0)
    return tl.where(column < stop, x, float("nan"))


@triton.jit
def least_selected(scores, begin, stop, want, TILE: tl.constexpr):
    """The score of place ``want`` in the order of all of them, which has to be above -inf, and how many lie above."""
    key = tl.zeros((), tl.int32)
    for bit in range(0, 32):
        with_bit = key | (1 << (31 - bit))
        floor = float_of(with_bit)
        count = tl.zeros((), tl.float32)
        for c in range(begin, stop, TILE):
            count += tl.sum(tl.where(tile_of(scores, c, stop, TILE) >= floor, 1.0, 0.0), 0)
        key = tl.where(count >= want, with_bit, key)
    floor = float_of(key)
    above = tl.zeros((), tl.float32)
    for c in range(begin, stop, TILE):
        above += tl.sum(tl.where(tile_of(scores, c, stop, TILE) > floor, 1.0, 0.0), 0)
    return floor, above


@triton.jit
def halves(number):
    """The upper and the lower half of an int32 as float32, as int32 is neither compared nor added up in vectors."""
    return (number >> 16).to(tl.float32), (number & 0xFFFF).to(tl.float32)


@triton.jit
def lower(a, b):
    """Where ``a`` lies below ``b``."""
    upper_a, lower_a = halves(a)
    upper_b, lower_b = halves(b)
    return (upper_a < upper_b) | ((upper_a == upper_b) & (lower_a < lower_b))


@triton.jit
def last_number(scores, numbers, begin, stop, floor, want, TILE: tl.constexpr):
    """Of the numbers whose score is ``floor`` that of place ``want``, and how many lie below it."""
    key = tl.zeros((), tl.int32)
    below = tl.zeros((), tl.float32)
    for bit in range(0, 32):
        with_bit = key | (1 << (31 - bit))
        count = tl.zeros((), tl.float32)
        for c in range(begin, stop, TILE):
            column = c + tl.arange(0, TILE)
            number = tl.load(numbers + column, mask=column < stop, other=0)
            at_floor = tile_of(scores, c, stop, TILE) == floor
            count += tl.sum(tl.where(at_floor & lower(number, with_bit ^ -2147483648), 1.0, 0.0), 0)
        below = tl.where(count < want, count, below)
        key = tl.where(count < want, with_bit, key)
    return key ^ -2147483648, below


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "batch", "ratio", "strides", "block", "k", "keep_first", "keep_last"),
        *("width", "row_width", "candidate_block", "places", "lists"),
    ]
)
def choose_kernel(
    cu_seqlens_q,
    seq_lens,
    kv_range,
    row_k,
    first_row,
    rows,
    batch,
    ratio,
    strides,
    block,
    k,
    keep_first,
    keep_last,
    scores,
    numbers,
    width,
    row_width,
    candidates,
    candidate_row_step,
    candidate_list_step,
    candidate_block,
    indices,
    counts,
    values,
    places,
    lists,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALL: tl.constexpr,
    MAKE: tl.constexpr,
    TILE: tl.constexpr,
):
    """``indices [T, lists, places]`` from ``scores [rows, lists, row_width]`` of ``width`` columns. MAKE: selects
    ``places`` blocks of ``candidate_block`` entries, the newest unit's always. ``numbers``, of the
    shape of scores: those of columns, in any order."""
    for task in range(tl.program_id(0), rows * lists, tl.num_programs(0)):
        r = (task // lists).to(tl.int64)
        o = task % lists
        t = first_row + r
        b, length, position = sequence_of(cu_seqlens_q, seq_lens, t, batch)
        tokens, low, high = entries_of(kv_range, t, length, position, ratio, strides, CAUSAL)
        first, end, newest, oldest, want = units_of(
            tokens, low, high, row_k, t, k, ratio, strides, block, keep_first, keep_last, TAIL
        )
        if MAKE:
            some = end > first
            newest = first * 0 + tl.where(some, 1, 0)
            oldest = first * 0
            want = places - newest
            end = tl.where(some, (end - 1) // candidate_block + 1, 0)
            first = tl.where(some, low // candidate_block, 0)
        if (position >= 0) & (end > first):
            row = t * lists + o
            to = indices + row * places
            to_values = None if values is None else values + row * places
            free = first + oldest
            free_end = end - newest
            from_ = scores + (r * lists + o) * row_width
            if candidates is None:
                begin = tl.minimum(free, width).to(tl.int32)
                stop = tl.minimum(free_end, width).to(tl.int32)
                free_places = free_end - free
            else:
                begin = tl.zeros((), tl.int32)
                stop = begin + width
                found = tl.zeros((), tl.float32)
                for c in range(begin, stop, TILE):
                    x = tile_of(from_, c, stop, TILE)
                    found += tl.sum(tl.where(x == x, 1.0, 0.0), 0)
                free_places = found.to(tl.int64)
            fits = free_places <= want
            if ALL:
                fits = fits & False
            put_run(to, to_values, first, oldest)
            n = oldest
            if fits & (candidates is None):
                put_run(to + n, None, free, free_places)
                n += free_places
            else:
                eligible = tl.zeros((), tl.float32)
                for c in range(begin, stop, TILE):
                    eligible += tl.sum(tl.where(tile_of(from_, c, stop, TILE) > float("-inf"), 1.0, 0.0), 0)
                floor = tl.full((), float("-inf"), tl.float32)
                ties = tl.zeros((), tl.float32)
                last = tl.full((), -2147483648, tl.int32)
                if fits:
                    ties += 4e9  # of candidates that need no score
                elif eligible > want.to(tl.float32):
                    floor, above = least_selected(from_, begin, stop, want.to(tl.float32), TILE)
                    ties += want.to(tl.float32) - above
                    if numbers is not None:
                        of_row = numbers + (r * lists + o) * row_width
                        last, below = last_number(from_, of_row, begin, stop, floor, ties, TILE)
                        ties -= below
                for c in range(begin, stop, PLACES):
                    x = tile_of(from_, c, stop, PLACES)
                    if tl.sum(tl.where(x >= floor, 1.0, 0.0), 0) > 0:
                        i = tl.arange(0, PLACES)
                        # row i of a table counts the places before place i
                        before = i[None, :] < i[:, None]
                        level = tl.where(x == floor, 1.0, 0.0)
                        sure = tl.where(x > floor, 1.0, 0.0)
                        if numbers is not None:
                            number = tl.load(numbers + (r * lists + o) * row_width + c + i, mask=c + i < stop, other=0)
                            sure = tl.where((level > 0) & lower(number, last), 1.0, sure)
                            level = tl.where(lower(number, last) | lower(last, number), 0.0, level)
                        rank = tl.sum(tl.where(before, level[None, :], 0.0), 1)
                        take = tl.where(sure > 0, 1.0, tl.where(rank < ties, level, 0.0))
                        ties -= tl.sum(level, 0)
                        place = tl.sum(tl.where(before, take[None, :], 0.0), 1)
                        taken = tl.sum(take, 0).to(tl.int32)
                        goes = (place[:, None] == i.to(tl.float32)[None, :]) & (take > 0)[:, None]
                        at = c + tl.sum(tl.where(goes, i.to(tl.float32)[:, None], 0.0), 0).to(tl.int32)
                        if candidates is not None:
                            blocks = candidates + t * candidate_row_step + o * candidate_list_step
                            at = tl.load(blocks + at // candidate_block) * candidate_block + at % candidate_block
                        if numbers is not None:
                            upper_half, lower_half = halves(number)
                            upper_half = tl.sum(tl.where(goes, upper_half[:, None], 0.0), 0).to(tl.int32)
                            lower_half = tl.sum(tl.where(goes, lower_half[:, None], 0.0), 0).to(tl.int32)
                            at = (upper_half << 16) | lower_half
                        tl.store(to + n + i, at, mask=i < taken)
                        if values is not None:
                            tl.store(to_values + n + i, tl.sum(tl.where(goes, x[:, None], 0.0), 0), mask=i < taken)
                        n += taken
            put_run(to + n, None if values is None else to_values + n, end - newest, newest)
            if counts is not None:
                tl.store(counts + row, (n + newest).to(tl.int32))
