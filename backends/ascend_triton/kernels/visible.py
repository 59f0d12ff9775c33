"""Device code: which sequence a query row belongs to, and what it may attend."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def position_of(cu_seqlens_q, seq_lens, row, batch, steps):
    """(sequence, its length, the row's token position), the position below 0 for rows that attend nothing. The sequence
    is the last that starts at or before the row, found in ``steps`` halvings; it never leaves the array."""
    low = 0
    high = batch
    for _ in tl.range(0, steps):
        middle = (low + high + 1) // 2
        starts = tl.load(cu_seqlens_q + middle) <= row
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    sequence = tl.minimum(low, batch - 1)
    length = tl.load(seq_lens + sequence)
    position = length - (tl.load(cu_seqlens_q + sequence + 1) - row)
    return sequence, length, tl.where(low < batch, position, -1)


@triton.jit
def window_of(ranges, row, position, window):
    """The row's range in the window plane: the one given, else its last ``window`` tokens (0: all before it)."""
    if ranges is not None:
        low = tl.load(ranges + row * 2)
        high = tl.load(ranges + row * 2 + 1)
    else:
        low = tl.where(window > 0, position - window + 1, 0)
        high = position + 1
    return tl.maximum(low, 0), tl.where(position >= 0, high, 0)


@triton.jit
def entries_of(ranges, row, position, length, ratio, CAUSAL: tl.constexpr):
    """The row's range in the main plane: the one given, else every visible entry."""
    if ranges is not None:
        low = tl.load(ranges + row * 2)
        high = tl.load(ranges + row * 2 + 1)
    else:
        low = 0
        high = (position + 1 if CAUSAL else length) // ratio
    return tl.maximum(low, 0), tl.where(position >= 0, high, 0)


@triton.jit
def within_table(low, high, width, PAGE: tl.constexpr):
    """A range cut to the page table, and at most one entry more: that one is enough to make the row NaN. Below 2**31,
    so that vectors of entries need no 64 bits."""
    end = tl.minimum(width.to(tl.int64) * PAGE, 0x7FFFFFFE)
    return tl.minimum(low.to(tl.int64), end).to(tl.int32), tl.minimum(high.to(tl.int64), end + 1).to(tl.int32)


@triton.jit
def listed_of(low, high, counts, at, width, select_block):
    """How long the list is of what a row attends: of its ``width`` indices, or as many as count, times the entries of
    each; without indices of its range."""
    if width is None:
        return tl.maximum(high - low, 0)
    else:
        count = width
        if counts is not None:
            count = tl.minimum(tl.maximum(tl.load(counts + at), 0), width)
        # where nothing is visible, nothing of a list is
        return tl.where(high > 0, count * select_block, 0)
