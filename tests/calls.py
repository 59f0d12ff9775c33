"""What `docs/calls.md` names: for each line a small random batch with the arguments it uses, and what each row attends.

The planes are built from plain per-sequence arrays. Every slot that no sequence owns holds NaN, and every page-table
column that no row needs holds a page number far out of range, so a read of either is seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CALLS = Path(__file__).parent.parent / "docs" / "calls.md"
NOWHERE = 1 << 30

PHASES: dict[str, tuple[list[int], list[int]]] = {
    # tokens of each sequence, query rows of each sequence
    "prefill": ([41, 0, 150], [41, 0, 150]),
    "chunk": ([150, 33, 301], [5, 33, 9]),
    "decode": ([1, 300, 0, 129], [1, 1, 1, 1]),
    "draft": ([290, 9, 131], [4, 4, 6]),
}
REPLAY, PREFIX, SHARD = 40, 24, (16, 140)


@dataclass(frozen=True)
class Line:
    """One line of the table of layers."""

    layer: str
    q_heads: int
    kv_heads: int
    v_dim: int
    phases: tuple[str, ...]
    arguments: str


def lines() -> list[Line]:
    found = []
    for row in CALLS.read_text().splitlines():
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        if len(cells) != 6 or not re.fullmatch(r"\d+/\d+", cells[1]):
            continue
        q_heads, kv_heads = map(int, cells[1].split("/"))
        phases = tuple(PHASES) if cells[3] == "all" else (cells[3],)
        found.append(Line(cells[0], q_heads, kv_heads, int(cells[2]), phases, cells[4].strip("`")))
    return found


@dataclass
class Paged:
    """Rows of every sequence, and the same rows in a shuffled paged plane with NaN between them."""

    logical: list[Tensor]  # per sequence [entries, heads, dim]
    page: int
    generator: torch.Generator
    table: Tensor = field(init=False)
    plane: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = [-(-len(rows) // self.page) for rows in self.logical]
        pool = torch.randperm(sum(counts) + 3, generator=self.generator).tolist()
        _, heads, dim = self.logical[0].shape
        self.plane = torch.full((len(pool), self.page, heads, dim), float("nan"))
        self.table = torch.full((len(counts), max(counts) + 2), NOWHERE, dtype=torch.int32)
        for b, rows in enumerate(self.logical):
            for i, part in enumerate(rows.split(self.page)):
                self.table[b, i] = pool.pop()
                self.plane[self.table[b, i], : len(part)] = part


class Batch:
    """One line in one phase: every name its arguments use, and the entries that each row attends."""

    def __init__(
        self, line: Line, phase: str, page: int, seed: int = 0, padding: int = 2, win_page: int | None = None
    ) -> None:
        self.line, self.phase = line, phase
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths, rows = PHASES[phase]
        self.rows = [(b, n - m + i) for b, (n, m) in enumerate(zip(self.lengths, rows, strict=True)) for i in range(m)]
        starts = [sum(rows[:b]) for b in range(len(rows) + 1)]
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.bounds = max(rows), max(self.lengths)
        self.padding = padding
        self.page, self.win_page = page, win_page or page + 1
        ratio = re.search(r"\bratio=(\d+)", line.arguments)
        self.ratio = int(ratio[1]) if ratio else 1
        block = re.search(r"select_block=(\d+)", line.arguments)
        self.block = int(block[1]) if block else 1
        mla, window = "latent" in line.arguments or "c_kv" in line.arguments, "window_kv" in line.arguments
        self.qk_dim = 576 if mla else 512 if window else line.v_dim
        self.scale = self.qk_dim**-0.5
        self.q = self.normal(len(self.rows) + padding, line.q_heads, self.qk_dim)
        self.q[len(self.rows) :] = float("nan")
        self.names: dict[str, Any] = {}
        self.main: tuple[list[Tensor], list[Tensor]] | None = None
        self.window: tuple[list[Tensor], list[Tensor]] | None = None
        for build in (self.build_mla, self.build_window, self.build_gqa, self.build_ranges, self.build_indices):
            build()
        if "sinks" in line.arguments:
            self.names["sinks"] = self.normal(line.q_heads) * 3

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def sequences(self, ratio: int, heads: int, dim: int) -> list[Tensor]:
        return [self.normal(n // ratio, heads, dim) for n in self.lengths]

    def uses(self, name: str) -> bool:
        return re.search(rf"=\s*{name}\b", self.line.arguments) is not None

    def build_mla(self) -> None:
        if not (self.uses("latent") or self.uses("c_kv")):
            return
        latent = Paged(self.sequences(1, 1, 576), self.page, self.generator)
        self.main = latent.logical, latent.logical
        self.names |= {"latent": latent.plane, "pages": latent.table}
        self.names |= {"c_kv": latent.plane[..., :512], "k_rope": latent.plane[..., 512:]}
        if "win=latent" in self.line.arguments:
            self.window = self.main

    def build_window(self) -> None:
        if not self.uses("window_kv"):
            return
        window = Paged(self.sequences(1, 1, 512), self.win_page, self.generator)
        self.window = window.logical, window.logical
        self.names |= {"window_kv": window.plane, "win_pages": window.table}
        if self.uses("compressed"):
            compressed = Paged(self.sequences(self.ratio, 1, 512), self.page, self.generator)
            self.main = compressed.logical, compressed.logical
            self.names |= {"compressed": compressed.plane, "pages": compressed.table}

    def build_gqa(self) -> None:
        if not self.uses("k"):
            return
        heads, dim = self.line.kv_heads, self.line.v_dim
        rows = self.sequences(1, heads, 2 * dim)
        if self.uses("k_scale"):  # integers and scales, so that the plane holds exactly what the oracle reads
            rows = [(r * 30).round().clamp(-127, 127) for r in rows]
            scales = [(self.normal(len(r), heads, 2).abs() / 32).half().float() for r in rows]
            scale = Paged(scales, self.page, torch.Generator().manual_seed(9))
            rows_plane = Paged(rows, self.page, torch.Generator().manual_seed(9))  # the same permutation of pages
            plane = rows_plane.plane.nan_to_num(99).to(torch.int8)
            self.names |= {"k_scale": scale.plane[..., 0].half(), "v_scale": scale.plane[..., 1].half()}
            rows = [
                torch.cat([r[..., :dim] * s[..., :1], r[..., dim:] * s[..., 1:]], -1)
                for r, s in zip(rows, scales, strict=True)
            ]
            table = rows_plane.table
        else:
            paged = Paged(rows, self.page, self.generator)
            plane, table = paged.plane, paged.table
        self.main = [r[..., :dim] for r in rows], [r[..., dim:] for r in rows]
        # one pool that holds k and v side by side: both planes are strided views
        self.names |= {"k": plane[..., :dim], "v": plane[..., dim:], "pages": table}

    def build_ranges(self) -> None:
        first = {b: next(p for c, p in self.rows if c == b) for b, _ in self.rows}
        ranges: dict[str, Callable[[int, int], tuple[int, int]]] = {
            "span_range": lambda b, p: (0, (p - 15) // 16 if p >= 31 else 0),
            "last_range": lambda b, p: (p - 95, p + 1),
            "prefix_range": lambda b, p: (0, min(PREFIX, p + 1) if self.phase != "draft" else first[b]),
            "rest_range": lambda b, p: (PREFIX, p + 1),
            "replay_range": lambda b, p: (max(p - 127, REPLAY), p + 1),
            "shard_range": lambda b, p: (SHARD[0], min(p + 1, SHARD[1])),
            "step_range": lambda b, p: (first[b], p + 1),
            "draft_range": lambda b, p: (first[b] - 128, self.lengths[b]),
        }
        used = re.findall(r"(kv|win)_range=(\w+)", self.line.arguments)
        self.range: dict[str, Callable[[int, int], tuple[int, int]]] = {kind: ranges[name] for kind, name in used}
        for _, name in used:
            rows = [ranges[name](b, p) for b, p in self.rows] + [(-5, NOWHERE)] * self.padding
            self.names[name] = torch.tensor(rows, dtype=torch.int32)

    def visible(self, b: int, p: int) -> tuple[int, int]:
        """Range of the main plane by the line's own words."""
        if "kv" in self.range:
            return self.range["kv"](b, p)
        return 0, (self.lengths[b] if "causal=False" in self.line.arguments else p + 1) // self.ratio

    def build_indices(self) -> None:
        name = next((n for n in ("topk", "tokens", "blocks", "path", "ancestors") if self.uses(n)), None)
        if name is None:
            return
        per_query = "per query head" in self.words()
        heads = {"topk": 1, "path": 1, "ancestors": 1}.get(name, self.line.q_heads if per_query else self.line.kv_heads)
        width = {"topk": 24, "tokens": 30, "blocks": 4, "path": max(self.lengths), "ancestors": 3}[name]
        ids = torch.randint(-3, NOWHERE, (heads, len(self.rows) + self.padding, width), generator=self.generator)
        for t, (b, p) in enumerate(self.rows):
            low, high = self.visible(b, p)
            for h in range(heads):
                if name in ("path", "ancestors"):  # a chain: every second token of this step, and the token itself
                    step = [x for c, x in self.rows if c == b]
                    chain = [x for x in step if x <= p and (p - x) % 2 == 0]
                    chosen = torch.tensor(([*range(step[0])] if name == "path" else []) + chain)
                else:
                    reach = -(-(max(high, 0) + 5) // self.block)  # a little past what is visible
                    chosen = torch.randperm(reach, generator=self.generator)
                ids[h, t, :] = torch.tensor([-1, -7, -(1 << 31), (1 << 31) - 1])[torch.arange(width) % 4]
                keep = torch.randperm(width, generator=self.generator)[: len(chosen)].sort().values
                ids[h, t, keep] = chosen[: len(keep)]
        # heads outermost in memory: indices may have any strides
        self.names[name] = ids.to(torch.int32).transpose(0, 1)
        if self.uses("topk_counts"):
            counts = torch.randint(0, width + 1, (len(self.rows) + self.padding, 1), generator=self.generator)
            self.names["topk_counts"] = counts.to(torch.int32)
        self.indices = name

    def words(self) -> str:
        row = next(r for r in CALLS.read_text().splitlines() if r.startswith(f"| {self.line.layer} |"))
        return row.rsplit(" | ", 1)[1]

    def attended(self, t: int, head: int) -> tuple[list[int], list[int]]:
        """Entries of the window plane and of the main plane that row ``t`` attends with one query head."""
        b, p = self.rows[t]
        window: list[int] = []
        if self.window is not None:
            low, high = self.range["win"](b, p) if "win" in self.range else (p - 127, p + 1)
            window = list(range(max(low, 0), high))
            if "win_indices" in self.line.arguments:
                window = [e for e in self.names["ancestors"][t, 0].tolist() if e in window]
        if self.main is None:
            return window, []
        low, high = self.visible(b, p)
        main = list(range(max(low, 0), high))
        if re.search(r"\bindices=", self.line.arguments.replace("win_indices", "")):
            ids = self.names[self.indices]
            row = ids[t, head * ids.shape[1] // self.line.q_heads].tolist()
            if "topk_counts" in self.names:
                row = row[: int(self.names["topk_counts"][t, 0])]
            chosen = [b * self.block + o for b in row if b >= 0 and b * self.block < high for o in range(self.block)]
            main = [e for e in chosen if low <= e < high]
        return window, main

    def expected(self) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` in float64, from the entries of each row."""
        heads, v_dim = self.line.q_heads, self.line.v_dim
        groups = self.line.kv_heads
        if hasattr(self, "indices"):
            groups = max(groups, self.names[self.indices].shape[1])
        together = heads // groups  # heads that attend the same entries
        out = torch.zeros(len(self.q), heads, v_dim, dtype=torch.float64)
        lse = torch.full((len(self.q), heads), float("-inf"), dtype=torch.float64)
        for t, (b, p) in enumerate(self.rows):
            if p < 0:
                continue
            for h in range(0, heads, together):
                kv_head = h // (heads // self.line.kv_heads)
                keys, values = [], []
                for plane, entries in zip((self.window, self.main), self.attended(t, h), strict=True):
                    if plane is not None and entries:
                        keys.append(plane[0][b][entries, kv_head])
                        values.append(plane[1][b][entries, kv_head, :v_dim])
                if not keys:
                    continue
                some = slice(h, h + together)
                scores = self.q[t, some].double() @ torch.cat(keys).double().T * self.scale
                largest = scores.amax(-1, keepdim=True)
                weights = torch.exp(scores - largest)
                total = weights.sum(-1, keepdim=True)
                lse[t, some] = (largest + total.log())[:, 0]
                if "sinks" in self.names:
                    total = total + torch.exp(self.names["sinks"][some, None].double() - largest)
                out[t, some] = weights @ torch.cat(values).double() / total
        return out, lse

    def arguments(self, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the line, always with ``return_lse``."""
        names = {n: x.to(dtype) if x.is_floating_point() and n in PLANES else x for n, x in self.names.items()}
        keywords = eval(f"dict({self.line.arguments})", {"__builtins__": {"dict": dict}}, names)
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        if "kv" in keywords:
            keywords.setdefault("format", plain)
        if "win" in keywords:
            keywords["win_format"] = plain
        keywords["return_lse"] = True
        leading = (self.q.to(dtype), self.cu_seqlens_q, self.seq_lens, self.scale, self.line.v_dim, *self.bounds)
        return leading, keywords


PLANES = ("latent", "c_kv", "k_rope", "window_kv", "compressed", "k", "v")
