"""``convert`` on Triton: arguments of the op to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_attn.layout import FORMATS

from . import planes
from .device import device_of
from .kernels.convert import convert_kernel
from .schedule import SMALLEST, power_of_two

if TYPE_CHECKING:
    from sparse_attn.ops.convert import Convert

ROWS = 4
MOVED_COLUMNS = 512


def convert(a: Convert) -> None:
    """Moves or requantises entries. One that a plane has no slot for is left out."""
    src, dst = a.planes
    count = src.slots if a.src_slots is None else a.src_slots.shape[0]
    if count == 0 or src.heads * src.dim == 0:
        return
    sizes: tuple[int, int, int] | None = None
    if FORMATS[a.src_format].codec == FORMATS[a.dst_format].codec:
        src_rows, sizes = planes.bits(a.src, a.src_format, src.page_size, a.src_scale)
        dst_rows, _ = planes.bits(a.dst, a.dst_format, dst.page_size, a.dst_scale)
        width = min(power_of_two(sizes[0]), MOVED_COLUMNS)
    else:
        src_rows = planes.rows("convert", "src", a.src, a.src_format, src.page_size, a.src_scale)
        dst_rows = planes.rows("convert", "dst", a.dst, a.dst_format, dst.page_size, a.dst_scale)
        width = power_of_two(src.dim)
    pad, pad_bytes = planes.padding(a.dst, a.dst_format, dst.page_size)
    convert_kernel[-(-count // ROWS), src.heads](
        *src_rows,
        a.src_slots,
        src.page_size,
        src.pages,
        *dst_rows,
        pad,
        a.dst_slots,
        dst.page_size,
        dst.pages,
        count,
        SRC=planes.codes(a.src_format, src.dim),
        DST=planes.codes(a.dst_format, dst.dim),
        SIZES=sizes,
        PAD=pad_bytes,
        WIDTH=max(width, SMALLEST),
        BLOCK=ROWS,
        HARDWARE_FP8=device_of(a.dst).hardware_fp8,
        num_warps=4,
    )
