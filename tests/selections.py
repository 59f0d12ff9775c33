"""What `docs/selections.md` names: for each line a small random batch, and what each row selects, found entry by entry.

Shares no code with the reference. Planes are those of `calls.py`: NaN in every slot that no sequence owns, and page
numbers far out of range in every column of a table that no row needs.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from calls import NOWHERE, Paged
from torch import Tensor

from sparse_attn import Selected

SELECTIONS = Path(__file__).parent.parent / "docs" / "selections.md"
INF = float("inf")

PHASES: dict[str, tuple[list[int], list[int]]] = {
    # tokens of each sequence, query rows of each sequence
    "prefill": ([19, 0, 70], [19, 0, 70]),
    "chunk": ([70, 20, 150], [5, 20, 4]),
    "decode": ([1, 150, 0, 73], [1, 1, 1, 1]),
    "draft": ([140, 9, 71], [4, 4, 6]),
}
SHARD = (8, 60)

TOKENS = {16: 4, 32: 8, 64: 16, 128: 16, 2048: 32}
SMALL: dict[str, dict[int, int]] = {
    # numbers of the page, and those that bite in sequences of 150 tokens
    **dict.fromkeys(("ratio", "span", "block", "select_block", "candidate_block"), TOKENS),
    "k": {2048: 12, 1024: 9, 513: 8, 512: 8, 129: 6, 96: 5, 64: 3, 16: 4, 3: 3},
    "keep_first": {16: 3},
    "keep_last": {1024: 5, 32: 2},
    "candidate_k": {2048: 4},
}


@dataclass(frozen=True)
class Line:
    """One line of the table of selectors."""

    selector: str
    q_heads: int
    key_heads: int
    weighted: bool
    k: int
    phases: tuple[str, ...]
    arguments: str
    lists: str
    attend: str

    def options(self, small: bool = True) -> dict[str, Any]:
        """The arguments, tensors by their names."""
        return _shrink(_words(self.arguments) | {"k": self.k}, small)

    def attend_options(self, small: bool = True) -> dict[str, Any]:
        return _shrink(_words(self.attend), small)


def _words(arguments: str) -> dict[str, Any]:
    names = re.findall(r"=([a-z]\w*)", arguments)
    return eval(f"dict({arguments})", {"__builtins__": {"dict": dict}}, {name: name for name in names})


def _shrink(options: dict[str, Any], small: bool) -> dict[str, Any]:
    return {name: SMALL.get(name, {}).get(value, value) if small else value for name, value in options.items()}


def lines() -> list[Line]:
    found = []
    for row in SELECTIONS.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in row.split("|")[1:-1]]
        if len(cells) != 9 or not re.fullmatch(r"\d+/\d+", cells[1]):
            continue
        q_heads, key_heads = map(int, cells[1].split("/"))
        phases = tuple(PHASES) if cells[4] == "all" else (cells[4],)
        weighted = {"yes": True, "no": False}[cells[2]]
        found.append(Line(cells[0], q_heads, key_heads, weighted, int(cells[3]), phases, *cells[5:8]))
    return found


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def bf16(x: float) -> float:
    """To nearest, ties to even, by the bits of a float32."""
    (bits,) = struct.unpack("I", struct.pack("f", x))
    kept, rest = bits >> 16, bits & 0xFFFF
    kept += rest > 0x8000 or (rest == 0x8000 and kept & 1)
    return struct.unpack("f", struct.pack("I", kept << 16))[0]


@dataclass
class Row:
    """What one row selects for one list."""

    indices: list[int]
    kept: list[int]
    scores: dict[int, float]
    blocks: list[int]


@dataclass
class Batch:
    """A random batch of one call, and what each row selects."""

    options: dict[str, Any]
    q_heads: int
    key_heads: int
    weighted: bool
    lengths: list[int]
    news: list[int]
    page: int = 4
    dim: int = 16
    seed: int = 0
    padding: int = 2
    draw: Callable[..., Tensor] = torch.randn
    """Random numbers of a shape, for queries, keys and weights."""
    dtype: torch.dtype = torch.float32
    faulty: Sequence[tuple[int, int]] = ()
    """(sequence, entry) of keys that are NaN."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rows = [
            (b, n - m + i) for b, (n, m) in enumerate(zip(self.lengths, self.news, strict=True)) for i in range(m)
        ]
        total = len(self.rows) + self.padding
        self.q = self.normal(total, self.q_heads, self.dim)
        self.weights = self.normal(total, self.q_heads) if self.weighted else None
        for padded in (self.q, self.weights):
            if padded is not None:
                padded[len(self.rows) :] = float("nan")
        self.scale = self.option("scale", 0.3)
        self.build_keys()
        self.names: dict[str, Any] = {}
        if "kv_range" in self.options:
            self.build_range()
        if "row_k" in self.options:
            budgets = [-(-len(self.visible(t)) // 4) for t in range(len(self.rows))] + [9] * self.padding
            self.names["row_k"] = torch.tensor(budgets, dtype=torch.int32)
        if "candidates" in self.options:
            self.build_candidates()

    def normal(self, *shape: int) -> Tensor:
        return self.draw(*shape, generator=self.generator).to(self.dtype).float()

    def option(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)

    @property
    def ratio(self) -> int:
        return self.option("ratio", 1)

    @property
    def span(self) -> int:
        return self.option("span", 0) or self.ratio

    @property
    def out_heads(self) -> int:
        return self.option("out_heads", 1)

    def build_keys(self) -> None:
        """Keys of every sequence, whole entries only, and the plane that holds them."""
        counts = [max((n - self.span) // self.ratio + 1, 0) if n >= self.span else 0 for n in self.lengths]
        wide = 2 if self.option("bounds", False) else 1
        self.keys = [self.normal(n, self.key_heads, wide * self.dim) for n in counts]
        for b, e in self.faulty:
            self.keys[b][e] = float("nan")
        if wide == 2:
            halves = [torch.stack(rows.chunk(2, -1)).sort(0).values for rows in self.keys]
            self.keys = [torch.cat(list(pair), -1) for pair in halves]
        self.key_scale = None
        if str(self.option("format", "")).startswith("int8"):
            self.keys = [(rows * 30).round().clamp(-127, 127) for rows in self.keys]
            scales = [self.normal(n, self.key_heads, 1).abs().half().float() for n in counts]
            self.key_scale = Paged(scales, self.page, torch.Generator().manual_seed(9)).plane[..., 0].half()
            paged = Paged(self.keys, self.page, torch.Generator().manual_seed(9))  # the same permutation of pages
            self.plane = paged.plane.nan_to_num(99).to(torch.int8)
            self.keys = [rows * scale for rows, scale in zip(self.keys, scales, strict=True)]
        else:
            paged = Paged(self.keys, self.page, self.generator)
            self.plane = paged.plane
        self.table = paged.table

    def build_range(self) -> None:
        first = {b: next(p for c, p in self.rows if c == b) for b, _ in self.rows}
        ranges: dict[str, Callable[[int, int], tuple[int, int]]] = {
            "prefix_range": lambda b, p: (0, first[b]),
            "shard_range": lambda b, p: (SHARD[0], min(p + 1, SHARD[1])),
        }
        given = self.options["kv_range"]
        self.range = ranges[given] if isinstance(given, str) else given
        rows = [self.range(b, p) for b, p in self.rows] + [(-5, NOWHERE)] * self.padding
        self.names["kv_range"] = torch.tensor(rows, dtype=torch.int32)

    def build_candidates(self) -> None:
        size, width = self.option("candidate_block", 8), self.option("candidate_width", 4)
        lists = self.option("candidate_heads", 1)
        hostile = torch.tensor([-1, -(1 << 31), (1 << 31) - 1, -9])
        blocks = hostile[torch.arange(width + 3) % 4].repeat(len(self.rows) + self.padding, lists, 1)
        for t, (b, _) in enumerate(self.rows):
            for o in range(lists):
                reach = -(-len(self.keys[b]) // size) + 1
                chosen = torch.randperm(reach, generator=self.generator)[:width]
                places = torch.randperm(width + 3, generator=self.generator)[: len(chosen)]
                blocks[t, o, places] = chosen
        # any strides
        self.names["candidates"] = torch.stack([blocks.int()] * 2, -1)[..., 0]

    def visible(self, t: int) -> list[int]:
        b, p = self.rows[t]
        if p < 0:
            return []
        if "kv_range" in self.names:
            low, high = self.range(b, p)
            return [e for e in range(len(self.keys[b])) if low <= e < high]
        return [e for e in range(len(self.keys[b])) if e * self.ratio + self.span <= self.tokens(t)]

    def tokens(self, t: int) -> int:
        b, p = self.rows[t]
        return p + 1 if self.option("causal", True) else self.lengths[b]

    def products(self, t: int, h: int) -> list[float]:
        """``q . key`` (or its bound) of query head ``h`` with every entry of the row's sequence."""
        q = self.q[t, h].double()
        keys = self.keys[self.rows[t][0]][:, h // (self.q_heads // self.key_heads)].double()
        if not self.option("bounds", False):
            return (keys @ q).tolist()
        low, high = keys[:, : self.dim], keys[:, self.dim :]
        return torch.where(q > 0, high * q, low * q).sum(-1).tolist()

    def entry_scores(self, t: int, o: int, entries: list[int], products: list[list[float]]) -> list[float]:
        """Score of each entry. ``products[h][i]`` belongs to query head ``h`` and ``entries[i]``."""
        group = self.q_heads // self.out_heads
        kind, narrow = self.option("score", "relu_sum"), self.option("score_dtype", "fp32") == "bf16"
        cut = bf16 if narrow else float
        sums: list[float] = []
        normalisers = []
        for h in range(o * group, (o + 1) * group):
            scaled = [self.scale * x for x in products[h] if x == x]
            top = max(scaled, default=0.0)
            normalisers.append((top, sum(math.exp(x - top) for x in scaled)))
        for i in range(len(entries)):
            terms = []
            for h in range(o * group, (o + 1) * group):
                weight = 1.0 if self.weights is None else float(self.weights[t, h])
                x = cut(products[h][i])
                if kind == "relu_sum" and x < 0:
                    x = 0.0
                if kind == "softmax_sum":
                    top, total = normalisers[h - o * group]
                    x = math.exp(self.scale * x - top) / total
                terms.append(cut(weight * x) if self.weights is not None else x)
            joined = max(terms) if kind == "max" else sum(terms)
            score = joined if kind == "softmax_sum" else cut(self.scale * joined)
            sums.append(-INF if any(x != x for x in terms) else score)
        return sums

    def unit_scores(self, t: int, o: int, units: dict[int, list[int]], entries: list[int]) -> dict[int, float]:
        heads = range(self.q_heads)
        every = [self.products(t, h) for h in heads]
        pool = self.option("pool", "none")
        if pool == "mean":  # the product with a mean key is the mean of the products
            means = [[sum(every[h][e] for e in some) / len(some) for some in units.values()] for h in heads]
            scores = self.entry_scores(t, o, list(units), means)
            return {unit: f32(score) for unit, score in zip(units, scores, strict=True)}
        scores = self.entry_scores(t, o, entries, [[every[h][e] for e in entries] for h in heads])
        by_entry = dict(zip(entries, scores, strict=True))
        join = sum if pool == "sum" else max
        return {unit: f32(join(by_entry[e] for e in some)) for unit, some in units.items()}

    def expected(self, t: int, o: int, scored: bool = False) -> Row:
        """What row ``t`` selects for list ``o``; ``scored``: values are asked for."""
        visible = entries = self.visible(t)
        if self.rows[t][1] < 0:
            return Row([], [], {}, [])
        if "candidates" in self.names:
            given = self.names["candidates"]
            blocks = given[t, o % given.shape[1]].tolist()
            entries = [e for e in visible if e // self.option("candidate_block", 8) in blocks]
        block, units, all_units = self.option("block", 1), {}, set()
        for e in visible:
            for stride in range(e, e + self.span // self.ratio):
                all_units.add(stride // block)
                if e in entries:
                    units.setdefault(stride // block, []).append(e)
        tail = set()
        if self.option("tail", "none") != "none":
            tail = {token // (self.ratio * block) for token in range(self.tokens(t))} - all_units
        room = self.options["k"]
        if "row_k" in self.names:
            room = max(min(room, int(self.names["row_k"][t])), 0)
        if self.option("tail", "none") == "reserved" and not tail:
            room = max(room - 1, 0)
        oldest_first = sorted(all_units | tail)
        newest_first = oldest_first[::-1]
        kept = newest_first[: max(self.option("keep_last", 0), len(tail))]
        kept += [u for u in oldest_first[: self.option("keep_first", 0)] if u not in kept]
        kept = kept[:room]
        scores = self.unit_scores(t, o, units, entries)
        count = self.option("candidate_k", 0)
        free = [u for u in units if u not in kept]
        if scored or count or self.option("order", "any") == "score" or len(kept) + len(free) > room:
            free = [u for u in free if scores[u] > -INF]
        free.sort(key=lambda u: (-scores[u], u))
        indices = sorted(kept + free[: room - len(kept)])
        best: list[int] = []
        if count and oldest_first:
            size = self.option("candidate_block", 8)
            maxima: dict[int, float] = {}
            for e, score in scores.items():
                maxima[e // size] = max(score, maxima.get(e // size, -INF))
            maxima[oldest_first[-1] // size] = INF
            best = [b for b in maxima if maxima[b] > -INF]
            best = sorted(sorted(best, key=lambda b: (-maxima[b], b))[:count])
        return Row(indices, kept, scores, best)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call."""
        starts = torch.tensor([sum(self.news[:b]) for b in range(len(self.news) + 1)], dtype=torch.int32)
        lens = torch.tensor(self.lengths, dtype=torch.int32)
        bounds = max(self.news, default=0), max(self.lengths, default=0)
        skip = ("k", "scale", "candidate_width", "candidate_heads")
        keywords = {n: self.names.get(n, x) for n, x in self.options.items() if n not in skip}
        if self.key_scale is not None:
            keywords["key_scale"] = self.key_scale
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        keywords.setdefault("format", plain)
        plane = self.plane if self.key_scale is not None else self.plane.to(self.dtype)
        weights = None if self.weights is None else self.weights.to(self.dtype)
        head = (self.q.to(self.dtype), weights, starts, lens, plane, self.table, self.options["k"], self.scale)
        return (*head, *bounds), keywords

    def expected_all(self, scored: bool = False) -> list[list[Row]]:
        return [[self.expected(t, o, scored) for o in range(self.out_heads)] for t in range(len(self.rows))]


def batch(line: Line, phase: str, small: bool = True) -> Batch:
    lengths, news = PHASES[phase]
    return Batch(line.options(small), line.q_heads, line.key_heads, line.weighted, lengths, news)


@cache
def expected_of(line: Line, phase: str, small: bool = True) -> list[list[Row]]:
    return batch(line, phase, small).expected_all()


def mistakes(batch: Batch, selected: Selected, expected: list[list[Row]], tolerance: tuple[float, float]) -> list[str]:
    """How a selection differs from the expected one. Units within the tolerance of the last selected score may differ,
    none if it is 0; so may values."""
    found = []
    atol, rtol = max(tolerance[0], 1e-6), max(tolerance[1], 1e-5)
    indices, counts = selected.indices.tolist(), selected.counts.tolist()
    for t in range(len(batch.q)):
        for o in range(batch.out_heads):
            where = f"row {t}, list {o}"
            row = expected[t][o] if t < len(expected) else Row([], [], {}, [])
            chosen, rest = indices[t][o][: counts[t][o]], indices[t][o][counts[t][o] :]
            if len(set(chosen)) != len(row.indices) or len(chosen) != len(row.indices) or set(rest) - {-1}:
                found.append(f"{where}: {indices[t][o]} of which {counts[t][o]}, expected {row.indices}")
                continue
            scores = row.scores | dict.fromkeys(row.kept, INF)
            order = batch.option("order", "any")
            pairs = [(-scores.get(u, INF) if order == "score" else 0.0, u) for u in chosen]
            if order != "any" and tolerance == (0.0, 0.0) and pairs != sorted(pairs):
                found.append(f"{where}: {chosen} is not in order of {order}")
            last = min((scores[u] for u in row.indices), default=0.0)
            slack = tolerance[0] + tolerance[1] * abs(last) if last < INF else 0.0
            for u in set(chosen) ^ set(row.indices):
                if slack == 0 or not abs(scores.get(u, INF) - last) <= slack:
                    found.append(f"{where}: {u} of score {scores.get(u)}, the last selected has {last}")
            if selected.values is not None:
                values = selected.values[t, o].tolist()
                for u, value in zip(chosen, values, strict=False):
                    score = scores.get(u, math.nan)
                    if value != score and not abs(value - score) <= atol + rtol * abs(score):
                        found.append(f"{where}: {u} has value {value}, expected {score}")
                if any(value != -INF for value in values[len(chosen) :]):
                    found.append(f"{where}: values after the last index: {values}")
            if selected.candidate_blocks is not None:
                blocks = selected.candidate_blocks[t, o].tolist()
                if blocks != row.blocks + [-1] * (len(blocks) - len(row.blocks)):
                    found.append(f"{where}: blocks {blocks}, expected {row.blocks}")
    return found
