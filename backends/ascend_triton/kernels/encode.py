"""Device code: numbers to the bytes of a plane, as the reference makes them. Rounds to nearest, ties to even.

The compiler has no type of 8 bits but int8, and none of 4: these are made by integer operations on float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_NORMAL = tl.constexpr(2.0**-126)
ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2**23: a number of magnitude below 2**22 loses its fraction by adding and taking away this one."""


@triton.jit
def rounded(x):
    """The nearest integers."""
    return (x + ROUNDS) - ROUNDS


@triton.jit
def as_int8(x):
    """Whole numbers from -128 to 127. By way of float16, as a conversion of int32 needs 16 times the memory."""
    return tl.cast(x.to(tl.float16), tl.int8, overflow_mode="saturate")


@triton.jit
def as_byte(code):
    """Codes 0 to 255 as int8 of the same bits."""
    return as_int8(tl.where(code > 127, code - 256, code).to(tl.float32))


@triton.jit
def sign_bit(x):
    return tl.where(x.to(tl.int32, bitcast=True) < 0, 1, 0)


@triton.jit
def e4m3_code(x):
    """Codes 0 to 255 of numbers up to 448; NaN gives NaN."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(magnitude < 0.015625, rounded(magnitude * 512.0).to(tl.int32), normal)
    code = tl.where(x == x, code, 0x7F)
    return code + sign_bit(x) * 128


@triton.jit
def e2m1_code(x):
    """Codes 0 to 15 of the nearest numbers; magnitudes above 6 become 6."""
    m = tl.abs(x)
    # halfway numbers go to the even one of two codes
    code = tl.where(m > 0.25, 1, 0) + tl.where(m >= 0.75, 1, 0) + tl.where(m > 1.25, 1, 0) + tl.where(m >= 1.75, 1, 0)
    code += tl.where(m > 2.5, 1, 0) + tl.where(m >= 3.5, 1, 0) + tl.where(m > 5.0, 1, 0)
    return code + sign_bit(x) * 8


@triton.jit
def nibble(x, ELEMENT: tl.constexpr):
    """Codes 0 to 15 of numbers to store."""
    if ELEMENT == "e2m1":
        return e2m1_code(x)
    else:
        code = rounded(x).to(tl.int32)
        return tl.where(code < 0, code + 16, code)


@triton.jit
def element(x, ELEMENT: tl.constexpr):
    """Numbers to store as int8 of their bits, of a type of 8 bits."""
    return as_byte(e4m3_code(x)) if ELEMENT == "e4m3" else as_int8(rounded(x))


@triton.jit
def largest_magnitude(x):
    """Of each row of ``x [P, n]``; NaN if one is NaN."""
    faults = tl.sum(tl.where(x == x, 0.0, 1.0), 1)
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
    return tl.where(faults > 0, float("nan"), amax)


@triton.jit
def scale_of(amax, ELEMENT: tl.constexpr, SCALE: tl.constexpr):
    """Scales as the numbers that they are stored as, in float32."""
    LARGEST: tl.constexpr = 448 if ELEMENT == "e4m3" else 6 if ELEMENT == "e2m1" else 127 if ELEMENT == "int8" else 7
    if SCALE == "fp16":
        half = (amax / LARGEST).to(tl.float16)
        wide = half.to(tl.float32)
        next_up = (half.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        clips = tl.where(wide * LARGEST < amax, 1.0, 0.0) * tl.where(wide < float("inf"), 1.0, 0.0)
        return tl.where(clips > 0, next_up, wide)
    elif ELEMENT == "int8":
        scale = amax / LARGEST
        return tl.where(scale < SMALLEST_NORMAL, SMALLEST_NORMAL, scale)
    elif SCALE == "e4m3":
        scale = amax / LARGEST
        scale = tl.where(scale < 2.0**-9, 2.0**-9, tl.where(scale > 448.0, 448.0, scale))
        scale = e4m3_value(scale)
        return tl.where(amax < float("inf"), scale, float("nan"))
    else:
        # the least power of two that is at least max(amax, FLOOR) / LARGEST
        FLOOR: tl.constexpr = 1e-4 if ELEMENT == "e4m3" else 6 * 2.0**-126
        FRACTION: tl.constexpr = 0x600000 if ELEMENT == "e4m3" else 0x400000
        EXPONENT: tl.constexpr = 8 if ELEMENT == "e4m3" else 2
        bits = tl.where(amax < FLOOR, FLOOR, amax).to(tl.int32, bitcast=True)
        power = (bits >> 23) - EXPONENT + tl.where((bits & 0x7FFFFF) > FRACTION, 1, 0)
        return tl.where(amax < float("inf"), (power << 23).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def e4m3_value(x):
    """``x`` from 2**-9 to 448 rounded to e4m3, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20).to(tl.float32, bitcast=True)
    return tl.where(x < 0.015625, rounded(x * 512.0) * 2.0**-9, normal)


@triton.jit
def stored_scale(scale, SCALE: tl.constexpr):
    """Scales in the type that kernels store for theirs."""
    if SCALE == "e8m0":
        bits = scale.to(tl.int32, bitcast=True)
        return as_byte(tl.where(scale == scale, bits >> 23, 255))
    elif SCALE == "e4m3":
        return as_byte(e4m3_code(scale))
    elif SCALE == "bf16":
        return scale.to(tl.bfloat16)
    elif SCALE == "fp16":
        return scale.to(tl.float16)
    else:
        return scale


@triton.jit
def over_scale(x, scale):
    """``x [P, n]`` over the scales of its rows; zeros where a scale is none."""
    usable = tl.where(scale > 0, 1.0, 0.0) * tl.where(scale < float("inf"), 1.0, 0.0)
    divisor = tl.where(usable > 0, scale, 1.0)
    return tl.where((usable > 0)[:, None], x / divisor[:, None], 0.0)
