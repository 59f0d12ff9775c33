"""``merge`` on triton-ascend: arguments of the op to a launch of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import soc

if TYPE_CHECKING:
    from sparse_attn.ops.merge import Merge

HEADS, COLUMNS = 16, 256
"""Most heads and columns of a tile: three of them in float32, twice, leave half of the unified buffer."""


def merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    """Runs one call on the current stream."""
    merge_parts(a.outs, a.lses, a.sinks, out, lse, a.base == "2", a.inf_is_empty)


def merge_parts(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    base_2: bool = False,
    inf_is_empty: bool = False,
) -> None:
    """Joins parts ``outs [parts, rows, heads, v_dim]``; ``lse=None`` keeps no LSE."""
    from .kernels.merge import merge_kernel

    parts, rows, heads, v_dim = outs.shape
    if lses.numel() == 0:
        return
    block_h = min(1 << (heads - 1).bit_length(), HEADS)
    merge_kernel[(min(soc.current().vector_cores, rows * -(-heads // block_h)),)](
        outs,
        *outs.stride()[:3],
        lses,
        *lses.stride(),
        sinks,
        out,
        lse,
        rows,
        parts,
        HEADS=heads,
        V_DIM=v_dim,
        BASE_2=base_2,
        INF_IS_EMPTY=inf_is_empty,
        BLOCK_H=block_h,
        BLOCK_D=min(max(1 << (v_dim - 1).bit_length(), 16), COLUMNS),
    )
