"""The attention backends for vLLM, against the interfaces of vLLM 0.32 and 0.33; ``tests/engines`` runs the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from stubs import LLAMA, V32, engine
from torch import Tensor

from sparse_attn import load, store
from sparse_attn.checks import InvalidCall
from sparse_attn.integrations.capabilities import Unsupported

PACKAGE = "sparse_attn.integrations.vllm"
M = TypeVar("M")
LENGTHS, NEW, PAGE = (5, 37, 64), (5, 1, 20), 16


class Builder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        pass


class Backend:
    """The choice of a backend, as vLLM's base class makes it."""

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        found = [] if asked["kv_cache_dtype"] in cls.supported_kv_cache_dtypes else ["kv_cache_dtype not supported"]  # type: ignore[attr-defined]
        found += [] if asked["dtype"] in cls.supported_dtypes else ["dtype not supported"]  # type: ignore[attr-defined]
        found += [] if asked["use_mla"] == cls.is_mla() else ["MLA not supported"]
        found += [] if asked["use_sparse"] == cls.is_sparse() else ["non-sparse not supported"]
        return found


class Impl(Generic[M]):
    pass


class Selector(SimpleNamespace):
    def _asdict(self) -> dict[str, Any]:
        return dict(vars(self))


class Platform:
    device_type = "cpu"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if attn_selector_config.use_sparse:
            raise NotImplementedError("Sparse Attention is not supported on CPU.")
        return "theirs"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM 0.32 for latent attention, which its own kernels need."""
        vllm_config.scheduler_config.enable_chunked_prefill = vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.cache_config.block_size = 8192, 16


def resolve(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


@pytest.fixture
def vllm() -> Iterator[SimpleNamespace]:
    """vLLM's modules, and the model that it loads."""
    current = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: LLAMA)),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto"),
    )
    interfaces = dict(
        AttentionBackend=Backend,
        AttentionImpl=Impl,
        MLAAttentionImpl=Impl,
        AttentionMetadata=object,
        AttentionMetadataBuilder=Builder,
        MultipleOf=lambda base: base,
    )
    modules = {
        "vllm.v1.attention.backend": interfaces,
        "vllm.platforms.interface": dict(Platform=Platform),
        "vllm.platforms.cpu": dict(CpuPlatform=Platform),
        "vllm.config": dict(get_current_vllm_config=lambda: current),
        "vllm.utils.import_utils": dict(resolve_obj_by_qualname=resolve),
    }
    with engine(modules, PACKAGE):
        yield current


def step(attention: Any, **changes: Any) -> Any:
    """A step of three sequences, of which the second decodes, in pages that are mixed up."""
    pages = torch.randperm(40)[: sum(-(-n // PAGE) for n in LENGTHS)].int().tolist()
    table = torch.zeros(len(LENGTHS), 8, dtype=torch.int32)
    slots: list[int] = []
    for row, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        taken = [pages.pop() for _ in range(-(-length // PAGE))]
        table[row, : len(taken)] = torch.tensor(taken)
        slots += [taken[t // PAGE] * PAGE + t % PAGE for t in range(length - new, length)]
    common = dict(
        causal=True,
        num_actual_tokens=sum(NEW),
        num_reqs=len(LENGTHS),
        query_start_loc=torch.tensor([0, *torch.tensor(NEW).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots, -1, -1]),  # padded
        max_query_len=max(NEW),
        max_seq_len=max(LENGTHS),
    )
    return attention.StepBuilder(None, [], None, torch.device("cpu")).build(0, SimpleNamespace(**common | changes))


def expected(q: Tensor, keys: Tensor, values: Tensor, made: Any, scale: float, allowed: Any) -> Tensor:
    """Attention row by row. ``allowed(row, position)`` are the tokens that it sees."""
    out = torch.zeros(*q.shape[:2], values.shape[-1])
    group = q.shape[1] // keys.shape[2]
    row = 0
    for b, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        for p in range(length - new, length):
            seen = [(int(made.page_table[b, t // PAGE]), t % PAGE) for t in allowed(row, p)]
            for h in range(q.shape[1]):
                k = torch.stack([keys[at][h // group] for at in seen])
                v = torch.stack([values[at][h // group] for at in seen])
                out[row, h] = (scale * k @ q[row, h]).softmax(0) @ v
            row += 1
    return out


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("window", [None, 9])
def test_keys_and_values(vllm: Any, order: tuple[int, ...], window: int | None) -> None:
    attention = import_module(f"{PACKAGE}.attention")
    made = step(attention)
    shape = [40, 2, PAGE, 2 * 32]
    cache = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])
    assert cache.shape == (40, 2, PAGE, 64)
    layer = attention.SparseAttnImpl(4, 32, 32**-0.5, 2, sliding_window=window)
    q, k, v = torch.randn(28, 4, 32), torch.randn(28, 2, 32), torch.randn(28, 2, 32)
    out = layer.forward(None, q, k, v, cache, made, torch.full((28, 4, 32), math.nan))
    keys, values = cache.transpose(1, 2).split(32, -1)
    assert torch.equal(keys.flatten(0, 1)[made.slots], k[:26])
    assert torch.equal(values.flatten(0, 1)[made.slots], v[:26])
    right = expected(q[:26], keys, values, made, 32**-0.5, lambda _, p: range(max(0, p + 1 - (window or p + 1)), p + 1))
    torch.testing.assert_close(out[:26], right, atol=2e-5, rtol=1e-5)
    assert layer.forward(None, q, k, v, cache, None, q) is q  # vLLM warms up


def test_what_a_layer_of_keys_and_values_cannot_do(vllm: Any) -> None:
    attention = import_module(f"{PACKAGE}.attention")
    for change in (dict(alibi_slopes=[0.5]), dict(logits_soft_cap=30.0), dict(attn_type="encoder_only")):
        with pytest.raises(InvalidCall, match="use another backend"):
            attention.SparseAttnImpl(4, 32, 1.0, 2, **change)
    with pytest.raises(InvalidCall, match="causal"):
        step(attention, causal=False)


@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_latent_rows(vllm: Any, kind: str) -> None:
    attention, latent = (import_module(f"{PACKAGE}.{name}") for name in ("attention", "latent"))
    made, topk = step(attention), 12
    buffer = torch.full((32, topk), -1, dtype=torch.int32)
    row = 0
    for length, new in zip(LENGTHS, NEW, strict=True):
        for p in range(length - new, length):
            chosen = torch.randperm(p + 1)[:topk]
            buffer[row, : len(chosen)] = chosen.int()
            row += 1
    cache = torch.zeros(40, PAGE, 656, dtype=torch.uint8) if kind == "fp8_ds_mla" else torch.randn(40, PAGE, 576)
    layer = latent.SparseLatentImpl(
        4, 576, 0.07, 1, kv_cache_dtype=kind, kv_lora_rank=512, topk_indices_buffer=buffer, q_lora_rank=8
    )
    format = layer.format(cache)
    old = torch.randn(40 * PAGE, 1, 576)
    store(old, cache.unsqueeze(2), torch.arange(40 * PAGE), format=format)
    c, rope = torch.randn(26, 512), torch.randn(26, 1, 64)
    layer.do_kv_cache_update(c, rope, cache, made.slots, kind, torch.ones(1))
    layer.do_kv_cache_update(c, rope, torch.tensor([]), made.slots, kind, torch.ones(1))  # while vLLM measures memory
    q = torch.randn(26, 4, 576)
    out, lse = layer.forward_mqa((q[..., :512], q[..., 512:]), cache, made, None)
    rows = load(cache.unsqueeze(2), torch.arange(40 * PAGE), format=format, dtype=torch.float32)
    rows = rows.view(40, PAGE, 1, 576)
    assert (rows.view(-1, 576)[made.slots] - torch.cat([c, rope[:, 0]], -1)).abs().max() < (
        0.3 if "fp8" in kind else 1e-6
    )
    right = expected(q, rows, rows[..., :512], made, 0.07, lambda row, p: [i for i in buffer[row].tolist() if i >= 0])
    torch.testing.assert_close(out, right, atol=3e-5, rtol=1e-4)
    assert lse is None


def selector(**changes: Any) -> Selector:
    asked = dict(use_mla=False, use_sparse=False, dtype=torch.bfloat16, kv_cache_dtype="auto")
    return Selector(**asked | changes)


def test_the_platform_chooses(vllm: Any) -> None:
    platform = import_module(f"{PACKAGE}.cpu").SparseCpuPlatform
    custom = SimpleNamespace(name="CUSTOM")
    assert platform.get_attn_backend_cls(None, selector()) == "theirs"
    gqa = platform.get_attn_backend_cls(custom, selector())
    assert resolve(gqa).get_name() == "CUSTOM"
    vllm.model_config.hf_text_config.to_dict = lambda: V32
    sparse = selector(use_mla=True, use_sparse=True)
    latent = platform.get_attn_backend_cls(None, sparse)  # which vLLM refuses
    assert resolve(latent).is_sparse()
    assert resolve(latent).is_mla()
    with pytest.raises(InvalidCall, match="got latent: MLA not supported"):
        platform.get_attn_backend_cls(custom, selector(use_mla=True))
    with pytest.raises(InvalidCall, match="kv_cache_dtype not supported"):
        platform.get_attn_backend_cls(custom, selector(kv_cache_dtype="fp8"))


def test_pairs_that_do_not_run_are_refused_at_load(vllm: Any) -> None:
    platform = import_module(f"{PACKAGE}.cpu").SparseCpuPlatform
    vllm.model_config.hf_text_config.to_dict = lambda: V32
    vllm.attention_config.indexer_kv_dtype = "mxfp4"
    with pytest.raises(Unsupported, match="prefill with the index plane in mxfp4"):
        platform.get_attn_backend_cls(None, selector(use_mla=True, use_sparse=True))
    vllm.attention_config.indexer_kv_dtype = "auto"
    vllm.model_config.hf_text_config.to_dict = lambda: V32 | dict(kv_lora_rank=128)
    with pytest.raises(Unsupported, match="expected rows of 576 elements, got 192"):
        platform.get_attn_backend_cls(None, selector(use_mla=True, use_sparse=True, kv_cache_dtype="fp8_ds_mla"))


@pytest.mark.parametrize("config", [V32, LLAMA])
def test_where_layers_select_chunks_and_prefixes_stay_as_asked(vllm: Any, config: dict[str, Any]) -> None:
    platform = import_module(f"{PACKAGE}.cpu").SparseCpuPlatform
    vllm.model_config.hf_text_config.to_dict = lambda: config
    vllm.scheduler_config = SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=96)
    vllm.cache_config = SimpleNamespace(enable_prefix_caching=True, block_size=32, user_specified_block_size=True)
    platform.check_and_update_config(vllm)
    kept = vllm.scheduler_config.enable_chunked_prefill, vllm.cache_config.enable_prefix_caching
    sizes = vllm.scheduler_config.max_num_batched_tokens, vllm.cache_config.block_size
    assert (kept, sizes) == (((True, True), (96, 32)) if config is V32 else ((False, False), (8192, 16)))
