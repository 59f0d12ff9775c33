"""Device code of ``convert``: a program takes BLOCK entries of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_start, row_tile
from .encode import put_rows, put_zeros
from .rows import located


@triton.jit
def move(src, dst, page, offset, to_page, to_offset, head, moved, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """One part of entries, SIZE numbers of each, as it is."""
    if src is not None:
        at = row_start(src, page, offset, head)
        to = row_start(dst, to_page, to_offset, head)
        for start in tl.static_range(0, SIZE, WIDTH):
            column = start + tl.arange(0, WIDTH)
            mask = moved[:, None] & (column < SIZE)[None, :]
            x = tl.load(src.data + at[:, None] + column[None, :], mask=mask, other=0)
            tl.store(dst.data + to[:, None] + column[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["count"])
def convert_kernel(
    src_values,
    src_rope,
    src_scales,
    src_slots,
    src_page_size,
    src_pages,
    values,
    rope,
    scales,
    pad,
    dst_slots,
    dst_page_size,
    dst_pages,
    count,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    SIZES: tl.constexpr,
    PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """With SIZES, moves the parts of entries, whose numbers are the same in both formats. Else reads rows as ``load``
    does and writes them as ``store`` does."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    _, leaves, page, offset = located(src_slots, n, count, src_page_size.to(tl.int64), src_pages)
    _, arrives, to_page, to_offset = located(dst_slots, n, count, dst_page_size.to(tl.int64), dst_pages)
    moved = leaves & arrives
    if SIZES is None:
        x = row_tile(
            src_values, src_rope, src_scales, page, offset, head, moved, SRC, 0, WIDTH, HARDWARE_FP8, tl.float32
        )
        put_rows(values, rope, scales, pad, to_page, to_offset, head, moved, x, DST, PAD)
    else:
        move(src_values, values, page, offset, to_page, to_offset, head, moved, SIZES[0], WIDTH)
        move(src_rope, rope, page, offset, to_page, to_offset, head, moved, SIZES[1], WIDTH)
        move(src_scales, scales, page, offset, to_page, to_offset, head, moved, SIZES[2], WIDTH)
        put_zeros(pad, to_page, to_offset, head, moved, PAD)
