"""The bytes of a pool of pages: keys, values and index keys of every layer, page by page.

A page holds what its entries have in all layers, in one run of bytes, so that it is copied, saved and restored at once.
The planes that ops take are strided views of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import FORMATS, Format
from .manager import Copy, PagedPlane, Tables

PLANE = "kv"
"""The one plane that a manager counts: keys, values and index keys of a token lie in the same page."""

ALIGNMENT = 64
"""Bytes to a multiple of which every plane's part of a page is padded: a line of a CPU's cache."""


@dataclass(frozen=True)
class Rows:
    """A plane of one layer, ``[pages, page_size, heads, row]``, and its scales if the format has them."""

    format: str
    plane: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class LayerPlanes:
    """``keys`` and ``values`` are attended, ``index`` is scored."""

    keys: Rows
    values: Rows
    index: Rows


class Memory:
    """A pool of pages, of a model whose layers are alike.

    Args:
        layers, kv_heads, dim: of the model; keys and values have ``dim`` elements for each head.
        pages, page_size: of the pool; entries of a page.
        format, index_format: of keys and values, and of index keys; names in ``layout.FORMATS`` that are not packed.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        dim: int,
        pages: int,
        page_size: int,
        format: str = "int8",
        index_format: str = "int4_index_h",
    ) -> None:
        self.page_size = page_size
        # of keys, values and index keys, the rows and the scales: dtype, shape of a page, and where it begins
        parts, end = [], 0
        for name in (format, format, index_format):
            found = FORMATS[name]
            if found.packed:
                raise ValueError(f"format: expected one whose rows lie in planes of their own, got {name!r}")
            for dtype, shape in _shapes(found, page_size, kv_heads, dim):
                parts.append((dtype, shape, end))
                end += _aligned(dtype, shape)
        self.bytes = torch.zeros(pages, layers * end, dtype=torch.uint8)
        self.layers = []
        for layer in range(layers):
            views = iter([self._view(dtype, shape, layer * end + at) for dtype, shape, at in parts])
            rows = (
                Rows(name, next(views), next(views) if FORMATS[name].scale_dtype else None)
                for name in (format, format, index_format)
            )
            self.layers.append(LayerPlanes(*rows))

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[:, begin : begin + size].view(dtype).unflatten(1, shape)

    @property
    def plane(self) -> PagedPlane:
        """For a manager."""
        return PagedPlane(PLANE, self.page_size, entry_bytes=self.bytes.shape[1] // self.page_size)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, in this order."""
        for copy in copies:
            self.bytes[copy.target] = self.bytes[copy.source]

    def save(self, tables: Tables) -> Tensor:
        """The bytes of a sequence's pages, uint8 ``[pages, page bytes]``."""
        return self.bytes[torch.tensor(tables[PLANE], dtype=torch.int64)]

    def restore(self, saved: Tensor, tables: Tables) -> None:
        """Write back what ``save`` gave."""
        self.bytes[torch.tensor(tables[PLANE], dtype=torch.int64)] = saved


def _shapes(format: Format, page_size: int, heads: int, dim: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Of a page's rows and, if there are any, of its scales."""
    found: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (getattr(torch, format.dtype), (page_size, heads, format.row(dim)))
    ]
    if format.scale_dtype:
        found.append((getattr(torch, format.scale_dtype), (page_size, heads)))
    return found


def _aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes, padded."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
