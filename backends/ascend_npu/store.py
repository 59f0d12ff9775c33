"""``store`` of plain rows, by an indexed write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparse_attn.ops.store import Store


def indexed_write(a: Store) -> None:
    """Rows with a negative slot are to be skipped, without waiting for the device to say which: they write the row, and
    go to the slot, of the first that is not; if there is none, the plane's first entry writes itself. A slot past the
    plane, which is a caller's error, is skipped as well."""
    pages, page_size, _ = a.paging
    if a.rows.numel() == 0 or a.plane.numel() == 0:
        return
    inside = (a.slots >= 0) & (a.slots < pages * page_size)
    first = inside.long().argmax()
    some = inside.any()
    rows = torch.where(some, a.rows[first].to(a.plane.dtype), a.plane[0, 0])
    slots = torch.where(inside, a.slots, torch.where(some, a.slots[first], 0))
    written = torch.where(inside[:, None, None], a.rows.to(a.plane.dtype), rows)
    a.plane.view(pages * page_size, *a.plane.shape[2:]).index_copy_(0, slots, written)
