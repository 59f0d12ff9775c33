"""``select_merge`` on triton-ascend: all selections of a list side by side, and the best of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .select import choose, in_order

if TYPE_CHECKING:
    from sparse_attn.ops.select_merge import SelectMerge


def select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    """Lists of the best. Global numbers that int32 does not hold wrap."""
    indices.fill_(-1)
    counts.zero_()
    values.fill_(float("-inf"))
    tokens = a.shard_indices.shape[1]
    if not a.shard_indices.numel() or not indices.numel():
        return
    local = a.shard_indices.long()
    numbers = a.shard_offsets.long()[..., None, None] + local // a.run * a.stride + local % a.run
    selected = (local >= 0) & (a.shard_values > float("-inf"))  # no NaN either
    scores = torch.where(selected, a.shard_values, float("-inf"))
    numbers, scores = (x.permute(1, 2, 0, 3).flatten(2).contiguous() for x in (numbers.int(), scores))  # [T, H, S * K]
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=indices.device)  # each row a sequence of its own
    lengths = torch.full_like(starts[1:], scores.shape[2])
    units = a.row_k, 0, tokens, tokens, 1, 1, 1, a.k, 0, 0
    shape = scores.shape[2], scores.shape[1]
    kind = dict(TAIL="none", CAUSAL=False, ALL=True, MAKE=False)
    choose((starts, lengths, None), units, scores, numbers, shape, (None, 0, 0, 1), (indices, counts, values), **kind)
    in_order(indices, counts, values, a.order == "score")
