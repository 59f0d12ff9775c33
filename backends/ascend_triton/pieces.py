"""Planes as kernels take them: typed views of the pieces of their entries.

A *piece* is what shares a scale: a head of an entry, or a group of its one head. So one kernel serves every format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_attn.checks import refuse
from sparse_attn.layout import FORMATS

TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int8,
    "e4m3": torch.int8,
    "e2m1": torch.int8,
    "e8m0": torch.int8,
}
"""What kernels load for each type of number: the compiler has no type of 8 or 4 bits but int8."""

TILE_ELEMENTS = 2048
"""Elements of an entry that a program takes at a time; a piece is never cut."""


class Plane(NamedTuple):
    """A plane as an op's arguments give it, under the name that refusals call it by."""

    name: str
    data: Tensor
    format: str
    page_size: int
    scale: Tensor | None

    @property
    def size(self) -> tuple[int, int]:
        """Entries of a page, and slots."""
        pages, page_size, _ = FORMATS[self.format].paging(self.data.shape, self.page_size)
        return page_size, pages * page_size


class Pieces(NamedTuple):
    """Views of the parts of every entry: values ``[pages, page_size, pieces, n]``, scales the same with n = 1, rotated
    elements and padding with one piece. Those that the format lacks are None."""

    values: Tensor
    scales: Tensor | None
    rope: Tensor | None = None
    pad: Tensor | None = None


class Tile(NamedTuple):
    """The constants of a kernel: PIECES pieces at a time, of PIECE elements in BLOCK columns, powers of two; STORED
    elements of a row lie in pieces and ROPE behind them."""

    ELEMENT: str
    SCALE: str
    PIECE: int
    BLOCK: int
    PIECES: int
    STORED: int
    ROPE: int


def pieces(op: str, plane: Plane) -> Pieces:
    """The pieces of a plane. Refuses a packed plane whose numbers are not aligned, which a device cannot load."""
    f, data, page_size = FORMATS[plane.format], plane.data, plane.size[0]
    if not f.packed:
        values = data.view(torch.int8) if f.dtype == "uint8" else data
        return Pieces(values, None if plane.scale is None else plane.scale[..., None])
    types = {"values": f.codec.element, "scales": f.codec.scale, "rope": "bf16", "pad": "int8"}
    found: dict[str, Tensor] = {}
    start = 0
    for section, width in zip(f.sections, f.widths(), strict=True):
        entries = data[:, start : start + page_size * width].unflatten(1, (page_size, 1, width)) if f.planar else data
        start += page_size * width
        at = 0
        for part, size in section:
            found[part] = _typed(op, plane.name, entries[..., at : at + size], TYPES[types[part]])
            at += size
    groups = f.codec.dim // f.codec.group
    found["values"] = found["values"][:, :, 0].unflatten(-1, (groups, -1))
    found["scales"] = found["scales"][:, :, 0].unsqueeze(-1)
    return Pieces(**found)


def _typed(op: str, name: str, entries: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        return entries.view(dtype)
    except RuntimeError:
        expected = f"entries at multiples of {dtype.itemsize} bytes, where the device loads such numbers"
        got = f"offset {entries.storage_offset()}, strides {entries.stride()}"
        raise refuse(op, name, expected, got, "align the pool and its pages") from None


def row_pieces(rows: Tensor, format: str) -> Tensor:
    """``rows [T, H, D]`` of numbers as ``[T, pieces, n]``, without rotated elements."""
    codec = FORMATS[format].codec
    return rows[:, 0, : codec.dim].unflatten(-1, (-1, codec.group)) if codec.dim else rows


def located(part: Tensor | None) -> tuple[Any, ...]:
    """A part as a kernel's arguments: its data, and the numbers from one page, entry and piece to the next."""
    return (None, 0, 0, 0) if part is None else (part, *part.stride()[:3])


def tile(format: str, heads: int, dim: int) -> Tile:
    """The constants for rows of ``dim`` elements."""
    codec = FORMATS[format].codec
    stored = codec.dim or dim
    piece = codec.group or stored
    count = heads * stored // piece
    block = padded(piece)
    at_once = min(padded(count), max(TILE_ELEMENTS // block, 1))
    return Tile(codec.element, codec.scale, piece, block, at_once, stored, codec.rope)


def padded(n: int) -> int:
    """The least power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()
