"""Calls of the ops at the sizes of models, and the kernels that they launch: what is planned for every chip, and
counted in `docs/ascend-triton.md`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import launching
import torch
from lowering import Chip, Specialised

import sparse_attn
from sparse_attn.layout import FORMATS

CALLS: dict[str, Callable[[], Any]] = {}
"""By a name that says what is launched."""


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        CALLS[name] = run
        return run

    return add


@call("merge, 4 parts, 64 heads of 512")
def merge() -> Any:
    outs, lses = torch.zeros(4, 2, 64, 512), torch.zeros(4, 2, 64)
    return sparse_attn.merge(outs, lses, sinks=torch.zeros(64), backend="ascend_triton")


ATTENDS: dict[str, dict[str, Any]] = {
    "V3.2, bf16, 128 heads": dict(cases.V32, q_heads=128, format="bf16"),
    "V3.2, bf16, 16 heads": dict(cases.V32, q_heads=16, format="bf16"),
    "V3.2, int8_v32, 128 heads": dict(cases.V32, q_heads=128, format="int8_v32"),
    "V3.2, fp8_v32, 128 heads": dict(cases.V32, q_heads=128, format="fp8_v32"),
    "V4, bf16, 64 heads": dict(cases.V4, q_heads=64, format="bf16", win_format="bf16"),
    "V4, fp8_v4_planar, 64 heads": dict(cases.V4, q_heads=64, format="fp8_v4_planar", win_format="fp8_v4_planar"),
    "V4.1, fp4_v41 + fp8_v41, 64 heads": dict(cases.V4, q_heads=64, format="fp4_v41", win_format="fp8_v41"),
    "GQA 32/8, bf16, dense": dict(cases.GQA, format="bf16", v_format="bf16"),
    "GQA 64/4, bf16, blocks of 128": dict(
        cases.GQA,
        q_heads=64,
        kv_heads=4,
        format="bf16",
        v_format="bf16",
        index_heads=4,
        selected=2048,
        select_block=128,
        page_size=128,
    ),
    "GQA 32/8, int8, tokens": dict(cases.GQA, format="int8", v_format="int8", index_heads=8, selected=1024),
    "V3.2, fp32, 16 heads": dict(cases.V32, q_heads=16, dtype="float32", format="fp32"),
}


def _attend(options: dict[str, Any]) -> None:
    leading, keywords = cases.attend(**options)
    sparse_attn.attend(*leading, **keywords, backend="ascend_triton")


for _name, _options in ATTENDS.items():
    CALLS[f"attend, {_name}"] = partial(_attend, _options)


def _plane(format: str, heads: int, dim: int) -> dict[str, Any]:
    f = FORMATS[format]
    plane = torch.zeros(f.shape(2, 64, heads, dim), dtype=getattr(torch, f.dtype))
    scale = torch.zeros(2, 64, heads, dtype=torch.half) if f.scale_dtype else None
    return dict(plane=plane, slots=torch.arange(2), scale=scale, format=format, page_size=64, backend="ascend_triton")


def _store(format: str, heads: int, dim: int) -> None:
    sparse_attn.store(torch.zeros(2, heads, dim, dtype=torch.bfloat16), **_plane(format, heads, dim))


def _load(format: str, heads: int, dim: int) -> None:
    sparse_attn.load(**_plane(format, heads, dim), dtype=torch.bfloat16)


for _format, _f in FORMATS.items():
    for _heads, _dim in ((1, _f.dim),) if _f.packed else ((8, 128), (1, 2048)):
        CALLS[f"store, {_format}, {_heads} of {_dim}"] = partial(_store, _format, _heads, _dim)
        CALLS[f"load, {_format}, {_heads} of {_dim}"] = partial(_load, _format, _heads, _dim)


def _convert(src: str, dst: str) -> None:
    planes = _plane(src, 1, 512), _plane(dst, 1, 512)
    sparse_attn.convert(
        *(plane["plane"] for plane in planes),
        src_format=src,
        dst_format=dst,
        src_page_size=64,
        dst_page_size=64,
        backend="ascend_triton",
    )


CALLS["convert, fp8_v4 to fp8_v4_planar"] = partial(_convert, "fp8_v4", "fp8_v4_planar")
CALLS["convert, fp4_v41 to bf16"] = partial(_convert, "fp4_v41", "bf16")


def _compress(stride: int, span: int, format: str, dim: int, gated: bool) -> None:
    width = span // stride * dim if gated and span == 8 else dim
    rows = torch.zeros(4, 1, width, dtype=torch.bfloat16)
    starts, lens, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4], [4], [[0, 1]]))
    state = torch.zeros(2, 64, 1, 2 * width if gated else width) if span > 1 else None
    sparse_attn.compress(
        *(rows, torch.zeros(4, 1, width) if gated else None, starts, lens, _plane(format, 1, dim)["plane"], table),
        *(stride, 4, 4),
        span=span,
        state=state,
        state_page_table=None if state is None else table,
        norm=torch.zeros(dim),
        cos_sin=torch.zeros(512, 64),
        dtype="bf16",
        format=format,
        entries=5,
        backend="ascend_triton",
    )


for _stride, _span, _format, _dim, _gated in (
    (4, 8, "fp8_v4", 512, True),
    (128, 128, "fp8_v4", 512, True),
    (2, 2, "fp4_v41", 512, True),
    (1, 1, "fp8_v41", 512, False),
    (16, 32, "bf16", 128, False),
):
    _name = f"compress, {_span} tokens every {_stride}, {_format}"
    CALLS[_name] = partial(_compress, _stride, _span, _format, _dim, _gated)


SELECTS: dict[str, dict[str, Any]] = {
    "V3.2, bf16, 64 heads": dict(heads=64, k=2048, order="index"),
    "V3.2, fp8_index_planar, 64 heads": dict(heads=64, k=2048, format="fp8_index_planar"),
    "GLM-5, int8_index_h, 32 heads": dict(heads=32, k=2048, format="int8_index_h"),
    "V4.1, makes candidates": dict(heads=32, k=512, score_dtype="bf16", candidate_k=2048),
    "V4.1, takes candidates": dict(heads=32, k=512, score_dtype="bf16", candidates=2048),
    "MiniMax-M3, blocks of 128": dict(
        heads=4, k=16, score="dot", out_heads=4, block=128, pool="max", keep_last=1, return_values=True
    ),
    "best of 9 heads, int8": dict(heads=9, key_heads=3, out_heads=3, k=512, score="max", format="int8"),
    "128 heads of 256, fp32": dict(heads=128, dim=256, k=512, format="fp32", dtype=torch.float32),
    "4 heads of 256, fp32": dict(heads=4, dim=256, k=512, format="fp32", dtype=torch.float32),
    "pages of 48": dict(heads=64, k=512, page_size=48),
    "V4.1, fp4_index, 32 heads": dict(heads=32, k=512, score_dtype="bf16", format="fp4_index_planar"),
    "NSA, sums of probabilities": dict(
        heads=64, key_heads=4, out_heads=4, k=16, score="softmax_sum", ratio=16, span=32, block=4, pool="sum"
    ),
    "Llama, probabilities, int8_index_h": dict(
        heads=32, key_heads=8, out_heads=8, k=2048, score="softmax_sum", format="int8_index_h", order="score"
    ),
    "Quest, bounds": dict(heads=32, key_heads=8, out_heads=32, k=64, score="dot", bounds=True, ratio=16),
    "Quest, bounds in int8": dict(heads=32, key_heads=8, out_heads=8, k=64, score="max", bounds=True, format="int8"),
    "MoBA, mean keys": dict(heads=32, key_heads=8, out_heads=32, k=3, score="dot", block=128, pool="mean"),
    "int8 queries and keys": dict(heads=64, k=2048, format="int8_index_h", dtype=torch.int8),
}


def _select(
    heads: int,
    k: int,
    key_heads: int = 1,
    dim: int = 128,
    format: str = "bf16",
    page_size: int = 64,
    candidates: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    f = FORMATS[format]
    row = 2 * dim if options.get("bounds") else dim
    keys = torch.zeros(f.shape(4, page_size, key_heads, row), dtype=getattr(torch, f.dtype))
    if f.scale_dtype:
        options["key_scale"] = torch.zeros(4, page_size, key_heads, dtype=torch.half)
    if dtype == torch.int8:
        options["q_scale"] = torch.ones(1, heads)
    if candidates:
        options["candidates"] = torch.zeros(1, 1, candidates, dtype=torch.int32)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([160], dtype=torch.int32)
    q, weights, table = torch.zeros(1, heads, dim, dtype=dtype), torch.zeros(1, heads), torch.zeros(1, 4).int()
    sparse_attn.select(
        *(q, weights, starts, lens, keys, table, k, 1.0, 1, 160),
        format=format,
        page_size=page_size,
        backend="ascend_triton",
        **options,
    )


for _name, _options in SELECTS.items():
    CALLS[f"select, {_name}"] = partial(_select, **_options)


@call("select_merge, 4 shards of 2048")
def _select_merge() -> None:
    lists, offsets = torch.zeros(4, 2, 1, 2048, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    sparse_attn.select_merge(lists, torch.zeros(lists.shape), offsets, 2048, backend="ascend_triton")


def kernels(name: str, chip: Chip) -> list[Specialised]:
    """The kernels that a call launches on a chip. None runs."""
    with launching.recorded(chip) as launched:
        CALLS[name]()
    return launched
