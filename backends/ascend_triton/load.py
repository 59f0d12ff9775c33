"""``load`` on triton-ascend: arguments of the op to a launch of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import soc
from .pieces import Plane, located, pieces, row_pieces, tile

if TYPE_CHECKING:
    from sparse_attn.ops.load import Load


def load(a: Load, out: Tensor) -> None:
    """Reads rows. One of a slot past the plane becomes NaN."""
    read_rows("load", Plane("plane", a.plane, a.format, a.page_size, a.scale), a.slots, out)


def read_rows(op: str, plane: Plane, slots: Tensor, out: Tensor) -> None:
    """Rows of a plane into ``out [T, H, D]``."""
    from .kernels.load import load_kernel

    count, heads, dim = out.shape
    if count == 0:
        return
    values, scales, rope, _ = pieces(op, plane)
    cut, parts = tile(plane.format, heads, dim), row_pieces(out, plane.format).shape[1]
    load_kernel[(min(soc.current().vector_cores, count * -(-parts // cut.PIECES)),)](
        *located(values),
        *located(scales),
        *located(rope)[:3],
        slots,
        count,
        parts,
        *plane.size,
        out,
        **cut._asdict(),
    )
