"""``load``: each slot's row as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..planes import Plane
from .rows import inside

if TYPE_CHECKING:
    from ..ops.load import Load


def load(a: Load, out: Tensor) -> None:
    """Read each slot's row; a negative slot gives zeros."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    kept = a.slots >= 0
    slots = a.slots[kept]
    inside("load", "slots", slots, plane)
    out.zero_()
    out[kept] = plane.rows(plane.at(slots)).to(out.dtype)
