"""A serving engine in small: sequences in paged planes, and a model whose attention layers call the ops alone.

Nothing of transformers' attention, caches or indexers runs here. A model gives its projections, norms, rotations and
MLPs; `layers.py` says which ops a layer calls with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from paged import NO_PAGE
from torch import Tensor, nn

import sparse_attn
from sparse_attn import registry

Alter = Callable[[str, dict[str, Any]], None]
"""Falsifies the arguments of a call of an op."""

INVISIBLE = -1e30
"""Masks are -inf, or the least number."""


class Ops:
    """The ops on one backend, and on the reference where the backend lacks one."""

    def __init__(self, backend: str, alter: Alter | None = None) -> None:
        self.backend, self.alter = backend, alter

    def __call__(self, op: str, **arguments: Any) -> Any:
        if self.alter is not None:
            self.alter(op, arguments)
        known = any(self.backend in ("auto", impl.backend) for impl in registry.implementations(op))
        return getattr(sparse_attn, op)(**arguments, backend=self.backend if known else "reference")


@dataclass
class Step:
    """What one forward pass adds to which sequences, in the order of its rows."""

    sequences: list[int]
    starts: list[int]
    """Tokens of each sequence before the step."""
    rows: list[int]
    guesses: list[int]
    """How many of the rows are drafts that will be rejected."""

    @property
    def ends(self) -> list[int]:
        return [start + rows for start, rows in zip(self.starts, self.rows, strict=True)]

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(*span) for span in zip(self.starts, self.ends, strict=True)])

    def lengths(self) -> dict[str, Any]:
        """The arguments that every call has."""
        cu_seqlens_q = torch.tensor([0, *self.rows]).cumsum(0).int()
        seq_lens = torch.tensor(self.ends, dtype=torch.int32)
        return {
            "cu_seqlens_q": cu_seqlens_q,
            "seq_lens": seq_lens,
            "max_seqlen_q": max(self.rows),
            "max_seq_len": max(self.ends),
        }


class Pool:
    """Pages that sequences take and give back, and the planes of all layers that lie in them.

    A page that nobody owns holds NaN. With ``window``, pages that no later row attends are given back. With ``ring``,
    a sequence keeps ``ring`` entries for good and writes over the oldest. Else it keeps every page.
    """

    def __init__(self, page_size: int, *, ratio: int = 1, window: int = 0, ring: int = 0, pages: int = 160) -> None:
        self.page_size, self.ratio, self.window, self.ring, self.pages = page_size, ratio, window, ring, pages
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(page_size)).tolist()
        self.users = [0] * pages
        self.owned: dict[int, list[int]] = {}
        self.planes: list[Tensor] = []

    def plane(self, heads: int, dim: int) -> Tensor:
        """A new plane ``[pages, page_size, heads, dim]``, whose pages lie apart."""
        pool = torch.full((self.pages, 2, self.page_size, heads, dim), torch.nan)
        self.planes.append(pool[:, 1])
        return self.planes[-1]

    def _take(self) -> int:
        page = self.free.pop(0)
        self.users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        if page == NO_PAGE:
            return
        self.users[page] -= 1
        if self.users[page] == 0:
            self.free.append(page)
            for plane in self.planes:
                plane[page] = torch.nan

    def _copy(self, page: int) -> int:
        new = self._take()
        for plane in self.planes:
            plane[new] = plane[page]
        return new

    def reserve(self, sequence: int, tokens: int) -> None:
        """Pages for ``tokens`` tokens."""
        owned = self.owned.setdefault(sequence, [])
        entries = self.ring or tokens // self.ratio
        while len(owned) * self.page_size < entries:
            owned.append(self._take())

    def release(self, sequence: int, tokens: int) -> None:
        """Give back what no row from position ``tokens`` on attends."""
        if self.window:
            owned = self.owned[sequence]
            for column in range(max(tokens - self.window + 1, 0) // self.page_size):
                self._drop(owned[column])
                owned[column] = NO_PAGE

    def fork(self, source: int, target: int, tokens: int) -> None:
        """``target`` starts as ``source`` stands. They share the pages that neither writes again."""
        owned = self.owned[source]
        full = 0 if self.ring else tokens // self.ratio // self.page_size
        for page in owned[:full]:
            if page != NO_PAGE:
                self.users[page] += 1
        self.owned[target] = owned[:full] + [self._copy(page) for page in owned[full:]]

    def save(self, sequence: int) -> tuple[list[int], list[Tensor]]:
        """Take all that ``sequence`` has out of the pool."""
        columns = self.owned.pop(sequence)
        kept = [page for page in columns if page != NO_PAGE]
        contents = [plane[kept].clone() for plane in self.planes]
        for page in kept:
            self._drop(page)
        return columns, contents

    def restore(self, sequence: int, saved: tuple[list[int], list[Tensor]]) -> None:
        """Put it back, in other pages."""
        columns, contents = saved
        self.owned[sequence] = [page if page == NO_PAGE else self._take() for page in columns]
        pages = [page for page in self.owned[sequence] if page != NO_PAGE]
        for plane, content in zip(self.planes, contents, strict=True):
            plane[pages] = content

    def table(self, step: Step) -> Tensor:
        """int32 ``[B, columns]``; columns that must not be read hold no page."""
        rows = [self._columns(s, end) for s, end in zip(step.sequences, step.ends, strict=True)]
        table = torch.full((len(rows), max(map(len, rows)) + 1), NO_PAGE, dtype=torch.int32)
        for row, columns in zip(table, rows, strict=True):
            row[: len(columns)] = torch.tensor(columns, dtype=torch.int32)
        return table

    def _columns(self, sequence: int, tokens: int) -> list[int]:
        owned = self.owned[sequence]
        return owned * -(-tokens // (len(owned) * self.page_size)) if self.ring else owned

    def slots(self, step: Step) -> Tensor:
        """Where the rows of the step go, one entry a token."""
        slots = []
        for sequence, start, end in zip(step.sequences, step.starts, step.ends, strict=True):
            owned = self.owned[sequence]
            slots += [owned[n // self.page_size] * self.page_size + n % self.page_size for n in range(start, end)]
        return torch.tensor(slots)


class Layers:
    """The attention layers of one model: their pools, planes and calls."""

    pools: list[Pool]
    outputs = 2
    """Results of the model's own attention modules."""

    def __init__(self, ops: Ops, judge: Judge | None) -> None:
        self.ops, self.judge = ops, judge

    def attend(self, module: nn.Module, x: Tensor, embeddings: Any, step: Step) -> Tensor:
        """``x [T, hidden]`` through one layer."""
        raise NotImplementedError

    def select(self, module: nn.Module, step: Step, **arguments: Any) -> dict[str, Tensor]:
        """``indices`` and ``index_counts`` for ``attend``."""
        selected = self.ops("select", **arguments, **step.lengths())
        if self.judge is not None:
            self.judge.settle(module.layer_idx, step, selected)
        return {"indices": selected.indices, "index_counts": selected.counts}


@dataclass
class Answer:
    """What a model of transformers makes of one sequence: logits, and by layer what its indexer ranked and picked."""

    logits: Tensor
    ranked: dict[int, Tensor] = field(default_factory=dict)
    """``[S, lists, units]``, below ``INVISIBLE`` where not visible"""
    picks: dict[int, Tensor] = field(default_factory=dict)
    """``[S, lists, k]``"""


class Judge:
    """Compares selections with the oracle's.

    Where scores are equal up to rounding, both picks are right, but the logits differ: such rows get the oracle's
    picks. Any other difference is listed in ``wrong``.
    """

    def __init__(self, answers: dict[int, Answer], tie: float) -> None:
        self.answers, self.tie = answers, tie
        self.rows, self.ties = 0, 0
        self.wrong: list[str] = []

    def settle(self, layer: int, step: Step, selected: Any) -> None:
        t = 0
        for sequence, start, rows, guesses in zip(step.sequences, step.starts, step.rows, step.guesses, strict=True):
            answer = self.answers[sequence]
            for i in range(rows - guesses):
                for o in range(selected.indices.shape[1]):
                    self._settle(answer, layer, start + i, o, selected.indices[t + i, o], selected.counts[t + i])
            t += rows

    def _settle(self, answer: Answer, layer: int, position: int, o: int, indices: Tensor, counts: Tensor) -> None:
        scores = answer.ranked[layer][position, o]
        theirs = {u for u in answer.picks[layer][position, o].tolist() if u >= 0 and scores[u] > INVISIBLE}
        ours = set(indices[: counts[o]].tolist())
        self.rows += 1
        if ours == theirs:
            return
        odd = torch.tensor([float(scores[u]) for u in ours ^ theirs])
        if len(ours) != len(theirs) or not odd.max() - odd.min() <= self.tie:
            self.wrong.append(f"layer {layer}, position {position}: {sorted(ours)}, theirs {sorted(theirs)}")
            return
        self.ties += 1
        indices[: len(theirs)] = torch.tensor(sorted(theirs), dtype=torch.int32)


class Engine:
    """A model over paged planes. Sequences are numbers."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.model, self.layers = copy.deepcopy(model), layers
        self.tokens: dict[int, int] = {}
        self.current: Step
        for layer in self.model.model.layers:
            layer.self_attn.forward = self._forward(layer.self_attn)

    def _forward(self, module: nn.Module) -> Callable[..., tuple[Tensor | None, ...]]:
        def forward(hidden_states: Tensor, position_embeddings: Any, **_: Any) -> tuple[Tensor | None, ...]:
            out = self.layers.attend(module, hidden_states[0], position_embeddings, self.current)
            return out[None], *[None] * (self.layers.outputs - 1)

        return forward

    @torch.no_grad()
    def step(self, new: dict[int, Tensor], guesses: dict[int, int] | None = None) -> dict[int, Tensor]:
        """Logits ``[rows, vocabulary]`` of the new tokens of each sequence.

        The last ``guesses[s]`` of them are drafts that are rejected: the next step writes over what they left.
        """
        rejected = [(guesses or {}).get(s, 0) for s in new]
        starts = [self.tokens.get(s, 0) for s in new]
        step = self.current = Step(list(new), starts, [len(tokens) for tokens in new.values()], rejected)
        for pool in self.layers.pools:
            for sequence, end in zip(new, step.ends, strict=True):
                pool.reserve(sequence, end)
        logits = self.model(
            input_ids=torch.cat(list(new.values()))[None],
            position_ids=step.positions[None],
            attention_mask={"indexed_attention": None},  # no mask is made
            use_cache=False,
        ).logits[0]
        for sequence, end, count in zip(new, step.ends, rejected, strict=True):
            self.tokens[sequence] = end - count
            for pool in self.layers.pools:
                pool.release(sequence, end - count)
        parts = logits.split(step.rows)
        return {s: part[: len(part) - n] for s, part, n in zip(new, parts, rejected, strict=True)}

    def fork(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]
        for pool in self.layers.pools:
            pool.fork(source, target, self.tokens[source])

    def preempt(self, sequence: int) -> list[Any]:
        return [pool.save(sequence) for pool in self.layers.pools]

    def resume(self, sequence: int, saved: Sequence[Any]) -> None:
        for pool, content in zip(self.layers.pools, saved, strict=True):
            pool.restore(sequence, content)
