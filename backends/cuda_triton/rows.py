"""``store`` and ``load`` on Triton: arguments of the ops to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparse_attn.layout import FORMATS

from . import planes
from .device import device_of
from .kernels.rows import load_kernel, store_kernel
from .schedule import SMALLEST, WIDEST, power_of_two

if TYPE_CHECKING:
    from sparse_attn.ops.load import Load
    from sparse_attn.ops.store import Store

LOAD_ROWS, STORE_ROWS = 16, 4


def load(a: Load, out: Tensor) -> None:
    """Reads rows. One of a slot past the plane becomes NaN."""
    count, heads, dim = out.shape
    if count == 0:
        return
    pages, page_size, _ = FORMATS[a.format].paging(a.plane.shape, a.page_size)
    width = min(max(power_of_two(dim), SMALLEST), WIDEST)
    load_kernel[-(-count // LOAD_ROWS), heads](
        *planes.rows("load", "plane", a.plane, a.format, page_size, a.scale),
        a.slots,
        count,
        page_size,
        pages,
        out,
        heads,
        CODES=planes.codes(a.format, dim),
        WIDTH=width,
        BLOCK=LOAD_ROWS,
        HARDWARE_FP8=device_of(out).hardware_fp8,
        num_warps=4,
    )


def store(a: Store) -> None:
    """Writes rows. One for a slot past the plane is left out."""
    count, heads, dim = a.rows.shape
    if count == 0:
        return
    pages, page_size, _ = a.paging
    rows, codes = planes.rows("store", "plane", a.plane, a.format, page_size, a.scale), planes.codes(a.format, dim)
    pad, pad_bytes = planes.padding(a.plane, a.format, page_size)
    width = max(power_of_two(dim), SMALLEST)
    store_kernel[-(-count // STORE_ROWS), heads](
        a.rows,
        a.rows.stride(0),
        a.rows.stride(1),
        a.slots,
        count,
        page_size,
        pages,
        *rows,
        pad,
        CODES=codes,
        WIDTH=width,
        PAD=pad_bytes,
        BLOCK=STORE_ROWS,
        num_warps=4,
    )
