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
    from .kernels.merge import merge_kernel

    parts, tokens, heads, v_dim = a.outs.shape
    if lse.numel() == 0:
        return
    block_h = min(1 << (heads - 1).bit_length(), HEADS)
    merge_kernel[(min(soc.current().vector_cores, tokens * -(-heads // block_h)),)](
        a.outs,
        *a.outs.stride()[:3],
        a.lses,
        *a.lses.stride(),
        a.sinks,
        out,
        lse,
        tokens,
        parts,
        HEADS=heads,
        V_DIM=v_dim,
        BASE_2=a.base == "2",
        INF_IS_EMPTY=a.inf_is_empty,
        BLOCK_H=block_h,
        BLOCK_D=min(max(1 << (v_dim - 1).bit_length(), 16), COLUMNS),
    )
