"""``select`` of the lightning indexer: CANN's ``LightningIndexer``, and ``QuantLightningIndexer`` for int8 queries and
keys."""

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
PER_TOKEN_AND_HEAD = 0  # quant_mode; the only one that is allowed


def lightning_indexer(
    a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None
) -> None:
    """The k best entries of each row; ``scale``, above 0, changes no order."""
    if _nothing(a, indices, counts):
        return
    assert a.weights is not None
    heads = _heads(a)
    found = operators.get(operators.INDEXER)(
        pad_heads(a.q, heads), a.keys, _padded(a.weights, heads), sparse_count=a.k, **_common(a)
    )
    # sgl-kernel-npu's version returns one tensor
    _listed(a, found if isinstance(found, Tensor) else found[0], indices, counts)


def quant_lightning_indexer(
    a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None
) -> None:
    """The same for int8 queries and keys.

    Weights times scales of queries must fit float16, and nothing says how the operator rounds them. So it is given this
    product as weights, divided by the row's largest, which changes no order, and scales of 1.
    """
    if _nothing(a, indices, counts):
        return
    assert a.q_scale is not None and a.key_scale is not None
    heads = _heads(a)
    weights = a.q_scale.float() if a.weights is None else a.weights.float() * a.q_scale.float()
    largest = weights.abs().amax(-1, keepdim=True)
    weights = _padded((weights / torch.where(largest > 0, largest, 1.0)).half(), heads)
    found = operators.get(operators.QUANT_INDEXER)(
        pad_heads(a.q, heads),
        a.keys,
        weights,
        torch.ones_like(weights),
        a.key_scale,
        PER_TOKEN_AND_HEAD,
        PER_TOKEN_AND_HEAD,
        sparse_count=a.k,
        **_common(a),
    )
    _listed(a, found, indices, counts)


def _nothing(a: Select, indices: Tensor, counts: Tensor) -> bool:
    """Whether nothing can be selected; then the lists are filled."""
    if indices.numel() and len(a.seq_lens):
        return False
    indices.fill_(-1)
    counts.zero_()
    return True


def _heads(a: Select) -> int:
    return next(heads for heads in HEADS if heads >= a.q.shape[1])


def _padded(weights: Tensor, heads: int) -> Tensor:
    return torch.nn.functional.pad(weights, (0, heads - weights.shape[1])).contiguous()


def _common(a: Select) -> dict[str, object]:
    return {
        "actual_seq_lengths_query": a.cu_seqlens_q[1:].clone(),  # ends alone, in memory of their own
        "actual_seq_lengths_key": a.seq_lens.clamp(min=0),
        "block_table": a.page_table.contiguous(),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_mode": CAUSAL if a.causal else ALL,
    }


def _listed(a: Select, chosen: Tensor, indices: Tensor, counts: Tensor) -> None:
    """The lists in our form; the operator leaves any numbers where nothing is visible."""
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    packed, count = pack(chosen, None, rows.tokens if a.causal else rows.length, a.k)
    indices.copy_(packed)
    counts.copy_(count)
