"""``store``: each row into its slot, quantised as the plane's format says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planes import Plane
from .rows import inside

if TYPE_CHECKING:
    from ..ops.store import Store


def store(a: Store) -> None:
    """Write the rows of slots that are not negative."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    kept = a.slots >= 0
    slots = a.slots[kept]
    inside("store", "slots", slots, plane)
    plane.put_rows(plane.at(slots), a.rows[kept].float())
