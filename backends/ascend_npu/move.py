"""``store``, ``load`` and ``convert`` of planes of any format, by torch's own operations on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import codecs
from .memory import Plane

if TYPE_CHECKING:
    from sparse_attn.ops.convert import Convert
    from sparse_attn.ops.load import Load
    from sparse_attn.ops.store import Store

CHUNK = 4096
"""Entries of a plane in memory at a time."""


def store(a: Store) -> None:
    """Each row into its slot. Slots past the plane, a caller's error, are skipped like negative ones."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    if a.rows.numel() and plane.pages:
        page, offset, head, kept = plane.at(a.slots)
        plane.write(page, offset, head, codecs.encode(plane.format.codec, a.rows.float()), kept)


def load(a: Load, out: Tensor) -> None:
    """Each slot's row. Slots past the plane, a caller's error, read as NaN."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    if not out.numel():
        return
    missing = torch.where(a.slots < 0, 0.0, torch.nan)[:, None, None]
    if not plane.pages:
        out.copy_(missing.expand(out.shape))
        return
    page, offset, head, exists = plane.at(a.slots)
    out.copy_(torch.where(exists[..., None], plane.rows(page, offset, head), missing))


def convert(a: Convert) -> None:
    """Entries of one plane into another: as bytes where both formats have one codec, else read and quantised anew."""
    src = Plane(a.src, a.src_format, a.src_scale, a.src_page_size)
    dst = Plane(a.dst, a.dst_format, a.dst_scale, a.dst_page_size)
    if not (src.pages and dst.pages and a.src.numel()):
        return
    every = torch.arange(src.pages * src.page_size, device=a.src.device)
    from_slots, to_slots = (every if slots is None else slots for slots in (a.src_slots, a.dst_slots))
    for origin, target in zip(from_slots.split(CHUNK), to_slots.split(CHUNK), strict=True):
        page, offset, head, exists = src.at(origin)
        parts = src.read(page, offset, head)
        if src.format.codec != dst.format.codec:
            parts = codecs.encode(dst.format.codec, codecs.decode(src.format.codec, parts))
        page, offset, head, kept = dst.at(target)
        dst.write(page, offset, head, parts, kept & exists)
