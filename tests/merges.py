"""Random calls of `select_merge`, and what they give, found entry by entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INF = float("inf")


@dataclass
class Merge:
    """One call. ``whole`` entries lie on the shards as ``run`` and ``stride`` say, or in contiguous parts."""

    shards: int
    k: int
    run: int = 0
    rows: int = 5
    lists: int = 2
    width: int = 6
    whole: int = 40
    order: str = "any"
    budgets: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        part = -(-self.whole // self.shards)
        shape = (self.shards, self.rows, self.lists)
        local = torch.rand(*shape, part, generator=g).argsort(-1)[..., : self.width]
        values = torch.randint(-3, 4, local.shape, generator=g).float()  # many are equal
        rare = torch.rand(local.shape, generator=g)
        values = torch.where(rare < 0.1, float("nan"), torch.where(rare < 0.2, -INF, values))
        values = torch.where((rare > 0.2) & (rare < 0.3), INF, values)
        self.indices = torch.where(rare > 0.9, -1, local).int()
        self.values = values
        if self.run:
            offsets = torch.arange(self.shards)[:, None].expand(-1, self.rows) * self.run
            self.dealt = dict(run=self.run, stride=self.run * self.shards)
        else:
            start = torch.randint(0, 9, (self.rows,), generator=g)  # each row in a sequence of its own
            offsets = (torch.arange(self.shards) * part)[:, None] + start
            self.dealt = {}
        self.offsets = offsets.int()
        self.row_k = torch.randint(-2, self.k + 3, (self.rows,), generator=g).int() if self.budgets else None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # any strides
        values = self.values.transpose(0, 1).contiguous().transpose(0, 1)
        indices = torch.stack([self.indices] * 2, -1)[..., 0]
        return (indices, values, self.offsets, self.k), dict(self.dealt, row_k=self.row_k, order=self.order)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        indices = torch.full((self.rows, self.lists, self.k), -1, dtype=torch.int32)
        values = torch.full(indices.shape, -INF)
        counts = torch.zeros(self.rows, self.lists, dtype=torch.int32)
        for t in range(self.rows):
            for h in range(self.lists):
                found = []
                for s in range(self.shards):
                    for i, value in zip(self.indices[s, t, h].tolist(), self.values[s, t, h].tolist(), strict=True):
                        number = i
                        if self.run:
                            number = i // self.run * self.run * self.shards + i % self.run
                        if i >= 0 and value > -INF:
                            found.append((-value, int(self.offsets[s, t]) + number))
                room = self.k if self.row_k is None else max(0, min(self.k, int(self.row_k[t])))
                found = sorted(found)[:room]
                if self.order != "score":
                    found.sort(key=lambda pair: pair[1])
                counts[t, h] = len(found)
                for place, (value, number) in enumerate(found):
                    indices[t, h, place], values[t, h, place] = number, -value
        return indices, counts, values


def merges() -> list[Merge]:
    return [
        Merge(3, 8),
        Merge(4, 7, run=1, order="index"),
        Merge(2, 9, run=3, order="score", seed=1),
        Merge(3, 6, budgets=True, order="score", seed=2),
        Merge(1, 12, width=5, seed=3),
        Merge(5, 3, run=2, budgets=True, lists=1, seed=4),
    ]
