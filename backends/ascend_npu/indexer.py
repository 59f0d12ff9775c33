"""``select`` of the lightning indexer: CANN's ``LightningIndexer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import operators
from .rows import pack, pad_heads, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.select import Select

CAUSAL, ALL = 3, 0  # sparse_mode
HEADS = (8, 16, 24, 32, 64)
"""Head counts that every family takes."""


def lightning_indexer(
    a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None
) -> None:
    """The k best entries of each row; ``scale``, above 0, changes no order."""
    if indices.numel() == 0 or len(a.seq_lens) == 0:
        indices.fill_(-1)
        counts.zero_()
        return
    assert a.weights is not None
    heads = next(heads for heads in HEADS if heads >= a.q.shape[1])
    weights = torch.nn.functional.pad(a.weights, (0, heads - a.q.shape[1]))
    found = operators.get(operators.INDEXER)(
        pad_heads(a.q, heads),
        a.keys,
        weights.contiguous(),
        actual_seq_lengths_query=a.cu_seqlens_q[1:].clone(),  # ends alone, in memory of their own
        actual_seq_lengths_key=a.seq_lens.clamp(min=0),
        block_table=a.page_table.contiguous(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=a.k,
        sparse_mode=CAUSAL if a.causal else ALL,
    )
    chosen = found if isinstance(found, Tensor) else found[0]  # sgl-kernel-npu's version returns one tensor
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    packed, count = pack(chosen, None, rows.tokens if a.causal else rows.length, a.k)
    indices.copy_(packed)
    counts.copy_(count)
