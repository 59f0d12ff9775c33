"""Numbers to bytes and back: the quantiser of every codec in plain PyTorch, the specification of ``layout.Codec``.

Rounding is to nearest, ties to even, and keeps the sign of zero. ``docs/formats.md`` states the rules and their origin.
A group that holds a NaN, an infinity, or more than its scale can express gets a scale that is not finite and stored
zeros: it reads as NaN, so a fault is seen and not clipped away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layout import BITS, Codec

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}

LARGEST = {"e4m3": 448, "e2m1": 6, "int8": 127, "int4": 7}
"""The largest element that a quantiser stores."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; 8 more is the same with a minus."""


def encode(codec: Codec, rows: Tensor) -> dict[str, Tensor]:
    """The bytes of each part of ``rows`` (float32 ``[..., D]``), as uint8 ``[..., n]``."""
    parts = {}
    if codec.rope:
        rows, rope = rows.split([codec.dim, codec.rope], -1)
        parts["rope"] = to_bytes("bf16", rope)
    if not codec.scale:
        return {**parts, "values": to_bytes(codec.element, rows)}
    groups = rows.unflatten(-1, (-1, codec.group or rows.shape[-1]))
    stored, scale = quantise(codec, groups)
    return {**parts, "values": to_bytes(codec.element, stored.flatten(-2)), "scales": to_bytes(codec.scale, scale)}


def decode(codec: Codec, parts: dict[str, Tensor]) -> Tensor:
    """Rows as float32 ``[..., D]``. An element is one product in float32: ``stored * scale``."""
    rows = from_bytes(codec.element, parts["values"])
    if codec.scale:
        scale = from_bytes(codec.scale, parts["scales"])
        rows = (rows.unflatten(-1, (-1, codec.group or rows.shape[-1])) * scale[..., None]).flatten(-2)
    return torch.cat([rows, from_bytes("bf16", parts["rope"])], -1) if codec.rope else rows


def quantise(codec: Codec, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Elements to store, before rounding, and the scale of each group, both as float32, of ``groups [..., n]``.

    Every scale but that of e4m3 is large enough for its group, so ``to_bytes`` clips nothing else.
    """
    amax = groups.abs().amax(-1)
    largest = LARGEST[codec.element]
    if codec.element in ("int8", "int4"):
        scale = fp16_scale(amax, largest) if codec.scale == "fp16" else fp32_scale(amax, largest)
    elif codec.scale == "e4m3":
        scale = e4m3_scale(amax, largest)
    else:
        scale = power_of_two_scale(amax, largest, 1e-4 if codec.element == "e4m3" else largest * 2.0**-126)
    usable = scale.isfinite() & (scale > 0)
    stored = groups / torch.where(usable, scale, 1.0)[..., None]
    return torch.where(usable[..., None], stored, 0.0), scale


def power_of_two_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """The least power of two that is at least ``max(amax, floor) / largest``."""
    mantissa, exponent = torch.frexp(amax.double().clamp(min=floor))
    largest_mantissa, largest_exponent = math.frexp(largest)
    power = exponent - largest_exponent + (mantissa > largest_mantissa)
    scale = torch.ldexp(torch.ones_like(mantissa), power).float()
    return torch.where(amax.isfinite(), scale, torch.nan)


def e4m3_scale(amax: Tensor, largest: float) -> Tensor:
    """``amax / largest`` from 2**-9 to 448, rounded to e4m3. Larger groups saturate."""
    scale = (amax / largest).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
    return torch.where(amax.isfinite(), scale, torch.nan)


def fp16_scale(amax: Tensor, largest: float) -> Tensor:
    """``amax / largest`` in float16, rounded up so that nothing is clipped."""
    scale = (amax / largest).half()
    clips = (scale.float() * largest < amax) & scale.isfinite()
    return torch.where(clips, (scale.view(torch.int16) + 1).view(torch.float16), scale).float()


def fp32_scale(amax: Tensor, largest: float) -> Tensor:
    """``amax / largest``, at least the smallest normal number."""
    return (amax / largest).clamp(min=2.0**-126)


def to_bytes(type: str, numbers: Tensor) -> Tensor:
    """``numbers [..., n]`` (float32) rounded to ``type``, as uint8."""
    if BITS[type] == 4:
        codes = e2m1_codes(numbers) if type == "e2m1" else numbers.round().to(torch.int8).view(torch.uint8) & 15
        return codes[..., 0::2] | codes[..., 1::2] << 4
    if type == "int8":
        numbers = numbers.round()
    # a copy, as an empty tensor counts as contiguous whatever its strides
    return numbers.to(DTYPES[type]).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(type: str, stored: Tensor) -> Tensor:
    """The numbers in ``stored`` (uint8 ``[..., n]``), as float32."""
    if BITS[type] == 4:
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).long()
        if type == "int4":
            return ((codes ^ 8) - 8).float()
        return torch.tensor([*E2M1, *(-m for m in E2M1)], device=stored.device)[codes]
    # a copy, as a slice of bytes may start where its numbers are not aligned
    return stored.clone(memory_format=torch.contiguous_format).view(DTYPES[type]).float()


def e2m1_codes(numbers: Tensor) -> Tensor:
    """Codes 0 to 15 of the nearest e2m1 numbers."""
    middles = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)]
    up_past, up_from = numbers.new_tensor(middles[0::2]), numbers.new_tensor(middles[1::2])  # ties go to even codes
    magnitude = numbers.abs()[..., None]
    code = (magnitude > up_past).sum(-1) + (magnitude >= up_from).sum(-1)
    return (code | numbers.signbit() << 3).to(torch.uint8)
