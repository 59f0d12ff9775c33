"""The ops as PyTorch sees them: schema, fake kernels, compile, export, and what a call costs before its kernel."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import sparse_attn
from sparse_attn import layout, library
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.compress import Compress
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select import Select
from sparse_attn.ops.select_merge import SelectMerge
from sparse_attn.ops.store import Store

OPS = torch.ops.sparse_attn


def gqa(tokens: int = 5, batch: int = 2, dtype: torch.dtype = torch.float32, page: int = 4) -> tuple[tuple, dict]:
    """A small GQA call with token selection: leading and keyword arguments."""
    lengths = torch.tensor([9 + b for b in range(batch)], dtype=torch.int32)
    rows = [tokens // batch + (b < tokens % batch) for b in range(batch)]
    starts = torch.tensor([sum(rows[:b]) for b in range(batch + 1)], dtype=torch.int32)
    kv, v = torch.randn(13 * batch, page, 2, 16, dtype=dtype), torch.randn(13 * batch, page, 2, 16, dtype=dtype)
    table = torch.randperm(13 * batch, dtype=torch.int32).view(batch, 13)
    indices = torch.randint(-1, 9, (tokens, 2, 4), dtype=torch.int32)
    leading = (torch.randn(tokens, 4, 16, dtype=dtype), starts, lengths, 0.25, 16, max(rows), 9 + batch)
    format = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return leading, dict(kv=kv, v=v, page_table=table, format=format, indices=indices, return_lse=True)


def window() -> tuple[tuple, dict]:
    leading, kwargs = gqa()
    table = kwargs["page_table"]
    return leading, dict(
        win=torch.randn(24, 4, 1, 16), win_page_table=table, win_format="fp32", window=3, sinks=torch.randn(4)
    )


def packed() -> tuple[tuple, dict]:
    """V4.1: a planar and an interleaved plane, one softmax."""
    leading, kwargs = gqa()
    leading = (torch.randn(5, 4, 512), *leading[1:4], 512, *leading[5:])
    planes = {}
    for name, format in (("kv", "fp4_v41_planar"), ("win", "fp8_v41")):
        plane = torch.zeros(layout.FORMATS[format].shape(26, 4, 1, 512), dtype=torch.uint8)
        sparse_attn.store(torch.randn(104, 1, 512), plane, torch.arange(104), format=format, page_size=4)
        planes[name] = plane
    table = kwargs["page_table"]
    return leading, dict(
        **planes,
        page_table=table,
        format="fp4_v41_planar",
        page_size=4,
        win_page_table=table,
        win_format="fp8_v41",
        window=3,
        sinks=torch.randn(4),
        return_lse=True,
    )


def index(tokens: int = 5, batch: int = 2, **options) -> tuple[tuple, dict]:
    """A small call of a lightning indexer: leading and keyword arguments."""
    (_, starts, lengths, *_, longest, most), kwargs = gqa(tokens, batch)
    keys, table = torch.randn(13 * batch, 4, 1, 16), kwargs["page_table"]
    leading = (torch.randn(tokens, 4, 16), torch.randn(tokens, 4), starts, lengths, keys, table, 3, 0.25, longest, most)
    return leading, dict(options, format="fp32")


def shards(tokens: int = 5, batch: int = 2) -> tuple[tuple, dict]:
    """The selections of two shards: leading and keyword arguments of a merge."""
    indices = torch.randint(-1, 9, (2, tokens, 1, 4), dtype=torch.int32)
    offsets = torch.tensor([[0], [9]], dtype=torch.int32).expand(2, tokens)
    return (indices, torch.randn(2, tokens, 1, 4), offsets, 5), dict(order="score")


MADE = dict(candidate_k=2, candidate_block=4, return_values=True)


@pytest.mark.parametrize("options", [{}, MADE], ids=["plain", "values and candidates"])
def test_opcheck_select(options: dict) -> None:
    leading, kwargs = index(**options)
    opcheck(OPS.select.default, leading, kwargs)
    indices, counts, values, blocks = OPS.select(*leading, **kwargs)
    given = dict(values=values, candidate_blocks=blocks) if options else {}
    opcheck(OPS.select.out, leading, dict(kwargs, indices=indices, counts=counts, **given))


def test_opcheck_select_merge() -> None:
    leading, kwargs = shards()
    opcheck(OPS.select_merge.default, leading, kwargs)
    names = ("indices", "counts", "values")
    outputs = dict(zip(names, OPS.select_merge(*leading, **kwargs), strict=True))
    opcheck(OPS.select_merge.out, leading, dict(kwargs, **outputs))


@pytest.mark.parametrize("call", [gqa, window, packed], ids=["main", "window", "packed"])
def test_opcheck_attend(call) -> None:
    leading, kwargs = call()
    opcheck(OPS.attend.default, leading, kwargs)
    out = torch.empty(leading[0].shape)
    lse = torch.empty(leading[0].shape[:2]) if kwargs.get("return_lse") else None
    opcheck(OPS.attend.out, leading, dict(kwargs, out=out, lse=lse))


def plane_of(format: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, a plane of 3 pages of 4 entries, and its scales."""
    f = layout.FORMATS[format]
    rows = torch.randn(3, 1 if f.packed else 2, f.dim or 16)
    plane = torch.zeros(f.shape(3, 4, rows.shape[1], rows.shape[2]), dtype=getattr(torch, f.dtype))
    return rows, plane, (torch.zeros(3, 4, 2, dtype=torch.half) if f.scale_dtype else None)


FORMATS = ["fp32", "int8", "int8_index_h", "int4_index_h", "fp8_v32", "fp8_v4_planar", "fp4_index"]


@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_store_and_load(format: str) -> None:
    rows, plane, scale = plane_of(format)
    slots = torch.tensor([5, -1, 2])
    kwargs = dict(scale=scale, format=format, page_size=4)
    opcheck(OPS.store.default, (rows, plane, slots), kwargs)
    opcheck(OPS.load.default, (plane, slots), kwargs)
    opcheck(OPS.load.default, (plane, slots), dict(kwargs, dtype=torch.bfloat16))
    opcheck(OPS.load.out, (plane, slots), dict(kwargs, out=torch.empty(3, *rows.shape[1:])))


@pytest.mark.parametrize("formats", [("fp8_v41", "fp8_v41_planar"), ("fp32", "int8"), ("int8", "int8_index_h")])
def test_opcheck_convert(formats: tuple[str, str]) -> None:
    (_, src, src_scale), (_, dst, dst_scale) = map(plane_of, formats)
    kwargs = dict(src_scale=src_scale, dst_scale=dst_scale, src_format=formats[0], dst_format=formats[1])
    kwargs |= dict(src_page_size=4, dst_page_size=4)
    opcheck(OPS.convert.default, (src, dst), kwargs)
    slots = torch.tensor([5, -1, 2])
    opcheck(OPS.convert.default, (src, dst, slots, slots), kwargs)


def compression(tokens: int = 5, batch: int = 2) -> tuple[tuple, dict]:
    """A step of overlapping entries: leading and keyword arguments."""
    (_, starts, lengths, *_, longest, most), kwargs = gqa(tokens, batch)
    table = kwargs["page_table"]
    rows, gates = torch.randn(tokens, 1, 32), torch.randn(tokens, 1, 32)
    leading = (rows, gates, starts, lengths, torch.zeros(13 * batch, 2, 1, 16), table, 4, longest, most)
    state = torch.randn(13 * batch, 4, 1, 64)
    kwargs = dict(span=8, bias=torch.randn(4, 32), state=state, state_page_table=table.clone(), norm=torch.randn(16))
    return leading, dict(kwargs, cos_sin=torch.randn(99, 8), format="fp32", entries=tokens // 4 + batch)


def test_opcheck_compress() -> None:
    leading, kwargs = compression()
    opcheck(OPS.compress.default, leading, kwargs)
    opcheck(OPS.compress.default, leading, dict(kwargs, entries=0))
    opcheck(OPS.compress.out, leading, dict(kwargs, latent=torch.empty(kwargs["entries"], 1, 16)))


def test_compress_compiles_for_all_shapes() -> None:
    """The plane and the state are written in the graph too."""
    compiled = torch.compile(sparse_attn.compress, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, batch in ((5, 2), (11, 3), (16, 4)):
        leading, kwargs = compression(tokens, batch)
        plane, state = leading[4].clone(), kwargs["state"].clone()
        expected = OPS.compress(*leading[:4], plane, *leading[5:], **dict(kwargs, state=state))
        assert torch.equal(compiled(*leading, **kwargs), expected)
        assert torch.equal(leading[4], plane) and torch.equal(kwargs["state"], state)


def test_opcheck_merge() -> None:
    outs, lses = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4)
    kwargs = dict(sinks=torch.randn(4), base="2")
    opcheck(OPS.merge.default, (outs, lses), kwargs)
    opcheck(OPS.merge.out, (outs, lses), dict(kwargs, out=torch.empty(5, 4, 16), lse=torch.empty(5, 4)))


def test_out_variant_gives_the_same_bits() -> None:
    leading, kwargs = gqa()
    out, lse = OPS.attend(*leading, **kwargs)
    out2, lse2 = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
    assert OPS.attend.out(*leading, **kwargs, out=out2, lse=lse2) is None
    assert torch.equal(out, out2) and torch.equal(lse, lse2)
    outs, lses = torch.stack([out, out2]), torch.stack([lse, lse2])
    joined = OPS.merge(outs, lses)
    assert OPS.merge.out(outs, lses, out=out2, lse=lse2) is None
    assert torch.equal(joined[0], out2) and torch.equal(joined[1], lse2)
    _, plane, _ = plane_of("fp8_v41")
    slots = torch.tensor([5, 2])
    rows, rows2 = OPS.load(plane, slots, format="fp8_v41"), torch.full((2, 1, 512), float("nan"))
    assert OPS.load.out(plane, slots, format="fp8_v41", out=rows2) is None
    assert torch.equal(rows, rows2)


def test_out_variants_of_selections_give_the_same_bits() -> None:
    for op, (leading, kwargs) in ((OPS.select, index(**MADE)), (OPS.select_merge, shards())):
        expected = op(*leading, **kwargs)
        outputs = [torch.full_like(x, 7) for x in expected]
        names = ("indices", "counts", "values", "candidate_blocks")
        assert op.out(*leading, **kwargs, **dict(zip(names, outputs, strict=False))) is None
        assert all(torch.equal(x, y) for x, y in zip(expected, outputs, strict=True))


def test_out_variant_refuses_outputs_that_were_not_asked_for() -> None:
    leading, kwargs = index()
    indices, counts, *_ = OPS.select(*leading, **kwargs)
    with pytest.raises(sparse_attn.InvalidCall, match="select: values: expected a tensor exactly when return_values"):
        OPS.select.out(*leading, **kwargs, indices=indices, counts=counts, values=torch.zeros(5, 1, 3))
    with pytest.raises(sparse_attn.InvalidCall, match="select: indices: expected int32 .T, out_heads, k. with k = 3"):
        OPS.select.out(*leading, **kwargs, indices=indices[..., :2], counts=counts)


def test_given_outputs_are_checked_in_every_call() -> None:
    """A call that passed is remembered, and its outputs are part of what it was."""
    leading, kwargs = gqa()
    out, lse = OPS.attend(*leading, **kwargs)
    wrong: list[tuple[dict, str]] = [
        (dict(out=out), "attend: lse: expected a tensor exactly when return_lse is True, got None"),
        (dict(out=out[:4], lse=lse), "attend: out: expected float32 .T, Hq, v_dim. with T = 5"),
        (dict(out=out.half(), lse=lse), "attend: out: expected float32 .*, got float16"),
        (dict(out=out, lse=lse.t().contiguous().t()), "attend: lse: expected a contiguous tensor"),
    ]
    for given, sentence in wrong:
        OPS.attend.out(*leading, **kwargs, out=out, lse=lse)
        with pytest.raises(sparse_attn.InvalidCall, match=sentence):
            OPS.attend.out(*leading, **kwargs, **given)
    OPS.attend.out(*leading, **dict(kwargs, return_lse=False), out=out)
    with pytest.raises(sparse_attn.InvalidCall, match="exactly when return_lse is True, got a tensor"):
        OPS.attend.out(*leading, **dict(kwargs, return_lse=False), out=out, lse=lse)


@pytest.mark.parametrize("call", [gqa, index], ids=["attend", "select"])
def test_compiled_once_for_all_shapes(call) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    op = sparse_attn.attend if call is gqa else sparse_attn.select

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def step(leading, kwargs):
        first, second, *_ = op(*leading, **kwargs)
        return first * 2, second

    for tokens, batch in ((11, 5), (7, 3), (9, 4), (20, 6)):
        leading, kwargs = call(tokens, batch)
        first, second = step(leading, kwargs)
        eager = op(*leading, **kwargs)
        assert torch.equal(first, eager[0] * 2) and torch.equal(second, eager[1])
    assert len(graphs) == 1


def test_select_then_attend_compiles() -> None:
    """A layer with an index plane: one graph from the index queries to the output."""
    (q, *rest), kwargs = gqa()
    (index_q, weights, *index_rest), options = index()
    del kwargs["indices"]

    def step(q: Tensor, index_q: Tensor, weights: Tensor) -> Tensor:
        selected = sparse_attn.select(index_q, weights, *index_rest, **options)
        out, _ = sparse_attn.attend(q, *rest, **kwargs, indices=selected.indices, index_counts=selected.counts)
        return out

    expected = step(q, index_q, weights)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(q, index_q, weights), expected)


def test_select_merge_compiles_for_all_shapes() -> None:
    compiled = torch.compile(sparse_attn.select_merge, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        leading, kwargs = shards(tokens)
        for x, y in zip(
            compiled(*leading, **kwargs)[:3], sparse_attn.select_merge(*leading, **kwargs)[:3], strict=True
        ):
            assert torch.equal(x, y)


def test_store_then_attend_compiles() -> None:
    leading, kwargs = gqa()

    def step(rows: Tensor, plane: Tensor, slots: Tensor, q: Tensor) -> Tensor:
        sparse_attn.store(rows, plane, slots, format="fp32")
        return sparse_attn.attend(q, *leading[1:], **dict(kwargs, kv=plane, return_lse=False))

    rows, slots = torch.randn(3, 2, 16), torch.tensor([0, 17, 4])
    plane, compiled_plane = kwargs["kv"].clone(), kwargs["kv"].clone()
    expected = step(rows, plane, slots, leading[0])
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")(
        rows, compiled_plane, slots, leading[0]
    )
    assert torch.equal(compiled, expected) and torch.equal(compiled_plane, plane)


def test_every_op_compiles_in_one_graph() -> None:
    """Rows into an interleaved plane, over into a planar one, read back, and two parts merged."""

    def step(rows: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        sparse_attn.store(rows, a, slots, format="fp8_v41")
        sparse_attn.convert(a, b, src_format="fp8_v41", dst_format="fp8_v41_planar", dst_page_size=4)
        read = sparse_attn.load(b, slots, format="fp8_v41_planar", page_size=4)
        return sparse_attn.merge(torch.stack([rows, read]), torch.zeros(2, *rows.shape[:2]))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 3, 5):
        rows, slots = torch.randn(tokens, 1, 512), torch.randperm(12)[:tokens]
        a, b = (plane_of(f)[1] for f in ("fp8_v41", "fp8_v41_planar"))
        c, d = a.clone(), b.clone()
        for got, expected in zip(compiled(rows, a, b, slots), step(rows, c, d, slots), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(a, c) and torch.equal(b, d) and a.any() and b.any()


def test_exports_with_dynamic_tokens() -> None:
    leading, kwargs = gqa(6, 2)

    class Step(torch.nn.Module):
        def forward(self, q: Tensor, indices: Tensor) -> Tensor:
            return OPS.attend(q, *leading[1:], **dict(kwargs, indices=indices))[0]

    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Step(), (leading[0], kwargs["indices"]),
                                  dynamic_shapes={"q": {0: tokens}, "indices": {0: tokens}})  # fmt: skip
    assert any("sparse_attn.attend" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(leading[0], kwargs["indices"]), OPS.attend(*leading, **kwargs)[0])


def test_select_exports_with_dynamic_tokens() -> None:
    leading, kwargs = index(6, **MADE)

    class Step(torch.nn.Module):
        def forward(self, q: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            return OPS.select(q, weights, *leading[2:], **kwargs)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = {"q": {0: tokens}, "weights": {0: tokens}}
    program = torch.export.export(Step(), leading[:2], dynamic_shapes=shapes)
    assert any("sparse_attn.select" in str(node.target) for node in program.graph.nodes)
    for x, y in zip(program.module()(*leading[:2]), OPS.select(*leading, **kwargs), strict=True):
        assert torch.equal(x, y)


def test_fake_of_select_gives_the_shapes() -> None:
    for options in ({}, MADE):
        leading, kwargs = index(**options)
        meta = [x.to("meta") if isinstance(x, Tensor) else x for x in leading]
        for x, y in zip(OPS.select(*meta, **kwargs), OPS.select(*leading, **kwargs), strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and x.device.type == "meta"
    with pytest.raises(
        sparse_attn.InvalidCall, match="select: out_heads: expected a divisor of the 4 query heads, got 3"
    ):
        OPS.select(*meta, **kwargs, out_heads=3)


def test_fakes_share_the_check() -> None:
    leading, kwargs = gqa()
    meta = [x.to("meta") if isinstance(x, Tensor) else x for x in leading]
    meta_kwargs = {k: x.to("meta") if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    out, lse = OPS.attend(*meta, **meta_kwargs)
    assert out.shape == leading[0].shape and lse.shape == leading[0].shape[:2] and out.device.type == "meta"
    with pytest.raises(
        sparse_attn.InvalidCall, match="attend: indices: expected int32 .T, Hi, K. with T = 5, got int32 .4, 2, 4."
    ):
        OPS.attend(*meta, **dict(meta_kwargs, indices=meta_kwargs["indices"][:4]))
    plane = torch.empty(3, 2048, dtype=torch.uint8, device="meta")
    slots = torch.empty(7, dtype=torch.int64, device="meta")
    rows = OPS.load(plane, slots, format="fp8_v41_planar", page_size=3, dtype=torch.bfloat16)
    assert rows.shape == (7, 1, 512) and rows.dtype == torch.bfloat16 and rows.device.type == "meta"
    with pytest.raises(sparse_attn.InvalidCall, match="load: plane: expected uint8 .* with page_bytes = 2560"):
        OPS.load(plane, slots, format="fp8_v41_planar", page_size=4)
    joined, joined_lse = OPS.merge(torch.empty(2, 5, 3, 8, device="meta"), torch.empty(2, 5, 3, device="meta"))
    assert joined.shape == (5, 3, 8) and joined_lse.shape == (5, 3)


CARDS = [
    (sparse_attn.attend, Attend),
    (sparse_attn.compress, Compress),
    (sparse_attn.convert, Convert),
    (sparse_attn.load, Load),
    (sparse_attn.merge, Merge),
    (sparse_attn.select, Select),
    (sparse_attn.select_merge, SelectMerge),
    (sparse_attn.store, Store),
]


@pytest.mark.parametrize(("public", "arguments"), CARDS, ids=lambda x: x.__name__)
def test_none_for_a_tensor_that_is_needed(public, arguments) -> None:
    """PyTorch lets None pass as any tensor."""
    calls = (gqa, index, shards, compression)
    made = dict(zip(("attend", "select", "select_merge", "compress"), calls, strict=True))
    rows, plane, _ = plane_of("fp32")
    leading: tuple = {
        "store": (rows, plane, torch.arange(3)),
        "load": (plane, torch.arange(3)),
        "convert": (plane, plane.clone()),
        "merge": (torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4)),
    }.get(public.__name__) or made[public.__name__]()[0]
    optional = {"weights", "gates", "src_slots", "dst_slots"}
    for i, name in enumerate(arguments._fields[: len(leading)]):
        if isinstance(leading[i], Tensor) and name not in optional:
            with pytest.raises(
                sparse_attn.InvalidCall, match=f"^{public.__name__}: {name}: expected a tensor, got None$"
            ):
                public(*leading[:i], None, *leading[i + 1 :])


@pytest.mark.parametrize(("public", "arguments"), CARDS, ids=lambda x: x.__name__)
def test_one_signature(public, arguments) -> None:
    """Schema, argument tuple and public function agree in names, order and defaults."""
    schema = getattr(OPS, public.__name__).default._schema
    tuple_defaults = arguments._field_defaults
    assert [a.name for a in schema.arguments] == list(arguments._fields) == list(inspect.signature(public).parameters)
    for a in schema.arguments:
        default = inspect.signature(public).parameters[a.name].default
        if a.has_default_value():
            assert a.default_value == tuple_defaults[a.name] == default, a.name
        else:
            assert a.name not in tuple_defaults and default is inspect.Parameter.empty


@pytest.mark.parametrize("call", [gqa, packed])
def test_a_plan_changes_no_bit(call) -> None:
    """Kernels that want none ignore it; what PyTorch sees of the call stays right."""
    leading, kwargs = call()
    plan = sparse_attn.attend_plan(*leading, **kwargs)
    planned, without = OPS.attend(*leading, **kwargs, plan=plan), OPS.attend(*leading, **kwargs)
    assert all(map(torch.equal, planned, without))
    opcheck(OPS.attend.default, leading, dict(kwargs, plan=plan))
    buffer = torch.zeros_like(plan)
    assert sparse_attn.attend_plan(*leading, **kwargs, plan=buffer) is buffer
    with pytest.raises(sparse_attn.InvalidCall, match=r"attend: plan: expected int32 \[1024 \+ 2 B \+ 1\]"):
        sparse_attn.attend_plan(*leading, **kwargs, plan=buffer[1:])


def test_debug_checks_find_a_stale_plan(debug_checks) -> None:
    leading, kwargs = gqa()
    kwargs["indices"] = torch.arange(4, dtype=torch.int32).expand_as(kwargs["indices"])
    plan = sparse_attn.attend_plan(*leading, **kwargs)
    OPS.attend(*leading, **kwargs, plan=plan)
    leading[2][0] -= 1
    with pytest.raises(sparse_attn.InvalidCall, match="attend: plan: expected one for the lengths of this step, got a"):
        OPS.attend(*leading, **kwargs, plan=plan)


def test_resolve_runs_without_the_router() -> None:
    leading, kwargs = gqa()
    impl = sparse_attn.resolve("attend", *leading, **kwargs)
    out, lse = torch.empty_like(leading[0]), torch.empty(leading[0].shape[:2])
    impl.run(Attend(*leading, **kwargs), out, lse)
    assert torch.equal(out, OPS.attend(*leading, **kwargs)[0])
    known = ", ".join(public.__name__ for public, _ in CARDS)
    with pytest.raises(ValueError, match=f"resolve: name: expected one of {known}, got 'attention'"):
        sparse_attn.resolve("attention")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("q", np.zeros((1, 4, 8)), "q: expected a dense tensor, got ndarray"),
        ("q", [0.0], "q: expected a dense tensor, got list"),
        ("q", None, "q: expected a tensor, got None"),
        ("kv", 5, "kv: expected a dense tensor, got int"),
        ("indices", torch.zeros(2, 2, 2).to_sparse(), "indices: expected a dense tensor, got torch.sparse_coo"),
        ("page_table", torch.zeros(2, 2).to_sparse_csr(), "page_table: expected a dense tensor, got torch.sparse_csr"),
        ("sinks", torch.nested.nested_tensor([torch.ones(2)]), "sinks: expected a dense tensor, got a nested one"),
        ("scale", torch.ones(()), "scale: expected a number, got Tensor"),
        ("v_dim", 1.5, "v_dim: expected an integer, got float"),
        ("max_seq_len", None, "max_seq_len: expected an integer, got NoneType"),
        ("format", b"fp32", "format: expected a word, got bytes"),
        ("format", "\ud800", "format: expected one of fp32, "),
        ("causal", "no", "causal: expected True or False, got str"),
    ],
)
def test_resolve_refuses_values_of_other_types(name: str, value: object, sentence: str) -> None:
    """PyTorch reads no schema for it."""
    leading, kwargs = gqa()
    arguments = Attend(*leading, **kwargs)._asdict() | {name: value}
    with pytest.raises(sparse_attn.InvalidCall, match=re.escape(f"attend: {sentence}")):
        sparse_attn.resolve("attend", **arguments)


def test_router_remembers_by_kind_of_call_and_stays_bounded(monkeypatch) -> None:
    library.forget()
    leading, kwargs = gqa()
    for _ in range(3):
        OPS.attend(*leading, **kwargs)
    assert len(library._memo) == 1
    longer = (*leading[:6], leading[6] + 1000)
    OPS.attend(*longer, **kwargs)
    assert len(library._memo) == 1, "a longer sequence is the same kind of call"
    leading, kwargs = index()
    OPS.select(*leading, **kwargs)
    OPS.select(*leading[:9], leading[9] + 1000, **kwargs)
    assert len(library._memo) == 2
    monkeypatch.setattr(library, "_MEMO_ENTRIES", 3)
    for tokens in range(2, 10):
        leading, kwargs = gqa(tokens)
        OPS.attend(*leading, **kwargs)
    assert len(library._memo) <= 3


# autograd


def test_tensors_with_a_gradient_are_refused() -> None:
    plane, slots = torch.zeros(1, 4, 1, 8), torch.tensor([0, 1])
    rows = torch.randn(2, 1, 8, requires_grad=True)
    outs, lses = torch.randn(2, 5, 3, 8, requires_grad=True), torch.zeros(2, 5, 3)
    out = torch.zeros(5, 3, 8), torch.zeros(5, 3)
    held = 2 * torch.zeros(5, 3, 8, requires_grad=True)  # would hold results, with the gradient of the product
    why = (
        "a tensor without requires_grad, as this op has no gradient, got one with it; detach it or use torch.no_grad()"
    )
    for call, sentence in (
        (lambda: OPS.store(rows, plane, slots, format="fp32"), f"store: rows: expected {why}"),
        (lambda: OPS.merge(outs, lses), f"merge: outs: expected {why}"),
        (lambda: OPS.merge.out(outs, lses, out=out[0], lse=out[1]), f"merge: outs: expected {why}"),
        (lambda: OPS.merge.out(outs.detach(), lses, out=held, lse=out[1]), f"merge: out: expected {why}"),
        (
            lambda: OPS.merge(outs.detach(), lses, sinks=torch.zeros(3, requires_grad=True)),
            f"merge: sinks: expected {why}",
        ),
    ):
        with pytest.raises(sparse_attn.InvalidCall) as refused:
            call()
        assert str(refused.value) == sentence
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call()
    assert plane[0, :2].equal(rows.detach())
    OPS.store(rows.detach(), plane, slots, format="fp32")
    merge = torch.compile(lambda x: OPS.merge(x, lses)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="merge: outs: expected a tensor without requires_grad"):
        merge(outs)
    with torch.no_grad():
        assert torch.equal(merge(outs), OPS.merge(outs, lses)[0])
    fill = torch.compile(
        lambda x: OPS.merge.out(outs.detach(), lses, out=x, lse=out[1]), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="merge: out: expected a tensor without requires_grad"):
        fill(held)


def test_autograd_knows_what_is_written() -> None:
    plane, slots, rows = torch.ones(1, 4, 1, 8), torch.tensor([0, 1]), torch.randn(2, 1, 8)
    weight = torch.ones(8, requires_grad=True)
    for write in (
        lambda: OPS.store(rows, plane, slots, format="fp32"),
        lambda: OPS.convert(plane.clone(), plane, src_format="fp32", dst_format="fp32"),
        lambda: OPS.load.out(plane, slots, format="fp32", out=rows),
    ):
        loss = (weight * plane).sum() + (weight * rows).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        private = torch.zeros(1, 4, 1, 8)
        OPS.store(rows, private, slots, format="fp32")
    OPS.store(rows, private, slots, format="fp32")  # has no version
