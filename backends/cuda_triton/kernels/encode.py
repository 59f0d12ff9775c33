"""Device code: numbers to the bytes of a plane, bit for bit as the reference. Rounds to nearest, ties to even."""

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
