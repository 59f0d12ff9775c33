"""Device code: rows in registers to the bytes of a plane, bit for bit as the reference. Rounds to nearest, ties to
even."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_start, typed

SMALLEST_NORMAL = tl.constexpr(2.0**-126)
ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2**23: a number of magnitude below 2**22 loses its fraction by adding and taking away this one."""


@triton.jit
def rounded(x):
    """The nearest integers."""
    return (x + ROUNDS) - ROUNDS


@triton.jit
def sign_bit(x):
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.uint8)


@triton.jit
def e4m3_codes(x):
    """Bytes of numbers up to 448, by integer operations, as devices before sm_89 have no others; NaN gives NaN."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    code = tl.where(magnitude < 2.0**-6, rounded(magnitude * 512.0).to(tl.int32), normal)
    code = tl.where(x == x, code, 0x7F)
    return code.to(tl.uint8) | (sign_bit(x) << 7)


@triton.jit
def e2m1_codes(x):
    """Codes 0 to 15 of the nearest numbers; larger ones than 6 become 6."""
    m = tl.abs(x)
    # halfway numbers go to the even one of two codes
    code = (m > 0.25).to(tl.uint8) + (m >= 0.75).to(tl.uint8) + (m > 1.25).to(tl.uint8) + (m >= 1.75).to(tl.uint8)
    code += (m > 2.5).to(tl.uint8) + (m >= 3.5).to(tl.uint8) + (m > 5.0).to(tl.uint8)
    return code | (sign_bit(x) << 3)


@triton.jit
def largest_magnitude(x):
    """Over the last axis; NaN if one is NaN, as its bits are above those of every number."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    return tl.max(bits, 2).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_scale(amax, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """The least power of two that is at least ``max(amax, FLOOR) / LARGEST``; LARGEST is 448 or 6."""
    FRACTION: tl.constexpr = 0x600000 if LARGEST == 448 else 0x400000
    EXPONENT: tl.constexpr = 8 if LARGEST == 448 else 2
    bits = tl.maximum(amax, FLOOR).to(tl.int32, bitcast=True)
    power = (bits >> 23) - EXPONENT + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)
    return tl.where(amax < float("inf"), (power << 23).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def scale_of(amax, ELEMENT: tl.constexpr, SCALE: tl.constexpr):
    """Scales as the numbers that they are stored as, in float32."""
    LARGEST: tl.constexpr = 448 if ELEMENT == "e4m3" else 6 if ELEMENT == "e2m1" else 127 if ELEMENT == "int8" else 7
    if SCALE == "fp16":  # of integers
        half = tl.div_rn(amax, LARGEST * 1.0).to(tl.float16)
        wide = half.to(tl.float32)
        clips = (wide * LARGEST < amax) & (wide < float("inf"))
        up = (half.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(clips, up, half).to(tl.float32)
    elif ELEMENT == "int8":
        scale = tl.div_rn(amax, LARGEST * 1.0)
        return tl.where(scale < SMALLEST_NORMAL, SMALLEST_NORMAL, scale)
    elif SCALE == "e4m3":
        # 448 holds back what would not fit; the code of what is not finite is that of NaN
        scale = tl.minimum(tl.maximum(tl.div_rn(amax, LARGEST * 1.0), 2.0**-9), 448.0)
        return tl.where(amax < float("inf"), scale, float("nan"))
    else:
        return power_of_two_scale(amax, LARGEST, 1e-4 if ELEMENT == "e4m3" else 6 * SMALLEST_NORMAL)


@triton.jit
def e4m3_value(x):
    """``x`` from 2**-9 to 448 rounded to e4m3, as float32."""
    bits = x.to(tl.uint32, bitcast=True)
    normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20).to(tl.float32, bitcast=True)
    return tl.where(x < 2.0**-6, rounded(x * 512.0) * 2.0**-9, tl.where(x == x, normal, x))


@triton.jit
def quantised(groups, ELEMENT: tl.constexpr, SCALE: tl.constexpr):
    """What to store of ``groups [N, G, n]``, before rounding, and the scale ``[N, G]`` of each."""
    scale = scale_of(largest_magnitude(groups), ELEMENT, SCALE)
    if SCALE == "e4m3":
        scale = e4m3_value(scale)
    usable = (scale > 0) & (scale < float("inf"))
    stored = tl.div_rn(groups, tl.where(usable, scale, 1.0)[:, :, None])
    return tl.where(usable[:, :, None], stored, 0.0), scale


@triton.jit
def put_scales(part, at, scale, mask, SCALE: tl.constexpr):
    """Scales ``[N, G]`` in their type."""
    if SCALE == "e8m0":
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(scale == scale, bits >> 23, 255).to(tl.uint8)
    elif SCALE == "e4m3":
        scale = e4m3_codes(scale)
    to = typed(part, SCALE)
    tl.store(to + at, scale.to(to.dtype.element_ty), mask=mask)


@triton.jit
def put_elements(part, at, stored, mask, CODES: tl.constexpr):
    """Elements ``[N, WIDTH]`` in their type."""
    WIDTH: tl.constexpr = stored.shape[1]
    column = tl.arange(0, WIDTH)
    cell = at[:, None] + column[None, :]
    mask = mask[:, None] & (column < CODES.stored)[None, :]
    if CODES.element == "e4m3":
        tl.store(part.data + cell, e4m3_codes(stored), mask=mask)
    elif CODES.element == "int8":
        tl.store(typed(part, "int8") + cell, rounded(stored).to(tl.int8), mask=mask)
    else:
        ROWS: tl.constexpr = stored.shape[0]
        HALF: tl.constexpr = WIDTH // 2
        codes = e2m1_codes(stored) if CODES.element == "e2m1" else (rounded(stored).to(tl.int32) & 15).to(tl.uint8)
        low, high = tl.split(tl.reshape(codes, (ROWS, HALF, 2)))
        pair = tl.arange(0, HALF)
        # a pair lies where its first element would, counted in bytes
        half_mask = tl.max(tl.reshape(mask.to(tl.int32), (ROWS, HALF, 2)), 2) > 0
        tl.store(part.data + at[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=half_mask)


@triton.jit
def put_zeros(pad, page, offset, head, mask, PAD: tl.constexpr):
    """The bytes of entries that hold nothing, 64 at most."""
    if pad is not None:
        byte = tl.arange(0, 64)
        at = row_start(pad, page, offset, head)[:, None] + byte[None, :]
        zeros = tl.zeros((page.shape[0], 64), tl.uint8)
        tl.store(pad.data + at, zeros, mask=mask[:, None] & (byte < PAD)[None, :])


@triton.jit
def put_rows(values, rope, scales, pad, page, offset, head, mask, rows, CODES: tl.constexpr, PAD: tl.constexpr):
    """Write float32 ``rows [N, WIDTH]`` to ``page``, ``offset`` (``[N]``) of a plane, where ``mask``ed in. WIDTH is a
    power of two, from the row's elements on; columns past these are 0."""
    ROWS: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = rows.shape[1]
    column = tl.arange(0, WIDTH)
    at = row_start(values, page, offset, head)
    if CODES.scale == "":
        numbers = rows.to(values.data.dtype.element_ty)
        tl.store(
            values.data + at[:, None] + column[None, :], numbers, mask=mask[:, None] & (column < CODES.dim)[None, :]
        )
    else:
        GROUP: tl.constexpr = CODES.group if CODES.group else WIDTH
        GROUPS: tl.constexpr = WIDTH // GROUP
        stored, scale = quantised(tl.reshape(rows, (ROWS, GROUPS, GROUP)), CODES.element, CODES.scale)
        put_elements(values, at, tl.reshape(stored, (ROWS, WIDTH)), mask, CODES)
        group = tl.arange(0, GROUPS)
        scale_at = row_start(scales, page, offset, head)[:, None] + group[None, :]
        put_scales(scales, scale_at, scale, mask[:, None] & (group * GROUP < CODES.stored)[None, :], CODES.scale)
    if CODES.rope == "bf16":
        rope_at = row_start(rope, page, offset, head)[:, None] + (column - CODES.stored)[None, :]
        in_rope = ((column >= CODES.stored) & (column < CODES.dim))[None, :]
        tl.store(typed(rope, "bf16") + rope_at, rows.to(tl.bfloat16), mask=mask[:, None] & in_rope)
    put_zeros(pad, page, offset, head, mask, PAD)
