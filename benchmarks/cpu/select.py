"""Cases of `select`: index shapes of released models, with the same selection in eager torch as a peer.

The peer gathers the pages of a sequence, scores every entry by one product, and takes torch.topk of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_attn import layout, resolve
from sparse_attn.ops.select import Select
from sparse_attn.planes import Plane
from sparse_attn.registry import Impl

from . import engines
from .attend import DTYPES, PLAIN, rows_of
from .machine import pool
from .timing import OURS, Case, variants_for

PAGED = "gather + matmul + topk"
CONTIGUOUS = "matmul + topk, contiguous keys"
COMPILED = "compiled matmul + topk, contiguous keys"
TOPK = "with k = 1"


@dataclass(frozen=True)
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
    GROUPS,
    Shape("gqa 9/3 x 64 relu_sum", 9, 3, 64, 2048, "relu_sum", out_heads=3),
    Shape("gqa 9/3 x 64 max", 9, 3, 64, 2048, "max", out_heads=3),
    Shape("gqa 9/3 x 64 dot", 9, 3, 64, 2048, "dot", out_heads=3),
    Shape("gqa 3/3 x 64 dot of summed queries", 3, 3, 64, 2048, "dot", out_heads=3),
)
"""Of models without an indexer."""
LLAMA = Shape("gqa 32/8 x 128", 32, 8, 128, 2048, "softmax_sum", out_heads=8)
JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_sum": lambda scores: scores.softmax(-1).sum(2),
    "relu_sum": lambda scores: scores.relu_().sum(2),
    "max": lambda scores: scores.amax(2),
    "dot": lambda scores: scores.sum(2),
}


def label(shape: Shape, context: int, format: str) -> str:
    rows = f", {shape.rows} rows" if shape.rows > 1 else ""
    return f"select {shape.name}, {context // 1024}K{rows}, {format}"


def make(shape: Shape, context: int, dtype: str = "bf16", format: str = "", compiled: bool = False) -> Case:
    torch.manual_seed(0)
    format = format or dtype
    entry = shape.key_heads * layout.FORMATS[format].entry_bytes(shape.dim)
    variants = variants_for(float(entry * context))
    per_sequence = layout.pages_for(context, shape.page)
    pages = variants * per_sequence
    keys, key_scale = rows_of(format, pages, shape.page, shape.key_heads, shape.dim)
    tables = torch.randperm(pages).int().view(variants, per_sequence)
    calls = [
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
        for i in range(variants)
    ]
    impl = resolve("select", **dict(calls[0]._asdict()))
    pairs = sum(range(context - shape.rows + 1, context + 1))
    functions = {OURS: lambda i: run(impl, calls[i])}
    if layout.FORMATS[format].packed:
        plain = pool(pages, shape.page, 1, shape.dim, dtype=torch.bfloat16)
        packed = Plane(keys, format, None, shape.page)
        for page in range(pages):
            at = torch.arange(page * shape.page, (page + 1) * shape.page)
            plain[page] = packed.rows(packed.at(at)).view(shape.page, 1, -1)
        functions[PLAIN] = lambda i: run(impl, calls[i]._replace(keys=plain, format="bf16"))
    elif key_scale is None:
        functions[TOPK] = lambda i: run(impl, calls[i]._replace(k=1))
    functions[PAGED] = lambda i: score(shape, calls[i], gathered(shape, calls[i]))
    if format in DTYPES:
        near = [gathered(shape, a) for a in calls[:4]]
        functions[CONTIGUOUS] = lambda i: score(shape, calls[i], near[i % len(near)])
        if compiled:
            made = torch.compile(score, dynamic=False)
            functions[COMPILED] = lambda i: made(shape, calls[i], near[i % len(near)])
    functions |= engines.select_peers(calls, lambda a: gathered(shape, a))
    case = Case(label(shape, context, format), functions, variants, 2.0 * pairs * shape.q_heads * shape.dim)
    case.bytes, case.limit = float(entry * context), dtype
    case.check = lambda: check(case, dtype)
    return case


def run(impl: Impl, a: Select) -> Tensor:
    lists = len(a.q), a.out_heads
    indices = torch.empty(*lists, a.k, dtype=torch.int32)
    impl.run(a, indices, torch.empty(lists, dtype=torch.int32), None, None)
    return indices


def gathered(shape: Shape, a: Select) -> Tensor:
    """The keys ``[L, Hk, D]`` of a call's sequence in the order of its tokens, times their scales."""
    if layout.FORMATS[a.format].packed:
        slots = a.page_table[0].long()[:, None] * shape.page + torch.arange(shape.page)
        packed = Plane(a.keys, a.format, None, shape.page)
        return packed.rows(packed.at(slots.flatten())).to(a.q.dtype)
    keys = a.keys.index_select(0, a.page_table[0]).flatten(0, 1)
    if a.key_scale is None:
        return keys
    return keys.to(a.q.dtype) * a.key_scale.index_select(0, a.page_table[0]).flatten(0, 1)[..., None].to(a.q.dtype)


def score(shape: Shape, a: Select, keys: Tensor) -> Tensor:
    """What torch selects: scores of every entry by one product, then torch.topk of them."""
    groups = shape.key_heads
    q = a.q.view(shape.rows, groups, -1, shape.dim).transpose(0, 1).reshape(groups, -1, shape.dim)
    scores = (q @ keys.permute(1, 2, 0)).view(groups, -1, len(keys))
    if a.weights is not None:
        total = (a.weights[:, None] @ scores.relu()[0][None]).view(shape.rows, 1, -1)
    else:
        hidden = torch.arange(len(keys)) > torch.arange(len(keys) - shape.rows, len(keys))[:, None]
        scores = (scores * a.scale).view(groups, shape.rows, -1, len(keys))
        total = JOINED[shape.score](scores.masked_fill_(hidden[:, None], -torch.inf)).transpose(0, 1)
    return total.topk(a.k, sorted=False).indices.int()


def check(case: Case, dtype: str) -> None:
    """Raise if another selects something else, but for scores that differ by rounding."""
    ours = case.functions[OURS](0)
    for name, function in case.functions.items():
        if name == TOPK:
            continue
        for mine, other in zip(ours.flatten(0, 1).tolist(), function(0).flatten(0, 1).tolist(), strict=True):
            same = len(set(mine) & set(other)) / len(mine)
            assert same >= (0.9 if dtype == "bf16" else 0.99), f"{case.name}: {name} shares {same:.3f}"
