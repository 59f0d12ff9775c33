"""``attend`` of a window of raw rows, alone or with compressed rows, as DeepSeek V4 and V4.1 have it: CANN's
``SparseFlashMla``, whose documents call its three forms SWA (the window), CSA (and a selection) and HCA (and all)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import operators
from .rows import Rows, fill, pack, pad_heads, power_of_two, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

DIM = 512
WIDTHS = (512, 1024)
"""Columns of a selection."""
BAND, CAUSAL = 4, 3  # mask modes of the window and of compressed rows
FAR = 1e30
"""A sink beyond this is as good as infinite, and the operator's arithmetic stays finite."""


def window_ratio_0(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """The window alone. On A2 and A3 the compression ratio is then 0 since the operator knows V4.1."""
    _run(a, out, 0)


def window_ratio_1(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """The window alone, on 950, or with an operator of A2 and A3 that does not know V4.1."""
    _run(a, out, 1)


def compressed(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """The window, and compressed rows: those selected, or all."""
    _run(a, out, a.ratio)


def _run(a: Attend, out: Tensor, ratio: int) -> None:
    if out.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        return
    assert a.win is not None and a.win_page_table is not None
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    heads = max(power_of_two(a.q.shape[1]), 2)  # 950 refuses a single one
    if a.indices is None:
        starts, lengths, tables = a.cu_seqlens_q, a.seq_lens.clamp(min=0), (a.win_page_table, a.page_table)
        longest_query, selection = a.max_seqlen_q, None
    else:
        starts, lengths, tables = _row_by_row(a, rows)
        longest_query, selection = 1, _selection(a, rows)
    shared: dict[str, Any] = {
        "cu_seqlens_q": starts,
        "seqused_ori_kv": lengths,
        "cmp_ratio": ratio,
        "ori_mask_mode": BAND,
        "cmp_mask_mode": CAUSAL,
        "ori_win_left": a.window - 1,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
    }
    if a.kv is not None:
        shared |= {"seqused_cmp_kv": lengths // ratio, "cmp_residual_kv": lengths % ratio}
    metadata = operators.get(operators.SMLA_METADATA)(
        heads,
        1,
        DIM,
        batch_size=len(lengths),
        max_seqlen_q=longest_query,
        max_seqlen_ori_kv=a.max_seq_len,
        max_seqlen_cmp_kv=0 if a.kv is None else a.max_seq_len // ratio,
        ori_topk=0,
        cmp_topk=0 if selection is None else selection.shape[-1],
        has_ori_kv=True,
        has_cmp_kv=a.kv is not None,
        **shared,
    )
    result = operators.get(operators.SMLA)(
        pad_heads(a.q, heads),
        ori_kv=a.win,
        cmp_kv=a.kv,
        cmp_sparse_indices=selection,
        ori_block_table=_contiguous(tables[0]),
        cmp_block_table=_contiguous(tables[1]),
        sinks=_sinks(a.sinks, heads, a.q.device),
        metadata=metadata,
        softmax_scale=a.scale,
        topk_value_mode=1,
        return_softmax_lse=False,
        **shared,
    )[0]
    fill(out, result, rows.tokens > 0)


def _row_by_row(a: Attend, rows: Rows) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Every query row as a sequence of its own: starts, lengths and page tables.

    How many columns of a selection count, the operator finds once for several rows of a sequence.
    """
    assert a.win_page_table is not None and a.page_table is not None
    starts = torch.arange(len(a.q) + 1, device=a.q.device, dtype=torch.int32)
    return starts, rows.tokens.int(), (a.win_page_table[rows.sequence], a.page_table[rows.sequence])


def _selection(a: Attend, rows: Rows) -> Tensor:
    assert a.indices is not None
    return pack(a.indices, a.index_counts, rows.tokens // a.ratio, width_of(a.indices))[0]


def width_of(indices: Tensor) -> int:
    """The least width of a list that the operator takes."""
    return next(width for width in WIDTHS if width >= indices.shape[2])


def _contiguous(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.contiguous()


def _sinks(sinks: Tensor | None, heads: int, device: torch.device) -> Tensor:
    """The operator needs sinks, and starts its sums from them."""
    if sinks is None:
        return _no_sinks(heads, device)
    return torch.nn.functional.pad(sinks.clamp(-FAR, FAR), (0, heads - len(sinks)))


@cache
def _no_sinks(heads: int, device: torch.device) -> Tensor:
    """Kept for good: a captured graph reads them at every replay."""
    return torch.full((heads,), -FAR, device=device)
