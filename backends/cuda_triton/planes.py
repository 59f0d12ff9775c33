"""What kernels are told about planes: where the bytes are, at run time, and how to read them, at compile time.

Triton takes named tuples whole, so a plane is one argument and not thirty.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparse_attn.checks import refuse
from sparse_attn.layout import BITS, FORMATS


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


def rows(op: str, name: str, data: Tensor, format: str, page_size: int, scale: Tensor | None = None) -> Rows:
    """The parts of a plane. Refuses a packed plane whose numbers are not aligned, which a device cannot load."""
    f = FORMATS[format]
    if not f.packed:
        return Rows(plain_part(data), None, None if scale is None else plain_part(scale))
    found: dict[str, Part] = {}
    section_start = 0
    for section, width in zip(f.sections, f.widths(), strict=True):
        at, step = section_start, width if f.planar else data.stride(1)
        types = {"values": f.codec.element, "rope": "bf16", "scales": f.codec.scale}
        for part, size in section:
            if part != "pad":
                found[part] = _typed(op, name, data, types[part], at, step)
            at += size
        section_start += width * page_size
    return Rows(found["values"], found.get("rope"), found.get("scales"))


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
