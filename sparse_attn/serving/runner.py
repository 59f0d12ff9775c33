"""Runs the steps of a scheduler on a Llama-style model of ``transformers``, with its cache in pages.

The model is used as it is: ``AttentionInterface`` hands over q, k and v of each layer for all sequences of the step.
k and v go into the pages with ``store``; ``select`` and ``attend`` read them back through page tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..layout import pages_for
from ..models import METHODS, Model, gqa, sparse
from ..ops.attend import attend
from ..ops.select import select
from ..ops.store import store
from .manager import Copy
from .memory import PLANE, LayerPlanes, Memory
from .scheduler import Part, Plan, Save

ATTENTION = "sparse_attn_pages"
"""The name under which the attention is registered with transformers."""

FORMAT, INDEX_FORMAT = "int8", "int4_index_h"
"""Of keys and values, and of index keys."""

PLAIN = "the bundled engine runs models like Llama, of alike layers that attend to everything"

KEEP_FIRST, KEEP_LAST, FLOOR = 4, 32, 256
"""Entries at either end that a row always attends, and how few it attends at least."""


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_p``: of the likeliest tokens, this share of the probability. ``draw``: of this
    request alone, so that neighbours change nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    draw: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> int:
        """A token, from float32 ``[vocabulary]``."""
        if not self.temperature:
            return int(logits.argmax())
        # in float64 and from the best down, as a temperature close to 0 leaves the range of float32
        probabilities = ((logits - logits.max()).double() / self.temperature).softmax(-1)
        ordered, tokens = probabilities.sort(descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
        return int(tokens[torch.multinomial(ordered, 1, generator=self.draw)])


GREEDY = Sampling()


@dataclass
class Batch:
    """Sequences that go into one call of each op: those that select, or those that attend to everything."""

    rows: slice
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    most_rows: int
    most_tokens: int
    budgets: Tensor | None
    """int32 ``[rows]``; None attends to everything."""
    most: int = 0

    @classmethod
    def of(cls, parts: Sequence[Part], start: int, shares: Sequence[Fraction] | None, page_size: int) -> Batch:
        """``shares``: of what the rows of each part see; None: they attend to everything."""
        counts = [part.after - part.before for part in parts]
        lengths = [part.after for part in parts]
        width = pages_for(max(lengths), page_size)
        table = torch.zeros(len(parts), width, dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            pages = part.tables[PLANE]
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        budgets = None
        if shares is not None:
            seen = [torch.arange(part.before, part.after) + 1 for part in parts]
            wanted = [-(-n * share.numerator // share.denominator) for n, share in zip(seen, shares, strict=True)]
            budgets = torch.minimum(torch.cat(wanted).clamp(min=FLOOR), torch.cat(seen)).int()
        return cls(
            slice(start, start + sum(counts)),
            torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            table,
            max(counts),
            max(lengths),
            budgets,
            0 if budgets is None else max(int(budgets.max()), KEEP_FIRST + KEEP_LAST),
        )

    def attend(self, planes: LayerPlanes, q: Tensor, scale: float, score: str) -> Tensor:
        """Attention of ``q [rows, Hq, D]`` in one layer."""
        common = (self.cu_seqlens, self.seq_lens)
        bounds = (self.most_rows, self.most_tokens)
        indices = counts = None
        if self.budgets is not None:
            selected = select(
                q.unflatten(1, (planes.index.plane.shape[2], -1)).sum(2) if score == "dot" else q,
                None,
                *common,
                planes.index.plane,
                self.page_table,
                self.most,
                scale,
                *bounds,
                key_scale=planes.index.scale,
                format=planes.index.format,
                row_k=self.budgets,
                score=score,
                out_heads=planes.index.plane.shape[2],
                keep_first=KEEP_FIRST,
                keep_last=KEEP_LAST,
                order="index",  # of memory
            )
            indices, counts = selected.indices, selected.counts
        out = attend(
            q,
            *common,
            scale,
            q.shape[2],
            *bounds,
            kv=planes.keys.plane,
            kv_scale=planes.keys.scale,
            v=planes.values.plane,
            v_scale=planes.values.scale,
            page_table=self.page_table,
            format=planes.keys.format,
            indices=indices,
            index_counts=counts,
        )
        assert isinstance(out, Tensor)
        return out


@dataclass
class Step:
    """What a forward pass tells every layer."""

    memory: Memory
    slots: Tensor
    batches: Sequence[Batch]
    score: str

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store ``k`` and ``v`` (``[T, Hkv, D]``), and attend ``q [T, Hq, D]``."""
        planes = self.memory.layers[layer]
        for rows, new in ((planes.keys, k), (planes.values, v), (planes.index, k)):
            store(new, rows.plane, self.slots, scale=rows.scale, format=rows.format)
        return torch.cat([batch.attend(planes, q[batch.rows], scale, self.score) for batch in self.batches])


@dataclass
class Trial:
    """In place of a step: what each layer of a model asks to attend, by number, and shapes of k and v."""

    asked: list[tuple[int, torch.Size, torch.Size]] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.asked.append((layer, k.shape[1:], v.shape[1:]))
        return torch.zeros_like(q)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, step: Step | Trial, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: q ``[1, Hq, T, D]``, new k and v ``[1, Hkv, T, D]``."""
    window = sliding_window is not None and sliding_window < module.config.max_position_embeddings
    for name, asked in (("a window", window), ("a soft cap", softcap), ("sinks", s_aux is not None)):
        if asked:
            raise ValueError(f"model: expected layers without {name}, got {module.config.model_type}: {PLAIN}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module.layer_idx, q, k, v, scaling)[None], None


def _no_mask(**_: Any) -> None:
    """The mask function that transformers calls. The ops derive causality from lengths."""


class Runner:
    """A model, and the bytes of its cache.

    Args:
        model: ``LlamaForCausalLM``, or a model with the same arguments.
        pages, page_size: of the pool.
        share: of the visible entries that requests attend which are not dense and name none.
        score: of ``select``: ``"dot"`` is the cheapest, and ``"softmax_sum"`` the probabilities of attention.
        format, index_format: of keys and values, and of index keys.

    Raises:
        ValueError: the model's layers are not alike, or ask for a window, a soft cap or sinks.
    """

    def __init__(
        self,
        model: Any,
        pages: int,
        page_size: int = 64,
        share: Fraction = Fraction(1, 4),
        score: str = "dot",
        format: str = FORMAT,
        index_format: str = INDEX_FORMAT,
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, _no_mask)
        model.set_attn_implementation(ATTENTION)
        config = model.config
        heads, dim = _shape(model)
        self.model, self.share, self.score = model, share, score
        self.longest: int = config.max_position_embeddings
        self.memory = Memory(config.num_hidden_layers, heads, dim, pages, page_size, format, index_format)
        whole = gqa(config.model_type, config.num_hidden_layers, config.num_attention_heads, heads, dim, format)
        self.plan: Model = sparse(whole, METHODS["tokens"], FLOOR, share)
        """For counts and costs."""
        self.formats = {"main": format, "index": index_format}
        self._saved: dict[Hashable, Tensor] = {}

    def run(self, plan: Plan) -> dict[Hashable, int | None]:
        """Run a step. Returns the next token of each part that samples, None where its logits are not finite."""
        self._move(plan)
        if not plan.parts:
            return {}
        parts = sorted(plan.parts, key=lambda part: part.dense)
        selecting = [part for part in parts if not part.dense]
        rows = sum(part.after - part.before for part in selecting)
        batches = []
        shares = [part.request.share or self.share for part in selecting]
        for some, start, chosen in ((selecting, 0, shares), (parts[len(selecting) :], rows, None)):
            if some:
                batches.append(Batch.of(some, start, chosen, self.memory.page_size))
        slots = torch.tensor([slot for part in parts for slot in part.slots[PLANE]], dtype=torch.int64)
        step = Step(self.memory, slots, batches, self.score)
        ends = torch.tensor([part.after - part.before for part in parts]).cumsum(0) - 1
        sampling = [n for n, part in enumerate(parts) if part.samples]
        with torch.inference_mode():
            logits = (
                self.model(
                    input_ids=torch.tensor(
                        [[t for part in parts for t in part.request.tokens[part.before : part.after]]]
                    ),
                    position_ids=torch.cat([torch.arange(part.before, part.after) for part in parts])[None],
                    use_cache=False,
                    logits_to_keep=ends[sampling],
                    step=step,
                )
                .logits[0]
                .float()
            )
            finite = logits.isfinite().all(-1).tolist()
            return {
                parts[n].request.name: (parts[n].request.options or GREEDY)(row) if good else None
                for n, row, good in zip(sampling, logits, finite, strict=True)
            }

    def _move(self, plan: Plan) -> None:
        for move in plan.moves:
            if isinstance(move, Copy):
                self.memory.copy([move])
            elif isinstance(move, Save):
                self._saved[move.request.name] = self.memory.save(move.tables)
            else:
                self.memory.restore(self._saved.pop(move.request.name), move.tables)

    def give(self, name: Hashable, saved: Tensor) -> None:
        """The bytes of a cache that a request will begin with."""
        self._saved[name] = saved

    def forget(self, name: Hashable) -> None:
        """A request ended."""
        self._saved.pop(name, None)


def _shape(model: Any) -> tuple[int, int]:
    """KV heads and head size of every layer, as a token through the model tells: a configuration does not say all that
    a layer asks for, and what is not done here must not be left out in silence."""
    trial, token = Trial(), torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, step=trial)
    shapes = {shape for _, *both in trial.asked for shape in both}
    if [layer for layer, *_ in trial.asked] != [*range(model.config.num_hidden_layers)] or len(shapes) != 1:
        raise ValueError(
            f"model: expected keys and values of one shape in every layer, got {model.config.model_type}: {PLAIN}"
        )
    heads, dim = shapes.pop()
    return heads, dim
