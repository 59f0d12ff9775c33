"""``select_merge``: the largest values of all shards, under global numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..ops.select_merge import SelectMerge


def select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    """Sort by number, then by value, and take the first ones."""
    local = a.shard_indices.long()
    numbers = a.shard_offsets[..., None, None] + local // a.run * a.stride + local % a.run
    selected = (local >= 0) & (a.shard_values > float("-inf"))  # no NaN either
    scores = torch.where(selected, a.shard_values, float("-inf"))
    numbers, scores = (x.permute(1, 2, 0, 3).flatten(2) for x in (numbers, scores))  # [T, H, S * K]
    numbers, scores = together(numbers, scores, numbers.sort(-1).indices)
    numbers, scores = together(numbers, scores, scores.sort(dim=-1, descending=True, stable=True).indices)
    places = torch.arange(a.k, device=local.device)
    room = torch.full_like(counts, a.k) if a.row_k is None else a.row_k[:, None].clamp(0, a.k)
    counts.copy_(torch.minimum((scores > float("-inf")).sum(-1), room))
    spare = max(a.k - numbers.shape[-1], 0)
    numbers = torch.nn.functional.pad(numbers[..., : a.k], (0, spare))
    scores = torch.nn.functional.pad(scores[..., : a.k], (0, spare))
    if a.order != "score":
        keys = torch.where(places < counts[..., None], numbers, torch.iinfo(torch.int64).max)
        numbers, scores = together(numbers, scores, keys.sort(-1).indices)
    taken = places < counts[..., None]
    indices.copy_(torch.where(taken, numbers, -1))
    values.copy_(torch.where(taken, scores, float("-inf")))


def together(numbers: Tensor, scores: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return numbers.gather(-1, order), scores.gather(-1, order)
