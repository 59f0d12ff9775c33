"""Numbers to bytes and back by 32-bit integers: A2 and A3 have no 8-bit floats, and no device a double.

The same bytes as ``sparse_attn.codecs``, which is the specification, if the device divides and rounds as IEEE 754 says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_attn.layout import BITS, Codec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}
INFINITY = 0x7F800000  # as float32
NAN_E4M3, NAN_E8M0 = 0x7F, 0xFF


class Small(NamedTuple):
    """A float of a few bits: bits of its exponent and mantissa, and the code of its largest magnitude."""

    exponent: int
    mantissa: int
    largest: int

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def step(self) -> float:
        """The smallest magnitude, of which those below ``normal`` are multiples."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def code_step(self) -> int:
        """What a step of the code is in the bits of a float32."""
        return 1 << 23 - self.mantissa

    @property
    def code_bias(self) -> int:
        """What lies between the code of a normal number and the upper bits of the same float32."""
        return 127 - self.bias << self.mantissa


SMALL = {"e4m3": Small(4, 3, 0x7E), "e2m1": Small(2, 1, 7)}


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
    """Elements to store, before rounding, and the scale of each group, of ``groups`` (float32 ``[..., n]``)."""
    top = magnitude(groups).amax(-1)  # as integers, so that a NaN is the largest on every device
    amax, largest = top.view(torch.float32), LARGEST[codec.element]
    if codec.element in ("int8", "int4"):
        scale = fp16_scale(amax, largest) if codec.scale == "fp16" else (amax / largest).clamp(min=2.0**-126)
    elif codec.scale == "e4m3":
        scale = from_bytes("e4m3", to_bytes("e4m3", (amax / largest).clamp(2.0**-9, 448.0)))
        scale = torch.where(top < INFINITY, scale, torch.nan)
    else:
        scale = power_of_two_scale(amax, largest, 1e-4 if codec.element == "e4m3" else largest * 2.0**-126)
        scale = torch.where(top < INFINITY, scale, torch.nan)
    usable = (magnitude(scale) < INFINITY) & (scale > 0)
    stored = groups / torch.where(usable, scale, 1.0)[..., None]
    return torch.where(usable[..., None], stored, 0.0), scale


def magnitude(numbers: Tensor) -> Tensor:
    """The bits of float32 numbers without their sign, as int32: in the order of magnitudes, infinity and then NaN
    last."""
    return numbers.contiguous().view(torch.int32) & 0x7FFFFFFF


def power_of_two_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """The least power of two that is at least ``max(amax, floor) / largest``, from the fields of the floats."""
    mantissa, exponent = math.frexp(largest)
    bits = amax.clamp(min=floor).view(torch.int32)
    more = bits % (1 << 23) > int((2 * mantissa - 1) * (1 << 23))
    return ((bits // (1 << 23) - exponent + 1 + more) * (1 << 23)).view(torch.float32)


def fp16_scale(amax: Tensor, largest: float) -> Tensor:
    """``amax / largest`` in float16, rounded up so that nothing is clipped."""
    scale = (amax / largest).half()
    clips = (scale.float() * largest < amax) & (scale.float() <= 65504)
    return torch.where(clips, (scale.view(torch.int16) + 1).view(torch.float16), scale).float()


def to_bytes(type: str, numbers: Tensor) -> Tensor:
    """``numbers [..., n]`` (float32) rounded to ``type``, as uint8."""
    if BITS[type] == 4:
        codes = small_codes(type, numbers) if type == "e2m1" else numbers.round().to(torch.int32) & 15
        return (codes[..., 0::2] + codes[..., 1::2] * 16).to(torch.uint8)
    if type == "e4m3":
        return torch.where(magnitude(numbers) > INFINITY, NAN_E4M3, small_codes(type, numbers)).to(torch.uint8)
    if type == "e8m0":  # of powers of two alone
        return torch.where(magnitude(numbers) < INFINITY, magnitude(numbers) // (1 << 23), NAN_E8M0).to(torch.uint8)
    if type == "int8":
        numbers = numbers.round()
    # a copy, as an empty tensor counts as contiguous whatever its strides
    return numbers.to(DTYPES[type]).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def small_codes(type: str, numbers: Tensor) -> Tensor:
    """Codes of the nearest numbers of ``type``, of equally near ones the even code, as int32; larger ones saturate."""
    small, bits = SMALL[type], magnitude(numbers)
    code = bits // small.code_step
    rounded = (bits + (small.code_step // 2 - 1) + code % 2) // small.code_step - small.code_bias
    tiny = (numbers.abs() / small.step).clamp(max=float(1 << small.mantissa)).round().to(torch.int32)
    code = torch.where(numbers.abs() < small.normal, tiny, rounded).clamp(max=small.largest)
    negative = (numbers.contiguous().view(torch.int32) < 0).to(torch.int32)
    return code + negative * (1 << small.exponent + small.mantissa)


def from_bytes(type: str, stored: Tensor) -> Tensor:
    """The numbers in ``stored`` (uint8 ``[..., n]``), as float32."""
    if type in DTYPES:
        # a copy, as a slice of bytes may start where its numbers are not aligned
        return stored.clone(memory_format=torch.contiguous_format).view(DTYPES[type]).float()
    codes = stored.to(torch.int32)
    if BITS[type] == 4:
        codes = torch.stack([codes % 16, codes // 16], -1).flatten(-2)
    if type == "int4":
        return ((codes + 8) % 16 - 8).float()
    if type == "e8m0":
        bits = torch.where(codes > 0, codes * (1 << 23), 1 << 22)  # the code 0 is half of the least normal float
        return torch.where(codes == NAN_E8M0, torch.nan, bits.view(torch.float32))
    return small_numbers(type, codes)


def small_numbers(type: str, codes: Tensor) -> Tensor:
    """The numbers of ``codes`` (int32)."""
    small = SMALL[type]
    positive = codes % (1 << small.exponent + small.mantissa)
    normal = ((positive + small.code_bias) * small.code_step).view(torch.float32)
    numbers = torch.where(positive < 1 << small.mantissa, positive.float() * small.step, normal)
    if type == "e4m3":
        numbers = torch.where(positive == NAN_E4M3, torch.nan, numbers)
    return torch.where(codes == positive, numbers, -numbers)
