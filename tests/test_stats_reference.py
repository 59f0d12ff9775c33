"""FLOPs and bytes of `stats` against those of the references: what they multiply, read and write, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_stats import MODELS, kinds, small
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sparse_attn import planes
from sparse_attn.models import Layer, Model, Plane
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.compress import Compress
from sparse_attn.ops.select import Select, Selected
from sparse_attn.reference.attend import attend
from sparse_attn.reference.compress import compress
from sparse_attn.reference.select import select
from sparse_attn.serving.stats import Counter

DIMS = {1024: 16, 576: 12, 512: 8, 256: 32, 128: 16}
FP32 = {"main": "fp32", "window": "fp32", "index": "fp32"}
SPANS = [(37, 38), (0, 12), (50, 53), (7, 8), (95, 97), (63, 64)]
PAGE = 4


def tiny(model: Model) -> Model:
    """The plan with short rows and few heads."""

    def layer(old: Layer) -> Layer:
        several = old.kv_heads > 1
        q_heads = old.q_heads if old.q_heads < 10 else 2 * old.kv_heads
        chosen = old.selection
        if chosen:
            heads = min(chosen.heads, q_heads) if several else 3
            chosen = replace(chosen, heads=heads, dim=DIMS.get(chosen.dim, chosen.dim))
        rows = [tuple(DIMS.get(row, row) for row in plane.rows) for plane in old.planes]
        cut = tuple(replace(plane, rows=row) for plane, row in zip(old.planes, rows, strict=True))
        qk_dim, v_dim = (DIMS.get(dim, dim) for dim in (old.qk_dim, old.v_dim))
        return replace(old, q_heads=q_heads, qk_dim=qk_dim, v_dim=v_dim, planes=cut, selection=chosen)

    return Model(model.name, tuple(map(layer, model.layers)))


class Traffic:
    """Bytes that references read and write, by the kind of plane, and FLOPs of their matrix products."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}

    def plane(self, kind: str, entries: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
        """A plane for every sequence and its page table."""
        pages = -(-entries // PAGE) + 1
        table = torch.arange(len(SPANS) * pages, dtype=torch.int32).view(len(SPANS), pages)
        data = torch.randn(table.numel(), PAGE, heads, dim)
        self.kinds[data.data_ptr()] = kind
        self.keep = [*getattr(self, "keep", []), data]  # an address that is used again would count as this plane
        return data, table

    @contextmanager
    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlopCounterMode]:
        rows, put_rows = planes.Plane.rows, planes.Plane.put_rows

        def note(into: dict[str, int], data: Tensor, entries: int, heads: int) -> None:
            kind = self.kinds[data.data_ptr()]
            into[kind] = into.get(kind, 0) + entries * heads * data.shape[-1] * 4

        def watched_rows(self_: planes.Plane, at: tuple[Tensor, Tensor], heads: slice = planes.EVERY) -> Tensor:
            found = rows(self_, at, heads)
            note(self.read, self_.data, *found.shape[:2])
            return found

        def watched_put(self_: planes.Plane, at: tuple[Tensor, Tensor], values: Tensor) -> None:
            note(self.written, self_.data, *values.shape[:2])
            put_rows(self_, at, values)

        products = {torch.ops.aten.mv: lambda a, b, **_: 2 * a[0] * a[1]}
        with monkeypatch.context() as patched, FlopCounterMode(display=False, custom_mapping=products) as flops:
            patched.setattr(planes.Plane, "rows", watched_rows)
            patched.setattr(planes.Plane, "put_rows", watched_put)
            yield flops


class Step:
    """One layer's calls in one step, on random tensors."""

    def __init__(self, model: Model, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.layer, self.monkeypatch = model, model.layers[number], monkeypatch
        self.traffic = Traffic()
        news = [after - before for before, after in SPANS]
        self.tokens = sum(news)
        starts = torch.tensor([sum(news[:b]) for b in range(len(news) + 1)], dtype=torch.int32)
        lengths = torch.tensor([after for _, after in SPANS], dtype=torch.int32)
        self.batch = dict(
            cu_seqlens_q=starts, seq_lens=lengths, max_seqlen_q=max(news), max_seq_len=max(lengths).item()
        )
        self.flops: dict[str, int] = {}

    def entries(self, ratio: int) -> int:
        return int(self.batch["max_seq_len"]) // ratio

    def index_rows(self, plane: Plane) -> list[tuple[Tensor, Tensor]]:
        """The index plane: keys, or bounds, and values if attention reads it."""
        apart = self.layer.attends_index
        dims = plane.rows if apart else (sum(plane.rows),)
        return [self.traffic.plane("index", self.entries(plane.ratio), plane.heads, dim) for dim in dims]

    def select(self, owner: Layer, candidates: Tensor | None, made: bool, index: tuple[Tensor, Tensor]) -> Selected:
        chosen, plane = owner.selection, self.model.plane("index", owner.number)
        assert chosen
        main = self.model.plane("main", owner.number)
        block = chosen.block * main.ratio // plane.ratio
        budgets, k = None, chosen.k
        if chosen.share:
            seen = [p + 1 for before, after in SPANS for p in range(before, after)]
            units = [-(-n // (plane.ratio * block)) for n in seen]
            budgets = [max(k, -(-n * chosen.share.numerator // chosen.share.denominator)) for n in units]
            k = max(budgets)
        a = Select(
            q=torch.randn(self.tokens, chosen.heads, chosen.dim),
            weights=torch.rand(self.tokens, chosen.heads),
            keys=index[0],
            page_table=index[1],
            k=k,
            scale=0.3,
            format="fp32",
            ratio=plane.ratio,
            span=chosen.span,
            bounds=chosen.bounds,
            row_k=None if budgets is None else torch.tensor(budgets, dtype=torch.int32),
            score="dot" if chosen.bounds else "softmax_sum",
            out_heads=chosen.out_heads,
            block=block,
            pool=chosen.pool if chosen.pool != "none" or block == 1 else "max",
            keep_first=chosen.keep_first,
            keep_last=chosen.keep_last,
            tail=chosen.tail,
            candidates=candidates,
            candidate_block=chosen.candidate_block or 8,
            candidate_k=chosen.candidate_k if made else 0,
            **self.batch,
        )
        lists = (self.tokens, chosen.out_heads)
        found = Selected(
            torch.empty(*lists, k, dtype=torch.int32),
            torch.empty(lists, dtype=torch.int32),
            candidate_blocks=torch.empty(*lists, chosen.candidate_k, dtype=torch.int32) if made else None,
        )
        select(a, found.indices, found.counts, None, found.candidate_blocks)
        return found

    def attend(self, **arguments) -> None:
        layer = self.layer
        q, out = (
            torch.randn(self.tokens, layer.q_heads, layer.qk_dim),
            torch.empty(self.tokens, layer.q_heads, layer.v_dim),
        )
        formats = dict(format="fp32", win_format="fp32")
        attend(Attend(q, scale=0.3, v_dim=layer.v_dim, **self.batch, **(formats | arguments)), out, None)

    def kv(self, rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Keys, and values if they are apart, as arguments of ``attend``."""
        apart = {"v": rows[1][0]} if len(rows) > 1 else {}
        return {"kv": rows[0][0], "page_table": rows[0][1], **apart}

    def run(self) -> None:
        """Select, attend and compress, each watched."""
        model, layer, traffic = self.model, self.layer, self.traffic
        arguments: dict[str, object] = {}
        main = window = None
        if "main" in layer.reads:
            plane = model.plane("main", layer.number)
            main = [traffic.plane("main", self.entries(plane.ratio), plane.heads, dim) for dim in plane.rows]
            arguments |= self.kv(main) | {"ratio": plane.ratio}
        if "window" in layer.reads:
            window = traffic.plane("window", self.entries(1), 1, *model.plane("window", layer.number).rows)
            arguments |= {"win": window[0], "win_page_table": window[1], "window": layer.window}
        if layer.selection_owner is not None:
            owner = model.layers[layer.selection_owner]
            index = self.index_rows(model.plane("index", owner.number))
            candidates = None
            if owner.candidate_owner not in (None, owner.number):
                candidates = self.select(model.layers[owner.candidate_owner], None, True, index[0]).candidate_blocks
            with traffic.watch(self.monkeypatch) as flops:
                selected = self.select(owner, candidates, owner.candidate_owner == owner.number, index[0])
            if layer.index_owner is None:
                traffic.read.clear()  # another layer's work
            else:
                self.flops["select"] = flops.get_total_flops()
            arguments |= {"indices": selected.indices, "index_counts": selected.counts}
            arguments["select_block"] = owner.selection.block
        with traffic.watch(self.monkeypatch) as flops:
            self.attend(**arguments)
            if layer.attends_index:  # NSA: two branches more, with a softmax each
                plane = model.plane("index", layer.number)
                past = [p + 1 for before, after in SPANS for p in range(before, after)]
                strides = layer.selection.span // plane.ratio
                ends = [max(n // plane.ratio - strides + 1, 0) for n in past]
                self.attend(**self.kv(index), kv_range=ranges([0] * len(ends), ends))
                self.attend(**self.kv(main), kv_range=ranges([max(n - layer.window, 0) for n in past], past))
        self.flops["attend"] = flops.get_total_flops()
        self.compress()

    def compress(self) -> None:
        """The planes that have a state: main, then index."""
        states = [plane for plane in self.layer.planes if plane.kind == "state"]
        for kind, plane in zip(("main", "index"), states, strict=False):
            target = self.model.plane(kind, self.layer.number)
            (dim,), (width, _) = target.rows, plane.rows
            span = max(plane.entries, target.ratio)
            data, table = self.traffic.plane(kind, self.entries(target.ratio), 1, dim)
            state, state_table = self.traffic.plane("state", self.entries(1), 1, 2 * width)
            rows, gates = torch.randn(2, self.tokens, 1, width).unbind()
            pages = dict(plane=data, page_table=table, state=state, state_page_table=state_table, format="fp32")
            rewind = plane.entries - (span - 1)
            done = sum(after // target.ratio - before // target.ratio for before, after in SPANS)
            self.flops["compress"] = self.flops.get("compress", 0) + 2 * done * span * dim  # a weight for each element
            a = Compress(rows, gates, stride=target.ratio, span=span, max_rewind=rewind, **pages, **self.batch)
            with self.traffic.watch(self.monkeypatch):
                compress(a, None)


def ranges(starts: list[int], ends: list[int]) -> Tensor:
    return torch.tensor([*zip(starts, ends, strict=True)], dtype=torch.int32)


CASES = [(name, number) for name, model in MODELS.items() for number in kinds(small(model)) if "pairs" not in name]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_counts_are_those_of_the_references(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = tiny(small(MODELS[name]))
    step = Step(model, number, monkeypatch)
    step.run()
    layer, found = model.layers[number], Counter(model, FP32).layers(SPANS)[number]
    read = {kind: size for kind, size in found.read.items() if kind != "dense"}
    chosen = layer.selection
    if chosen and layer.index_owner is not None and not layer.attends_index:
        # the reference reads a key anew for each list
        read["index"] *= max(chosen.out_heads // model.plane("index", number).heads, 1)
    assert step.traffic.read == read
    written = {kind: size for kind, size in found.written.items() if kind in step.traffic.written}
    assert step.traffic.written == written
    assert bool(written) == ("state" in found.written)
    assert found.flops["attend"] == step.flops["attend"] > 0
    assert found.flops.get("compress", 0) == step.flops.get("compress", 0)
    if chosen and chosen.bounds:  # no matrix product in the reference: both bounds by the query
        assert found.flops["select"] == found.pairs["scored"] * chosen.heads * 2 * sum(
            model.plane("index", number).rows
        )
    else:
        assert found.flops.get("select", 0) == step.flops.get("select", 0)
