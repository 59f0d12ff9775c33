"""``compress`` on triton-ascend: arguments of the op to launches of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import soc
from .pieces import TYPES, Plane, located, padded
from .store import write_rows

if TYPE_CHECKING:
    from sparse_attn.ops.compress import Compress


def compress(a: Compress, latent: Tensor | None) -> None:
    """Entries go to memory in float32 and from there into the plane. One without a page there is left out."""
    tokens, heads, width = a.rows.shape
    batch = a.seq_lens.shape[0]
    if latent is not None:
        latent.zero_()
    if tokens == 0 or batch == 0:
        return
    _entries(a, latent)
    if a.state is None or a.state_page_table is None:
        return
    slots = a.seq_lens.new_empty(tokens, dtype=torch.int64)
    from .kernels.compress import state_slots_kernel

    state_slots_kernel[(min(soc.current().vector_cores, tokens),)](
        a.cu_seqlens_q,
        a.seq_lens,
        tokens,
        batch,
        a.kept,
        *_table(a.state_page_table),
        a.state.shape[1],
        a.state.shape[0],
        slots,
    )
    for part, rows in ((a.state[..., :width], a.rows), (a.state[..., width:], a.gates)):
        if rows is not None:
            write_rows("compress", Plane("state", part, "fp32", 0, None), slots, rows)


def _entries(a: Compress, latent: Tensor | None) -> None:
    from .kernels.compress import entries_kernel, rotate_kernel

    tokens, heads, width = a.rows.shape
    after = a.seq_lens.clamp(min=0)
    before = (a.seq_lens - a.cu_seqlens_q.diff()).clamp(min=0)
    ends = (after // a.stride - before // a.stride).cumsum(0, dtype=torch.int32)
    count = tokens // a.stride + a.seq_lens.shape[0]
    out = a.rows.new_zeros((count, heads, a.dim), dtype=torch.float32)
    numbers, slots = a.seq_lens.new_empty((2, count), dtype=torch.int64)
    model = a.rows.new_empty(0, dtype=TYPES[a.dtype])
    pages, page_size, _ = a.paging
    state_pages, state_page_size = (1, 1) if a.state is None else a.state.shape[:2]
    entries_kernel[(min(soc.current().vector_cores, count * heads),)](
        a.rows,
        *a.rows.stride()[:2],
        a.gates,
        *((0, 0) if a.gates is None else a.gates.stride()[:2]),
        a.bias,
        0 if a.bias is None else a.bias.stride(0),
        a.cu_seqlens_q,
        a.seq_lens,
        ends,
        a.seq_lens.shape[0],
        count,
        heads,
        a.stride,
        a.covered,
        a.dim if width > a.dim else 0,
        *_table(a.page_table),
        page_size,
        pages,
        *located(a.state),
        *_table(a.state_page_table),
        state_page_size,
        state_pages,
        a.norm,
        a.eps,
        out,
        numbers,
        slots,
        latent,
        model,
        WIDTH=width,
        DIM=a.dim,
        BLOCK=padded(a.dim),
    )
    if a.cos_sin is not None and a.cos_sin.shape[1]:
        rotate_kernel[(min(soc.current().vector_cores, count * heads),)](
            out,
            numbers,
            slots,
            count,
            heads,
            a.dim,
            a.cos_sin,
            a.cos_sin.stride(0),
            a.cos_sin.shape[0],
            a.rope_step,
            model,
            ROPE=a.cos_sin.shape[1],
            BLOCK=padded(a.cos_sin.shape[1]),
        )
    write_rows("compress", Plane("plane", a.plane, a.format, page_size, a.scale), slots, out)


def _table(table: Tensor | None) -> tuple[Any, ...]:
    """A page table as a kernel's arguments: its data, step and width."""
    return (None, 0, 0) if table is None else (table, table.stride(0), table.shape[1])
