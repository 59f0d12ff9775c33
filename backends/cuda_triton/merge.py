"""``merge`` on Triton: arguments of the op to a launch of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernels.merge import merge_kernel

if TYPE_CHECKING:
    from sparse_attn.ops.merge import Merge

COLUMNS = 128


def merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    """Runs one call on the current stream."""
    parts, tokens, heads, v_dim = a.outs.shape
    if lse.numel() == 0:
        return
    merge_kernel[tokens * heads, max(-(-v_dim // COLUMNS), 1)](
        a.outs,
        *a.outs.stride()[:3],
        a.lses,
        *a.lses.stride(),
        a.sinks,
        out,
        lse,
        HEADS=heads,
        V_DIM=v_dim,
        PARTS=parts,
        BASE_2=a.base == "2",
        INF_IS_EMPTY=a.inf_is_empty,
        BLOCK_D=COLUMNS,
        num_warps=4,
    )
