"""Kernels of engines as peers, where they are installed beside this package. None is needed, none is brought along."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sparse_attn.ops.attend import Attend

VLLM = "vLLM flash_mla"


@cache
def _vllm() -> bool:
    """Whether vLLM's kernels for CPUs are there. Loads them, but not the engine."""
    spec = find_spec("vllm")
    libraries = (
        [file for place in (spec.submodule_search_locations or ()) for file in Path(place).glob("_C.*.so")]
        if spec
        else []
    )
    if not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError:  # built for another torch
        return False
    return hasattr(torch.ops._C, "flash_mla_with_kvcache_cpu")


def peers(calls: list[Attend], slots: list[Tensor], window_slots: list[Tensor]) -> dict[str, Callable[[int], Tensor]]:
    """vLLM's sparse MLA, on calls with a window whose planes are both fp8_v4_planar. `slots`: ``[T, 1, K]`` of each."""
    a = calls[0]
    if (a.format, a.win_format) != ("fp8_v4_planar", "fp8_v4_planar") or a.win is None or not _vllm():
        return {}
    sinks = torch.full((a.q.shape[1],), -torch.inf)
    lists = [(window[:, 0].contiguous(), s[:, 0].contiguous()) for window, s in zip(window_slots, slots, strict=True)]

    def run(i: int) -> Tensor:
        call = calls[i]
        out = torch.empty_like(call.q)
        torch.ops._C.flash_mla_with_kvcache_cpu(
            out,
            call.q,
            call.win,
            lists[i][0],
            call.win_page_size,
            call.kv,
            lists[i][1],
            call.page_size,
            sinks,
            call.scale,
        )
        return out

    return {VLLM: run}
