"""Attention of the bundled engine in decode, timed: dense, and by a selection of some shares of the visible entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from time import perf_counter
from typing import Any

import torch

from ..layout import pages_for
from ..ops.store import store
from .crossover import Timing
from .memory import PLANE, Memory
from .runner import FORMAT, INDEX_FORMAT, Batch
from .scheduler import Part, Request


def measure(
    config: Any,
    shares: Sequence[Fraction],
    lengths: Sequence[int],
    sequences: Sequence[int],
    rounds: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    score: str = "dot",
    format: str = FORMAT,
    index_format: str = INDEX_FORMAT,
) -> Iterator[Timing]:
    """Times of one layer of a model with the ``config`` of a Llama-style one, on random keys in scattered pages.

    Both paths take turns, after a round that does not count. The other arguments are those of ``Runner``.
    """
    for name, values in (("lengths", lengths), ("sequences", sequences), ("rounds", [rounds])):
        if not values or min(values) < 1:
            raise ValueError(f"{name}: expected numbers of at least 1, got {', '.join(map(str, values)) or 'none'}")
    heads, dim = config.num_key_value_heads, config.head_dim
    width = pages_for(max(lengths), page_size)
    memory = Memory(1, heads, dim, width * max(sequences), page_size, format, index_format)
    for page in range(len(memory.bytes)):
        slots = torch.arange(page * page_size, (page + 1) * page_size)
        for rows in (memory.layers[0].keys, memory.layers[0].values, memory.layers[0].index):
            store(
                torch.randn(page_size, heads, dim, dtype=dtype), rows.plane, slots, scale=rows.scale, format=rows.format
            )
    order = torch.randperm(len(memory.bytes)).tolist()
    for length in lengths:
        for batch in sequences:
            parts = [_part(length, order[n * width :][: pages_for(length, page_size)]) for n in range(batch)]
            q = torch.randn(batch, config.num_attention_heads, dim, dtype=dtype)
            for share in shares:
                for path, seconds in _turns(memory, parts, q, share, score, rounds):
                    yield Timing(length, batch, float(share), path, seconds)


def _part(length: int, pages: Sequence[int]) -> Part:
    """The decode of a sequence's last token."""
    return Part(Request("", [], 1), length - 1, length, {}, {PLANE: list(pages)}, "plan")


def _turns(
    memory: Memory, parts: Sequence[Part], q: torch.Tensor, share: Fraction, score: str, rounds: int
) -> Iterator[tuple[str, float]]:
    for turn in range(rounds + 1):
        for path, chosen in (("dense", None), ("sparse", [share] * len(parts))):
            batch = Batch.of(parts, 0, chosen, memory.page_size)
            begin = perf_counter()
            with torch.inference_mode():
                batch.attend(memory.layers[0], q, q.shape[2] ** -0.5, score)
            if turn:
                yield path, perf_counter() - begin
