"""``attend`` of a window of raw rows, alone or with compressed rows, as DeepSeek V4 and V4.1 have it: CANN's
``SparseFlashMla``, whose documents call its three forms SWA (the window), CSA (and a selection) and HCA (and all)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

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


def plan_window_ratio_0(a: Attend, words: Tensor) -> None:
    _plan(a, words, 0)


def plan_window_ratio_1(a: Attend, words: Tensor) -> None:
    _plan(a, words, 1)


def plan_compressed(a: Attend, words: Tensor) -> None:
    _plan(a, words, a.ratio)


class Step(NamedTuple):
    """What the operator and the one that makes its schedule are both given."""

    heads: int
    longest_query: int
    width: int
    """Columns of a selection; 0 without one."""
    tables: tuple[Tensor, Tensor | None]
    shared: dict[str, Any]

    @property
    def lengths(self) -> Tensor:
        return self.shared["seqused_ori_kv"]


def _step(a: Attend, rows: Rows, ratio: int) -> Step:
    assert a.win_page_table is not None
    tables: tuple[Tensor, Tensor | None]
    if a.indices is None:
        starts, lengths, tables = a.cu_seqlens_q, a.seq_lens.clamp(min=0), (a.win_page_table, a.page_table)
        longest_query, width = a.max_seqlen_q, 0
    else:
        starts, lengths, tables = _row_by_row(a, rows)
        longest_query, width = 1, width_of(a.indices)
    shared = {
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
    heads = max(power_of_two(a.q.shape[1]), 2)  # 950 refuses a single one
    return Step(heads, longest_query, width, tables, shared)


def _schedule(a: Attend, step: Step, ratio: int) -> Tensor:
    """How the operator divides its work, which depends on lengths and shapes alone: int32 ``[1024]``."""
    return operators.get(operators.SMLA_METADATA)(
        step.heads,
        1,
        DIM,
        batch_size=len(step.lengths),
        max_seqlen_q=step.longest_query,
        max_seqlen_ori_kv=a.max_seq_len,
        max_seqlen_cmp_kv=0 if a.kv is None else a.max_seq_len // ratio,
        ori_topk=0,
        cmp_topk=step.width,
        has_ori_kv=True,
        has_cmp_kv=a.kv is not None,
        **step.shared,
    )


def _plan(a: Attend, words: Tensor, ratio: int) -> None:
    """The schedule of a step, for all of its layers."""
    if len(a.q) and len(a.seq_lens):
        rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
        words.copy_(_schedule(a, _step(a, rows, ratio), ratio))


def _run(a: Attend, out: Tensor, ratio: int) -> None:
    if out.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        return
    planned, fits = a.planned, None
    if planned is not None:
        fits = (planned.cu_seqlens_q == a.cu_seqlens_q).all() & (planned.seq_lens == a.seq_lens).all()
        a = _as_planned(a, planned.cu_seqlens_q, planned.seq_lens, fits)
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    step = _step(a, rows, ratio)
    result = operators.get(operators.SMLA)(
        pad_heads(a.q, step.heads),
        ori_kv=a.win,
        cmp_kv=a.kv,
        cmp_sparse_indices=None if a.indices is None else _selection(a, rows),
        ori_block_table=_contiguous(step.tables[0]),
        cmp_block_table=_contiguous(step.tables[1]),
        sinks=_sinks(a.sinks, step.heads, a.q.device),
        metadata=_schedule(a, step, ratio) if planned is None else planned.words,
        softmax_scale=a.scale,
        topk_value_mode=1,
        return_softmax_lse=False,
        **step.shared,
    )[0]
    fill(out, result, rows.tokens > 0)
    if fits is not None:
        out.masked_fill_(~fits, float("nan"))


def _as_planned(a: Attend, starts: Tensor, lengths: Tensor, fits: Tensor) -> Attend:
    """The call with the lengths of its plan, as the operator must never meet a schedule of others.

    If they are not the call's, its page tables may lack pages for them: page 0 is read then, and the result is NaN.
    """
    assert a.win_page_table is not None
    return a._replace(
        cu_seqlens_q=starts,
        seq_lens=lengths,
        win_page_table=torch.where(fits, a.win_page_table, 0),
        page_table=None if a.page_table is None else torch.where(fits, a.page_table, 0),
        plan=None,
    )


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
