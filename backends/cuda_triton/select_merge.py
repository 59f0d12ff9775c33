"""``select_merge`` on Triton: arguments of the op to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .choose import Goals, Lists, choose, put_in_order
from .kernels.select_merge import numbers_kernel

if TYPE_CHECKING:
    from sparse_attn.ops.select_merge import SelectMerge

MOST_SCORES = 1 << 22
"""Selections that are joined at a time, unless a single row has more."""

BLOCK = 1024


def select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    """Runs one call on the current stream, without waiting for it: some rows at a time."""
    shards, tokens, lists, width = a.shard_indices.shape
    step = max(MOST_SCORES // max(shards * lists * width, 1), 1)
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        _merge_rows(a, part, Lists(indices[part], counts[part], values[part]))


def _merge_rows(a: SelectMerge, part: slice, to: Lists) -> None:
    rows = part.stop - part.start
    shards, _, lists, width = a.shard_indices.shape
    given, scores, offsets = a.shard_indices[:, part], a.shard_values[:, part], a.shard_offsets[:, part]
    numbers = torch.empty(rows, lists, shards * width, dtype=torch.int32, device=given.device)
    found = torch.empty(numbers.shape, dtype=torch.float32, device=given.device)
    numbers_kernel[rows * lists, max(-(-shards * width // BLOCK), 1)](
        given,
        *given.stride(),
        scores,
        *scores.stride(),
        offsets,
        *offsets.stride(),
        a.run,
        a.stride,
        numbers,
        found,
        SHARDS=shards,
        LISTS=lists,
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,
    )
    goals = Goals(*torch.zeros(7, rows, dtype=torch.int32, device=given.device))
    goals.high.fill_(shards * width)
    if a.row_k is None:
        goals.wanted.fill_(a.k)
    else:
        torch.clamp(a.row_k[part], 0, a.k, out=goals.wanted)
    best = Lists(torch.empty_like(to.indices), to.counts, torch.empty_like(to.indices, dtype=torch.float32))
    choose(found, goals, best, numbers=numbers)
    if a.k:
        put_in_order(best, a.order == "score", to.indices, to.values)
