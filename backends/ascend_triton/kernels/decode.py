"""Device code: stored elements of every type as float32."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import e2m1_numbers, e4m3_numbers


@triton.jit
def unscaled(stored, ELEMENT: tl.constexpr):
    """Elements without their scales. Of types of 4 bits, the last axis becomes twice as long."""
    if ELEMENT == "e4m3":
        return e4m3_numbers(stored)
    elif ELEMENT == "e2m1" or ELEMENT == "int4":
        wide = stored.to(tl.int16)
        code = tl.interleave(wide & 15, (wide >> 4) & 15)
        if ELEMENT == "e2m1":
            return e2m1_numbers(code)
        else:
            return tl.where(code > 7, code - 16, code).to(tl.float32)
    else:
        return stored.to(tl.float32)
