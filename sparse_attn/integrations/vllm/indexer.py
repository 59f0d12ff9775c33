"""The indexer on CPU, where vLLM has kernels for none but V4's: ``select`` over an index plane in vLLM's pages.

vLLM lets other packages replace its outer layer of latent attention. The one here is the same, but for the indexer:
projections and weights stay vLLM's; queries are not quantised; keys are in a cache of this package's own format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from ... import layout
from . import formats
from .attention import SparseAttnBackend, ops


class IndexBackend(SparseAttnBackend):
    """What vLLM asks of the cache of index keys: sizes of blocks, and steps."""

    @classmethod
    def is_mla(cls) -> bool:
        return True


class IndexCache(nn.Module, AttentionLayerBase):
    """Index keys of a layer, in pages that vLLM allocates: ``[blocks, block, 1, row]`` in ``format``."""

    def __init__(self, name: str, head_dim: int, dtype: torch.dtype, kind: str) -> None:
        super().__init__()
        self.format = formats.index(kind, dtype)
        self.kv_cache = torch.tensor([])
        plane = layout.FORMATS[self.format]
        self._row, self._dtype = plane.shape(1, 1, 1, head_dim)[-1], getattr(torch, plane.dtype)
        get_current_vllm_config().compilation_config.static_forward_context[name] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache.transpose(1, 2)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return IndexBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self._row,
            dtype=self._dtype,
            cache_role=SparseCacheRole.INDEXER,
        )


class Indexer(nn.Module):
    """Chooses entries for each token, with the weights of vLLM's ``indexer``, whose cache it takes the place of."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.weights_of: Any = indexer
        self.name: str = indexer.k_cache.prefix
        self.topk_tokens: int = indexer.topk_tokens
        self.buffer: Tensor = indexer.topk_indices_buffer
        config = get_current_vllm_config()
        kind = config.attention_config.indexer_kv_dtype
        self.cache = IndexCache(self.name, indexer.head_dim, config.model_config.dtype, kind)

    def forward(self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: nn.Module) -> Tensor:
        w = self.weights_of
        q = w.wq_b(qr)[0].view(-1, w.n_head, w.head_dim)
        k, weights = w.wk_weights_proj(hidden_states)[0].split([w.head_dim, w.n_head], -1)
        k = w.k_norm(k)[:, None].to(q.dtype)
        (q_pe, q_rest), (k_pe, k_rest) = (x.split([w.rope_dim, w.head_dim - w.rope_dim], -1) for x in (q, k))
        q_pe, k_pe = rotary_emb(positions, q_pe, k_pe)
        q, k = torch.cat([q_pe.view_as(q[..., : w.rope_dim]), q_rest], -1), torch.cat([k_pe.view_as(k_pe), k_rest], -1)
        weights = weights.contiguous() * w.n_head**-0.5
        torch.ops.vllm.sparse_attn_select(q, k, weights, self.buffer, self.name, w.softmax_scale)
        return self.buffer


def _select(q: Tensor, k: Tensor, weights: Tensor, buffer: Tensor, layer: str, scale: float) -> None:
    """Store the keys of a step, then write what its tokens attend into ``buffer [T, topk]``."""
    context = get_forward_context()
    if context.attn_metadata is None:
        return
    step, cache = context.attn_metadata[layer], context.no_compile_layers[layer]
    tokens = step.tokens
    ops.store(k[:tokens], cache.kv_cache, step.slots, format=cache.format)
    ops.select.out(
        q[:tokens],
        weights[:tokens],
        **step.sequences,
        keys=cache.kv_cache,
        format=cache.format,
        k=buffer.shape[1],
        scale=scale,
        indices=buffer[:tokens, None],
        counts=torch.empty(tokens, 1, dtype=torch.int32, device=q.device),
    )


def _select_fake(q: Tensor, k: Tensor, weights: Tensor, buffer: Tensor, layer: str, scale: float) -> None:
    return


class LatentAttention(MultiHeadLatentAttentionWrapper):
    """vLLM's outer layer of latent attention, with this package's indexer where the layer has one."""

    indexer: nn.Module | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for rotary in (self.rotary_emb, self.indexer_rope_emb):
            if hasattr(rotary, "forward_native"):  # vLLM 0.32's kernel for CPUs rotates other elements of such views
                rotary._forward_method = rotary.forward_native
        if self.indexer is not None:
            self.indexer = Indexer(self.indexer)


def install() -> None:
    """Have vLLM build ``LatentAttention`` in the place of its own layer. Calling it again does nothing."""
    if hasattr(torch.ops.vllm, "sparse_attn_select"):
        return
    direct_register_custom_op("sparse_attn_select", _select, ["buffer"], _select_fake)
    MultiHeadLatentAttentionWrapper.register_oot(LatentAttention, MultiHeadLatentAttentionWrapper.__name__)
