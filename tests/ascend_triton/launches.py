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


_ONE_ROW: dict[str, Any] = dict(dtype="bfloat16", lengths=(2500,), rows=(1,), padding=0, page_size=64, win_page_size=64)
_V32 = dict(_ONE_ROW, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1, selected=2048)
_V4 = dict(_ONE_ROW, planes="main+window", kv_heads=1, qk_dim=512, v_dim=512, index_heads=1, selected=512, sinks=True)
_GQA = dict(_ONE_ROW, q_heads=32, kv_heads=8, qk_dim=128, v_dim=128)
ATTENDS: dict[str, dict[str, Any]] = {
    "V3.2, bf16, 128 heads": dict(_V32, q_heads=128, format="bf16"),
    "V3.2, bf16, 16 heads": dict(_V32, q_heads=16, format="bf16"),
    "V3.2, int8_v32, 128 heads": dict(_V32, q_heads=128, format="int8_v32"),
    "V3.2, fp8_v32, 128 heads": dict(_V32, q_heads=128, format="fp8_v32"),
    "V4, bf16, 64 heads": dict(_V4, q_heads=64, format="bf16", win_format="bf16"),
    "V4, fp8_v4_planar, 64 heads": dict(_V4, q_heads=64, format="fp8_v4_planar", win_format="fp8_v4_planar"),
    "V4.1, fp4_v41 + fp8_v41, 64 heads": dict(_V4, q_heads=64, format="fp4_v41", win_format="fp8_v41"),
    "GQA 32/8, bf16, dense": dict(_GQA, format="bf16", v_format="bf16"),
    "GQA 64/4, bf16, blocks of 128": dict(
        _GQA,
        q_heads=64,
        kv_heads=4,
        format="bf16",
        v_format="bf16",
        index_heads=4,
        selected=2048,
        select_block=128,
        page_size=128,
    ),
    "GQA 32/8, int8, tokens": dict(_GQA, format="int8", v_format="int8", index_heads=8, selected=1024),
    "V3.2, fp32, 16 heads": dict(_V32, q_heads=16, dtype="float32", format="fp32"),
}


def _attend(options: dict[str, Any]) -> None:
    leading, keywords = cases.attend(**options)
    sparse_attn.attend(*leading, **keywords, backend="ascend_triton")


for _name, _options in ATTENDS.items():
    CALLS[f"attend, {_name}"] = partial(_attend, _options)


def kernels(name: str, chip: Chip) -> list[Specialised]:
    """The kernels that a call launches on a chip. None runs."""
    with launching.recorded(chip) as launched:
        CALLS[name]()
    return launched
