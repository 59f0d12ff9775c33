"""Cases of `attend`: shapes of released models, with the same attention in torch as peers.

Peers are given what is best for them: slots are computed beforehand, dense peers find keys and values contiguous, and
grouped heads are rows of one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import sparse_attn
from sparse_attn import layout, resolve
from sparse_attn.ops.attend import Attend
from sparse_attn.planes import Plane
from sparse_attn.registry import Impl

from . import engines
from .machine import pool
from .timing import OURS, Case, variants_for

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

IDIOMATIC = "gather + matmul"
COMPILED = "compiled gather + matmul"
FLEX = "compiled flex_attention"
DENSE = "dense SDPA"
PLAIN = "in bf16 planes"
"""Names of peers that suites ask for. "gather" is indexing, as users write it; "index_select" is the quicker form."""


@dataclass(frozen=True)
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
    rows: int = 1
    """Query rows of a sequence."""
    separate_v: bool = True
    page: int = 64
    heads_first: bool = False
    """Whether the rows of a head lie side by side in a page, instead of the heads of a token."""


def latent(heads: int, context: int = 32768, selected: int = 2048, rows: int = 1) -> Shape:
    """DeepSeek V3.2, on one of 128 / heads devices."""
    return Shape(f"V3.2 {heads} heads", heads, 1, 576, 512, context, selected, rows=rows, separate_v=False)


V4 = Shape("V4 64 heads", 64, 1, 512, 512, 8192, 512, window=128, separate_v=False)
GQA_BLOCKS = Shape("GQA 32/8 blocks", 32, 8, 128, 128, 32768, 2048, block=64)
SMOLLM = Shape("GQA 9/3", 9, 3, 64, 64, 8192, 2048)


def label(shape: Shape, batch: int, format: str, win_format: str = "") -> str:
    length = f"{shape.context // 1024}K"
    many = f", {shape.rows} rows" if shape.rows > 1 else ""
    chosen = f", K {shape.selected}" if shape.selected else ", dense"
    order = ", heads first" if shape.heads_first else ""
    name = f"{shape.name}, {length}{chosen}, B {batch}{many}, {format}{order}"
    return name + (f" + {win_format} window" if win_format not in ("", format) else "")


def rows_of(format: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    """A plane of random rows, and its scale plane."""
    f = layout.FORMATS[format]
    if f.packed:
        plane = pool(*f.shape(*shape), dtype=torch.uint8).zero_()
        rows = torch.randn(shape[1], *shape[2:])
        for page in range(shape[0]):
            slots = torch.arange(page * shape[1], (page + 1) * shape[1])
            sparse_attn.store(rows, plane, slots, format=format, page_size=shape[1])
        return plane, None
    if f.scale_dtype:
        scale = torch.rand(shape[:-1], dtype=torch.float32).half() * 0.02 + 0.01
        return torch.randint(-127, 128, shape, dtype=torch.int8), scale
    return pool(*shape, dtype=DTYPES[format]), None


def make(
    shape: Shape,
    batch: int,
    dtype: str = "bf16",
    format: str = "",
    win_format: str = "",
    compiled: bool = False,
    peers: bool = True,
    dense: bool = False,
) -> Case:
    """One case; the window's plane has its own pages, as in models that have one. `dense`: dense peers as well."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    format = format or dtype
    win_format = win_format or dtype
    tokens, scale = batch * shape.rows, shape.qk_dim**-0.5
    per_sequence = layout.pages_for(shape.context, shape.page)
    attended = shape.selected + shape.window
    entry = shape.kv_heads * layout.FORMATS[format].entry_bytes(shape.qk_dim)
    entry += shape.kv_heads * layout.FORMATS[format].entry_bytes(shape.v_dim) if shape.separate_v else 0
    attends = entry * (tokens * attended if attended else batch * shape.context)
    read = float(min(attends, entry * batch * (shape.context + shape.window)))
    variants = variants_for(attends)
    # Contexts that would stay in caches take turns with others.
    pages = batch * min(variants, variants_for(batch * shape.context * entry, 1)) * per_sequence

    def plane(dim: int) -> tuple[Tensor, Tensor | None]:
        if not shape.heads_first:
            return rows_of(format, pages, shape.page, shape.kv_heads, dim)
        return pool(pages, shape.kv_heads, shape.page, dim, dtype=DTYPES[format]).transpose(1, 2), None

    kv, kv_scale = plane(shape.qk_dim)
    v, v_scale = plane(shape.v_dim) if shape.separate_v else (None, None)
    tables = torch.randperm(pages, generator=g).int().view(-1, batch, per_sequence)
    window = window_table = None
    if shape.window:
        window = rows_of(win_format, batch * 4, shape.page, shape.kv_heads, shape.qk_dim)[0]
        window_table = torch.full((batch, per_sequence), -1, dtype=torch.int32)
        window_table[:, -2:] = torch.randperm(batch * 4, generator=g).int()[: batch * 2].view(batch, 2)

    calls = [
        Attend(
            torch.randn(tokens, shape.q_heads, shape.qk_dim).to(DTYPES[dtype]),
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
            page_table=tables[i % len(tables)],
            format=format,
            page_size=shape.page,
            indices=chosen(shape, tokens, g) if shape.selected else None,
            select_block=shape.block,
            win=window,
            win_page_table=window_table,
            win_format=win_format,
            win_page_size=shape.page if shape.window else 0,
            window=shape.window,
        )
        for i in range(variants)
    ]
    impl = resolve("attend", **dict(calls[0]._asdict()))
    pairs = tokens * attended if attended else batch * sum(range(shape.context - shape.rows + 1, shape.context + 1))
    functions = {OURS: lambda i: run(impl, calls[i])}
    if layout.FORMATS[format].packed:
        plain = in_bf16(shape, calls)
        functions[PLAIN] = lambda i: run(impl, plain[i])
    if peers and shape.selected:
        functions |= sparse_peers(shape, calls, compiled)
    if (peers and not shape.selected) or dense:
        functions |= dense_peers(shape, calls, compiled)
    name = label(shape, batch, format, win_format if shape.window else "")
    name += "" if peers or dense else ", alone"
    memory_bound = shape.separate_v and not shape.rows > 1
    case = Case(name, functions, variants, 2.0 * pairs * shape.q_heads * (shape.qk_dim + shape.v_dim), read)
    case.limit = "blocks" if memory_bound else "bf16" if dtype == "bf16" else "fp32"  # fp16 is multiplied in fp32
    case.check = lambda: check(case)
    return case


def chosen(shape: Shape, tokens: int, g: torch.Generator) -> Tensor:
    """Random distinct entries (or blocks) for each row and KV head, visible to all rows, in no order."""
    visible = (shape.context - shape.rows + 1) // shape.block
    heads = shape.kv_heads
    lists = [torch.randperm(visible, generator=g)[: shape.selected // shape.block] for _ in range(tokens * heads)]
    return torch.stack(lists).int().view(tokens, heads, -1)


def run(impl: Impl, a: Attend) -> Tensor:
    out = a.q.new_empty(a.q.shape[0], a.q.shape[1], a.v_dim)
    impl.run(a, out, None)
    return out


def numbers(shape: Shape, plane: Tensor, format: str, at: Tensor) -> Tensor:
    """Rows at slots ``at [N]`` of a packed plane, dequantised by torch."""
    packed = Plane(plane, format, None, shape.page)
    return packed.rows(packed.at(at))[:, 0]


def in_bf16(shape: Shape, calls: list[Attend]) -> list[Attend]:
    """The same calls on the numbers of their planes in bf16."""
    a = calls[0]
    changed: dict[str, Any] = {}
    for name, format, plane in (("kv", "format", a.kv), ("win", "win_format", a.win)):
        if plane is not None:
            same = pool(len(plane), shape.page, 1, shape.qk_dim, dtype=torch.bfloat16)
            for page in range(len(plane)):
                at = torch.arange(page * shape.page, (page + 1) * shape.page)
                same[page] = numbers(shape, plane, getattr(a, format), at).view(shape.page, 1, -1)
            changed |= {name: same, format: "bf16"}
    return [call._replace(**changed) for call in calls]


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


def sparse_peers(shape: Shape, calls: list[Attend], compiled: bool) -> dict[str, Callable[[int], Tensor]]:
    """Gather the selected rows, then attend densely."""
    where = [slots(shape, a) for a in calls]
    where_window = [window_slots(shape, a) for a in calls] if shape.window else []
    size, packed = shape.q_heads // shape.kv_heads, layout.FORMATS[calls[0].format].packed

    def gather(plane: Tensor, format: str, scales: Tensor | None, at: Tensor, dtype: torch.dtype) -> Tensor:
        if layout.FORMATS[format].packed:
            return numbers(shape, plane, format, at.flatten()).to(dtype).view(-1, at.shape[-1], shape.qk_dim)
        rows = plane.view(-1, plane.shape[-1]).index_select(0, at.flatten())
        if scales is not None:
            rows = rows.to(dtype) * scales.view(-1).index_select(0, at.flatten()).to(dtype)[:, None]
        return rows.view(-1, at.shape[-1], plane.shape[-1])

    def operands(i: int) -> tuple[Tensor, Tensor, Tensor]:
        a = calls[i]
        assert a.kv is not None
        keys = gather(a.kv, a.format, a.kv_scale, where[i], a.q.dtype)
        if a.win is not None:
            keys = torch.cat([gather(a.win, a.win_format, None, where_window[i], a.q.dtype), keys], dim=1)
        values = keys[..., : a.v_dim] if a.v is None else gather(a.v, a.format, a.v_scale, where[i], a.q.dtype)
        return a.q.view(-1, size, a.q.shape[-1]), keys, values

    def bmm(i: int) -> Tensor:
        q, keys, values = operands(i)
        scores = torch.bmm(q * calls[i].scale, keys.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), values).view(-1, shape.q_heads, shape.v_dim)

    def sdpa(i: int) -> Tensor:
        q, keys, values = operands(i)
        out = scaled_dot_product_attention(q[:, None], keys[:, None], values[:, None], scale=calls[i].scale)
        return out.view(-1, shape.q_heads, shape.v_dim)

    def indexed(
        q: Tensor, kv: Tensor, v: Tensor | None, at: Tensor, win: Tensor | None, win_at: Tensor | None
    ) -> Tensor:
        keys = kv.view(-1, shape.qk_dim)[at.view(-1, at.shape[-1])]
        if win is not None and win_at is not None:
            keys = torch.cat([win.view(-1, shape.qk_dim)[win_at.view(-1, win_at.shape[-1])], keys], dim=1)
        values = keys[..., : shape.v_dim] if v is None else v.view(-1, shape.v_dim)[at.view(-1, at.shape[-1])]
        scores = (q.view(-1, size, shape.qk_dim) @ keys.transpose(1, 2)) * calls[0].scale
        return (scores.float().softmax(-1).to(q.dtype) @ values).view(-1, shape.q_heads, shape.v_dim)

    def arguments(i: int) -> tuple[Any, ...]:
        a = calls[i]
        return a.q, a.kv, a.v, where[i], a.win, where_window[i] if shape.window else None

    found: dict[str, Callable[[int], Tensor]] = {"index_select + bmm": bmm, "gather + SDPA": sdpa}
    found |= engines.attend_peers(calls, where, where_window)
    if not packed and calls[0].kv_scale is None:
        found[IDIOMATIC] = lambda i: indexed(*arguments(i))
        if compiled:
            made = torch.compile(indexed, dynamic=False)
            found[COMPILED] = lambda i: made(*arguments(i))
            if shape.block > 1:
                found[FLEX] = flex(shape, calls)
    return found


def flex(shape: Shape, calls: list[Attend]) -> Callable[[int], Tensor]:
    """flex_attention over contiguous keys and values, told the blocks of each KV head."""
    keys, values = contiguous(shape, calls[0])
    batch, size = len(keys), shape.q_heads // shape.kv_heads
    chosen_blocks = torch.zeros(len(calls), batch, shape.kv_heads, shape.context // shape.block, dtype=torch.bool)
    for i, a in enumerate(calls):
        assert a.indices is not None
        chosen_blocks[i].scatter_(-1, a.indices.long(), True)

    def mask_of(i: int) -> Any:
        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return chosen_blocks[i][b, h // size, kv // shape.block]

        return create_block_mask(allowed, batch, shape.q_heads, 1, shape.context, "cpu", (1, shape.block))

    mask = mask_of(0)  # another would be compiled anew; what is read is larger than caches
    attend = torch.compile(flex_attention, dynamic=False)

    def run_flex(i: int) -> Tensor:
        q = calls[i].q.view(batch, 1, shape.q_heads, shape.qk_dim).transpose(1, 2)
        out = attend(q, keys, values, block_mask=mask, scale=calls[i].scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).reshape(-1, shape.q_heads, shape.v_dim)

    return run_flex


def contiguous(shape: Shape, a: Attend) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, Hkv, L, D]`` of a call, in plain formats."""
    assert a.kv is not None and a.page_table is not None
    found = [
        None
        if plane is None
        else plane[a.page_table.long()].flatten(1, 2)[:, : shape.context].transpose(1, 2).contiguous()
        for plane in (a.kv, a.v)
    ]
    assert found[0] is not None
    return found[0], found[0][..., : shape.v_dim] if found[1] is None else found[1]


def dense_peers(shape: Shape, calls: list[Attend], compiled: bool) -> dict[str, Callable[[int], Tensor]]:
    """Attend everything over keys and values that lie contiguous already."""
    keys, values = contiguous(shape, calls[0])
    batch, groups, size, scale = len(keys), shape.kv_heads, shape.q_heads // shape.kv_heads, calls[0].scale

    def rows_sdpa(i: int) -> Tensor:
        q = calls[i].q.view(batch, groups, size, shape.qk_dim)
        out = scaled_dot_product_attention(q, keys, values, scale=scale)
        return out.reshape(batch, groups * size, shape.v_dim)

    def sdpa(i: int) -> Tensor:
        q = calls[i].q.view(batch, shape.rows, groups * size, shape.qk_dim).transpose(1, 2)
        out = scaled_dot_product_attention(q, keys, values, is_causal=shape.rows > 1, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, groups * size, shape.v_dim)

    def matmul(i: int) -> Tensor:
        q = calls[i].q.view(batch, groups, size, shape.qk_dim) * scale
        return ((q @ keys.transpose(2, 3)).softmax(-1) @ values).view(batch, groups * size, shape.v_dim)

    if shape.rows > 1:
        return {DENSE: sdpa}
    return {"dense matmul": matmul, f"{DENSE}, heads as rows": rows_sdpa, DENSE: sdpa}


def check(case: Case) -> None:
    """Raise if a peer computes something else; those that attend everything are not asked of a sparse call."""
    ours = case.functions[OURS](0).float()
    for name, function in case.functions.items():
        if name.startswith("dense") and ", dense" not in case.name:
            continue
        differ = (function(0).float() - ours).abs() > 2e-2 + 2e-2 * ours.abs()
        assert not differ.any(), f"{case.name}: {name} differs in {int(differ.sum())} numbers"
