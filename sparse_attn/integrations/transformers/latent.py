"""Layers of DeepSeek V3.2 and GLM-5 over latent rows: what they project is theirs, what they read is in the planes.

Keys and values are never expanded: queries are multiplied into the latent space, and what they attend to out of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from ... import attend, select, store
from ...checks import expect
from ...ops import Selected
from .attention import Rows
from .planes import Planes, Step

INDEX_ROTATIONS = {"deepseek_v32": apply_rotary_pos_emb, "glm_moe_dsa": apply_rotary_pos_emb_interleave}


def forward(
    module: Any,
    planes: Planes,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    prev_topk_indices: Selected | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """What the attention module returns, for ``hidden_states [B, S, hidden]``. Lists of None select every token."""
    assert planes.step is not None
    step = planes.step.on(hidden_states.device)
    x = step.pack(hidden_states)
    rotation = tuple(map(step.pack, position_embeddings))
    rows = planes.of(module.layer_idx, x)
    latent, rope = module.kv_lora_rank, module.qk_rope_head_dim

    residual = module.q_a_layernorm(module.q_a_proj(x))
    q = module.q_b_proj(residual).unflatten(-1, (-1, module.qk_head_dim))
    q_nope, q_rope = q.split([module.qk_nope_head_dim, rope], -1)
    kv, k_rope = module.kv_a_proj_with_mqa(x).split([latent, rope], -1)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *rotation)
    main = rows["main"]
    store(torch.cat([module.kv_a_layernorm(kv)[:, None], k_rope], -1), main.rows, step.slots, format=main.format)

    lists = prev_topk_indices
    if module.indexer is not None:
        lists = choose(module.indexer, rows["index"], x, residual, rotation, step)
    to_keys, to_values = absorbed(module)
    out = attend(
        torch.cat([torch.einsum("thn,hnc->thc", q_nope, to_keys), q_rope], -1),
        **step.lengths,
        scale=module.scaling,
        v_dim=latent,
        kv=main.rows,
        page_table=step.page_table,
        format=main.format,
        indices=None if lists is None else lists.indices,
        index_counts=None if lists is None else lists.counts,
    )
    assert isinstance(out, Tensor)
    out = module.o_proj(torch.einsum("thc,hvc->thv", out, to_values).flatten(1))
    results = (step.unpack(out), None)
    return (*results, lists) if module.config.model_type == "glm_moe_dsa" else results


def absorbed(module: Any) -> tuple[Tensor, Tensor]:
    """``kv_b_proj`` in two: ``[heads, nope, latent]`` and ``[heads, v, latent]``."""
    projection = module.kv_b_proj
    plain = type(projection) is nn.Linear and projection.weight.is_floating_point()
    do = "load the model without quantisation of kv_b_proj, and merge adapters"
    expect(plain, "attention", "kv_b_proj", "a torch.nn.Linear", type(projection).__name__, do)
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    to_keys, to_values = projection.weight.unflatten(0, (-1, sum(widths))).split(widths, 1)
    return to_keys, to_values


def choose(
    indexer: Any, keys: Rows, x: Tensor, residual: Tensor, rotation: tuple[Tensor, ...], step: Step
) -> Selected | None:
    """Store the index keys, and select. None: every token fits the budget."""
    rope, rotate = indexer.qk_rope_head_dim, INDEX_ROTATIONS[indexer.config.model_type]
    q = indexer.wq_b(residual).unflatten(-1, (-1, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(x))[:, None]
    q_rope, k_rope = rotate(q[..., :rope], k[..., :rope], *rotation)
    store(torch.cat([k_rope, k[..., rope:]], -1), keys.rows, step.slots, format=keys.format)
    if step.lengths["max_seq_len"] <= indexer.index_topk:
        return None
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)).float()
    return select(
        torch.cat([q_rope, q[..., rope:]], -1),
        weights * indexer.n_heads**-0.5,
        keys=keys.rows,
        page_table=step.page_table,
        k=indexer.index_topk,
        scale=indexer.softmax_scale,
        format=keys.format,
        **step.lengths,
    )
