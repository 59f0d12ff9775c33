"""Device code shared by the kernels of ``select``: what a row may select, in int64, as a range may end anywhere."""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCES = tl.constexpr(256)


@triton.jit
def sequence_of(cu_seqlens_q, seq_lens, t, batch):
    """The sequence of row ``t``, its length, and the position of the row in it: below 0 for padding."""
    b = tl.zeros((), tl.int32)
    for j in range(0, batch, SEQUENCES):
        n = j + tl.arange(0, SEQUENCES)
        ends = tl.load(cu_seqlens_q + 1 + n, mask=n < batch, other=0)
        b += tl.sum(tl.where((n < batch) & (ends <= t), 1, 0), 0)
    inside = tl.minimum(b, tl.maximum(batch - 1, 0))
    length = tl.load(seq_lens + inside).to(tl.int64)
    position = length - (tl.load(cu_seqlens_q + inside + 1) - t)
    return inside, length, tl.where(b < batch, position, -1)


@triton.jit
def entries_of(kv_range, t, length, position, ratio, strides, CAUSAL: tl.constexpr):
    """Tokens, and the first and the end of the entries that row ``t`` may read."""
    tokens = position + 1 if CAUSAL else length
    if kv_range is None:
        low = tokens * 0
        high = tokens // ratio - strides + 1
    else:
        low = tl.load(kv_range + 2 * t).to(tl.int64)
        high = tl.load(kv_range + 2 * t + 1).to(tl.int64)
    low = tl.maximum(low, 0)
    return tokens, low, tl.maximum(high, low)


@triton.jit
def units_of(tokens, low, high, row_k, t, k, ratio, strides, block, keep_first, keep_last, TAIL: tl.constexpr):
    """Of the units that a row may select: the first and the end, how many of the newest and of the first are always
    kept, and how many others the budget has places for."""
    first = low // block
    covered = tl.where(high > low, (high + strides - 1 + block - 1) // block, first)
    end = covered
    if TAIL != "none":
        unit = ratio * block
        end = tl.maximum(covered, (tokens + unit - 1) // unit)
    tail = end - covered
    room = k + tail * 0
    if row_k is not None:
        room = tl.minimum(tl.maximum(tl.load(row_k + t).to(tl.int64), 0), room)
    if TAIL == "reserved":
        room = tl.where(tail == 0, tl.maximum(room - 1, 0), room)
    newest = tl.minimum(tl.maximum(keep_last, tail), end - first)
    oldest = tl.minimum(keep_first, end - first - newest)
    newest = tl.minimum(newest, room)
    oldest = tl.minimum(oldest, room - newest)
    return first, end, newest, oldest, room - newest - oldest
