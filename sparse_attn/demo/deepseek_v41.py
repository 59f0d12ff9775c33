"""The attention of DeepSeek V4.1-Flash on paged planes, from the model's projections to its output, by the ops alone.

Written to be read by those who bring the model into an engine. A layer makes at most five kinds of calls:

* ``compress`` with stride 1 norms, rotates, quantises and stores the window rows (528 bytes);
* ``compress`` with the layer's ratio makes compressed entries (288 bytes) of groups of tokens, in layers that own KV;
* ``compress`` with stride 1 does with the index keys (68 bytes) of these entries what it did with the window rows;
* ``select`` finds the entries that each token attends, in layers that select;
* ``attend`` attends to the window and to the selected entries, in one softmax with the sinks.

Layers share KV, index keys, selections and candidates by being given the tensors of another layer. Who gives what to
whom is in the plan (``models.Model``), not here: any plan of this family runs.

The maths is that of DeepSeek-V4.1 (arXiv 2609.19969) and its released configuration. Names of parameters are those of
the checkpoint, behind the part that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import attend, compress, load, select, store
from ..layout import FORMATS, pages_for
from ..models import Layer, Model, Plane
from ..ops import Selected
from ..serving.pages import PageAllocator

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Config:
    """Sizes that the plan does not tell, as released."""

    hidden: int = 5120
    q_lora: int = 1280
    o_groups: int = 8
    o_lora: int = 1024
    rope: int = 64  # the last elements of queries, keys and entries, rotated in adjacent pairs
    eps: float = 1e-20
    theta: float = 10_000
    compress_theta: float = 160_000
    yarn_factor: float = 16
    yarn_length: int = 65_536
    yarn_betas: tuple[float, float] = (32, 1)
    positions: int = 16_384  # length of the tables of rotations; the released model goes to 1,048,576


# --- Rotations -------------------------------------------------------------------------------------------------------


def rotations(config: Config, compressed: bool) -> Tensor:
    """``exp(i angle)`` of every position and pair, complex64 ``[positions, rope / 2]``.

    Layers with compressed entries have another base, and YaRN's interpolation of the frequencies alone.
    """
    base, dim = config.compress_theta if compressed else config.theta, config.rope
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if compressed:

        def turns(beta: float) -> float:
            """The pair that turns ``beta`` times over the original length."""
            return dim * math.log(config.yarn_length / (beta * 2 * math.pi)) / (2 * math.log(base))

        low, high = (
            max(math.floor(turns(config.yarn_betas[0])), 0),
            min(math.ceil(turns(config.yarn_betas[1])), dim - 1),
        )
        slow = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies / config.yarn_factor * slow + frequencies * (1 - slow)
    angles = torch.arange(config.positions, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """``x [T, heads, D]`` with its last elements rotated by ``turns [T, rope / 2]``."""
    kept, rope = x.split([x.shape[-1] - 2 * turns.shape[-1], 2 * turns.shape[-1]], -1)
    pairs = torch.view_as_complex(rope.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([kept, torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)], -1)


# --- Sequences and planes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Lengths of packed sequences in one unit: tokens, or entries of a ratio. See ``attend``."""

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seq_len: int
    count: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], ratio: int = 1) -> Rows:
        """Of sequences that go from ``start`` to ``end`` tokens."""
        ends = [end // ratio for _, end in spans]
        new = [end // ratio - start // ratio for start, end in spans]
        starts = [0, *accumulate(new)]
        return Rows(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            max(new),
            max(ends),
            sum(new),
        )


@dataclass(frozen=True)
class Step:
    """What every layer is told about one step: which tokens are new, and where entries lie.

    ``page_table`` is that of planes that grow: a page holds the entries of as many tokens in each of them.
    ``ring_table`` is that of planes that do not grow: a sequence has one page, in every column, so that entry ``e``
    lies at ``e % page_size`` and overwrites an older one.
    """

    spans: tuple[tuple[int, int], ...]
    positions: Tensor
    tokens: Rows
    page_table: Tensor
    ring_table: Tensor
    max_rewind: int

    def entries(self, ratio: int) -> Rows:
        """Lengths in entries, of which the step completes ``count``."""
        return Rows.of(self.spans, ratio)


@dataclass
class Tokens:
    """How long a sequence is; how long it ever was, as rings reach back from there; and how much of it is shared."""

    now: int = 0
    most: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Saved:
    """A preempted sequence: its length, and copies of its pages in every plane."""

    tokens: Tokens
    pages: list[Tensor]


class Cache:
    """The planes of every layer, and which of their pages belong to each sequence.

    Args:
        model: the plan.
        tokens: that fit into the planes that grow, of all sequences together.
        sequences: how many there can be.
        page_size: tokens of a page, a multiple of every ratio.
        max_step: tokens that one step may bring to a sequence.
        max_rewind: tokens that ``rewind`` may take back.
    """

    def __init__(
        self, model: Model, tokens: int, sequences: int, page_size: int = 64, max_step: int = 512, max_rewind: int = 0
    ) -> None:
        self.model, self.max_step, self.max_rewind = model, max_step, max_rewind
        self.pages = PageAllocator(pages_for(tokens, page_size), page_size)
        self.rings = PageAllocator(sequences, 1)
        self.sequences: dict[Hashable, Tokens] = {}
        self.planes: list[dict[str, Tensor]] = [
            {plane.kind: self._plane(plane) for plane in layer.planes} for layer in model.layers
        ]
        self._columns = min(plane.shape[1] for plane in self._of_kinds(ring=True))

    def _plane(self, plane: Plane) -> Tensor:
        format = FORMATS[plane.format]
        if plane.entries:
            # a step writes before it attends, and a rewound step has written: what the window still needs must stay
            more = max(self.max_step - 1, self.max_rewind) if plane.kind == "window" else self.max_rewind
            pages, page_size = self.rings.pages, plane.entries + more
        else:
            pages, page_size = self.pages.pages, self.pages.page_size // plane.ratio
        shape = format.shape(pages, page_size, plane.heads, sum(plane.rows))
        return torch.zeros(shape, dtype=getattr(torch, format.dtype))

    def read(self, number: int) -> dict[str, Tensor]:
        """The planes that layer ``number`` reads or writes, its own or another's, by kind."""
        return {kind: self.planes[owner][kind] for kind, owner in self.model.layers[number].reads.items()}

    def add(self, sequence: Hashable) -> None:
        """Begin an empty sequence."""
        self.pages.add(sequence)
        self.rings.add(sequence)
        self.rings.extend(sequence, 1)
        self.sequences[sequence] = Tokens()

    def step(self, new: Mapping[Hashable, int]) -> Step:
        """Make room for so many more tokens of each sequence. If that fails, no sequence is longer."""
        spans = []
        for sequence, tokens in new.items():
            if not 1 <= tokens <= self.max_step:
                raise ValueError(f"sequence {sequence!r}: expected 1 to {self.max_step} tokens, got {tokens}")
            start = self.sequences[sequence].now
            spans.append((start, start + tokens))
            self.pages.extend(sequence, max(start + tokens - self.pages.entries(sequence), 0))
        for sequence, (_, end) in zip(new, spans, strict=True):
            held = self.sequences[sequence]
            held.now, held.most = end, max(held.most, end)
        rows = Rows.of(spans)
        tables = [self.pages.page_table(sequence) for sequence in new]
        width = max(map(len, tables))
        rings = torch.tensor([self.rings.page_table(sequence) for sequence in new], dtype=torch.int32)
        return Step(
            tuple(spans),
            torch.tensor([*chain(*(range(*span) for span in spans))]),
            rows,
            torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
            rings.repeat(1, pages_for(rows.max_seq_len, self._columns)),
            self.max_rewind,
        )

    def rewind(self, sequence: Hashable, tokens: int) -> None:
        """Forget the newest ``tokens`` of a sequence (rejected drafts). Nothing is moved: they are written over."""
        held = self.sequences[sequence]
        kept = held.now - tokens
        if not max(held.most - self.max_rewind, held.shared) <= kept <= held.now:
            raise ValueError(
                f"sequence {sequence!r}: expected to take back at most {self.max_rewind} of its newest tokens, "
                f"none of them shared, got {tokens}"
            )
        held.now = kept

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin ``child`` with the tokens of ``parent``, which must fill its pages: these are shared, rings copied."""
        held = self.sequences[parent]
        if held.now != self.pages.entries(parent):
            raise ValueError(f"sequence {parent!r}: expected full pages, got {held.now} tokens after a rewind")
        self.pages.fork(parent, child)
        self.rings.add(child)
        self.rings.extend(child, 1)
        held.shared = held.now
        self.sequences[child] = replace(held)
        (there,), (here,) = self.rings.page_table(parent), self.rings.page_table(child)
        for plane in self._of_kinds(ring=True):
            plane[here] = plane[there]

    def free(self, sequence: Hashable) -> None:
        """End a sequence."""
        self.pages.free(sequence)
        self.rings.free(sequence)
        del self.sequences[sequence]

    def preempt(self, sequence: Hashable) -> Saved:
        """End a sequence, for now."""
        saved = Saved(self.sequences[sequence], [plane[pages].clone() for plane, pages in self._held(sequence)])
        self.free(sequence)
        return saved

    def resume(self, sequence: Hashable, saved: Saved) -> None:
        """Go on with a preempted sequence, in whatever pages are free now. None of them is shared."""
        self.add(sequence)
        self.pages.extend(sequence, saved.tokens.now)
        self.sequences[sequence] = replace(saved.tokens, shared=0)
        for (plane, pages), rows in zip(self._held(sequence), saved.pages, strict=True):
            plane[pages] = rows[: len(pages)]

    def _held(self, sequence: Hashable) -> list[tuple[Tensor, list[int]]]:
        """Every plane and the sequence's pages in it."""
        grown, ring = self.pages.page_table(sequence), self.rings.page_table(sequence)
        return [*((p, grown) for p in self._of_kinds(ring=False)), *((p, ring) for p in self._of_kinds(ring=True))]

    def _of_kinds(self, ring: bool) -> list[Tensor]:
        return [
            self.planes[layer.number][plane.kind]
            for layer in self.model.layers
            for plane in layer.planes
            if bool(plane.entries) == ring
        ]


# --- Parts of a layer ------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMS norm: in float32, rounded once."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * y).to(x.dtype)


def projection(inputs: int, outputs: int, dtype: torch.dtype = DTYPE) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


class Queries(nn.Module):
    """Queries through a low rank. Unlike those of V4, heads have no norm of their own."""

    def __init__(self, config: Config, plan: Layer) -> None:
        super().__init__()
        self.heads = plan.q_heads
        self.wq_a = projection(config.hidden, config.q_lora)
        self.q_norm = Norm(config.q_lora, config.eps)
        self.wq_b = projection(config.q_lora, plan.q_heads * plan.qk_dim)

    def forward(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``x [T, hidden]``: the low-rank rows ``[T, q_lora]``, which the indexer takes, and the queries
        ``[T, heads, D]``."""
        low = self.q_norm(self.wq_a(x))
        return low, rotate(self.wq_b(low).unflatten(-1, (self.heads, -1)), turns)


class WindowRows(nn.Module):
    """Raw rows of the last tokens, keys and values in one. Every layer has its own."""

    def __init__(self, config: Config, plane: Plane) -> None:
        super().__init__()
        self.format = plane.format
        self.wkv = projection(config.hidden, plane.rows[0])
        self.kv_norm = Norm(plane.rows[0], config.eps)

    def forward(self, x: Tensor, step: Step, window: Tensor, cos_sin: Tensor) -> None:
        compress(
            self.wkv(x)[:, None],
            None,
            step.tokens.cu_seqlens_q,
            step.tokens.seq_lens,
            window,
            step.ring_table,
            1,
            step.tokens.max_seqlen_q,
            step.tokens.max_seq_len,
            norm=self.kv_norm.weight.float(),
            eps=self.kv_norm.eps,
            cos_sin=cos_sin,
            dtype="bf16",
            format=self.format,
        )


class Compressor(nn.Module):
    """Entries of ``ratio`` tokens each: the tokens' rows weighted by a softmax of their gates, channel by channel."""

    def __init__(self, config: Config, plane: Plane) -> None:
        super().__init__()
        self.format, self.ratio = plane.format, plane.ratio
        self.wkv = projection(config.hidden, plane.rows[0], torch.float32)
        self.wgate = projection(config.hidden, plane.rows[0], torch.float32) if plane.ratio > 1 else None
        self.norm = Norm(plane.rows[0], config.eps)

    def forward(self, x: Tensor, step: Step, main: Tensor, state: Tensor | None, cos_sin: Tensor) -> Tensor:
        """Write the entries that the step completes, and return them before rotation, ``[entries, 1, D]``."""
        if self.wgate is None:
            rows, gates = linear(x, self.wkv.weight.to(x.dtype)), None
        else:
            rows, gates = self.wkv(x.float()), self.wgate(x.float())[:, None]
        entries = step.entries(self.ratio).count
        latent = compress(
            rows[:, None],
            gates,
            step.tokens.cu_seqlens_q,
            step.tokens.seq_lens,
            main,
            step.page_table,
            self.ratio,
            step.tokens.max_seqlen_q,
            step.tokens.max_seq_len,
            state=state,
            state_page_table=None if state is None else step.ring_table,
            max_rewind=0 if state is None else step.max_rewind,
            norm=self.norm.weight.float(),
            eps=self.norm.eps,
            cos_sin=cos_sin,
            dtype="bf16",
            format=self.format,
            entries=entries,
        )
        return latent.view(entries, 1, -1) if entries else x.new_empty(0, 1, self.norm.weight.shape[0])


class IndexKeys(nn.Module):
    """Index keys of compressed entries, in layers that own KV."""

    def __init__(self, config: Config, main: Plane, index: Plane) -> None:
        super().__init__()
        self.format, self.ratio = index.format, index.ratio
        self.wk = projection(main.rows[0], index.rows[0])
        self.k_norm = Norm(index.rows[0], config.eps)

    def forward(self, latent: Tensor, step: Step, index: Tensor, cos_sin: Tensor) -> None:
        """Write the keys of the entries ``latent [entries, 1, D]`` that the compressor returned."""
        entries = step.entries(self.ratio)
        compress(
            self.wk(latent),
            None,
            entries.cu_seqlens_q,
            entries.seq_lens,
            index,
            step.page_table,
            1,
            entries.max_seqlen_q,
            entries.max_seq_len,
            norm=self.k_norm.weight.float(),
            eps=self.k_norm.eps,
            cos_sin=cos_sin,
            rope_stride=self.ratio,  # an entry stands at its first token
            dtype="bf16",
            format=self.format,
        )


class Selector(nn.Module):
    """The lightning indexer, in layers that select. Its keys may be another layer's."""

    def __init__(self, config: Config, model: Model, number: int) -> None:
        super().__init__()
        selection = model.layers[number].selection
        assert selection is not None
        self.heads, self.scale = selection.heads, selection.dim**-0.5 * selection.heads**-0.5
        self.arguments = model.select_arguments(number)
        self.wq_b = projection(config.q_lora, selection.heads * selection.dim)
        self.weights_proj = projection(config.hidden, selection.heads)

    def forward(
        self, x: Tensor, low: Tensor, step: Step, index: Tensor, turns: Tensor, candidates: Tensor | None
    ) -> Selected:
        """What each token attends; candidate blocks too, in the layer that makes them."""
        queries = rotate(self.wq_b(low).unflatten(-1, (self.heads, -1)), turns)
        return select(
            as_stored(queries, self.arguments["format"]),
            self.weights_proj(x) * self.scale,
            step.tokens.cu_seqlens_q,
            step.tokens.seq_lens,
            index,
            step.page_table,
            scale=1.0,
            max_seqlen_q=step.tokens.max_seqlen_q,
            max_seq_len=step.tokens.max_seq_len,
            candidates=candidates,
            order="index",  # ascending: neighbours in memory are read one after the other
            **self.arguments,
        )


def as_stored(rows: Tensor, format: str) -> Tensor:
    """``rows [T, heads, D]`` rounded as a plane of ``format`` rounds them: the model was trained so."""
    flat = rows.flatten(0, 1)[:, None]
    plane = torch.empty(FORMATS[format].shape(1, len(flat), 1, flat.shape[-1]), dtype=torch.uint8)
    slots = torch.arange(len(flat))
    store(flat, plane, slots, format=format)
    return load(plane, slots, format=format, dtype=rows.dtype).view(rows.shape)


class Output(nn.Module):
    """What attention gives, rotated back, through a low rank for each group of heads."""

    def __init__(self, config: Config, plan: Layer) -> None:
        super().__init__()
        self.groups = config.o_groups
        self.wo_a = projection(plan.q_heads * plan.v_dim // config.o_groups, config.o_groups * config.o_lora)
        self.wo_b = projection(config.o_groups * config.o_lora, config.hidden)

    def forward(self, attended: Tensor, turns: Tensor) -> Tensor:
        grouped = rotate(attended, turns.conj()).reshape(len(attended), self.groups, -1)
        weight = self.wo_a.weight.unflatten(0, (self.groups, -1))
        low = torch.bmm(grouped.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        return self.wo_b(low.flatten(1))


# --- Layers ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One layer of any kind: window, full, reindex or reuse."""

    def __init__(self, config: Config, model: Model, number: int) -> None:
        super().__init__()
        self.plan = plan = model.layers[number]
        planes = {plane.kind: plane for plane in plan.planes}
        self.queries = Queries(config, plan)
        self.window = WindowRows(config, planes["window"])
        self.compressor = Compressor(config, planes["main"]) if "main" in planes else None
        self.keys = IndexKeys(config, planes["main"], planes["index"]) if "index" in planes else None
        self.selector = Selector(config, model, number) if plan.selection_owner == number else None
        self.sinks = nn.Parameter(torch.zeros(plan.q_heads, dtype=torch.float32))
        self.output = Output(config, plan)
        self.arguments: dict[str, Any] = model.attend_arguments(number)
        turns = rotations(config, compressed=plan.kv_owner is not None)
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("cos_sin", torch.cat([turns.real, turns.imag], -1), persistent=False)

    turns: Tensor
    cos_sin: Tensor

    def forward(
        self,
        x: Tensor,
        step: Step,
        planes: Mapping[str, Tensor],
        selected: Selected | None = None,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Selected | None]:
        """Attention of the step's tokens.

        Args:
            x: ``[T, hidden]``, normed.
            step: the step.
            planes: by kind, those that the layer reads or writes, its own or another layer's.
            selected: what another layer selected, for a layer that does not.
            candidates: candidate blocks of another layer, if they restrict this one.

        Returns:
            ``[T, hidden]``, and what the layer attended to, for those that attend to the same.
        """
        turns = self.turns[step.positions]
        low, q = self.queries(x, turns)
        self.window(x, step, planes["window"], self.cos_sin)
        if self.compressor is not None and self.keys is not None:
            latent = self.compressor(x, step, planes["main"], planes.get("state"), self.cos_sin)
            self.keys(latent, step, planes["index"], self.cos_sin)
        if self.selector is not None:
            selected = self.selector(x, low, step, planes["index"], turns, candidates)
        main: dict[str, Any] = {}
        if selected is not None:
            main = dict(
                kv=planes["main"],
                page_table=step.page_table,
                indices=selected.indices,
                index_counts=selected.counts,
            )
        out = attend(
            q,
            step.tokens.cu_seqlens_q,
            step.tokens.seq_lens,
            self.plan.qk_dim**-0.5,
            max_seqlen_q=step.tokens.max_seqlen_q,
            max_seq_len=step.tokens.max_seq_len,
            win=planes["window"],
            win_page_table=step.ring_table,
            sinks=self.sinks,
            batch_invariant=True,  # drafts, preemption and another batch then change no bit
            **main,
            **self.arguments,
        )
        assert isinstance(out, Tensor)
        return self.output(out, turns), selected


class Layers(nn.Module):
    """The attention layers of a plan, without what stands between them in the model: each has an input of its own."""

    def __init__(self, config: Config, model: Model) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(config, model, number) for number in range(len(model.layers)))

    @torch.inference_mode()
    def forward(self, inputs: Sequence[Tensor], cache: Cache, step: Step) -> tuple[list[Tensor], list[Selected | None]]:
        """Outputs ``[T, hidden]`` of each layer for ``inputs [T, hidden]`` of each, and what each attended to."""
        outputs: list[Tensor] = []
        selections: dict[int | None, Selected] = {}  # by the layers that made or reused them, so far
        for x, layer in zip(inputs, self.layers, strict=True):
            assert isinstance(layer, Attention)
            plan = layer.plan
            source = selections.get(plan.candidate_owner)
            candidates = None if source is None else source.candidate_blocks
            given = selections.get(plan.selection_owner)
            out, selected = layer(x, step, cache.read(plan.number), given, candidates)
            outputs.append(out)
            if selected is not None:
                selections[plan.number] = selected
        return outputs, [selections.get(number) for number in range(len(outputs))]
