"""The layer for vllm-ascend on the emulated machine: its step ends in CANN's operators."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import emulator
import npu
import operators
import pytest
import torch
from sfa import LAYOUTS, SFABackend, SFAImpl, caches, expected, layer_of, queries
from stubs import V32, engine

PACKAGE = "sparse_attn.integrations.vllm_ascend"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlaid", [False, True])
def test_a_step_of_the_layer(whole_family: str, layout: str, overlaid: bool) -> None:
    cache, table = caches(layout, overlaid)
    q = queries(table)
    right = expected(layout, cache, **q)
    moved: dict[str, Any] = {name: npu.on_npu(value) for name, value in q.items()}
    moved["attn_metadata"].block_table = npu.on_npu(table)
    before = operators.calls.copy()
    with engine({"vllm_ascend.attention.sfa_v1": dict(AscendSFABackend=SFABackend, AscendSFAImpl=SFAImpl)}, PACKAGE):
        layer = layer_of(import_module(f"{PACKAGE}.attention").SparseSFAImpl, layout, V32)
        out = layer._execute_sparse_flash_attention_process(kv_cache=tuple(map(npu.on_npu, cache)), **moved)
    torch.testing.assert_close(out.cpu().float(), right, atol=2e-2, rtol=2e-2)
    # A2 and A3 read no pages of int8 rows that lie apart: those are gathered first
    in_place = layout == "int8" and (not overlaid or whole_family == "950")
    name = emulator.KV_QUANT if in_place else emulator.SFA
    assert operators.calls[name] > before[name]
