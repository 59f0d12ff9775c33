"""Device code: rows of a plane to numbers, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_numbers(stored, HARDWARE_FP8: tl.constexpr):
    """Bytes as float32. Without conversion instructions (before sm_89): as float16 with an exponent too small by 8,
    which holds the subnormal ones too."""
    if HARDWARE_FP8:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = stored.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def e8m0_numbers(stored):
    """Powers of two from 2**-127, in float32 a subnormal number, to 2**127; 255 is NaN."""
    wide = stored.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_numbers(codes):
    """Codes 0 to 15 as float32, by float16 with an exponent too small by 14."""
    wide = codes.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def typed(part, TYPE: tl.constexpr):
    """Pointer to the numbers of a part. Those of 8 bits and fewer, but for int8, are bytes; ``""`` is as they are."""
    if TYPE == "fp32":
        return part.data.to(tl.pointer_type(tl.float32))
    elif TYPE == "bf16":
        return part.data.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == "fp16":
        return part.data.to(tl.pointer_type(tl.float16))
    elif TYPE == "int8":
        return part.data.to(tl.pointer_type(tl.int8))
    else:
        return part.data


@triton.jit
def scale_numbers(part, at, mask, SCALE: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Scales of any type as float32; where masked, of some finite value."""
    stored = tl.load(typed(part, SCALE) + at, mask=mask, other=0)
    if SCALE == "e8m0":
        return e8m0_numbers(stored)
    elif SCALE == "e4m3":
        return e4m3_numbers(stored, HARDWARE_FP8)
    else:
        return stored.to(tl.float32)


@triton.jit
def row_start(part, page, offset, head):
    """Where the numbers of rows in a part begin."""
    return part.start + page * part.page_step + offset * part.entry_step + head * part.head_step


@triton.jit
def stored_tile(
    part, at, valid, CODES: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, HARDWARE_FP8: tl.constexpr
):
    """Elements ``[N, WIDTH]`` without their scales, from column START on; 0 past the stored ones."""
    if CODES.element == "e2m1" or CODES.element == "int4":
        pair = START // 2 + tl.arange(0, WIDTH // 2)
        mask = valid[:, None] & (pair[None, :] < CODES.stored // 2)
        stored = tl.load(part.data + at[:, None] + pair[None, :], mask=mask, other=0)
        codes = tl.interleave(stored & 15, stored >> 4)
        if CODES.element == "e2m1":
            return e2m1_numbers(codes)
        else:
            return ((codes ^ 8).to(tl.int32) - 8).to(tl.float32)
    else:
        column = START + tl.arange(0, WIDTH)
        mask = valid[:, None] & (column[None, :] < CODES.stored)
        stored = tl.load(typed(part, CODES.element) + at[:, None] + column[None, :], mask=mask, other=0)
        if CODES.element == "e4m3":
            return e4m3_numbers(stored, HARDWARE_FP8)
        else:
            return stored


@triton.jit
def rope_tile(part, at, valid, CODES: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Elements ``[N, WIDTH]`` of the rope part, 0 outside it. ``START`` counts columns of the whole row."""
    column = START + tl.arange(0, WIDTH)
    mask = valid[:, None] & ((column >= CODES.stored) & (column < CODES.dim))[None, :]
    within = at[:, None] + (column - CODES.stored)[None, :]
    return tl.load(typed(part, CODES.rope) + within, mask=mask, other=0)


@triton.jit
def row_tile(
    values,
    rope,
    scales,
    page,
    offset,
    head,
    valid,
    CODES: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Columns START to START + WIDTH of the rows at ``page``, ``offset`` (``[N]``), as COMPUTE ``[N, WIDTH]``. 0 past
    the row's end and where not ``valid``. An element is one product in float32, rounded once: stored * scale."""
    if CODES.stored <= START:
        at = row_start(rope, page, offset, head)
        return rope_tile(rope, at, valid, CODES, START, WIDTH).to(COMPUTE)
    else:
        at = row_start(values, page, offset, head)
        numbers = stored_tile(values, at, valid, CODES, START, WIDTH, HARDWARE_FP8)
        if CODES.scale != "":
            numbers = numbers.to(tl.float32)
            scale_at = row_start(scales, page, offset, head)
            if CODES.group == 0 or CODES.group >= WIDTH:
                first = 0 if CODES.group == 0 else START // CODES.group
                scale = scale_numbers(scales, scale_at + first, valid, CODES.scale, HARDWARE_FP8)
                numbers = numbers * scale[:, None]
            else:
                ROWS: tl.constexpr = page.shape[0]
                GROUP: tl.constexpr = CODES.group
                GROUPS: tl.constexpr = WIDTH // GROUP
                group = START // GROUP + tl.arange(0, GROUPS)
                mask = valid[:, None] & (group < CODES.stored // GROUP)[None, :]
                within = scale_at[:, None] + group[None, :]
                scale = scale_numbers(scales, within, mask, CODES.scale, HARDWARE_FP8)
                grouped = tl.reshape(numbers, (ROWS, GROUPS, GROUP)) * scale[:, :, None]
                numbers = tl.reshape(grouped, (ROWS, WIDTH))
        if CODES.stored < START + WIDTH and CODES.stored < CODES.dim:
            at = row_start(rope, page, offset, head)
            others = rope_tile(rope, at, valid, CODES, START, WIDTH)
            column = START + tl.arange(0, WIDTH)
            numbers = tl.where((column < CODES.stored)[None, :], numbers.to(tl.float32), others.to(tl.float32))
        return numbers.to(COMPUTE)
