"""``store`` on triton-ascend: arguments of the op to a launch of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import soc
from .pieces import Plane, located, pieces, row_pieces, tile

if TYPE_CHECKING:
    from sparse_attn.ops.store import Store


def store(a: Store) -> None:
    """Writes rows. One for a slot past the plane is left out."""
    write_rows("store", Plane("plane", a.plane, a.format, a.page_size, a.scale), a.slots, a.rows)


def write_rows(op: str, plane: Plane, slots: Tensor, rows: Tensor) -> None:
    """``rows [T, H, D]`` into a plane, those with a slot in it."""
    from .kernels.store import store_kernel

    count, heads, dim = rows.shape
    if count == 0:
        return
    values, scales, rope, pad = pieces(op, plane)
    rows, cut = row_pieces(rows, plane.format), tile(plane.format, heads, dim)
    store_kernel[(min(soc.current().vector_cores, count * -(-rows.shape[1] // cut.PIECES)),)](
        rows,
        *rows.stride()[:2],
        slots,
        count,
        rows.shape[1],
        *plane.size,
        *located(values),
        *located(scales),
        *located(rope)[:3],
        *located(pad)[:3],
        **cut._asdict(),
        PAD=0 if pad is None else pad.shape[-1],
    )
