"""Device code of ``select``: what each row may select, and candidate blocks in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequences_of(cu_seqlens_q, row, batch, steps):
    """Of each row the last sequence that starts at or before it; ``batch`` for padding. Never leaves the array."""
    low = tl.zeros_like(row)
    high = low + batch
    for _ in tl.range(0, steps):
        middle = (low + high + 1) // 2
        starts = tl.load(cu_seqlens_q + middle) <= row
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def ceil_divide(x, by):
    return (x + by - 1) // by


@triton.jit(do_not_specialize=["batch", "steps", "first_row", "rows", "entries", "places", "units"])
def goals_kernel(
    cu_seqlens_q,
    seq_lens,
    batch,
    steps,
    first_row,
    rows,
    kv_range,
    row_k,
    ratio,
    strides,
    block,
    k,
    keep_first,
    keep_last,
    candidate_block,
    candidate_k,
    entries,
    places,
    units,
    sight,
    goals,
    block_goals,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    TAKES_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes BLOCK rows. ``entries`` bounds the entries that a row sees."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    row = (first_row + at).to(tl.int64)
    sequence = sequences_of(cu_seqlens_q, row, batch, steps)
    live = inside & (sequence < batch)
    length = tl.load(seq_lens + sequence, mask=live, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_q + sequence + 1, mask=live, other=0)
    position = length - (end - row)
    live = live & (position >= 0)

    tokens = position + 1 if CAUSAL else length
    if kv_range is not None:
        low = tl.load(kv_range + row * 2, mask=live, other=0).to(tl.int64)
        high = tl.load(kv_range + row * 2 + 1, mask=live, other=0).to(tl.int64)
    else:
        low = row * 0
        high = tokens // ratio - strides + 1
    high = tl.where(live, tl.maximum(tl.minimum(high, entries), 0), 0)
    low = tl.minimum(tl.maximum(low, 0), high)

    first = low // block
    covered = tl.where(high > low, ceil_divide(high + strides - 1, block), first)
    last = covered
    if TAIL != "none":
        last = tl.maximum(covered, tl.where(live, ceil_divide(ceil_divide(tokens, ratio), block), 0))
    tail = last - covered
    budget = row * 0 + k
    if row_k is not None:
        budget = tl.maximum(tl.minimum(tl.load(row_k + row, mask=live, other=0).to(tl.int64), k), 0)
    if TAIL == "reserved":
        budget = tl.maximum(budget - (tail == 0).to(tl.int64), 0)
    size = last - first
    newest = tl.minimum(tl.maximum(tail, keep_last), size)
    last_kept = tl.minimum(newest, budget)
    first_kept = tl.minimum(tl.minimum(size - newest, keep_first), budget - last_kept)
    free_low = first + first_kept
    free_high = last - last_kept

    tl.store(sight.sequence + at, tl.where(live, sequence, -1), mask=inside)
    tl.store(sight.low + at, low, mask=inside)
    tl.store(sight.high + at, high, mask=inside)
    tl.store(sight.free_low + at, free_low, mask=inside)
    tl.store(sight.free_high + at, free_high, mask=inside)
    if TAKES_CANDIDATES:
        tl.store(goals.low + at, row * 0, mask=inside)
        tl.store(goals.high + at, tl.where(high > low, row * 0 + places, 0), mask=inside)
    else:
        tl.store(goals.low + at, free_low, mask=inside)
        tl.store(goals.high + at, tl.minimum(free_high, units), mask=inside)
    tl.store(goals.wanted + at, budget - first_kept - last_kept, mask=inside)
    tl.store(goals.first + at, first, mask=inside)
    tl.store(goals.first_kept + at, first_kept, mask=inside)
    tl.store(goals.end + at, last, mask=inside)
    tl.store(goals.last_kept + at, last_kept, mask=inside)
    if block_goals is not None:
        # the newest unit's block is returned whatever it scores
        some = size > 0
        pinned = tl.where(some, (last - 1) // candidate_block, 0)
        tl.store(block_goals.low + at, row * 0, mask=inside)
        tl.store(
            block_goals.high + at, tl.minimum(pinned, ceil_divide(row * 0 + entries, candidate_block)), mask=inside
        )
        tl.store(block_goals.wanted + at, tl.where(some, row * 0 + candidate_k - 1, 0), mask=inside)
        tl.store(block_goals.first + at, row * 0, mask=inside)
        tl.store(block_goals.first_kept + at, row * 0, mask=inside)
        tl.store(block_goals.end + at, pinned + 1, mask=inside)
        tl.store(block_goals.last_kept + at, some.to(tl.int32), mask=inside)


@triton.jit
def sort_kernel(
    candidates, row_step, head_step, step, out, HEADS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """A program puts BLOCK candidate blocks of a row and head where they belong in ascending order. A block listed
    twice leaves a hole behind itself, which keeps the -1 that is there, as do negative ones."""
    cell = tl.program_id(0).to(tl.int64)
    start = candidates + cell // HEADS * row_step + cell % HEADS * head_step
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(start + mine.to(tl.int64) * step, mask=mine < COUNT, other=-1)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, COUNT, BLOCK):
        n = first + tl.arange(0, BLOCK)
        other = tl.load(start + n.to(tl.int64) * step, mask=n < COUNT, other=-1)
        lower = (other[None, :] >= 0) & (other[None, :] < block[:, None])
        before += tl.sum(lower.to(tl.int32), 1)
    tl.store(out + cell * COUNT + before, block, mask=block >= 0)
