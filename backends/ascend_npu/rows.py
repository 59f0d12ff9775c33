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


def pack(indices: Tensor, counts: Tensor | None, limit: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices in the one form that every operator reads alike: the valid ones first, in their order, then -1.

    The operators stop at the first -1 of a row and trust lengths for the rest, so that one inside reads stale memory.

    ``indices`` int32 ``[T, H, K]``, of which the first ``counts [T, H]`` (None: K) in ``[0, limit [T])`` are valid.
    Returns int32 ``[T, H, width]``, and int64 ``[T, H]`` how many are valid.
    """
    keep = (indices >= 0) & (indices < limit[:, None, None])
    if counts is not None:
        keep &= torch.arange(indices.shape[2], device=indices.device) < counts.unsqueeze(-1)
    place = torch.where(keep, keep.long().cumsum(-1) - 1, width)  # the last column takes what is not valid
    packed = indices.new_full((*indices.shape[:2], width + 1), -1)
    packed.scatter_(-1, place, torch.where(keep, indices, -1))
    return packed[..., :width].contiguous(), keep.sum(-1)


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
