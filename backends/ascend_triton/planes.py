"""What kernels are told about planes: where the numbers are, at run time, and how to read them, at compile time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_attn.checks import refuse
from sparse_attn.layout import FORMATS, Format


class Part(NamedTuple):
    """Where one part of the entries lies. Steps count the numbers that the kernel loads, not bytes."""

    data: Tensor | None
    page_step: int
    entry_step: int
    head_step: int


ABSENT = Part(None, 0, 0, 0)


class Codes(NamedTuple):
    """How a kernel reads rows: ``stored`` of ``dim`` elements from the values, the others from the rope part. Numbers
    that a tensor holds as they are have no name here."""

    stored: int
    dim: int
    element: str
    scale: str
    group: int


class Rows(NamedTuple):
    """The parts of the rows of a plane."""

    values: Part
    rope: Part
    scales: Part
    codes: Codes


_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
"""Others are read as int8, the only type of one byte that Triton loads on Ascend."""


def rows(op: str, name: str, data: Tensor, format: str, page_size: int, dim: int, scale: Tensor | None = None) -> Rows:
    """The parts of a plane whose rows have ``dim`` elements there. Refuses a packed plane whose numbers are not
    aligned, which a device cannot load."""
    f = FORMATS[format]
    codes = Codes(
        f.codec.dim or dim, dim, "" if f.codec.element == "int8" else f.codec.element, f.codec.scale, f.codec.group
    )
    if not f.packed:
        return Rows(
            plain_part(data), ABSENT, ABSENT if scale is None else plain_part(scale), codes._replace(element="")
        )
    types = {"values": f.codec.element, "rope": "bf16", "scales": f.codec.scale}
    parts = {
        part: _typed(op, name, data, _DTYPES.get(types[part], torch.int8), at, step)
        for part, (at, step) in _places(f, data, page_size).items()
        if part != "pad"
    }
    return Rows(parts["values"], parts.get("rope", ABSENT), parts.get("scales", ABSENT), codes)


def plain_part(data: Tensor) -> Part:
    """A tensor ``[pages, page_size, heads, ...]`` as it is."""
    return Part(data, data.stride(0), data.stride(1), data.stride(2))


def _places(f: Format, data: Tensor, page_size: int) -> dict[str, tuple[int, int]]:
    """For each part of a packed format: its byte in a page, and the bytes from one entry's to the next."""
    places = {}
    start = 0
    for section, width in zip(f.sections, f.widths(), strict=True):
        at = start
        for part, size in section:
            places[part] = at, width if f.planar else data.stride(1)
            at += size
        start += width * page_size
    return places


def _typed(op: str, name: str, data: Tensor, dtype: torch.dtype, at: int, step: int) -> Part:
    """The part of ``dtype`` numbers at byte ``at`` of a page of bytes."""
    size = dtype.itemsize
    if any(x % size for x in (data.data_ptr(), data.stride(0), at, step)):
        expected = f"entries at multiples of {size} bytes, where the device loads {dtype} numbers"
        got = f"address {data.data_ptr()}, strides {data.stride()}"
        raise refuse(op, name, expected, got, "align the pool and its pages")
    first = data.as_strided((size,), (1,), data.storage_offset() + at).view(dtype)
    return Part(first, data.stride(0) // size, step // size, 0)
