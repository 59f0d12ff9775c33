"""Which sequence a query row belongs to and where it stands, and its selection as the operators want it. On the device,
without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """For each of T query rows, int64 ``[T]``."""

    sequence: Tensor
    """Its sequence; of padding the last one."""
    tokens: Tensor
    """Tokens up to and with its own; 0 for padding and for rows that stand before the first token."""
    length: Tensor
    """Tokens of its sequence; 0 where ``tokens`` is."""


def rows_of(tokens: int, cu_seqlens_q: Tensor, seq_lens: Tensor) -> Rows:
    """Rows of a call with at least one sequence."""
    t = torch.arange(tokens, device=cu_seqlens_q.device)
    ends = cu_seqlens_q[1:].long()
    sequence = torch.searchsorted(ends, t, right=True).clamp(max=len(ends) - 1)
    length = seq_lens.long()[sequence]
    tokens_up_to = (length - (ends[sequence] - t) + 1).clamp(min=0)
    live = (t < ends[-1]) & (length > 0) & (tokens_up_to > 0)
    return Rows(sequence, torch.where(live, tokens_up_to, 0), torch.where(live, length, 0))


def pack(
    indices: Tensor, counts: Tensor | None, limit: Tensor, width: int, low: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices in the one form that every operator reads alike: the valid ones first, in their order, then -1.

    The operators stop at the first -1 of a row and trust lengths for the rest, so that one inside reads stale memory.

    ``indices`` int32 ``[T, H, K]``, of which the first ``counts [T, H]`` (None: K) in ``[low [T], limit [T])`` are
    valid (``low`` None: 0). Returns int32 ``[T, H, width]``, and int64 ``[T, H]`` how many are valid.
    """
    keep = (indices >= 0) & (indices < limit[:, None, None])
    if low is not None:
        keep &= indices >= low[:, None, None]
    if counts is not None:
        keep &= torch.arange(indices.shape[2], device=indices.device) < counts.unsqueeze(-1)
    place = torch.where(keep, keep.long().cumsum(-1) - 1, width)  # the last column takes what is not valid
    packed = indices.new_full((*indices.shape[:2], width + 1), -1)
    packed.scatter_(-1, place, torch.where(keep, indices, -1))
    return packed[..., :width].contiguous(), keep.sum(-1)


def ranges(given: Tensor | None, visible: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """First and last, exclusive, of the entries that each row may attend: those ``given``, int32 ``[T, 2]``, or of 0 to
    ``visible [T]``. Empty for padding."""
    if given is None:
        return torch.zeros_like(visible), visible
    low, high = given.long().clamp(min=0).unbind(1)
    return low, torch.where(rows.tokens > 0, high, 0)


def pad_heads(q: Tensor, heads: int) -> Tensor:
    """``q [T, H, D]`` with heads of zeros up to ``heads``, contiguous."""
    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()


def power_of_two(heads: int) -> int:
    """The least power of two from ``heads`` on: head counts that the operators take."""
    return 1 << (heads - 1).bit_length()


def fill(out: Tensor, result: Tensor, attended: Tensor) -> None:
    """Write the heads and elements of ``out [T, H, V]`` from a larger ``result``; rows that attend nothing, of which
    operators leave any bits, become 0. ``attended`` bool ``[T]``."""
    out.copy_(torch.where(attended[:, None, None], result[:, : out.shape[1], : out.shape[2]], 0))


def place(
    table: Tensor, sequence: Tensor, entries: Tensor, wanted: Tensor, pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Page and offset of ``entries`` under the ``table [B, max_pages]`` of their ``sequence``, and which of them are
    wanted but have no page. What is not wanted, or has none, is at page 0, offset 0."""
    if not table.shape[1]:
        return torch.zeros_like(entries), torch.zeros_like(entries), wanted
    column = entries // page_size
    listed = wanted & (column < table.shape[1])
    page = table[sequence, torch.where(listed, column, 0)].long()
    found = listed & (page >= 0) & (page < pages)
    return torch.where(found, page, 0), torch.where(found, entries % page_size, 0), wanted & ~found
