"""``merge`` and ``select_merge`` by torch's own operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparse_attn.ops.merge import Merge
    from sparse_attn.ops.select_merge import SelectMerge

INF = float("inf")


def merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    """Parts weighted by what each softmax summed up to, in float32, in the order of the parts."""
    lses = a.lses * (math.log(2) if a.base == "2" else 1.0)
    if a.inf_is_empty:
        lses = torch.where(lses == INF, -INF, lses)
    top = lses.amax(0)
    floor = torch.where(top == -INF, 0.0, top)
    total, joined = torch.zeros_like(top), torch.zeros_like(a.outs[0], dtype=torch.float32)
    for part, part_out in zip(lses, a.outs, strict=True):
        weight = torch.exp(part - floor)
        total = total + weight
        weighted = weight[..., None] * part_out.float()
        joined = joined + torch.where((part == -INF)[..., None], 0.0, weighted)  # what an empty part holds is nothing
    sum_of_all = torch.where(top.abs() == INF, top, floor + total.log())
    lse.copy_(sum_of_all)
    joined = joined / torch.where(top == -INF, 1.0, total)[..., None]
    if a.sinks is not None:
        share = torch.sigmoid(sum_of_all - a.sinks)  # of the entries, in what the softmax sums up to
        joined = torch.where((sum_of_all == -INF)[..., None], joined, joined * share[..., None])
    out.copy_(joined)


def select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    """Sort all by number, then by value, and take the first ones."""
    local = a.shard_indices.long()
    numbers = a.shard_offsets[..., None, None] + local // a.run * a.stride + local % a.run
    scores = torch.where(local >= 0, a.shard_values, -INF)
    scores = torch.where(scores > -INF, scores, -INF)  # no NaN either
    numbers, scores = (x.permute(1, 2, 0, 3).flatten(2) for x in (numbers, scores))  # [T, H, S * K]
    if numbers.shape[-1] < a.k:
        spare = (0, a.k - numbers.shape[-1])
        numbers, scores = torch.nn.functional.pad(numbers, spare), torch.nn.functional.pad(scores, spare, value=-INF)
    numbers, scores = reorder(numbers, scores, numbers.sort(-1).indices)
    numbers, scores = reorder(numbers, scores, scores.sort(dim=-1, descending=True, stable=True).indices)
    room = torch.full_like(counts, a.k) if a.row_k is None else a.row_k[:, None].clamp(0, a.k)
    count = torch.minimum((scores > -INF).sum(-1), room)
    counts.copy_(count)
    taken = torch.arange(a.k, device=local.device) < count[..., None]
    numbers, scores = numbers[..., : a.k], torch.where(taken, scores[..., : a.k], -INF)
    if a.order != "score":
        keys = torch.where(taken, numbers, torch.iinfo(torch.int64).max)
        numbers, scores = reorder(numbers, scores, keys.sort(-1).indices)
    indices.copy_(torch.where(taken, numbers, -1))
    values.copy_(scores)


def reorder(numbers: Tensor, scores: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return numbers.gather(-1, order), scores.gather(-1, order)
