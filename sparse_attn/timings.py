"""A selecting layer timed on this device, and where its promised speed-up goes.

Pairs of the selection over those of all visible entries promise a speed-up. What is measured falls short by the time of
the selection, by what scattered entries take more than adjacent ones, by calls that do nothing, and by the rest: what
the kernel itself does worse on short lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from . import attend, layout, select, store
from .models import Model, dense
from .serving.stats import Counter

PAGE = 64
FULL = 0.5
"""Share of a limit from which it is said to bind; below for both, neither does."""
YARDSTICKS = 4
"""Rounds in which limits are measured, before and after, for each in which calls are."""


@dataclass(frozen=True)
class Limits:
    """Of the device, just before and after the calls: products of matrices in operations, copies in bytes, a second."""

    compute: float
    bandwidth: float


@dataclass(frozen=True)
class Part:
    """A call: median seconds, and the shares of the device's limits that it reaches."""

    seconds: float
    compute: float
    bandwidth: float

    @property
    def binds(self) -> str:
        share, name = max((self.compute, "compute"), (self.bandwidth, "bandwidth"))
        return name if share >= FULL else "neither"


@dataclass(frozen=True)
class LayerProfile:
    """Of a length, and of ``queries`` query tokens of each sequence.

    ``pairs``: those that the selection attends over those of the dense call, which attends to every visible entry of
    the same planes. ``effective_kv_ratio``: the same over those of full attention, which attends to every token; below
    ``pairs`` where a model compresses. Seconds of what a sparse step takes more than ``pairs`` of a dense one:
    ``selection``, ``scattered`` access, ``launches`` of two calls, and the ``rest``, which may be negative.
    """

    length: int
    queries: int
    limits: Limits
    pairs: float
    effective_kv_ratio: float
    dense: Part
    select: Part
    attend: Part
    selection: float
    scattered: float
    launches: float
    rest: float

    @property
    def promised(self) -> float:
        return 1 / self.pairs

    @property
    def measured(self) -> float:
        return self.dense.seconds / (self.select.seconds + self.attend.seconds)


class Step:
    """Calls of one layer with random planes, on ``device``: ``batch`` sequences of ``length`` tokens, ``queries`` of
    which are the step's."""

    def __init__(self, model: Model, number: int, length: int, batch: int, queries: int, device: str) -> None:
        self.layer = layer = model.layers[number]
        chosen = layer.selection
        assert chosen is not None
        self.device, self.batch, self.queries, self.length = device, batch, queries, length
        self.pages = layout.pages_for(length, PAGE)
        main, index = model.plane("main", number), model.plane("index", number)
        rows = batch * queries
        self.q = torch.randn(rows, layer.q_heads, layer.qk_dim, device=device).bfloat16()
        self.index_q = torch.randn(rows, chosen.heads, chosen.dim, device=device).bfloat16()
        self.weights = torch.rand(rows, chosen.heads, device=device) if chosen.weighted else None
        self.planes: dict[str, Any] = {}
        for name, dim in zip(("kv", "v"), main.rows, strict=False):
            self.planes |= self._plane(name, main.format, main.heads, dim)
        if len(main.rows) == 2:
            self.planes["v_format"] = main.format
        if "window" in layer.reads:
            window = model.plane("window", number)
            self.planes |= self._plane("win", window.format, window.heads, window.rows[0])
            self.planes |= dict(win_page_table=self._table(), win_page_size=PAGE)
        if layer.sinks:
            self.planes["sinks"] = torch.zeros(layer.q_heads, device=device)
        self.index: dict[str, Any] = self._plane("keys", index.format, index.heads, index.rows[0], "key_scale")
        self.arguments: dict[str, Any] = dict(page_table=self._table(), page_size=PAGE)
        self.attend_arguments = model.attend_arguments(number)
        self.select_arguments = model.select_arguments(number)
        # units of the list that each row sees; a row of the batch's every sequence sees as many
        seen = (torch.arange(length - queries, length, device=device) + 1) // main.ratio
        units = (-(-seen // chosen.block)).repeat(batch)[:, None, None]
        most, lists = max(int(units.max()), 1), chosen.out_heads
        k = min(chosen.k, most)
        newest = units - 1 - torch.arange(k, device=device).flip(0)
        self.adjacent = newest.clamp(min=-1).int().expand(rows, lists, k).contiguous()
        drawn = torch.rand(rows, lists, most, device=device)
        drawn.masked_fill_(torch.arange(most, device=device) >= units, -1.0)
        values, spread = drawn.topk(k)
        self.scattered = spread.masked_fill_(values < 0, -1).sort(-1).values.int()
        self.nothing = torch.full_like(self.scattered, -1)

    def _table(self) -> Tensor:
        pages = torch.randperm(self.batch * self.pages, device=self.device)
        return pages.int().view(self.batch, self.pages)

    def _plane(self, name: str, format: str, heads: int, dim: int, scale_name: str = "") -> dict[str, Tensor]:
        spec = layout.FORMATS[format]
        count = self.batch * self.pages
        shape = spec.shape(count, PAGE, heads, dim)
        plane = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)
        scale = torch.zeros(shape[:3], dtype=torch.float16, device=self.device) if spec.scale_dtype else None
        for page in range(0, count, 64):  # rows of all pages at once would take many times the plane's memory
            slots = torch.arange(page * PAGE, min(page + 64, count) * PAGE, device=self.device)
            rows = torch.randn(len(slots), heads, dim, device=self.device).bfloat16()
            store(rows, plane, slots, scale=scale, format=format, page_size=PAGE)
        return {name: plane} | ({} if scale is None else {scale_name or f"{name}_scale": scale})

    def _lengths(self, length: int) -> dict[str, Any]:
        rows = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.queries
        lengths = torch.full((self.batch,), length, dtype=torch.int32, device=self.device)
        return dict(cu_seqlens_q=rows, seq_lens=lengths, max_seqlen_q=self.queries, max_seq_len=max(length, 1))

    def attend(self, indices: Tensor | None, length: int) -> None:
        dim = self.layer.qk_dim
        common = self.planes | self.arguments | self.attend_arguments | self._lengths(length)
        if indices is None:
            common.pop("select_block", None)
        attend(self.q, scale=dim**-0.5, indices=indices, **common)

    def select(self, length: int) -> None:
        dim = self.index_q.shape[-1]
        common = self.index | self.arguments | self.select_arguments | self._lengths(length)
        select(self.index_q, self.weights, scale=dim**-0.5, **common)

    def calls(self) -> dict[str, Callable[[], None]]:
        """What is timed, by name."""
        return {
            "dense": lambda: self.attend(None, self.length),
            "select": lambda: self.select(self.length),
            "attend": lambda: self.attend(self.scattered, self.length),
            "adjacent": lambda: self.attend(self.adjacent, self.length),
            "empty select": lambda: self.select(0),
            "empty attend": lambda: self.attend(self.nothing, 0),
        }


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; they take turns, after a first round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            found[name].append(perf_counter() - start)
    return {name: times[1:] for name, times in found.items()}


class Yardsticks:
    """A product of bf16 matrices, and a copy that no cache holds."""

    def __init__(self, device: str) -> None:
        self.size, count = (512, 2**24) if device == "cpu" else (8192, 2**28)  # short, as other processes interrupt
        self.a, self.b = torch.randn(2, self.size, self.size, device=device).bfloat16()
        self.source = torch.zeros(count, device=device)
        self.target = torch.zeros_like(self.source)

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {"product": lambda: self.a @ self.b, "copy": lambda: self.target.copy_(self.source)}

    def limits(self, times: dict[str, list[float]]) -> Limits:
        """The most that was reached in a round."""
        return Limits(2 * self.size**3 / min(times["product"]), 2 * self.source.nbytes / min(times["copy"]))


def profile(
    model: Model, number: int, length: int, batch: int, queries: int, device: str, yardsticks: Yardsticks, rounds: int
) -> LayerProfile:
    """Layer ``number`` of ``model``, timed. Work is what the calls do: FLOPs of the pairs that they attend or score,
    and bytes in the planes' own formats, each entry read once, as query tokens share caches."""
    if not 1 <= queries <= length:
        raise ValueError(f"queries: expected 1 to {length}, the tokens of a sequence, got {queries}")
    step = Step(model, number, length, batch, queries, device)
    before = timed(yardsticks.calls(), device, YARDSTICKS * rounds)
    times = {name: median(some) for name, some in timed(step.calls(), device, rounds).items()}
    after = timed(yardsticks.calls(), device, YARDSTICKS * rounds)
    limit = yardsticks.limits({name: some + after[name] for name, some in before.items()})
    layer, spans = model.excerpt((number,)), [(length - queries, length)] * batch
    counts, whole = Counter(layer)(spans), Counter(dense(layer))(spans)

    def part(name: str, flops: float, size: float) -> Part:
        seconds = times[name]
        return Part(seconds, flops / seconds / limit.compute, size / seconds / limit.bandwidth)

    every = _attended(whole.least_read)
    pairs = counts.attended_pairs / whole.attended_pairs
    return LayerProfile(
        length,
        queries,
        limit,
        pairs,
        counts.effective_kv_ratio,
        part("dense", whole.flops["attend"], every),
        part("select", counts.flops["select"], counts.least_read["index"]),
        part("attend", counts.flops["attend"], min(_attended(counts.read), every)),
        selection=times["select"] - times["empty select"],
        scattered=times["attend"] - times["adjacent"],
        launches=times["empty select"] + times["empty attend"],
        rest=times["adjacent"] - times["empty attend"] - pairs * times["dense"],
    )


def _attended(read: dict[str, int]) -> int:
    """Bytes of the planes that attention reads."""
    return read.get("main", 0) + read.get("window", 0)
