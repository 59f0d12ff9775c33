"""``attend`` by torch's own operations: every call of the contract, for where no operator of CANN takes it.

Rows are gathered and multiplied in float32, a bounded number at a time, which is slow: an operator that fits comes
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .memory import PLAIN, Plane
from .rows import Rows, place, ranges, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

WORKSPACE = 1 << 28
"""Bytes of keys in float32 at a time."""
COLUMNS = 512
"""Entries of a row at a time."""


def attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """One softmax over all planes, in chunks of rows and of entries."""
    if out.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    planes = [plane for plane in (window(a, rows), main(a, rows)) if plane is not None]
    groups = max(max(plane.keys.heads, plane.lists) for plane in planes)
    most = max(WORKSPACE // (groups * COLUMNS * a.q.shape[2] * 4), 1)
    for first in range(0, len(a.q), most):
        part = slice(first, first + most)
        result, total = attend_rows(a, planes, groups, part)
        if a.sinks is not None:
            share = torch.sigmoid(total - a.sinks)  # of the entries, in what the softmax sums up to
            result = torch.where((total > float("-inf"))[..., None], result * share[..., None], result)
        out[part] = result.to(out.dtype)
        if lse is not None:
            lse[part] = total


@dataclass(frozen=True)
class Attended:
    """What rows attend in one plane: those of its listed units, or of all, whose entries lie in a range."""

    keys: Plane
    rope: Plane | None
    values: Plane | None
    table: Tensor
    sequence: Tensor
    low: Tensor
    high: Tensor
    """Range of each row, int64 ``[T]``; empty for padding."""
    most: int
    """Bound of the entries that a row may attend."""
    indices: Tensor | None = None
    counts: Tensor | None = None
    block: int = 1

    @property
    def lists(self) -> int:
        return 1 if self.indices is None else self.indices.shape[1]

    def entries(self, rows: slice, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Entries in ``columns`` of the lists of ``rows``, int64 ``[R, lists, C]``, and which of them are attended."""
        low, high = self.low[rows, None, None], self.high[rows, None, None]
        if self.indices is None:
            entries = low + columns
            return entries, entries < high
        unit = columns // self.block
        chosen = self.indices[rows].index_select(2, unit).long()
        entries = chosen * self.block + columns % self.block
        attended = (chosen >= 0) & (entries >= low) & (entries < high)
        if self.counts is not None:
            attended &= unit < self.counts[rows, :, None]
        return entries, attended

    def read(self, rows: slice, columns: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[R, groups, C, D]`` of what is attended, zeros elsewhere, and what is:
        ``[R, groups, C]``."""
        entries, attended = self.entries(rows, columns)
        if self.lists not in (1, groups):
            heads = torch.arange(groups, device=entries.device) * self.lists // groups
            entries, attended = entries.index_select(1, heads), attended.index_select(1, heads)
        sequence = self.sequence[rows, None, None]
        page, offset, lost = place(self.table, sequence, entries, attended, self.keys.pages, self.keys.page_size)
        head = (torch.arange(groups, device=entries.device) * self.keys.heads // groups)[:, None]
        if self.keys.heads == 1 and entries.shape[1] == 1:
            head = head[:1]

        def rows_of_plane(plane: Plane) -> Tensor:
            found = plane.rows(page, offset, head)
            found = torch.where(attended[..., None], found, 0.0)
            return torch.where(lost[..., None], torch.nan, found)  # a page that does not exist is seen in the result

        keys = rows_of_plane(self.keys)
        values = keys if self.values is None else rows_of_plane(self.values)
        if self.rope is not None:
            keys = torch.cat([keys, rows_of_plane(self.rope)], -1)
        return keys, values, attended


def main(a: Attend, rows: Rows) -> Attended | None:
    """What rows attend in the main plane."""
    if a.kv is None:
        return None
    assert a.page_table is not None
    keys = Plane(a.kv, a.format, a.kv_scale, a.page_size)
    low, high = ranges(a.kv_range, (rows.tokens if a.causal else rows.length) // a.ratio, rows)
    # with a range one more than the table has, so that an entry past it is seen
    most = a.max_seq_len // a.ratio if a.kv_range is None else a.page_table.shape[1] * keys.page_size + 1
    block = min(a.select_block, most)  # all that can be visible of block 0, where blocks are larger
    return Attended(
        keys,
        None if a.kv_rope is None else Plane(a.kv_rope, PLAIN[a.kv_rope.dtype]),
        None if a.v is None else Plane(a.v, a.v_format or a.format, a.v_scale),
        a.page_table,
        rows.sequence,
        low,
        high,
        most if a.indices is None else a.indices.shape[2] * block,
        a.indices,
        a.index_counts,
        block,
    )


def window(a: Attend, rows: Rows) -> Attended | None:
    """What rows attend in the window plane."""
    if a.win is None:
        return None
    assert a.win_page_table is not None
    keys = Plane(a.win, a.win_format, None, a.win_page_size)
    low, high = ranges(a.win_range, rows.tokens, rows)
    most = min(a.window or a.max_seq_len, a.max_seq_len)
    if a.win_range is not None:
        most = a.win_page_table.shape[1] * keys.page_size + 1
    elif a.window:
        low = (high - a.window).clamp(min=0)
    most = most if a.win_indices is None else a.win_indices.shape[2]
    return Attended(keys, None, None, a.win_page_table, rows.sequence, low, high, most, a.win_indices)


def attend_rows(a: Attend, planes: list[Attended], groups: int, part: slice) -> tuple[Tensor, Tensor]:
    """Output, without sinks, and log-sum-exp of some rows, in float32."""
    q = a.q[part].float().unflatten(1, (groups, -1)) * a.scale  # [R, groups, heads of one, D]
    top = q.new_full(q.shape[:3], float("-inf"))
    total, joined = torch.zeros_like(top), q.new_zeros(*q.shape[:3], a.v_dim)
    for plane in planes:
        for first in range(0, plane.most, COLUMNS):
            columns = torch.arange(first, min(first + COLUMNS, plane.most), device=q.device)
            keys, values, attended = plane.read(part, columns, groups)
            scores = torch.where(attended[:, :, None], q @ keys.transpose(-1, -2), float("-inf"))
            highest = torch.maximum(top, scores.amax(-1))
            floor = torch.where(highest == float("-inf"), 0.0, highest)
            weights, keep = torch.exp(scores - floor[..., None]), torch.exp(top - floor)
            total = total * keep + weights.sum(-1)
            joined = joined * keep[..., None] + weights @ values[..., : a.v_dim]
            top = highest
    empty = total == 0
    joined = torch.where(empty[..., None], 0.0, joined / torch.where(empty, 1.0, total)[..., None])
    return joined.flatten(1, 2), torch.where(empty, float("-inf"), top + total.log()).flatten(1, 2)
