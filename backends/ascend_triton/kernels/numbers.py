"""Device code: rows of a plane, in any format, to numbers. Integer operations stand in for the types that Triton has
not on Ascend: bytes are read as int8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_numbers(stored):
    """Bytes as float32, by float16 with an exponent too small by 8, which holds the subnormal ones too."""
    wide = stored.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def e8m0_numbers(stored):
    """Powers of two from 2**-127, in float32 a subnormal number, to 2**127; 255 is NaN."""
    wide = stored.to(tl.int32) & 0xFF
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_numbers(codes):
    """Codes 0 to 15 (int16) as float32, by float16 with an exponent too small by 14."""
    half = ((codes & 8) << 12) | ((codes & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def scale_numbers(stored, SCALE: tl.constexpr):
    """Scales of any type as float32."""
    if SCALE == "e8m0":
        return e8m0_numbers(stored)
    elif SCALE == "e4m3":
        return e4m3_numbers(stored)
    else:
        return stored.to(tl.float32)


@triton.jit
def scaled(numbers, scales, scales_at, FIRST: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """``numbers [ROWS, WIDTH]`` times the scales of their groups of GROUP columns (0: of the whole row), the first of
    which is FIRST."""
    ROWS: tl.constexpr = numbers.shape[0]
    WIDTH: tl.constexpr = numbers.shape[1]
    if GROUP == 0 or GROUP >= WIDTH:
        return numbers * scale_numbers(tl.load(scales + scales_at + FIRST), SCALE)[:, None]
    else:
        GROUPS: tl.constexpr = WIDTH // GROUP
        group = FIRST + tl.arange(0, GROUPS)
        scale = scale_numbers(tl.load(scales + scales_at[:, None] + group[None, :]), SCALE)
        return tl.reshape(tl.reshape(numbers, (ROWS, GROUPS, GROUP)) * scale[:, :, None], (ROWS, WIDTH))


@triton.jit
def pairs_of(
    values,
    values_at,
    scales,
    scales_at,
    there,
    CODES: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Like ``tile_of``, for rows of e2m1 numbers: the bits of two neighbours as one integer of twice the width, as two
    tiles can be dealt into the columns of one only number by number."""
    pair = START // 2 + tl.arange(0, WIDTH // 2)
    stored = tl.load(values + values_at[:, None] + pair[None, :]).to(tl.int16)
    GROUP: tl.constexpr = CODES.value.group
    FIRST: tl.constexpr = START // GROUP
    SCALE: tl.constexpr = CODES.value.scale
    low = scaled(e2m1_numbers(stored & 15), scales, scales_at, FIRST, GROUP // 2, SCALE)
    high = scaled(e2m1_numbers((stored >> 4) & 15), scales, scales_at, FIRST, GROUP // 2, SCALE)
    low = tl.where(there[:, None], low, 0.0).to(COMPUTE)
    high = tl.where(there[:, None], high, 0.0).to(COMPUTE)
    BITS: tl.constexpr = COMPUTE.value.primitive_bitwidth
    if BITS == 32:
        low_bits = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        return low_bits | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    else:
        low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def tile_of(
    values,
    values_at,
    rope,
    rope_at,
    scales,
    scales_at,
    there,
    CODES: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Columns START to START + WIDTH of ROWS rows as COMPUTE, 0 past their end and where not ``there``. Every row is
    read, so ``at`` must lie in the plane. An element is one product in float32, rounded once: stored * scale."""
    STORED: tl.constexpr = CODES.value.stored
    DIM: tl.constexpr = CODES.value.dim
    ELEMENT: tl.constexpr = CODES.value.element
    SCALE: tl.constexpr = CODES.value.scale
    GROUP: tl.constexpr = CODES.value.group
    column = START + tl.arange(0, WIDTH)
    # Columns past the end are read again from its last element: addresses that are no run cost a read each.
    if START >= STORED:
        within = column - STORED
        if START + WIDTH > DIM:
            within = tl.minimum(within, DIM - STORED - 1)
        numbers = tl.load(rope + rope_at[:, None] + within[None, :]).to(COMPUTE)
    else:
        within = column
        if START + WIDTH > STORED:
            within = tl.minimum(within, STORED - 1)
        numbers = tl.load(values + values_at[:, None] + within[None, :])
        if ELEMENT == "e4m3":
            numbers = e4m3_numbers(numbers)
        if SCALE != "":
            FIRST: tl.constexpr = 0 if GROUP == 0 else START // GROUP
            numbers = scaled(numbers.to(tl.float32), scales, scales_at, FIRST, GROUP, SCALE)
        if START + WIDTH > STORED and STORED < DIM:
            within = tl.minimum(tl.maximum(column - STORED, 0), DIM - STORED - 1)
            others = tl.load(rope + rope_at[:, None] + within[None, :]).to(tl.float32)
            numbers = tl.where((column < STORED)[None, :], numbers.to(tl.float32), others)
        numbers = numbers.to(COMPUTE)
    if START + WIDTH > DIM:
        numbers = tl.where((column < DIM)[None, :], numbers, 0.0)
    return tl.where(there[:, None], numbers, 0.0)
