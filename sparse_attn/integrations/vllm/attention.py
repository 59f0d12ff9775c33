"""What the attention backends share, and the one for layers with keys and values of their own (GQA).

vLLM's cache of a layer is ``[blocks, heads, block, elements]``, whatever its order in memory: a plane of pages with
strides, which ``attend`` reads in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)

from ...checks import InvalidCall
from .. import step
from . import formats

ops = torch.ops.sparse_attn


@dataclass(kw_only=True)
class Step(step.Step, AttentionMetadata):
    """A step, and what vLLM's layers of latent attention ask: every token takes the path of decoding."""

    slots: Tensor
    num_decodes: int
    num_prefills: int = 0
    prefill: None = None

    @property
    def num_actual_tokens(self) -> int:
        return self.tokens

    @property
    def num_decode_tokens(self) -> int:
        return self.tokens


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a ``Step`` of what vLLM's runner knows of a batch."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        c = common_attn_metadata
        if c.causal is not True:
            raise InvalidCall("attention: causal: expected True, got another mask; use another backend for this model")
        return Step(
            tokens=c.num_actual_tokens,
            cu_seqlens_q=c.query_start_loc,
            seq_lens=c.seq_lens,
            page_table=c.block_table_tensor,
            slots=c.slot_mapping[: c.num_actual_tokens],
            max_seqlen_q=c.max_query_len,
            max_seq_len=c.max_seq_len,
            num_decodes=c.num_reqs,
        )


class SparseAttnBackend(AttentionBackend):
    """``CUSTOM`` for layers that cache keys and values."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among its own names

    @staticmethod
    def get_impl_cls() -> Any:
        return SparseAttnImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class SparseAttnImpl(AttentionImpl[Step]):
    """One layer: stores its keys and values, and attends to all that are visible, or to the window's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": None if attn_type == "decoder" else attn_type,
        }
        for name, given in refused.items():
            if given:
                raise InvalidCall(f"attention: {name}: expected none, got {given}; use another backend for this model")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.window = kv_cache_dtype, sliding_window
        self.owns_cache = kv_sharing_target_layer_name is None
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's tokens.

        Args:
            query, output: ``[T, heads, head_size]``, padded.
            key, value: ``[T, kv heads, head_size]``.
            kv_cache: ``[blocks, kv heads, block, 2 * head_size]``, keys before values.
            attn_metadata: None while vLLM warms up.
        """
        if attn_metadata is None:
            return output
        made, tokens = attn_metadata, attn_metadata.tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, -1)
        format = formats.PLAIN[kv_cache.dtype]
        if self.owns_cache:
            ops.store(key[:tokens], keys, made.slots, format=format)
            ops.store(value[:tokens], values, made.slots, format=format)
        ops.attend.out(
            query[:tokens],
            **made.sequences,
            scale=self.scale,
            v_dim=self.head_size,
            kv=keys,
            v=values,
            format=format,
            kv_range=made.last(self.window) if self.window else None,
            sinks=self.sinks,
            out=output[:tokens],
        )
        return output
