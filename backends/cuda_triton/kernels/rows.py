"""Device code of ``store`` and ``load``: a program takes BLOCK rows of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_start, row_tile
from .encode import e2m1_codes, e4m3_codes, quantised, rounded


@triton.jit
def located(slots, n, count, page_size, pages):
    """Slots, which of them lie in the plane, and their pages and offsets."""
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
    for start in tl.static_range(0, CODES.dim, WIDTH):
        rows = row_tile(values, rope, scales, page, offset, head, inside, CODES, start, WIDTH, HARDWARE_FP8, tl.float32)
        rows = tl.where(past[:, None], float("nan"), rows).to(out.dtype.element_ty)
        column = start + tl.arange(0, WIDTH)
        at = (n[:, None] * heads + head) * CODES.dim + column[None, :]
        tl.store(out + at, rows, mask=(n < count)[:, None] & (column < CODES.dim)[None, :])


@triton.jit
def put_scales(part, at, scale, mask, SCALE: tl.constexpr):
    """Scales ``[N, G]`` in their type."""
    if SCALE == "e8m0":
        bits = scale.to(tl.int32, bitcast=True)
        tl.store(part.data + at, tl.where(scale == scale, bits >> 23, 255).to(tl.uint8), mask=mask)
    elif SCALE == "e4m3":
        tl.store(part.data + at, e4m3_codes(scale), mask=mask)
    elif SCALE == "fp32":
        tl.store(part.data.to(tl.pointer_type(tl.float32)) + at, scale, mask=mask)
    elif SCALE == "bf16":
        tl.store(part.data.to(tl.pointer_type(tl.bfloat16)) + at, scale.to(tl.bfloat16), mask=mask)
    else:
        tl.store(part.data.to(tl.pointer_type(tl.float16)) + at, scale.to(tl.float16), mask=mask)


@triton.jit
def put_elements(part, at, stored, mask, CODES: tl.constexpr, WIDTH: tl.constexpr):
    """Elements ``[N, WIDTH]`` in their type."""
    column = tl.arange(0, WIDTH)
    cell = at[:, None] + column[None, :]
    mask = mask[:, None] & (column < CODES.stored)[None, :]
    if CODES.element == "e4m3":
        tl.store(part.data + cell, e4m3_codes(stored), mask=mask)
    elif CODES.element == "int8":
        tl.store(part.data.to(tl.pointer_type(tl.int8)) + cell, rounded(stored).to(tl.int8), mask=mask)
    else:
        ROWS: tl.constexpr = stored.shape[0]
        HALF: tl.constexpr = WIDTH // 2
        codes = e2m1_codes(stored) if CODES.element == "e2m1" else (rounded(stored).to(tl.int32) & 15).to(tl.uint8)
        low, high = tl.split(tl.reshape(codes, (ROWS, HALF, 2)))
        pair = tl.arange(0, HALF)
        # a pair lies where its first element would, counted in bytes
        half_mask = tl.max(tl.reshape(mask.to(tl.int32), (ROWS, HALF, 2)), 2) > 0
        tl.store(part.data + at[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=half_mask)


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
    GROUPS: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    slot, inside, page, offset = located(slots, n, count, page_size.to(tl.int64), pages)
    column = tl.arange(0, WIDTH)
    from_row = n * row_step + head * row_head_step
    mask = inside[:, None] & (column < CODES.stored)[None, :]
    x = tl.load(rows + from_row[:, None] + column[None, :], mask=mask, other=0)
    at = row_start(values, page, offset, head)
    if CODES.scale == "":
        numbers = x.to(tl.float32).to(values.data.dtype.element_ty)
        tl.store(values.data + at[:, None] + column[None, :], numbers, mask=mask)
    else:
        GROUP: tl.constexpr = WIDTH // GROUPS
        groups = tl.reshape(x.to(tl.float32), (BLOCK, GROUPS, GROUP))
        stored, scale = quantised(groups, CODES.element, CODES.scale)
        put_elements(values, at, tl.reshape(stored, (BLOCK, WIDTH)), inside, CODES, WIDTH)
        group = tl.arange(0, GROUPS)
        scale_at = row_start(scales, page, offset, head)[:, None] + group[None, :]
        put_scales(scales, scale_at, scale, inside[:, None] & (group * GROUP < CODES.stored)[None, :], CODES.scale)
    if CODES.rope == "bf16":
        rest = tl.arange(0, CODES.dim - CODES.stored)
        tail = tl.load(rows + from_row[:, None] + (CODES.stored + rest)[None, :], mask=inside[:, None], other=0)
        rope_at = row_start(rope, page, offset, head)[:, None] + rest[None, :]
        tail = tail.to(tl.float32).to(tl.bfloat16)
        tl.store(rope.data.to(tl.pointer_type(tl.bfloat16)) + rope_at, tail, mask=inside[:, None])
    if pad is not None:
        zero = tl.arange(0, 64)
        pad_at = row_start(pad, page, offset, head)[:, None] + zero[None, :]
        tl.store(pad.data + pad_at, tl.zeros((BLOCK, 64), tl.uint8), mask=inside[:, None] & (zero < PAD)[None, :])
