"""Device code: which sequence a row belongs to, and where the entries of a sequence lie."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(cu_seqlens_q, row, batch):
    """The last sequence that starts at or before ``row``; ``batch`` for padding. It never leaves the array."""
    low = 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        starts = tl.load(cu_seqlens_q + middle) <= row
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    return low


@triton.jit
def place_of(cu_seqlens_q, seq_lens, row, batch):
    """The sequence of ``row``, its length, the row's position, and whether there is such a token: for padding and rows
    before token 0 there is none."""
    sequence = sequence_of(cu_seqlens_q, row, batch)
    live = sequence < batch
    length = tl.load(seq_lens + sequence, mask=live, other=0)
    position = length - (tl.load(cu_seqlens_q + sequence + 1, mask=live, other=0) - row)
    return sequence, length, position, live & (position >= 0)


@triton.jit
def paged(pages, sequence, entry, wanted, PAGE: tl.constexpr):
    """Page and offset, int64, of ``entry`` (int32) of a sequence, and which of the ``wanted`` ones have a page: of one
    that the table or the plane lacks nothing is read."""
    column = entry // PAGE
    wanted = wanted & (column < pages.width)
    page = tl.load(pages.table + sequence * pages.step + column, mask=wanted, other=-1)
    there = wanted & (page >= 0) & (page < pages.pages)
    return page.to(tl.int64), (entry % PAGE).to(tl.int64), there
