"""Cases of `select`: index shapes of released models, with the same selection in eager torch as a peer.

The peer gathers the pages of a sequence, scores every entry by one product, and takes torch.topk of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from attend import DTYPES, VARIANTS, Case, numbers, rows_of
from torch import Tensor

from sparse_attn import layout, resolve
from sparse_attn.ops.select import Select


@dataclass
class Shape:
    name: str
    q_heads: int
    key_heads: int
    dim: int
    k: int
    score: str = "relu_sum"
    out_heads: int = 1
    rows: int = 1
    """Query rows of the sequence."""
    page: int = 64


INDEXER = Shape("indexer 64 x 128", 64, 1, 128, 2048)
GROUPS = Shape("gqa 9/3 x 64", 9, 3, 64, 2048, "softmax_sum", out_heads=3)
SCORES = (
    Shape("gqa 9/3 x 64 relu_sum", 9, 3, 64, 2048, "relu_sum", out_heads=3),
    Shape("gqa 9/3 x 64 max", 9, 3, 64, 2048, "max", out_heads=3),
    Shape("gqa 9/3 x 64 dot", 9, 3, 64, 2048, "dot", out_heads=3),
    Shape("gqa 3/3 x 64 dot of summed queries", 3, 3, 64, 2048, "dot", out_heads=3),
)
CONTEXTS = (8192, 32768, 131072)


def cases() -> Iterator[Callable[[], Case]]:
    """Makers of every case; each holds its memory only while it is measured."""
    for format in ("fp8_index_planar", "int8_index_planar", "fp4_index_planar"):
        yield partial(make, INDEXER, 32768, "bf16", format)
    for context in CONTEXTS:
        for dtype in ("bf16", "fp32"):
            yield partial(make, INDEXER, context, dtype, dtype)
        for dtype in ("bf16", "fp32"):
            yield partial(make, GROUPS, context, dtype, "int8_index_h")
    for shape in SCORES:  # of dense models, with softmax_sum above
        yield partial(make, shape, CONTEXTS[0], "fp32", "int8_index_h")
    prefill = Shape("gqa 9/3 x 64 prefill", 9, 3, 64, 512, "softmax_sum", out_heads=3, rows=256)
    yield partial(make, prefill, 4096, "fp32", "int8_index_h")


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_sum": lambda scores: scores.softmax(-1).sum(2),
    "relu_sum": lambda scores: scores.relu_().sum(2),
    "max": lambda scores: scores.amax(2),
    "dot": lambda scores: scores.sum(2),
}


def name_of(shape: Shape, context: int, dtype: str, format: str) -> str:
    return f"{shape.name}, {context // 1024}K, {dtype}" + ("" if format == dtype else f", keys {format}")


def make(shape: Shape, context: int, dtype: str, format: str) -> Case:
    torch.manual_seed(0)
    per_sequence = layout.pages_for(context, shape.page)
    pages = VARIANTS * per_sequence
    keys, key_scale = rows_of(format, pages, shape.page, shape.key_heads, shape.dim)
    tables = torch.randperm(pages).int().view(VARIANTS, per_sequence)
    variants = [
        Select(
            torch.randn(shape.rows, shape.q_heads, shape.dim).to(DTYPES[dtype]),
            torch.randn(shape.rows, shape.q_heads).to(DTYPES[dtype]) if shape.out_heads == 1 else None,
            torch.tensor([0, shape.rows], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            keys,
            tables[i : i + 1],
            shape.k,
            shape.dim**-0.5,
            shape.rows,
            context,
            key_scale=key_scale,
            format=format,
            page_size=shape.page,
            score=shape.score,
            out_heads=shape.out_heads,
        )
        for i in range(VARIANTS)
    ]
    impl = resolve("select", **dict(variants[0]._asdict()))
    pairs = sum(range(context - shape.rows + 1, context + 1))
    entry = shape.key_heads * layout.FORMATS[format].entry_bytes(shape.dim)
    functions = {
        "sparse_attn": lambda i: run(impl, variants[i]),
        "gather + matmul + topk": lambda i: peer(shape, variants[i]),
    }
    if layout.FORMATS[format].packed:
        rows = numbers(shape, keys, format, torch.arange(pages * shape.page)).bfloat16()
        plain = rows.view(pages, shape.page, 1, shape.dim)
        functions["sparse_attn in bf16"] = lambda i: run(impl, variants[i]._replace(keys=plain, format="bf16"))
    return Case(
        name_of(shape, context, dtype, format),
        functions,
        flops=2.0 * pairs * shape.q_heads * shape.dim,
        bytes=float(entry * context),
    )


def run(impl, a: Select) -> Tensor:
    lists = len(a.q), a.out_heads
    indices = torch.empty(*lists, a.k, dtype=torch.int32)
    impl.run(a, indices, torch.empty(lists, dtype=torch.int32), None, None)
    return indices


def peer(shape: Shape, a: Select) -> Tensor:
    if layout.FORMATS[a.format].packed:
        slots = a.page_table[0].long()[:, None] * shape.page + torch.arange(shape.page)
        keys = numbers(shape, a.keys, a.format, slots.flatten()).to(a.q.dtype)[:, None]
    else:
        keys = a.keys.index_select(0, a.page_table[0]).flatten(0, 1)
    scale = a.scale
    if a.key_scale is not None:
        keys = keys.to(a.q.dtype)
        scale = scale * a.key_scale.index_select(0, a.page_table[0]).flatten(0, 1).to(a.q.dtype).t()[:, None]
    groups = shape.key_heads
    q = a.q.view(shape.rows, groups, -1, shape.dim).transpose(0, 1).reshape(groups, -1, shape.dim)
    scores = (q @ keys.permute(1, 2, 0)).view(groups, -1, len(keys))
    hidden = torch.arange(len(keys)) > torch.arange(len(keys) - shape.rows, len(keys))[:, None]
    if a.weights is not None:
        total = (a.weights[:, None] @ scores.relu_()[0][None]).view(shape.rows, 1, -1)
    else:
        scores = (scores * scale).view(groups, shape.rows, -1, len(keys))
        scores = scores.masked_fill_(hidden[:, None], -torch.inf)
        total = JOINED[shape.score](scores).transpose(0, 1)
    return total.topk(a.k, sorted=False).indices.int()


def check(case: Case) -> None:
    """Raise if another selects something else, but for scores that differ by rounding."""
    ours, *others = (function(0) for function in case.functions.values())
    for theirs in others:
        for mine, other in zip(ours.flatten(0, 1).tolist(), theirs.flatten(0, 1).tolist(), strict=True):
            assert len(set(mine) & set(other)) >= (0.9 if "bf16" in case.name else 0.99) * len(mine), case.name
