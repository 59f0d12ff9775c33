"""The attention backend for layers with keys and values.

SGLang's pools hold a row of each token, and its tables the row of each token of a request. With pages, rows of a page
lie together, so a pool is a plane of pages; without, each row is a page of one token.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from ... import layout
from ...checks import InvalidCall, expect
from ..capabilities import check_config
from ..step import Step

FORMATS = {getattr(torch, layout.FORMATS[name].dtype): name for name in layout.PLAIN_FORMATS}


class SparseAttnBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.tables: Tensor = runner.req_to_token_pool.req_to_token
        self.pool: Any = runner.token_to_kv_pool
        self.page: int = runner.page_size or 1
        self.step: Step | None = None
        format = FORMATS.get(runner.kv_cache_dtype, str(runner.kv_cache_dtype))
        check_config("sglang", runner.device, runner.model_config.hf_text_config.to_dict(), {"main": format})
        kind = getattr(self.pool, "kv_cache_layout", type(self.pool).__name__)
        expect(kind == "nhd", "sglang", "KV pool", "one of rows [token, head, element]", kind, "choose another backend")
        self.format = format

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lengths and tables of a batch. In decode each request has one row, else those that it extends by."""
        b = forward_batch
        mode = b.forward_mode
        if mode.is_decode():
            lengths, most = torch.ones_like(b.seq_lens), 1
        elif mode.is_extend() and not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            lengths, most = b.extend_seq_lens, max(b.extend_seq_lens_cpu)
        else:
            raise InvalidCall(f"sglang: forward mode: expected decode or extend, got {mode}; leave out drafts")
        ends = lengths.cumsum(0).int()
        longest = int(b.seq_lens_cpu.max())
        slots = self.tables[b.req_pool_indices, : layout.pages_for(longest, self.page) * self.page]
        self.step = Step(
            tokens=len(b.out_cache_loc),
            cu_seqlens_q=torch.cat([ends.new_zeros(1), ends]),
            seq_lens=b.seq_lens.int(),
            page_table=(slots[:, :: self.page] // self.page).int(),
            max_seqlen_q=int(most),
            max_seq_len=longest,
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer: ``[T, heads * D]``, of queries that are so, or ``[T, heads, D]``."""
        assert self.step is not None
        _refuse(layer, kwargs)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        pages = (-1, self.page)
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else 0  # SGLang leaves itself out
        sinks = kwargs.get("sinks")
        out, _ = torch.ops.sparse_attn.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            **self.step.sequences,
            scale=layer.scaling,
            v_dim=layer.v_head_dim,
            kv=self.pool.get_key_buffer(layer.layer_id).unflatten(0, pages),
            v=self.pool.get_value_buffer(layer.layer_id).unflatten(0, pages),
            format=self.format,
            kv_range=self.step.last(window) if window else None,
            sinks=None if sinks is None else sinks.float(),
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def _refuse(layer: Any, given: dict[str, Any]) -> None:
    asked = {
        "logit_cap": layer.logit_cap,
        "cross attention": layer.is_cross_attention,
        "attn_type": None if layer.attn_type.value == "decoder" else layer.attn_type.value,
    }
    asked |= {name: value for name, value in given.items() if name != "sinks"}
    for name, value in asked.items():
        if value is not None and value is not False and not (isinstance(value, float) and value == 0):
            raise InvalidCall(f"sglang: {name}: expected none, got {value}; choose another attention backend")
