"""Device code of ``select_merge``: the global numbers of what shards selected."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def numbers_kernel(
    indices,
    index_shard_step,
    index_row_step,
    index_list_step,
    index_step,
    values,
    value_shard_step,
    value_row_step,
    value_list_step,
    value_step,
    offsets,
    offset_shard_step,
    offset_row_step,
    run,
    stride,
    numbers,
    scores,
    SHARDS: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes BLOCK places of a list: its shards, one after the other. What is no selection scores -inf;
    numbers that int32 does not hold wrap."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // LISTS
    list = cell % LISTS
    place = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = place < SHARDS * WIDTH
    shard = place // WIDTH
    n = place % WIDTH
    at = shard * index_shard_step + row * index_row_step + list * index_list_step + n * index_step
    local = tl.load(indices + at, mask=inside, other=-1).to(tl.int64)
    at = shard * value_shard_step + row * value_row_step + list * value_list_step + n * value_step
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    offset = tl.load(offsets + shard * offset_shard_step + row * offset_row_step, mask=inside, other=0).to(tl.int64)
    number = offset + local // run * stride + local % run
    selected = (local >= 0) & (value > float("-inf"))
    to = cell * (SHARDS * WIDTH) + place
    tl.store(numbers + to, number.to(tl.int32), mask=inside)
    tl.store(scores + to, tl.where(selected, value, float("-inf")), mask=inside)
