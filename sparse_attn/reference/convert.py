"""``convert``: entries of one plane into another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..planes import Plane
from .rows import inside

if TYPE_CHECKING:
    from ..ops.convert import Convert

CHUNK = 4096
"""Entries in memory at a time."""


def convert(a: Convert) -> None:
    """Move the parts of entries where both formats have one codec, else read rows and quantise them anew."""
    src = Plane(a.src, a.src_format, a.src_scale, a.src_page_size)
    dst = Plane(a.dst, a.dst_format, a.dst_scale, a.dst_page_size)
    every = torch.arange(src.slots, device=a.src.device)
    src_slots, dst_slots = (every if slots is None else slots for slots in (a.src_slots, a.dst_slots))
    kept = (src_slots >= 0) & (dst_slots >= 0)
    src_slots, dst_slots = src_slots[kept], dst_slots[kept]
    inside("convert", "src_slots", src_slots, src)
    inside("convert", "dst_slots", dst_slots, dst)
    for origin, target in zip(src_slots.split(CHUNK), dst_slots.split(CHUNK), strict=True):
        if src.format.codec == dst.format.codec:
            dst.write(dst.at(target), src.read(src.at(origin)))
        else:
            dst.put_rows(dst.at(target), src.rows(src.at(origin)))
