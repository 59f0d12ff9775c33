"""Attention of DeepSeek V3.2 and GLM-5 in vllm-ascend, by ``attend``.

vllm-ascend's own layer projects, rotates, stores and selects; only its last step is replaced. Its caches are read where
they lie, also as views with a page stride into memory that other planes share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm_ascend.attention.sfa_v1 import AscendSFABackend, AscendSFAImpl

from ..capabilities import Unsupported, check_config


class SparseSFABackend(AscendSFABackend):
    @staticmethod
    def get_impl_cls() -> Any:
        theirs = AscendSFABackend.get_impl_cls()
        if theirs is not AscendSFAImpl:
            raise Unsupported(
                f"vllm-ascend on npu: expected layers without context parallelism and offload, got {theirs.__name__}; "
                "leave out sparse_attn.attention"
            )
        return SparseSFAImpl


class SparseSFAImpl(AscendSFAImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.format = "bf16"
        if self.enable_sparse_sfa_c8:
            self.format = "int8_v32" if self.c8_k_cache_dtype == torch.int8 else str(self.c8_k_cache_dtype)
        model = self.vllm_config.model_config.hf_text_config.to_dict()
        check_config("vllm-ascend", "npu", model, {"main": self.format})

    def _execute_sparse_flash_attention_process(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: tuple[Tensor, ...],
        topk_indices: Tensor,
        attn_metadata: Any,
        actual_seq_lengths_query: Tensor,
        actual_seq_lengths_key: Tensor,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries ``[T, heads, 512]`` and their rotated part ``[T, heads, 64]``.

        Args:
            kv_cache: rows ``[blocks, 128, 1, 512]`` and ``[blocks, 128, 1, 64]``, or int8 rows of 656 bytes; then the
                planes of the indexer.
            topk_indices: int32 ``[T, 1, K]`` or ``[T, K]``, -1 where there are fewer.
            actual_seq_lengths_query: int32 ``[B]``, where the rows of each sequence end.
        """
        table = attn_metadata.block_table if block_table is None else block_table
        rows = kv_cache[0]
        packed = self.format == "int8_v32"
        ends = actual_seq_lengths_query.int()
        out, _ = torch.ops.sparse_attn.attend(
            torch.cat([ql_nope, q_pe], -1),
            torch.cat([ends.new_zeros(1), ends]),
            actual_seq_lengths_key.int(),
            scale=self.scale,
            v_dim=self.kv_lora_rank,
            max_seqlen_q=len(ql_nope),  # bounds that the host knows without asking the device
            max_seq_len=table.shape[1] * rows.shape[1],
            kv=rows.view(torch.uint8) if packed else rows,
            kv_rope=None if packed else kv_cache[1],
            format=self.format,
            page_table=table,
            indices=topk_indices.reshape(len(ql_nope), 1, -1),
        )
        return out
