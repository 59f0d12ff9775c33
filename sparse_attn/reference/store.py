"""``store``: each row into its slot, quantised row by row where the format has scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import expect

if TYPE_CHECKING:
    from ..ops.store import Store


def store(a: Store) -> None:
    """Write each row into its slot; formats with scales are quantised row by row."""
    pages, page_size = a.plane.shape[:2]
    kept = a.slots >= 0
    slots, rows = a.slots[kept], a.rows[kept].float()
    last = int(slots.max()) if len(slots) else -1
    expect(last < pages * page_size, "store", "slots", f"less than pages * page_size = {pages * page_size}", last)
    at = slots // page_size, slots % page_size
    if a.scale is not None:
        rows, a.scale[at] = quantise_int8(rows)
    a.plane[at] = rows.to(a.plane.dtype)


def quantise_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127..127 (as float32) and the float16 scale ``amax / 127``, rounded up so that nothing is clipped."""
    amax = rows.abs().amax(-1)
    scale = (amax / 127).half()
    clips = (scale.float() * 127 < amax) & scale.isfinite()
    scale = torch.where(clips, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    usable = scale.isfinite() & (scale > 0)
    divisor = torch.where(usable, scale.float(), 1.0)[..., None]
    stored = (rows / divisor).round().clamp(-127, 127)
    return torch.where(usable[..., None], stored, 0.0), scale
