"""Planes as FlashMLA takes them: views of the pool, never copies. What no view expresses is refused in a sentence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_attn.checks import expect
from sparse_attn.layout import FORMATS

INT32 = (1 << 31) - 1
ALIGNED = 16
"""Bytes that the kernels load at a time."""


class View(NamedTuple):
    """The rows of a plane, and how to number them: row ``e`` of page ``p`` has the slot ``p * step + e``."""

    rows: Tensor
    pages: int
    page_size: int
    step: int


def packed(name: str, data: Tensor, format: str, page_size: int) -> View:
    """A packed plane as ``[pages, page_size, 1, bytes of a row]``. Of a planar one that is the shape alone: the kernel
    knows where in a page the parts lie."""
    f = FORMATS[format]
    pages, page_size, _ = f.paging(data.shape, page_size)
    width = sum(f.widths())
    stride = data.stride(0) if pages > 1 else f.page_bytes(page_size)
    # for planar pages on sm_100 the page stride counts in rows of this many bytes
    multiple = f.page_multiple if f.planar else ALIGNED
    _expect_pages(name, data, pages, pages * page_size)
    got = f"address {data.data_ptr()}, strides {data.stride()}"
    expected = f"an address at a multiple of {ALIGNED} bytes, and pages {multiple} or a multiple of it apart"
    expect(
        data.data_ptr() % ALIGNED == 0 and stride % multiple == 0 and stride <= INT32,
        "attend",
        name,
        f"{expected}, up to 2**31 - 1",
        got,
        "align the pool and its pages",
    )
    return View(data.as_strided((pages, page_size, 1, width), (stride, width, width, 1)), pages, page_size, page_size)


def plain(name: str, data: Tensor, format: str, page_size: int) -> View:
    """A plain plane as ``[slots, 1, dim]``: all rows of all pages, and those that lie between pages of a larger pool,
    which no list names."""
    pages, page_size, _, dim = data.shape
    row = data.stride(1) if page_size > 1 else data.stride(0) if pages > 1 else dim
    step = data.stride(0) // row if pages > 1 and row else page_size
    slots = (pages - 1) * step + page_size
    _expect_pages(name, data, pages, slots)
    aligned = data.data_ptr() % ALIGNED == 0 and row * data.element_size() % ALIGNED == 0
    whole = pages == 1 or (row and data.stride(0) % row == 0)
    expect(
        aligned and whole and dim <= row <= INT32,
        "attend",
        name,
        f"rows at multiples of {ALIGNED} bytes, and pages a multiple of the step of rows apart",
        f"address {data.data_ptr()}, strides {data.stride()}",
        "align the pool and its pages",
    )
    return View(data.as_strided((slots, 1, dim), (row, dim, 1)), pages, page_size, step)


def _expect_pages(name: str, data: Tensor, pages: int, slots: int) -> None:
    expect(pages > 0, "attend", name, "at least one page", f"{[*data.shape]}")
    expect(slots <= INT32, "attend", name, "at most 2**31 - 1 slots, which FlashMLA counts in 32 bits", slots)


def queries(q: Tensor) -> Tensor:
    """``q [T, H, D]`` contiguous and aligned, as the device's block copies want it."""
    q = q.contiguous()
    return q if q.data_ptr() % ALIGNED == 0 else q.clone(memory_format=torch.contiguous_format)
