"""Device code of ``select``: the mean key of each block of entries that a row may read. A program takes one head of
one block."""

from __future__ import annotations

import triton
import triton.language as tl

from .keys import entries_at, stored_keys
from .numbers import scale_numbers
from .units import entries_of, sequence_of


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "batch", "ratio", "block", "table_width", "pages", "page_size", "units", "heads"),
        *("size", "groups"),
    ]
)
def mean_kernel(
    cu_seqlens_q,
    seq_lens,
    kv_range,
    first_row,
    rows,
    batch,
    ratio,
    block,
    values,
    value_page_step,
    value_entry_step,
    value_piece_step,
    scales,
    scale_page_step,
    scale_entry_step,
    scale_piece_step,
    page_table,
    table_step,
    table_width,
    pages,
    page_size,
    means,
    ranges,
    units,
    heads,
    size,
    groups,
    BLOCK_D: tl.constexpr,
    ENTRIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """``means [rows, units, heads, groups * size]``, NaN where an entry has no page, and ``ranges [rows, 2]`` of the
    blocks that hold entries. Other means are not written."""
    for task in range(tl.program_id(0), rows * units * heads, tl.num_programs(0)):
        head = task % heads
        unit = (task // heads) % units
        r = (task // (heads * units)).to(tl.int64)
        t = first_row + r
        b, length, position = sequence_of(cu_seqlens_q, seq_lens, t, batch)
        _, low, high = entries_of(kv_range, t, length, position, ratio, 1, CAUSAL)
        high = tl.where(position >= 0, high, low)
        first = low // block
        end = tl.where(high > low, (high + block - 1) // block, first)
        if (unit == 0) & (head == 0):
            tl.store(ranges + 2 * r, first.to(tl.int32))
            tl.store(ranges + 2 * r + 1, end.to(tl.int32))
        if (unit >= first) & (unit < end):
            begin = tl.maximum(unit.to(tl.int64) * block, low)
            stop = tl.minimum((unit.to(tl.int64) + 1) * block, high)
            to = means + ((r * units + unit) * heads + head) * (groups * size)
            d = tl.arange(0, BLOCK_D)
            for g in range(0, groups):
                total = tl.zeros((BLOCK_D,), tl.float32)
                for c in range(begin, stop, ENTRIES):
                    entry = c + tl.arange(0, ENTRIES).to(tl.int64)
                    there = entry < stop
                    page, offset, valid = entries_at(
                        c, entry, there, page_table + b.to(tl.int64) * table_step, table_width, page_size, pages,
                        ENTRIES, False
                    )  # fmt: skip
                    piece = (head * groups + g).to(tl.int64)
                    value_at = page * value_page_step + offset * value_entry_step
                    key = stored_keys(
                        values + piece * value_piece_step, value_at, valid, size, False, BLOCK_D, ELEMENT
                    ).to(tl.float32)
                    if SCALE != "":
                        at = scales + page * scale_page_step + offset * scale_entry_step + piece * scale_piece_step
                        key = key * scale_numbers(tl.load(at, mask=valid, other=0), SCALE)[:, None]
                    lost = tl.where(there & (valid == 0), float("nan"), 0.0)
                    total += tl.sum(tl.where(valid[:, None], key, 0.0) + lost[:, None], 0)
                mean = total / (stop - begin).to(tl.float32)
                tl.store(to + g * size + d, mean, mask=d < size)
