"""Cases of `attend`: shapes of released models, with the same attention in eager torch as peers.

Peers are given what is best for them: slots are computed beforehand, dense peers find keys and values contiguous, and
grouped heads are rows of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparse_attn
from sparse_attn import layout, resolve
from sparse_attn.ops.attend import Attend
from sparse_attn.planes import Plane

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = 4
"""Index sets (and sequences) of a case. Calls take them in turn, so that caches do not hold the rows already."""


@dataclass
class Case:
    name: str
    functions: dict[str, Callable[[int], Tensor]]
    """By name, "sparse_attn" first: functions of the variant's number, which all return ``[T, Hq, v_dim]``."""
    flops: float
    bytes: float
    """What one call must compute, and must read of keys and values."""


@dataclass
class Shape:
    name: str
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    context: int
    selected: int = 0
    """Entries of an index list; 0: dense."""
    block: int = 1
    window: int = 0
    batch: int = 1
    rows: int = 1
    """Query rows of a sequence."""
    separate_v: bool = True
    page: int = 64


SHAPES = [
    Shape("v3.2 128 heads", 128, 1, 576, 512, 32768, 2048, separate_v=False),
    Shape("v3.2 16 heads", 16, 1, 576, 512, 32768, 2048, separate_v=False),
    Shape("v4 64 heads", 64, 1, 512, 512, 8192, 512, window=128, separate_v=False),
    Shape("gqa 32/8 blocks", 32, 8, 128, 128, 32768, 2048, block=64),
    Shape("smollm sparse", 9, 3, 64, 64, 8192, 2048),
    Shape("smollm dense", 9, 3, 64, 64, 8192),
]
PREFILL = [
    Shape("smollm prefill", 9, 3, 64, 64, 2048, rows=2048),
    Shape("gqa 32/8 prefill", 32, 8, 128, 128, 1024, rows=1024),
    Shape("v3.2 128 heads prefill", 128, 1, 576, 512, 8192, 2048, rows=16, separate_v=False),
]
PACKED = [
    (SHAPES[0], "fp8_v32", ""),
    (SHAPES[0], "int8_v32", ""),
    (SHAPES[1], "fp8_v32", ""),
    (SHAPES[2], "fp8_v4_planar", "fp8_v4_planar"),
    (SHAPES[2], "fp4_v41", "fp8_v41"),
]
"""Shapes on packed planes: the format of the main plane, and of the window plane."""


def cases() -> Iterator[Callable[[], Case]]:
    """Makers of every case; each holds its memory only while it is measured."""
    for packed in PACKED:
        yield partial(make, packed[0], 1, "bf16", *packed[1:])
    for shape in SHAPES:
        for batch in (1, 8):
            for dtype in DTYPES:
                yield partial(make, shape, batch, dtype, dtype)
    for shape in SHAPES:
        if shape.separate_v and shape.selected:
            yield partial(make, shape, 1, "bf16", "int8")
            yield partial(make, shape, 1, "fp32", "int8")
    for shape in PREFILL:
        for dtype in DTYPES:
            yield partial(make, shape, 1, dtype, dtype)


def name_of(shape: Shape, batch: int, dtype: str, format: str, win_format: str = "") -> str:
    name = f"{shape.name}, B {batch}, {dtype}" + ("" if format == dtype else f", kv {format}")
    return name + (f", window {win_format}" if win_format else "")


def rows_of(format: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    f = layout.FORMATS[format]
    if f.packed:
        plane = torch.zeros(f.shape(*shape), dtype=torch.uint8)
        rows = torch.randn(shape[0] * shape[1], *shape[2:])
        sparse_attn.store(rows, plane, torch.arange(len(rows)), format=format, page_size=shape[1])
        return plane, None
    if layout.FORMATS[format].scale_dtype:
        scale = torch.rand(shape[:-1], dtype=torch.float32).half() * 0.02 + 0.01
        return torch.randint(-127, 128, shape, dtype=torch.int8), scale
    return torch.randn(shape).to(DTYPES[format]), None


def make(shape: Shape, batch: int, dtype: str, format: str, win_format: str = "") -> Case:
    """One case. The window's plane has its own pages, as in models that have one."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    tokens, scale = batch * shape.rows, shape.qk_dim**-0.5
    per_sequence = layout.pages_for(shape.context, shape.page)
    sequences = batch if batch > 1 or not shape.selected else VARIANTS
    pages = sequences * per_sequence
    kv, kv_scale = rows_of(format, pages, shape.page, shape.kv_heads, shape.qk_dim)
    v, v_scale = rows_of(format, pages, shape.page, shape.kv_heads, shape.v_dim) if shape.separate_v else (None, None)
    tables = torch.randperm(pages, generator=g).int().view(sequences, per_sequence)
    win_format = win_format or dtype
    window = rows_of(win_format, batch * 4, shape.page, shape.kv_heads, shape.qk_dim)[0] if shape.window else None
    window_table = torch.full((batch, per_sequence), -1, dtype=torch.int32)
    window_table[:, -2:] = torch.randperm(batch * 4, generator=g).int()[: batch * 2].view(batch, 2)

    variants = []
    for i in range(VARIANTS):
        table = tables if sequences == batch else tables[i : i + 1]
        q = torch.randn(tokens, shape.q_heads, shape.qk_dim).to(DTYPES[dtype])
        a = Attend(
            q,
            torch.arange(0, tokens + 1, shape.rows, dtype=torch.int32),
            torch.full((batch,), shape.context, dtype=torch.int32),
            scale,
            shape.v_dim,
            shape.rows,
            shape.context,
            kv=kv,
            kv_scale=kv_scale,
            v=v,
            v_scale=v_scale,
            page_table=table,
            format=format,
            page_size=shape.page,
            indices=select(shape, tokens, g) if shape.selected else None,
            select_block=shape.block,
            win=window,
            win_page_table=None if window is None else window_table,
            win_format=win_format,
            win_page_size=shape.page if shape.window else 0,
            window=shape.window,
        )
        variants.append(a)
    impl = resolve("attend", **dict(variants[0]._asdict()))
    attended = shape.selected + shape.window
    pairs = tokens * attended if attended else batch * sum(range(shape.context - shape.rows + 1, shape.context + 1))
    entry = shape.kv_heads * layout.FORMATS[format].entry_bytes(shape.qk_dim)
    entry += shape.kv_heads * layout.FORMATS[format].entry_bytes(shape.v_dim) if shape.separate_v else 0
    functions = {
        "sparse_attn": lambda i: run(impl, variants[i]),
        **(sparse_peers(shape, variants) if shape.selected else dense_peers(shape, variants)),
    }
    if layout.FORMATS[format].packed:  # before the last peer, so that both calls of ours follow one
        plain = [in_bf16(shape, a) for a in variants]
        name, last = functions.popitem()
        functions |= {"sparse_attn in bf16": lambda i: run(impl, plain[i]), name: last}
    return Case(
        name_of(shape, batch, dtype, format, "" if win_format == dtype else win_format),
        functions,
        flops=2.0 * pairs * shape.q_heads * (shape.qk_dim + shape.v_dim),
        bytes=float(entry * (tokens * attended if attended else batch * shape.context)),
    )


def select(shape: Shape, tokens: int, g: torch.Generator) -> Tensor:
    """Random distinct entries (or blocks) for each row and KV head, visible to all rows, in no order."""
    visible = (shape.context - shape.rows + 1) // shape.block
    heads = shape.kv_heads
    lists = [torch.randperm(visible, generator=g)[: shape.selected // shape.block] for _ in range(tokens * heads)]
    return torch.stack(lists).int().view(tokens, heads, -1)


def run(impl, a: Attend) -> Tensor:
    out = a.q.new_empty(a.q.shape[0], a.q.shape[1], a.v_dim)
    impl.run(a, out, None)
    return out


def numbers(shape: Shape, plane: Tensor, format: str, at: Tensor) -> Tensor:
    """Rows at slots ``at [N]`` of a packed plane, dequantised by torch."""
    packed = Plane(plane, format, None, shape.page)
    return packed.rows(packed.at(at))[:, 0]


def in_bf16(shape: Shape, a: Attend) -> Attend:
    """The same call on the numbers of its planes in bf16."""
    changed: dict[str, object] = {}
    for name, format, plane in (("kv", "format", a.kv), ("win", "win_format", a.win)):
        if plane is not None:
            rows = numbers(shape, plane, getattr(a, format), torch.arange(len(plane) * shape.page))
            changed |= {name: rows.bfloat16().view(-1, shape.page, 1, shape.qk_dim), format: "bf16"}
    return a._replace(**changed)


def slots(shape: Shape, a: Attend) -> Tensor:
    """Rows of the flat plane ``[pages * page_size * Hkv, D]`` that each row and KV head attends, ``[T, Hkv, K]``."""
    assert a.indices is not None and a.page_table is not None
    entries = a.indices.long()[..., None] * shape.block + torch.arange(shape.block)
    entries = entries.flatten(-2)
    table = a.page_table.long()[torch.arange(len(a.q)) // shape.rows]
    page = torch.gather(table[:, None].expand(-1, shape.kv_heads, -1), 2, entries // shape.page)
    return (page * shape.page + entries % shape.page) * shape.kv_heads + torch.arange(shape.kv_heads)[:, None]


def window_slots(shape: Shape, a: Attend) -> Tensor:
    """The same for the window plane."""
    assert a.win_page_table is not None
    entries = torch.arange(shape.context - shape.window, shape.context)
    page = a.win_page_table.long()[:, entries // shape.page]
    return (page * shape.page + entries % shape.page)[:, None]


def sparse_peers(shape: Shape, variants: list[Attend]) -> dict[str, Callable[[int], Tensor]]:
    """Gather the selected rows, then attend densely."""
    where = [slots(shape, a) for a in variants]
    where_window = [window_slots(shape, a) for a in variants] if shape.window else []
    groups, size = shape.kv_heads, shape.q_heads // shape.kv_heads

    def gather(plane: Tensor, format: str, scales: Tensor | None, at: Tensor, dtype: torch.dtype) -> Tensor:
        if layout.FORMATS[format].packed:
            return numbers(shape, plane, format, at.flatten()).to(dtype).view(-1, at.shape[-1], shape.qk_dim)
        rows = plane.view(-1, plane.shape[-1]).index_select(0, at.flatten())
        if scales is not None:
            rows = rows.to(dtype) * scales.view(-1).index_select(0, at.flatten()).to(dtype)[:, None]
        return rows.view(-1, at.shape[-1], plane.shape[-1])

    def operands(i: int) -> tuple[Tensor, Tensor, Tensor]:
        a = variants[i]
        assert a.kv is not None
        keys = gather(a.kv, a.format, a.kv_scale, where[i], a.q.dtype)
        if a.win is not None:
            keys = torch.cat([gather(a.win, a.win_format, None, where_window[i], a.q.dtype), keys], dim=1)
        values = keys[..., : a.v_dim] if a.v is None else gather(a.v, a.format, a.v_scale, where[i], a.q.dtype)
        return a.q.view(-1, size, a.q.shape[-1]), keys, values

    def matmul(i: int) -> Tensor:
        q, keys, values = operands(i)
        scores = torch.bmm(q * variants[i].scale, keys.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), values).view(-1, groups * size, shape.v_dim)

    def sdpa(i: int) -> Tensor:
        q, keys, values = operands(i)
        out = scaled_dot_product_attention(q[:, None], keys[:, None], values[:, None], scale=variants[i].scale)
        return out.view(-1, groups * size, shape.v_dim)

    return {"gather + matmul": matmul, "gather + sdpa": sdpa}


def dense_peers(shape: Shape, variants: list[Attend]) -> dict[str, Callable[[int], Tensor]]:
    """Attend densely over keys and values that lie contiguous already."""
    a = variants[0]
    assert a.kv is not None and a.v is not None and a.page_table is not None
    batch, groups, size = len(a.page_table), shape.kv_heads, shape.q_heads // shape.kv_heads
    keys, values = (
        plane[a.page_table.long()].flatten(1, 2)[:, : shape.context].transpose(1, 2).contiguous()
        for plane in (a.kv, a.v)
    )

    def sdpa(i: int) -> Tensor:
        q = variants[i].q.view(batch, shape.rows, groups, size, shape.qk_dim)
        if shape.rows == 1:
            out = scaled_dot_product_attention(q[:, 0], keys, values, scale=a.scale)
            return out.reshape(batch, groups * size, shape.v_dim)
        q = q.flatten(2, 3).transpose(1, 2)
        out = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=a.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, groups * size, shape.v_dim)

    def matmul(i: int) -> Tensor:
        q = variants[i].q.view(batch * groups, size, shape.qk_dim) * a.scale
        scores = torch.bmm(q, keys.flatten(0, 1).transpose(1, 2))
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(batch, groups * size, shape.v_dim)

    return {"sdpa": sdpa} if shape.rows > 1 else {"matmul": matmul, "sdpa": sdpa}


def check(case: Case) -> None:
    """Raise if a peer computes something else."""
    ours = case.functions["sparse_attn"](0).float()
    for name, function in case.functions.items():
        torch.testing.assert_close(function(0).float(), ours, atol=2e-2, rtol=2e-2, msg=lambda m, n=name: f"{n}: {m}")
