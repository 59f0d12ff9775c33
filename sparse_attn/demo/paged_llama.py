"""A Llama-style model of ``transformers`` whose attention runs on paged planes through ``attend``.

The model is used as it is: ``AttentionInterface`` hands over q, k and v of each layer; k and v go
into the planes with ``store``, and the op reads them back through the page table.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .. import attend, resolve, store
from ..layout import FORMATS
from ..serving.pages import PageAllocator
from .selection import Budget, Selection, Selector

ATTENTION = "sparse_attn_paged"
"""The name under which the attention is registered with transformers."""

FORMAT = "fp32"  # of K and V: exact, so that dense attention can be held against the model's own


class PagedCache:
    """K and V of every layer, and the selector's copies of K, over one page table a sequence.

    Args:
        config: the model's ``LlamaConfig``.
        pages, page_size: the pool; entries of all sequences together.
        selector: scores entries; its planes have the same pages.
    """

    def __init__(self, config: Any, pages: int, page_size: int, selector: Selector) -> None:
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.dim: int = config.head_dim
        self.pages = PageAllocator(pages, page_size)
        self.keys = torch.zeros(self.layers, pages, page_size, self.kv_heads, self.dim)
        self.values = torch.zeros_like(self.keys)
        self.selector = selector

    @property
    def entry_bytes(self) -> float:
        """Bytes of K and V of one entry of one layer, all KV heads."""
        return 2.0 * self.kv_heads * FORMATS[FORMAT].entry_bytes(self.dim)


@dataclass
class Tally:
    """What attention read, and the seconds it took, over all layers. A pair is (query token, entry, KV head)."""

    dense_pairs: int = 0
    scored_pairs: int = 0
    attended_pairs: int = 0
    store_s: float = 0.0
    select_s: float = 0.0
    attend_s: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Step:
    """What one forward pass of one sequence tells every layer, and what the layers report.

    ``budget`` None attends densely. ``slots`` (int64 ``[T]``) are where the new tokens are stored, ``visible``
    (int64 ``[T]``) how many entries each of them sees. ``queries`` collects the last token's queries of each layer.
    """

    cache: PagedCache
    budget: Budget | None
    slots: Tensor
    page_table: Tensor
    visible: Tensor
    tally: Tally = field(default_factory=Tally)
    queries: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_seq_len = int(self.visible[-1])
        self.seq_lens = torch.tensor([self.max_seq_len], dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, len(self.visible)], dtype=torch.int32)


def writing_step(cache: PagedCache, sequence: Hashable, tokens: int, budget: Budget | None) -> Step:
    """A step that adds ``tokens`` tokens to ``sequence``, for which it makes room."""
    start = cache.pages.entries(sequence)
    slots = torch.tensor(cache.pages.extend(sequence, tokens), dtype=torch.int64)
    return Step(cache, budget, slots, _page_table(cache, sequence), torch.arange(start, start + tokens) + 1)


def reading_step(cache: PagedCache, sequence: Hashable, entries: int, budget: Budget | None) -> Step:
    """A step of one token that sees the first ``entries`` entries of ``sequence`` and stores nothing."""
    return Step(cache, budget, torch.empty(0, dtype=torch.int64), _page_table(cache, sequence), torch.tensor([entries]))


def _page_table(cache: PagedCache, sequence: Hashable) -> Tensor:
    return torch.tensor([cache.pages.page_table(sequence)], dtype=torch.int32)


def _arguments(step: Step, layer: int, q: Tensor, scale: float, selection: Selection | None) -> dict[str, Any]:
    cache = step.cache
    return dict(
        q=q,
        cu_seqlens_q=step.cu_seqlens_q,
        seq_lens=step.seq_lens,
        scale=scale,
        v_dim=cache.dim,
        max_seqlen_q=q.shape[0],
        max_seq_len=step.max_seq_len,
        kv=cache.keys[layer],
        v=cache.values[layer],
        page_table=step.page_table,
        format=FORMAT,
        indices=None if selection is None else selection.indices,
        select_block=1 if selection is None else selection.block,
    )


def attend_layer(step: Step, layer: int, q: Tensor, scale: float) -> Tensor:
    """Attention of ``q [T, Hq, D]`` in one layer, over selected entries or all."""
    cache, tally = step.cache, step.tally
    pairs = int(step.visible.sum()) * cache.kv_heads
    tally.dense_pairs += pairs
    selection = None
    begin = perf_counter()
    if step.budget is None:
        tally.attended_pairs += pairs
    else:
        selection = cache.selector.select(layer, q, step.page_table[0], step.visible, scale, step.budget)
        tally.scored_pairs += pairs
        tally.attended_pairs += selection.attended
    selected = perf_counter()
    out = attend(**_arguments(step, layer, q, scale, selection))
    tally.select_s += selected - begin
    tally.attend_s += perf_counter() - selected
    assert isinstance(out, Tensor)
    return out


def backend(cache: PagedCache, sequence: Hashable, q: Tensor) -> str:
    """The name of the backend that attends ``q [1, Hq, D]`` densely."""
    step = reading_step(cache, sequence, cache.pages.entries(sequence), None)
    return resolve("attend", **_arguments(step, 0, q, 1.0, None)).backend


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, step: Step, **_: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: q ``[1, Hq, T, D]``, new k and v ``[1, Hkv, T, D]``."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cache, layer = step.cache, module.layer_idx
    begin = perf_counter()
    store(k, cache.keys[layer], step.slots, format=FORMAT)
    store(v, cache.values[layer], step.slots, format=FORMAT)
    cache.selector.write(layer, k, cache.keys[layer], step.slots, step.visible)
    step.tally.store_s += perf_counter() - begin
    step.queries.append(q[-1:].clone())
    return attend_layer(step, layer, q, scaling)[None], None


def _no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """The mask function that transformers calls. The op derives causality from lengths."""
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None, as sequences are packed, got a tensor")


def register() -> None:
    """Make ``ATTENTION`` known to transformers, for ``model.set_attn_implementation``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def forward(
    model: Any, cache: PagedCache, sequence: Hashable, tokens: Tensor, budget: Budget | None = None, logits: int = 1
) -> tuple[Tensor, Step]:
    """Run ``tokens`` (int64 ``[T]``) as the next ones of ``sequence``.

    Returns the logits after each of the last ``logits`` tokens, float32 ``[logits, vocabulary]``, and the step.
    """
    step = writing_step(cache, sequence, len(tokens), budget)
    with torch.inference_mode():
        output = model(
            input_ids=tokens[None],
            position_ids=step.visible[None] - 1,
            use_cache=False,
            logits_to_keep=logits,
            step=step,
        )
    return output.logits[0], step
