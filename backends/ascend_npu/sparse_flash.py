"""``attend`` of the latent rows of DeepSeek V3.2 and GLM-5: CANN's ``SparseFlashAttention`` and
``KvQuantSparseFlashAttention``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import operators
from .rows import fill, pack, pad_heads, power_of_two, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

NOPE, ROPE = 512, 64
ABSORBED = 2  # attention_mode of latent rows; the only one that is allowed
CAUSAL, ALL = 3, 0  # sparse_mode
TILES = 2  # quant_mode: a scale for each 128 elements


def sparse_flash_attention(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """bf16 rows with the rope part apart."""
    selection = _selection(a, out)
    if selection is None:
        return
    indices, attended = selection
    assert a.kv is not None and a.kv_rope is not None
    q = pad_heads(a.q, power_of_two(a.q.shape[1]))
    result = operators.get(operators.SFA)(
        q[..., :NOPE].contiguous(),
        a.kv,
        a.kv,
        indices,
        a.scale,
        query_rope=q[..., NOPE:].contiguous(),
        key_rope=a.kv_rope,
        **_common(a),
    )[0]
    fill(out, result, attended)


def kv_quant_sparse_flash_attention(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Rows of 656 bytes: int8 values, rope, scales."""
    selection = _selection(a, out)
    if selection is None:
        return
    indices, attended = selection
    assert a.kv is not None
    rows = a.kv.view(torch.int8)
    result = operators.get(operators.KV_QUANT_SFA)(
        pad_heads(a.q, power_of_two(a.q.shape[1])),
        rows,
        rows,
        indices,
        a.scale,
        TILES,
        TILES,
        quant_scale_repo_mode=1,
        tile_size=128,
        rope_head_dim=ROPE,
        **_common(a),
    )
    # torch_npu returns a tensor, vllm-ascend's version of the operator a tuple
    fill(out, result if isinstance(result, Tensor) else result[0], attended)


def _selection(a: Attend, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packed indices and which rows attend anything; None, with ``out`` filled, if none can."""
    assert a.indices is not None
    if out.numel() == 0 or a.indices.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        return None
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    visible = rows.tokens if a.causal else rows.length
    indices, count = pack(a.indices, a.index_counts, visible, a.indices.shape[2])
    return indices, count[:, 0] > 0


def _common(a: Attend) -> dict[str, object]:
    assert a.page_table is not None
    return {
        "block_table": a.page_table.contiguous(),
        "actual_seq_lengths_query": a.cu_seqlens_q[1:].clone(),  # ends alone, in memory of their own
        "actual_seq_lengths_kv": a.seq_lens.clamp(min=0),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": CAUSAL if a.causal else ALL,
        "attention_mode": ABSORBED,
    }
