"""``compress`` on Triton: arguments of the op to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl
from torch import Tensor

from . import planes
from .kernels.compress import compress_kernel, state_kernel
from .schedule import SMALLEST, power_of_two

if TYPE_CHECKING:
    from sparse_attn.ops.compress import Compress

MODEL_TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
TILE, MOST_TOKENS = 4096, 16
STATE_COLUMNS = 512


def compress(a: Compress, latent: Tensor | None) -> None:
    """Runs one call on the current stream, without waiting for it."""
    if latent is not None:
        latent.zero_()
    tokens, heads, columns = a.rows.shape
    if tokens == 0:
        return
    page_size = a.paging[1]
    codes = planes.codes(a.format, a.dim)
    pad, pad_bytes = planes.padding(a.plane, a.format, page_size)
    width = max(power_of_two(a.dim), SMALLEST)
    state, state_pages, state_page = None, None, 0
    if a.state is not None and a.state_page_table is not None:
        state, state_page = planes.plain_part(a.state), a.state.shape[1]
        state_pages = planes.pages(a.state_page_table, a.state.shape[0])
    new = (a.rows, *a.rows.stride()[:2], a.gates, *((0, 0) if a.gates is None else a.gates.stride()[:2]))
    batch = (a.cu_seqlens_q, a.seq_lens, a.seq_lens.shape[0])
    compress_kernel[tokens, heads](
        *new,
        *batch,
        a.covered,
        a.stride,
        a.bias,
        0 if a.bias is None else a.bias.stride(0),
        a.norm,
        a.eps,
        a.cos_sin,
        *((0, 0) if a.cos_sin is None else (a.cos_sin.stride(0), a.cos_sin.shape[0])),
        a.rope_step,
        state_pages,
        state,
        planes.pages(a.page_table, a.paging[0]),
        *planes.rows("compress", "plane", a.plane, a.format, page_size, a.scale),
        pad,
        latent,
        a.entries,
        heads,
        STATE_PAGE=state_page,
        PAGE=page_size,
        CODES=codes,
        PAD=pad_bytes,
        COLUMNS=columns,
        ROTATED=0 if a.cos_sin is None else a.cos_sin.shape[1],
        MODEL=MODEL_TYPES[a.dtype],
        WIDTH=width,
        TOKENS=min(power_of_two(a.covered), max(TILE // width, 1), MOST_TOKENS),
        num_warps=4,
    )
    if state is not None:
        state_kernel[tokens, heads](
            *new,
            *batch,
            a.kept,
            state_pages,
            state,
            STATE_PAGE=state_page,
            COLUMNS=columns,
            WIDTH=STATE_COLUMNS,
            num_warps=4,
        )
