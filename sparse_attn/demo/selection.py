"""Which entries a query attends, for a model that was not trained to select.

Each row (query token) and KV head gets its own selection. Scores are attention probabilities on a
small copy of the keys, summed over the query heads of the KV head's group. Tokens are selected by
``sparse_attn.select``, blocks in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import select, store
from ..layout import FORMATS

SCORE_ELEMENTS = 1 << 22
"""Bound of the score workspace: rows are scored in parts that have at most this many scores."""


@dataclass(frozen=True)
class Budget:
    """Entries a row may attend: ``keep`` of the visible ones, but never under ``floor``.

    The first ``first`` and the last ``last`` visible entries are always attended and count in it.
    """

    keep: Fraction
    floor: int = 256
    first: int = 4
    last: int = 32

    def entries(self, visible: Tensor) -> Tensor:
        """Budget of rows that see ``visible`` entries (int64 ``[T]``)."""
        wanted = -(-visible * self.keep.numerator // self.keep.denominator)
        return torch.minimum(wanted.clamp(min=max(self.floor, self.first + self.last)), visible)


class Selection(NamedTuple):
    """Arguments of ``attend``, and what they cost."""

    indices: Tensor
    """int32 ``[T, Hkv, K]``; -1 after the row's budget."""
    block: int
    """Entries an index stands for."""
    attended: int
    """Pairs of (row, entry) that attention reads, summed over rows and KV heads."""


class Selector(Protocol):
    """Keeps a copy of each layer's keys to score, in planes that share the page table of K."""

    name: str
    """What is selected, and by what."""
    entry_bytes: float
    """Bytes of the copy for one entry of one layer, all KV heads."""

    def write(self, layer: int, keys: Tensor, plane: Tensor, slots: Tensor, visible: Tensor) -> None:
        """Take ``keys [T, Hkv, D]``, which ``plane`` holds at ``slots`` and rows see ``visible``."""

    def select(
        self, layer: int, q: Tensor, page_table: Tensor, visible: Tensor, scale: float, budget: Budget
    ) -> Selection:
        """Choose for ``q [T, Hq, D]``, whose rows see ``visible`` (int64 ``[T]``) entries."""


def grouped_scores(q: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention probabilities over ``keys``, summed over the query heads of each KV head.

    Args:
        q: ``[T, Hq, D]``.
        keys: ``[Hkv, L, D]``.
        visible: int64 ``[T]``; row t sees ``keys[:, :visible[t]]``.
        scale: factor of the scores.

    Returns:
        float32 ``[T, Hkv, L]``; 0 for what a row does not see.
    """
    return _grouped(_scores(q, keys) * scale, visible)


def grouped_bounds(q: Tensor, low: Tensor, high: Tensor, visible: Tensor, scale: float) -> Tensor:
    """As ``grouped_scores``, for boxes ``low <= key <= high`` (``[Hkv, L, D]``) instead of keys.

    The score of a box is the largest that a key in it can have (Quest, arXiv:2406.10774).
    """
    scores = _scores(q.clamp(min=0), high) + _scores(q.clamp(max=0), low)
    return _grouped(scores * scale, visible)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """``[Hkv, T * group, L]``: every query head against the keys of its KV head."""
    (tokens, heads, dim), kv_heads = q.shape, keys.shape[0]
    rows = q.reshape(tokens, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    return rows.reshape(kv_heads, -1, dim) @ keys.transpose(1, 2)


def _grouped(scores: Tensor, visible: Tensor) -> Tensor:
    scores = scores.view(scores.shape[0], len(visible), -1, scores.shape[-1])
    hidden = (torch.arange(scores.shape[-1]) >= visible[:, None])[None, :, None]
    probabilities = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    return probabilities.masked_fill_(hidden, 0.0).sum(dim=2).transpose(0, 1)


def best(scores: Tensor, budget: Tensor, visible: Tensor, first: int, last: int) -> Tensor:
    """The ``budget[t]`` best of the ``visible[t]`` places, the first and the last ones among them.

    Args:
        scores: float32 ``[T, Hkv, L]``, not negative. Changed in place.
        budget, visible: int64 ``[T]``, ``budget <= visible``.
        first, last: places that are taken whatever their scores are.

    Returns:
        int32 ``[T, Hkv, max(budget)]``, ascending, filled up with -1.
    """
    place = torch.arange(scores.shape[-1])
    forced = (place < first) | (place >= (visible - last)[:, None])
    scores.masked_fill_(forced[:, None], torch.inf)
    scores.masked_fill_((place >= visible[:, None])[:, None], -1.0)
    width = int(budget.max())
    equal = bool((budget == width).all())  # else the best must come first, and sorting costs
    chosen = scores.topk(width, dim=-1, sorted=not equal).indices.to(torch.int32)
    unused = torch.arange(width) >= budget[:, None, None]
    end = torch.iinfo(torch.int32).max
    chosen = chosen.masked_fill_(unused, end).sort(dim=-1).values  # in order of memory
    return chosen.masked_fill_(chosen == end, -1)


class TokenSelector:
    """Scores every entry on an int8 copy of its key: format ``int8_index_h``, a scale per head."""

    format = FORMATS["int8_index_h"]

    def __init__(self, layers: int, pages: int, page_size: int, kv_heads: int, dim: int) -> None:
        shape = (layers, pages, page_size, kv_heads)
        self.keys = torch.zeros(*shape, dim, dtype=torch.int8)
        self.scales = torch.zeros(shape, dtype=torch.float16)
        self.name = "tokens, scored on an int8 copy of the keys"
        self.entry_bytes = float(kv_heads * self.format.entry_bytes(dim))

    def write(self, layer: int, keys: Tensor, plane: Tensor, slots: Tensor, visible: Tensor) -> None:
        store(keys, self.keys[layer], slots, scale=self.scales[layer], format=self.format.name)

    def select(
        self, layer: int, q: Tensor, page_table: Tensor, visible: Tensor, scale: float, budget: Budget
    ) -> Selection:
        tokens, length = len(visible), int(visible.max())
        counts = budget.entries(visible)
        chosen = select(
            q,
            None,
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            self.keys[layer],
            page_table[None],
            max(int(counts.max()), budget.first + budget.last),
            scale,
            tokens,
            length,
            key_scale=self.scales[layer],
            format=self.format.name,
            kv_range=torch.stack([torch.zeros_like(visible), visible], dim=1).int(),
            row_k=counts.int(),
            score="softmax_sum",
            out_heads=self.keys.shape[3],
            keep_first=budget.first,
            keep_last=budget.last,
            order="index",  # of memory
        )
        return Selection(chosen.indices, 1, int(counts.sum()) * self.keys.shape[3])


class BlockSelector:
    """Scores blocks of ``block`` entries on their mean key, or on the box that holds their keys.

    A block is scored once it is complete, seen from the row. The last block, complete or not, is
    always attended.
    """

    def __init__(
        self, layers: int, pages: int, page_size: int, kv_heads: int, dim: int, block: int, score: str
    ) -> None:
        if page_size % block:
            raise ValueError(f"expected blocks that divide pages of {page_size} entries, got {block}")
        self.block = block
        summaries = {"mean": 1, "bounds": 2}[score]
        self.summaries = torch.zeros(summaries, layers, pages, page_size // block, kv_heads, dim)
        self.name = f"blocks of {block}, scored on the {score} of their keys"
        self.entry_bytes = summaries * kv_heads * dim * 4 / block

    def write(self, layer: int, keys: Tensor, plane: Tensor, slots: Tensor, visible: Tensor) -> None:
        completed = slots[visible % self.block == 0] // self.block  # a block lies in one page
        keys = plane.view(-1, self.block, *plane.shape[2:])[completed]
        found = [keys.mean(dim=1)] if len(self.summaries) == 1 else keys.aminmax(dim=1)
        for summary, rows in zip(self.summaries[:, layer], found, strict=True):
            summary.view(-1, *rows.shape[1:])[completed] = rows

    def select(
        self, layer: int, q: Tensor, page_table: Tensor, visible: Tensor, scale: float, budget: Budget
    ) -> Selection:
        total = -(-visible // self.block)
        complete = visible // self.block
        first = -(-budget.first // self.block)
        last = 1 + -(-(budget.last - 1) // self.block)  # blocks that the last entries can lie in
        counts = -(-budget.entries(visible) // self.block)
        counts = torch.minimum(counts.clamp(min=first + last), total)
        length = int(total.max())
        summaries = [_gathered(summary, page_table, length) for summary in self.summaries[:, layer]]
        rows = []
        for part in _parts(q.shape[0], q.shape[1] * length):
            if len(summaries) == 1:
                scores = grouped_scores(q[part], summaries[0], complete[part], scale)
            else:
                low, high = summaries
                scores = grouped_bounds(q[part], low, high, complete[part], scale)
            rows.append(best(scores, counts[part], total[part], first, last))
        clipped = total * self.block - visible
        attended = int((counts * self.block - clipped).sum()) * len(summaries[0])
        return Selection(_join(rows), self.block, attended)


def _gathered(plane: Tensor, page_table: Tensor, length: int) -> Tensor:
    """The first ``length`` entries of a sequence, float32 ``[Hkv, length, ...]``, in the order that products like."""
    entries = plane.index_select(0, page_table).flatten(0, 1)[:length]
    return entries.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)


def _parts(tokens: int, scores: int) -> list[slice]:
    """Parts of the rows, each with ``scores`` scores, that fit in the workspace."""
    step = max(1, SCORE_ELEMENTS // max(1, scores))
    return [slice(start, start + step) for start in range(0, tokens, step)]


def _join(rows: list[Tensor]) -> Tensor:
    """Stack parts of ``indices``, whose widths differ with the budgets of their rows."""
    width = max(part.shape[-1] for part in rows)
    return torch.cat([pad(part, (0, width - part.shape[-1]), value=-1) for part in rows])
