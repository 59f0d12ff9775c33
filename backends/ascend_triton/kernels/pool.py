"""Device code of ``select``: scores of units from those of the entries that share strides with them."""

from __future__ import annotations

import triton
import triton.language as tl

from .units import entries_of, sequence_of


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "batch", "ratio", "strides", "block", "row_width", "units", "lists"),
    ]
)
def pool_kernel(
    cu_seqlens_q,
    seq_lens,
    kv_range,
    first_row,
    rows,
    batch,
    ratio,
    strides,
    block,
    scores,
    row_width,
    out,
    units,
    lists,
    SUM: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNITS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """``out [rows, lists, units]`` of units below ``units``. ``scores`` may be read NEAR columns to both sides of
    what it holds."""
    tiles = tl.cdiv(units, UNITS)
    for task in range(tl.program_id(0), rows * lists * tiles, tl.num_programs(0)):
        r = task // tiles
        t = (first_row + r // lists).to(tl.int64)
        _, length, position = sequence_of(cu_seqlens_q, seq_lens, t, batch)
        _, low, high = entries_of(kv_range, t, length, position, ratio, strides, CAUSAL)
        unit = (task % tiles) * UNITS + tl.arange(0, UNITS)
        start = unit * block
        near = tl.arange(0, NEAR)
        entry = (start - strides + 1)[:, None] + near[None, :]
        x = tl.load(scores + r.to(tl.int64) * row_width + entry)
        there = (near < block + strides - 1)[None, :] & (entry >= low) & (entry < high)
        if SUM:
            end = start + block
            times = tl.minimum(entry + strides, end[:, None]) - tl.maximum(entry, start[:, None])
            total = tl.sum(tl.where(there, x * times.to(tl.float32), 0.0), 1)
            some = tl.sum(tl.where(there, 1.0, 0.0), 1)
            total = tl.where((some > 0) & (total == total), total, float("-inf"))
        else:
            total = tl.max(tl.where(there, x, float("-inf")), 1)
        tl.store(out + r.to(tl.int64) * units + unit, total, mask=unit < units)
