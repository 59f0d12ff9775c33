"""SGLang's kernels: attention on latent rows in bf16 and fp8, and the scores of an indexer on rows in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_attn import layout
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

from .operators import chosen, in_fp8, load

NAME = "SGLang"
ATTEND, SELECT = f"{NAME} flash_mla", f"{NAME} mqa_logits + topk"
LAYOUTS = {"bf16": 0, "fp8_v32": 1, "fp8_v4_planar": 2}
"""Its number of a format; 0 is not in fp8."""
INDEX_PAGE = 64
"""Rows of a page of index keys."""


def operator(name: str) -> Any:
    return getattr(load("sgl_kernel", "common_ops*.so", "sgl_kernel"), name, None)


def pages(plane: Tensor, format: str, page_size: int, dim: int) -> Tensor:
    """A plane as ``[pages, page_size, 1, elements or bytes of a row]``."""
    if not layout.FORMATS[format].planar:
        return plane
    row = layout.FORMATS[format].entry_bytes(dim)
    return plane[:, : page_size * row].unflatten(1, (page_size, 1, row))


def attend_peers(
    calls: list[Attend], slots: list[Tensor], window_slots: list[Tensor]
) -> dict[str, Callable[[int], Tensor]]:
    a, kernel = calls[0], operator("flash_mla_with_kvcache_cpu")
    if kernel is None or a.q.dtype != torch.bfloat16 or a.format not in LAYOUTS:
        return {}
    if a.win is not None and a.win_format != a.format:
        return {}
    number = LAYOUTS[a.format]
    lists, window_lists = [s.int() for s in slots], [s.int() for s in window_slots]

    def run(i: int) -> Tensor:
        call, dim = calls[i], a.q.shape[2]
        assert call.kv is not None
        first, other = (pages(call.kv, a.format, a.page_size, dim), lists[i]), (None, None)
        if call.win is not None:
            first, other = (pages(call.win, a.format, a.win_page_size, dim), window_lists[i]), first
        plane, indices = first
        out, _ = kernel(
            call.q[:, None], plane, a.v_dim, call.scale, indices, None, None, *other, None, number > 0, number
        )
        return out[:, 0]  # type: ignore[no-any-return]

    return {ATTEND: run}


def select_peers(calls: list[Select]) -> dict[str, Callable[[int], Tensor]]:
    a, kernel = calls[0], operator("fp8_paged_mqa_logits_cpu")
    if kernel is None or a.format != "fp8_index_planar" or a.page_size != INDEX_PAGE:
        return {}
    keys, queries = pages(a.keys, a.format, a.page_size, a.q.shape[2]), in_fp8(calls)

    def run(i: int) -> Tensor:
        call, (q, weights) = calls[i], queries[i]
        scores = kernel(q[:, None], keys, weights, call.seq_lens, call.page_table, call.max_seq_len, False)
        return chosen(scores, call)

    return {SELECT: run}
