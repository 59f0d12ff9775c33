"""``convert`` on triton-ascend: arguments of the op to launches of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

from . import soc
from .load import read_rows
from .pieces import Plane, Tile, located, padded, pieces, tile
from .store import write_rows

if TYPE_CHECKING:
    from sparse_attn.ops.convert import Convert

ROW_BYTES = 64 << 20
"""Rows in float32 in memory at a time, at most."""


def convert(a: Convert) -> None:
    """Moves entries. One whose slot lies past its plane is left out."""
    origin = Plane("src", a.src, a.src_format, a.src_page_size, a.src_scale)
    target = Plane("dst", a.dst, a.dst_format, a.dst_page_size, a.dst_scale)
    src_slots, dst_slots = a.src_slots, a.dst_slots
    if src_slots is None or dst_slots is None:
        src_slots = dst_slots = torch.arange(origin.size[1], device=a.src.device)
    dst_slots = torch.where((src_slots >= 0) & (src_slots < origin.size[1]), dst_slots, -1)
    rows, _ = a.planes
    if rows.format.codec == FORMATS[a.dst_format].codec:
        _move(origin, src_slots, target, dst_slots, tile(a.src_format, rows.heads, rows.dim))
        return
    chunk = max(ROW_BYTES // (4 * rows.heads * rows.dim), 1)
    for some, into in zip(src_slots.split(chunk), dst_slots.split(chunk), strict=True):
        numbers = a.src.new_empty((len(some), rows.heads, rows.dim), dtype=torch.float32)
        read_rows("convert", origin, some, numbers)
        write_rows("convert", target, into, numbers)


def _move(origin: Plane, src_slots: Tensor, target: Plane, dst_slots: Tensor, cut: Tile) -> None:
    """Entries as they are, to a plane of the same codec."""
    from .kernels.move import move_kernel

    values, scales, rope, _ = pieces("convert", origin)
    to_values, to_scales, to_rope, pad = pieces("convert", target)
    count, parts = len(src_slots), values.shape[2]
    if count == 0:
        return
    move_kernel[(min(soc.current().vector_cores, count * -(-parts // cut.PIECES)),)](
        src_slots,
        dst_slots,
        count,
        parts,
        *origin.size,
        *target.size,
        *located(values),
        *located(scales),
        *located(rope)[:3],
        *located(to_values),
        *located(to_scales),
        *located(to_rope)[:3],
        *located(pad)[:3],
        ITEMS=values.shape[3],
        BLOCK=padded(values.shape[3]),
        PIECES=cut.PIECES,
        ROPE=cut.ROPE,
        PAD=0 if pad is None else pad.shape[-1],
    )
