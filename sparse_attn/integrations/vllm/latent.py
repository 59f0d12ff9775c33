"""The attention backend for latent attention over a selection: DeepSeek V3.2, GLM-5 and others of their kind.

Every token takes the absorbed path, prefill too. The selection comes in the buffer that the layer's indexer fills:
vLLM's own, or on CPU the one in ``indexer.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import MLAAttentionImpl

from . import formats
from .attention import SparseAttnBackend, Step, ops


class SparseLatentBackend(SparseAttnBackend):
    """``CUSTOM`` for layers that cache latent rows and attend to a selection of them."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *formats.PACKED]

    @staticmethod
    def get_impl_cls() -> Any:
        return SparseLatentImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


class SparseLatentImpl(MLAAttentionImpl[Step]):
    """One layer over rows of latent and rotated elements, which are its keys; the latent ones are its values."""

    is_sparse = True
    supports_dense_mha_prefill = False
    masked_mha_available = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: Any = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Any = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        *,
        kv_lora_rank: int,
        topk_indices_buffer: Tensor,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype, self.kv_lora_rank = num_kv_heads, kv_cache_dtype, kv_lora_rank
        self.topk_indices_buffer = topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """vLLM says that the indexer has filled the buffer; there is no other stream that waits for it."""

    def format(self, cache: Tensor) -> str:
        return formats.PACKED.get(self.kv_cache_dtype) or formats.PLAIN[cache.dtype]

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store rows ``[T, kv_lora_rank]`` and ``[T, 1, rope]``. A cache that is not there yet is empty."""
        if kv_cache.numel():
            rows = torch.cat([kv_c_normed[:, None], k_pe.view(len(k_pe), 1, -1)], -1)
            slots = slot_mapping.flatten()
            ops.store(rows[: len(slots)], kv_cache.unsqueeze(2), slots, format=self.format(kv_cache))

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Step, layer: Any
    ) -> tuple[Tensor, None]:
        """Attention of ``[T, heads, kv_lora_rank + rope]``, or of the two parts, over rows ``[blocks, block, row]``."""
        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        out, _ = ops.attend(
            queries,
            **attn_metadata.sequences,
            scale=self.scale,
            v_dim=self.kv_lora_rank,
            kv=kv_c_and_k_pe_cache.unsqueeze(2),
            format=self.format(kv_c_and_k_pe_cache),
            indices=self.topk_indices_buffer[: len(queries), None],
        )
        return out, None
