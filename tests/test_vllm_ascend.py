"""The backend for vllm-ascend, against signatures recorded from its sources (182b75ea, August 2026).

``tests/ascend`` runs the same layer on an emulated device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sfa import LAYOUTS, SFABackend, SFAImpl, caches, expected, layer_of, queries
from stubs import LLAMA, V32, engine

from sparse_attn.integrations.capabilities import Unsupported

PACKAGE = "sparse_attn.integrations.vllm_ascend"


class NPUPlatform:
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return "vllm_ascend.attention.sfa_v1.AscendSFABackend"
        return "vllm_ascend.attention.attention_v1.AscendAttentionBackend"


@pytest.fixture
def config() -> Iterator[SimpleNamespace]:
    current = SimpleNamespace(additional_config=None)
    modules = {
        "vllm.config": dict(get_current_vllm_config=lambda: current),
        "vllm_ascend.attention.sfa_v1": dict(AscendSFABackend=SFABackend, AscendSFAImpl=SFAImpl),
    }
    with engine(modules, PACKAGE):
        yield current


def test_it_is_chosen_where_it_is_asked_for(config: Any) -> None:
    package = import_module(PACKAGE)
    theirs = NPUPlatform.__dict__["get_attn_backend_cls"]
    sparse, dense = SimpleNamespace(use_sparse=True), SimpleNamespace(use_sparse=False)
    try:
        package.choose(NPUPlatform)
        package.choose(NPUPlatform)
        assert NPUPlatform.get_attn_backend_cls(None, sparse) == package.THEIRS
        config.additional_config = {"sparse_attn": {"attention": True}}
        assert NPUPlatform.get_attn_backend_cls(None, dense).endswith("AscendAttentionBackend")
        chosen = NPUPlatform.get_attn_backend_cls(None, sparse, num_heads=16)
    finally:
        NPUPlatform.get_attn_backend_cls = theirs
    module, name = chosen.rsplit(".", 1)
    made = getattr(import_module(module), name)
    assert made.get_name() == "ASCEND_SFA"
    assert issubclass(made.get_impl_cls(), SFAImpl)


def test_signatures_are_the_recorded_ones(config: Any) -> None:
    ours = import_module(f"{PACKAGE}.attention").SparseSFAImpl
    name = "_execute_sparse_flash_attention_process"
    assert list(inspect.signature(getattr(ours, name)).parameters) == list(
        inspect.signature(getattr(SFAImpl, name)).parameters
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlaid", [False, True])
def test_its_caches_are_read_where_they_lie(config: Any, layout: str, overlaid: bool) -> None:
    layer = layer_of(import_module(f"{PACKAGE}.attention").SparseSFAImpl, layout, V32)
    cache, table = caches(layout, overlaid)
    q = queries(table)
    out = layer._execute_sparse_flash_attention_process(kv_cache=cache, **q)
    torch.testing.assert_close(out.float(), expected(layout, cache, **q), atol=2e-2, rtol=2e-2)


def test_what_it_has_no_kernel_for_is_refused_at_load(config: Any) -> None:
    attention = import_module(f"{PACKAGE}.attention")
    with pytest.raises(Unsupported, match="prefill with the main plane in torch.float8_e4m3fn"):
        layer_of(attention.SparseSFAImpl, "float8", V32)
    with pytest.raises(Unsupported, match="expected layers of dsa, got gqa"):
        layer_of(attention.SparseSFAImpl, "bf16", LLAMA)
    SFABackend.impl = type("AscendSFADCPImpl", (SFAImpl,), {})
    try:
        with pytest.raises(Unsupported, match="got AscendSFADCPImpl"):
            attention.SparseSFABackend.get_impl_cls()
    finally:
        SFABackend.impl = SFAImpl
