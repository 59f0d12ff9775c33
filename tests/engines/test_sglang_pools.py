"""The backend on SGLang's own pools, layers, modes and registry, against SGLang's own ``torch_native`` backend.

Skipped where SGLang cannot be imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

try:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
except Exception as error:
    pytest.skip(f"SGLang cannot be imported here: {type(error).__name__}: {error}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))
from stubs import LLAMA  # noqa: E402

from sparse_attn.integrations import sglang as package  # noqa: E402

SIZE, TOTAL, REQUESTS = 512, (40, 70, 33), (3, 1, 5)


def runner(page: int) -> SimpleNamespace:
    shape = dict(head_num=2, head_dim=32, layer_num=1, dtype=torch.float32)
    pool = MHATokenToKVPool(size=SIZE, page_size=page, **shape, device="cpu", enable_memory_saver=False)
    table = ReqToTokenPool(size=8, max_context_len=256, device="cpu", enable_memory_saver=False)
    pages = (torch.randperm(SIZE // page) + 1).tolist()
    for request, tokens in zip(REQUESTS, TOTAL, strict=True):
        taken = [pages.pop() for _ in range(-(-(tokens + 1) // page))]
        slots = [taken[t // page] * page + t % page for t in range(tokens + 1)]
        table.req_to_token[request, : tokens + 1] = torch.tensor(slots, dtype=torch.int32)
    return SimpleNamespace(
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        page_size=page,
        kv_cache_dtype=torch.float32,
        device="cpu",
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: LLAMA)),
    )


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [-1, 9])
def test_it_computes_what_torch_native_does(page: int, window: int) -> None:
    package.register()
    made = runner(page)
    ours, theirs = ATTENTION_BACKENDS["sparse_attn"](made), TorchNativeAttnBackend(made)
    layer = RadixAttention(4, 32, 32**-0.5, 2, 0, sliding_window_size=window)
    steps = (
        (ForwardMode.EXTEND, (0, 1, 2), (0, 0, 0), (30, 70, 20)),
        (ForwardMode.EXTEND, (0, 2), (30, 20), (10, 13)),
        (ForwardMode.DECODE, (0, 1, 2), TOTAL, (1, 1, 1)),
    )
    for mode, which, before, new in steps:
        requests = [REQUESTS[i] for i in which]
        table, lengths = made.req_to_token_pool.req_to_token, torch.tensor(before) + torch.tensor(new)
        slots = [table[r, b : b + n] for r, b, n in zip(requests, before, new, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(requests),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=torch.cat(slots).long(),
            extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=list(new),
            extend_prefix_lens=torch.tensor(before),
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )
        q, k, v = torch.randn(sum(new), 128), torch.randn(sum(new), 2, 32), torch.randn(sum(new), 2, 32)
        found = []
        for backend in (theirs, ours):
            backend.init_forward_metadata(batch)
            run = backend.forward_decode if mode.is_decode() else backend.forward_extend
            found.append(run(q.clone(), k, v, layer, batch))
        torch.testing.assert_close(found[1], found[0].view_as(found[1]), atol=2e-6, rtol=1e-5)


def test_it_is_a_choice() -> None:
    package.register()
    package.register()
    assert ATTENTION_BACKEND_CHOICES.count("sparse_attn") == 1
