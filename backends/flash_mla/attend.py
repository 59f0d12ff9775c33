"""``attend`` on FlashMLA: every query row is a sequence of its own, whose list names slots of the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_attn.checks import expect

from . import planes
from .installed import module
from .planes import View
from .slots import Lists, main_lists, main_width, rows_of, window_lists, window_width

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

LEAST, MOST = 2.0**-126, 2.0**126
"""Magnitudes of a scale which times log2(e) is neither 0 nor infinite in float32."""
PIECE_ROWS = 1024
"""Query rows of a launch: FlashMLA keeps a partial result of each in float32."""
PIECE_SLOTS = 1 << 22
"""Places in lists of a launch, 16 MiB."""

Launch = Callable[[Tensor, Sequence[View], Sequence[Tensor], float, Tensor | None], tuple[Tensor, Tensor]]


def packed_rows(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Rows of 8-bit floats in one or two planes."""
    _run(a, out, lse, planes.packed, _with_kvcache, 64)


def plain_rows(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Rows of bfloat16 in one plane."""
    _run(a, out, lse, planes.plain, _sparse_fwd, 128)


def _run(
    a: Attend, out: Tensor, lse: Tensor | None, view_of: Callable[..., View], launch: Launch, multiple: int
) -> None:
    """Runs one call on the current stream, without waiting for it. Widths of lists are multiples of ``multiple``."""
    scale = abs(a.scale)
    expect(LEAST <= scale <= MOST, "attend", "scale", "a magnitude from 2**-126 to 2**126 for FlashMLA", a.scale)
    attended = []
    if a.win is not None and window_width(a):
        attended.append((view_of("win", a.win, a.win_format, a.win_page_size), window_lists, window_width(a)))
    if a.kv is not None and main_width(a):
        attended.append((view_of("kv", a.kv, a.format, a.page_size), main_lists, main_width(a)))
    if not attended or len(a.seq_lens) == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    # FlashMLA takes the largest product times the scale as the largest score
    q = planes.queries(a.q if a.scale > 0 else -a.q)
    rows = rows_of(a)
    piece = max(min(PIECE_ROWS, PIECE_SLOTS // sum(width for _, _, width in attended)), 1)
    for first in range(0, len(q), piece):
        part = slice(first, first + piece)
        lists = [lists_of(a, rows, part, view, multiple) for view, lists_of, _ in attended]
        result = launch(q[part], [view for view, _, _ in attended], [each.slots for each in lists], scale, a.sinks)
        _write(out[part], None if lse is None else lse[part], *result, lists)


def _with_kvcache(
    q: Tensor, views: Sequence[View], slots: Sequence[Tensor], scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    flash_mla = module()
    extra = {}
    if len(views) > 1:
        extra = {"extra_k_cache": views[1].rows, "extra_indices_in_kvcache": slots[1][:, None]}
    result, total = flash_mla.flash_mla_with_kvcache(
        q[:, None],
        views[0].rows,
        None,
        None,
        512,
        # anew, as it lies in memory of the stream, and of a capture, in which it is first used
        flash_mla.get_mla_metadata()[0],
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots[0][:, None],
        attn_sink=sinks,
        **extra,
    )
    return result[:, 0], total[..., 0]


def _sparse_fwd(
    q: Tensor, views: Sequence[View], slots: Sequence[Tensor], scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    place = torch.arange(1, slots[0].shape[1] + 1, dtype=torch.int32, device=q.device)
    used = torch.where(slots[0] >= 0, place, 1).amax(1)  # the rest of a list is skipped
    result, _, total = module().flash_mla_sparse_fwd(
        q, views[0].rows, slots[0][:, None], scale, attn_sink=sinks, topk_length=used
    )
    return result, total


def _write(out: Tensor, lse: Tensor | None, result: Tensor, total: Tensor, lists: Sequence[Lists]) -> None:
    """FlashMLA's results as the op's: its log-sum-exp of a row that attends nothing is +inf."""
    nothing = total == math.inf
    lost = torch.stack([each.lost for each in lists]).any(0)[:, None]
    result = result.masked_fill(nothing[..., None], 0).masked_fill(lost[..., None], math.nan)
    out.copy_(result)
    if lse is not None:
        lse.copy_(total.masked_fill(nothing, -math.inf).masked_fill(lost, math.nan))
