"""The slots that each query row attends, as the lists that FlashMLA reads. On the device, without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .planes import View

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend


class Rows(NamedTuple):
    """For each of T query rows, int64 ``[T]``."""

    sequence: Tensor
    """Its sequence; of padding the last one."""
    tokens: Tensor
    """Tokens up to and with its own; 0 for padding and for rows that stand before the first token."""
    length: Tensor
    """Tokens of its sequence."""


class Lists(NamedTuple):
    """What T query rows attend in one plane."""

    slots: Tensor
    """int32 ``[T, width]``, -1 where nothing is attended: FlashMLA reads any other number, wherever it points."""
    lost: Tensor
    """bool ``[T]``: an entry to attend has no page in the plane."""


def rows_of(a: Attend) -> Rows:
    """The rows of a call with at least one sequence."""
    t = torch.arange(len(a.q), device=a.q.device)
    ends = a.cu_seqlens_q[1:].long()
    sequence = torch.searchsorted(ends, t, right=True).clamp(max=len(ends) - 1)
    length = a.seq_lens.long()[sequence]
    tokens = length - (ends[sequence] - t) + 1
    live = (t < ends[-1]) & (length > 0) & (tokens > 0)
    return Rows(sequence, torch.where(live, tokens, 0), length)


def main_width(a: Attend) -> int:
    """Bound of the entries of the main plane that a row attends, from what the host knows."""
    assert a.page_table is not None
    if a.indices is not None:
        return a.indices.shape[2]
    return a.max_seq_len // a.ratio if a.kv_range is None else _paged(a.page_table, a.main_paging[1])


def window_width(a: Attend) -> int:
    """The same of the window plane."""
    assert a.win_page_table is not None
    if a.win_indices is not None:
        return a.win_indices.shape[2]
    return min(a.window, a.max_seq_len) if a.win_range is None else _paged(a.win_page_table, a.window_paging[1])


def _paged(table: Tensor, page_size: int) -> int:
    """Entries of a sequence that may have a page."""
    return max(table.shape[1] * page_size, 1)


def main_lists(a: Attend, rows: Rows, part: slice, view: View, multiple: int) -> Lists:
    """Of the query rows ``part``; the width of a list is a multiple of ``multiple``."""
    assert a.page_table is not None
    tokens = rows.tokens[part]
    if a.kv_range is not None:
        low, high = a.kv_range[part].long().unbind(1)
    else:
        low, high = torch.zeros_like(tokens), (tokens if a.causal else rows.length[part]) // a.ratio
    chosen = None if a.indices is None else a.indices[part, 0]
    counts = None if a.index_counts is None else a.index_counts[part]
    return _lists(low, high, rows, part, chosen, counts, main_width(a), a.page_table, view, multiple)


def window_lists(a: Attend, rows: Rows, part: slice, view: View, multiple: int) -> Lists:
    """The same of the window plane."""
    assert a.win_page_table is not None
    tokens = rows.tokens[part]
    if a.win_range is not None:
        low, high = a.win_range[part].long().unbind(1)
    else:
        low, high = tokens - a.window if a.window else torch.zeros_like(tokens), tokens
    chosen = None if a.win_indices is None else a.win_indices[part, 0]
    return _lists(low, high, rows, part, chosen, None, window_width(a), a.win_page_table, view, multiple)


def _lists(
    low: Tensor,
    high: Tensor,
    rows: Rows,
    part: slice,
    chosen: Tensor | None,
    counts: Tensor | None,
    width: int,
    table: Tensor,
    view: View,
    multiple: int,
) -> Lists:
    """Entries ``[low, high)``, or the first ``counts [T, 1]`` of the ``chosen [T, width]`` that lie there."""
    low, high = low.clamp(min=0), torch.where(rows.tokens[part] > 0, high, 0)
    place = torch.arange(width, device=low.device)
    entries = low[:, None] + place if chosen is None else chosen.long()
    wanted = (entries >= low[:, None]) & (entries < high[:, None])
    if counts is not None:
        wanted &= place < counts
    slots = torch.full((len(low), -(-width // multiple) * multiple), -1, dtype=torch.int32, device=low.device)
    found = torch.zeros_like(wanted)
    if table.shape[1]:
        column = entries // view.page_size
        listed = wanted & (column < table.shape[1])
        page = table[rows.sequence[part, None], torch.where(listed, column, 0)].long()
        found = listed & (page >= 0) & (page < view.pages)
        slots[:, :width] = torch.where(found, page * view.step + entries % view.page_size, -1)
    lost = (wanted & ~found).any(1)
    return Lists(slots, lost if chosen is not None else lost | (high - low > width))
