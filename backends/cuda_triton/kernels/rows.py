"""Device code of ``store`` and ``load``: a program takes BLOCK rows of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_tile
from .encode import put_rows


@triton.jit
def located(slots, n, count, page_size, pages):
    """Slots ``n``, or numbers ``n`` themselves without slots; which lie in the plane, and their pages and offsets."""
    slot = tl.where(n < count, n, -1)
    if slots is not None:
        slot = tl.load(slots + n, mask=n < count, other=-1)
    inside = (slot >= 0) & (slot < pages * page_size)
    slot = tl.where(inside, slot, 0)
    return slot, inside, slot // page_size, slot % page_size


@triton.jit(do_not_specialize=["count"])
def load_kernel(
    values,
    rope,
    scales,
    slots,
    count,
    page_size,
    pages,
    out,
    heads,
    CODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    slot, inside, page, offset = located(slots, n, count, page_size.to(tl.int64), pages)
    past = (tl.load(slots + n, mask=n < count, other=-1) >= 0) & (inside == 0)
    DIM: tl.constexpr = CODES.dim
    for start in tl.static_range(0, DIM, WIDTH):
        rows = row_tile(values, rope, scales, page, offset, head, inside, CODES, start, WIDTH, HARDWARE_FP8, tl.float32)
        rows = tl.where(past[:, None], float("nan"), rows).to(out.dtype.element_ty)
        column = start + tl.arange(0, WIDTH)
        at = (n[:, None] * heads + head) * CODES.dim + column[None, :]
        tl.store(out + at, rows, mask=(n < count)[:, None] & (column < CODES.dim)[None, :])


@triton.jit(do_not_specialize=["count"])
def store_kernel(
    rows,
    row_step,
    row_head_step,
    slots,
    count,
    page_size,
    pages,
    values,
    rope,
    scales,
    pad,
    CODES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    slot, inside, page, offset = located(slots, n, count, page_size.to(tl.int64), pages)
    column = tl.arange(0, WIDTH)
    at = n * row_step + head * row_head_step
    mask = inside[:, None] & (column < CODES.dim)[None, :]
    x = tl.load(rows + at[:, None] + column[None, :], mask=mask, other=0).to(tl.float32)
    put_rows(values, rope, scales, pad, page, offset, head, inside, x, CODES, PAD)
