"""vLLM's kernels: DeepSeek V4's attention, and the scores of its indexer, both on rows in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

from .operators import chosen, in_fp8, load

NAME = "vLLM"
ATTEND, SELECT = f"{NAME} flash_mla", f"{NAME} mqa_logits + topk"


def operator(name: str) -> Any:
    return getattr(load("vllm", "_C.*.so", "_C"), name, None)


def attend_peers(
    calls: list[Attend], slots: list[Tensor], window_slots: list[Tensor]
) -> dict[str, Callable[[int], Tensor]]:
    a, kernel = calls[0], operator("flash_mla_with_kvcache_cpu")
    if kernel is None or a.win is None or (a.format, a.win_format) != ("fp8_v4_planar", "fp8_v4_planar"):
        return {}
    sinks = torch.full((a.q.shape[1],), -torch.inf)
    lists = [(window[:, 0].contiguous(), s[:, 0].contiguous()) for window, s in zip(window_slots, slots, strict=True)]

    def run(i: int) -> Tensor:
        call, (window, entries) = calls[i], lists[i]
        out = torch.empty_like(call.q)
        kernel(out, call.q, call.win, window, a.win_page_size, call.kv, entries, a.page_size, sinks, call.scale)
        return out

    return {ATTEND: run}


def select_peers(calls: list[Select]) -> dict[str, Callable[[int], Tensor]]:
    kernel = operator("fp8_paged_mqa_logits_cpu")
    if kernel is None or calls[0].format != "fp8_index_planar":
        return {}
    queries = in_fp8(calls)

    def run(i: int) -> Tensor:
        a, (q, weights) = calls[i], queries[i]
        scores = kernel(q, a.keys, weights, a.seq_lens, a.page_table, a.page_size, a.max_seq_len)
        return chosen(scores, a)

    return {SELECT: run}
