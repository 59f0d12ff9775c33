"""What kernels are told about planes: where the bytes are, at run time, and how to read them, at compile time.

Triton takes named tuples whole, so a plane is one argument and not thirty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_attn.checks import refuse
from sparse_attn.layout import BITS, FORMATS, Format


class Part(NamedTuple):
    """Where one part of the entries lies. Steps count the numbers that the kernel loads, not bytes."""

    data: Tensor
    start: int
    page_step: int
    entry_step: int
    head_step: int


class Rows(NamedTuple):
    """The parts of the rows of a plane; those that its format lacks are None."""

    values: Part | None
    rope: Part | None
    scales: Part | None


ABSENT = Rows(None, None, None)


class Codes(NamedTuple):
    """How a kernel reads rows: ``stored`` of ``dim`` elements from the values, the others from the rope part. Numbers
    that a tensor holds as they are have no name here."""

    stored: int
    dim: int
    element: str = ""
    scale: str = ""
    group: int = 0
    rope: str = ""


class Pages(NamedTuple):
    """Page table of a plane."""

    table: Tensor
    step: int
    width: int
    pages: int


def pages(table: Tensor, count: int) -> Pages:
    """The page table of a plane of ``count`` pages."""
    return Pages(table, table.stride(0), table.shape[1], count)


def rows(op: str, name: str, data: Tensor, format: str, page_size: int, scale: Tensor | None = None) -> Rows:
    """The parts of a plane. Refuses a packed plane whose numbers are not aligned, which a device cannot load."""
    f = FORMATS[format]
    if not f.packed:
        return Rows(plain_part(data), None, None if scale is None else plain_part(scale))
    types = {"values": f.codec.element, "rope": "bf16", "scales": f.codec.scale}
    parts = {
        part: _typed(op, name, data, types[part], at, step)
        for part, (at, step, _) in _places(f, data, page_size).items()
        if part != "pad"
    }
    return Rows(parts["values"], parts.get("rope"), parts.get("scales"))


def bits(data: Tensor, format: str, page_size: int, scale: Tensor | None = None) -> tuple[Rows, tuple[int, int, int]]:
    """The parts of a plane as integers, and how many of them an entry and head have of each: what formats of one codec
    move between orders."""
    f = FORMATS[format]
    if f.packed:
        places = _places(f, data, page_size)
        found = [places.get(part, (0, 0, 0)) for part in Rows._fields]
        parts = [Part(data, at, data.stride(0), step, 0) if size else None for at, step, size in found]
        return Rows(*parts), (found[0][2], found[1][2], found[2][2])
    values = plain_part(data.view(_INTEGERS[data.element_size()]))
    scales = None if scale is None else plain_part(scale.view(torch.int16))
    return Rows(values, None, scales), (data.shape[3], 0, int(scale is not None))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def padding(data: Tensor, format: str, page_size: int) -> tuple[Part | None, int]:
    """The bytes of an entry that hold nothing, and how many they are."""
    at, step, size = _places(FORMATS[format], data, page_size).get("pad", (0, 0, 0))
    return (Part(data, at, data.stride(0), step, 0), size) if size else (None, 0)


def _places(f: Format, data: Tensor, page_size: int) -> dict[str, tuple[int, int, int]]:
    """For each part of a packed format: its byte in a page, the bytes from one entry's to the next, and its own."""
    places = {}
    start = 0
    for section, width in zip(f.sections, f.widths(), strict=True):
        at = start
        for part, size in section:
            places[part] = at, width if f.planar else data.stride(1), size
            at += size
        start += width * page_size
    return places


def plain_part(data: Tensor) -> Part:
    """A tensor ``[pages, page_size, heads, ...]`` as it is."""
    return Part(data, 0, data.stride(0), data.stride(1), data.stride(2))


def _typed(op: str, name: str, data: Tensor, type: str, at: int, step: int) -> Part:
    """The part of ``type`` numbers at byte ``at`` of a page of bytes."""
    size = max(BITS[type] // 8, 1)
    if any(x % size for x in (data.data_ptr(), data.stride(0), at, step)):
        expected = f"entries at multiples of {size} bytes, where the device loads {type} numbers"
        got = f"address {data.data_ptr()}, strides {data.stride()}"
        raise refuse(op, name, expected, got, "align the pool and its pages")
    return Part(data, at // size, data.stride(0) // size, step // size, 0)


def codes(format: str, dim: int) -> Codes:
    """How to read rows of ``dim`` elements that lie in one plane."""
    codec = FORMATS[format].codec
    stored, rope = (codec.dim, "bf16") if codec.rope else (dim, "")
    return Codes(stored, dim, codec.element if codec.scale else "", codec.scale, codec.group, rope)
