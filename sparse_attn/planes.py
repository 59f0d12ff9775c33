"""Where the bytes of an entry lie: reads and writes the parts of entries in a plane of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from . import codecs
from .layout import FORMATS

EVERY = slice(None)


class Plane:
    """A paged tensor, its format, and its scale plane if the format has one (see ``layout.Format``)."""

    def __init__(self, data: Tensor, format: str, scale: Tensor | None = None, page_size: int = 0) -> None:
        self.data, self.scale, self.format = data, scale, FORMATS[format]
        self.pages, self.page_size, self.heads = self.format.paging(data.shape, page_size)

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.format.row_dim(self.data.shape[-1])

    @property
    def slots(self) -> int:
        """Entries that the plane holds."""
        return self.pages * self.page_size

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Pages and offsets of ``slots`` (int64 ``[N]``)."""
        return slots // self.page_size, slots % self.page_size

    def rows(self, at: tuple[Tensor, Tensor], heads: slice = EVERY) -> Tensor:
        """Rows of entries as float32 ``[N, heads, D]``."""
        return codecs.decode(self.format.codec, self.read(at, heads))

    def put_rows(self, at: tuple[Tensor, Tensor], rows: Tensor) -> None:
        """Write float32 ``rows [N, heads, D]``."""
        self.write(at, codecs.encode(self.format.codec, rows))

    def scales(self, at: tuple[Tensor, Tensor]) -> Tensor:
        """Scales of entries as float32 ``[N, heads, groups]``, of a format that has them."""
        return codecs.from_bytes(self.format.codec.scale, self.read(at)["scales"])

    def read(self, at: tuple[Tensor, Tensor], heads: slice = EVERY) -> dict[str, Tensor]:
        """The parts of entries as uint8 ``[N, heads, n]``."""
        page, offset = at
        parts: dict[str, Tensor] = {}
        if not self.format.packed:
            parts["values"] = self.data[:, :, heads][page, offset].contiguous().view(torch.uint8)
            if self.scale is not None:
                parts["scales"] = self.scale[:, :, heads][page, offset].unsqueeze(-1).contiguous().view(torch.uint8)
            return parts
        for section, index in zip(self.format.sections, self._indices(at), strict=True):
            pieces = self.data[index].split([size for _, size in section], -1)
            parts |= {name: piece[:, None, :] for (name, _), piece in zip(section, pieces, strict=True)}
        return parts

    def write(self, at: tuple[Tensor, Tensor], parts: dict[str, Tensor]) -> None:
        """Write the parts of entries; padding becomes 0."""
        page, offset = at
        if not self.format.packed:
            self.data[page, offset] = parts["values"].view(self.data.dtype)
            if self.scale is not None:
                self.scale[page, offset] = parts["scales"].view(self.scale.dtype).squeeze(-1)
            return
        for section, index in zip(self.format.sections, self._indices(at), strict=True):
            self.data[index] = torch.cat([self._part(part, parts, len(page)) for part in section], -1)

    def _part(self, part: tuple[str, int], parts: dict[str, Tensor], entries: int) -> Tensor:
        name, size = part
        return self.data.new_zeros(entries, size) if name == "pad" else parts[name].view(entries, size)

    def _indices(self, at: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        """For each section, the index of the plane that gives the bytes ``[N, n]`` of entries."""
        page, offset = at
        if not self.format.planar:
            return [(page, offset, torch.zeros_like(page))]
        indices: list[tuple[Tensor, ...]] = []
        start = 0
        for width in self.format.widths():
            within = torch.arange(width, device=page.device)
            indices.append((page[:, None], start + offset[:, None] * width + within))
            start += self.page_size * width
        return indices


def strides_of(*planes: Tensor | None) -> str:
    """What kernels must know of the strides of planes: ``contiguous`` all through; ``pages``: each page is, and pages
    lie apart; ``rows``: any other. No plane: ``contiguous``."""
    given = [plane for plane in planes if plane is not None]
    if all(plane.is_contiguous() for plane in given):
        return "contiguous"
    return "pages" if all(plane[:1].is_contiguous() for plane in given) else "rows"


def reach_of(*planes: Tensor | None) -> int:
    """Elements from the first to the last of the widest plane: what products of page and stride grow to."""
    return max(
        (sum((n - 1) * step for n, step in zip(plane.shape, plane.stride(), strict=True)) + 1)
        if plane is not None and plane.numel()
        else 0
        for plane in planes
    )
