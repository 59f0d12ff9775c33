"""Which ops an attention layer of each model calls, with the model's own projections, norms and rotations.

`docs/models.md` describes the same calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import Judge, Layers, Ops, Pool, Step
from torch import Tensor, nn

v32 = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")


class Mla(Layers):
    """DeepSeek V3.2 and GLM-5: absorbed MLA over selected tokens; a shared layer of GLM-5 takes the list of the layer
    before it."""

    def __init__(self, config: Any, ops: Ops, judge: Judge | None, page_size: int) -> None:
        super().__init__(ops, judge)
        glm = config.model_type == "glm_moe_dsa"
        self.outputs = 3 if glm else 2
        self.rotate_index = v32.apply_rotary_pos_emb_interleave if glm else v32.apply_rotary_pos_emb
        self.pool = Pool(page_size)
        self.pools = [self.pool]
        layers = range(config.num_hidden_layers)
        self.latents = [self.pool.plane(1, config.kv_lora_rank + config.qk_rope_head_dim) for _ in layers]
        self.keys = [self.pool.plane(1, config.index_head_dim) for _ in layers]
        self.chosen: dict[str, Tensor] = {}

    def attend(self, module: nn.Module, x: Tensor, embeddings: Any, step: Step) -> Tensor:
        cos, sin = (part[0] for part in embeddings)
        heads, latent_dim = module.num_heads, module.kv_lora_rank
        residual = module.q_a_layernorm(module.q_a_proj(x))
        q = module.q_b_proj(residual).unflatten(-1, (heads, -1))
        q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(x).split([latent_dim, module.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = v32.apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], cos, sin)
        row = torch.cat([module.kv_a_layernorm(latent)[:, None], k_rope], dim=-1)
        plane, table = self.latents[module.layer_idx], self.pool.table(step)
        self.ops("store", rows=row, plane=plane, slots=self.pool.slots(step), format="fp32")
        if module.indexer is not None:
            self.chosen = self.choose(module, x, residual, (cos, sin), table, step)
        to_keys, to_values = module.kv_b_proj.weight.unflatten(0, (heads, -1)).split(
            [module.qk_nope_head_dim, module.v_head_dim], dim=1
        )
        out = self.ops(
            "attend",
            q=torch.cat([torch.einsum("thn,hnc->thc", q_nope, to_keys), q_rope], dim=-1),
            **step.lengths(),
            scale=module.scaling,
            v_dim=latent_dim,
            kv=plane,
            page_table=table,
            format="fp32",
            **self.chosen,
        )
        return module.o_proj(torch.einsum("thc,hvc->thv", out, to_values).flatten(1))

    def choose(
        self, module: nn.Module, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], table: Tensor, step: Step
    ) -> dict[str, Tensor]:
        indexer, keys = module.indexer, self.keys[module.layer_idx]
        q = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, -1))
        k = indexer.k_norm(indexer.wk(x))[:, None]
        rope = indexer.qk_rope_head_dim
        q_rope, k_rope = self.rotate_index(q[..., :rope], k[..., :rope], *rotation)
        k = torch.cat([k_rope, k[..., rope:]], dim=-1)
        self.ops("store", rows=k, plane=keys, slots=self.pool.slots(step), format="fp32")
        return self.select(
            module,
            step,
            q=torch.cat([q_rope, q[..., rope:]], dim=-1),
            weights=indexer.weights_proj(x) * indexer.n_heads**-0.5,
            keys=keys,
            page_table=table,
            k=indexer.index_topk,
            scale=indexer.softmax_scale,
            format="fp32",
        )


class BlockGqa(Layers):
    """MiniMax-M3: GQA, in the first layers over every token, then over blocks chosen for each KV head."""

    def __init__(self, config: Any, ops: Ops, judge: Judge | None, page_size: int) -> None:
        super().__init__(ops, judge)
        self.pool = Pool(page_size)
        self.pools = [self.pool]
        layers = range(config.num_hidden_layers)
        self.k, self.v = (
            [self.pool.plane(config.num_key_value_heads, config.head_dim) for _ in layers] for _ in range(2)
        )
        self.keys = [self.pool.plane(1, config.index_head_dim) for _ in layers]

    def attend(self, module: nn.Module, x: Tensor, embeddings: Any, step: Step) -> Tensor:
        rotation = tuple(part[0] for part in embeddings)
        q, k, v = (p(x).unflatten(-1, (-1, module.head_dim)) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k = m3.apply_rotary_pos_emb(module.q_norm(q), module.k_norm(k), *rotation)
        planes = self.k[module.layer_idx], self.v[module.layer_idx]
        slots, table = self.pool.slots(step), self.pool.table(step)
        for rows, plane in zip((k, v), planes, strict=True):
            self.ops("store", rows=rows, plane=plane, slots=slots, format="fp32")
        chosen: dict[str, Any] = {}
        if module.indexer is not None:
            chosen = self.choose(module, x, rotation, slots, table, step)
        out = self.ops(
            "attend",
            q=q,
            **step.lengths(),
            scale=module.scaling,
            v_dim=module.head_dim,
            kv=planes[0],
            v=planes[1],
            page_table=table,
            format="fp32",
            **chosen,
        )
        return module.o_proj(out.flatten(1))

    def choose(
        self, module: nn.Module, x: Tensor, rotation: tuple[Tensor, ...], slots: Tensor, table: Tensor, step: Step
    ) -> dict[str, Any]:
        indexer, keys = module.indexer, self.keys[module.layer_idx]
        q = indexer.q_norm(indexer.q_proj(x).unflatten(-1, (indexer.num_heads, -1)))
        k = indexer.k_norm(indexer.k_proj(x))[:, None]
        q, k = m3.apply_rotary_pos_emb(q, k, *(part[:, : indexer.head_dim] for part in rotation))
        self.ops("store", rows=k, plane=keys, slots=slots, format="fp32")
        chosen = self.select(
            module,
            step,
            q=q,
            weights=None,
            keys=keys,
            page_table=table,
            k=indexer.topk_blocks,
            scale=1.0,
            format="fp32",
            score="dot",
            out_heads=indexer.num_heads,
            block=indexer.block_size,
            pool="max",
            keep_last=indexer.local_blocks,
        )
        return chosen | {"select_block": indexer.block_size}


class Compressed(Layers):
    """DeepSeek V4: in every layer a window of raw rows, and beside it nothing, selected entries of 4 tokens, or every
    entry of 128 tokens."""

    MAX_REWIND = 3
    OVERLAP = {4: 8, 128: 128}
    """Tokens that make an entry, by its ratio."""

    def __init__(self, config: Any, ops: Ops, judge: Judge | None, page_size: int) -> None:
        super().__init__(ops, judge)
        dim, index_dim = config.head_dim, config.index_head_dim
        self.window = Pool(page_size, window=config.sliding_window)
        self.entries = {ratio: Pool(page_size + 1, ratio=ratio) for ratio in self.OVERLAP}
        # two ways to keep the tokens that later entries need: a ring, and pages that are given back
        self.states = {4: Pool(page_size, ring=8 - 1 + self.MAX_REWIND), 128: Pool(page_size, window=128)}
        self.pools = [self.window, *self.entries.values(), *self.states.values()]
        layers = range(config.num_hidden_layers)
        self.windows = [self.window.plane(1, dim) for _ in layers]
        self.planes: dict[Any, Tensor] = {}
        """Entries, index keys and their states, by layer and use."""
        for layer in layers:
            ratio = config.compress_rates.get(config.layer_types[layer])
            uses = {"main": dim, "index": index_dim} if ratio == 4 else {"main": dim} if ratio else {}
            for use, width in uses.items():
                self.planes[layer, use] = self.entries[ratio].plane(1, width)
                # values and gates, each with channels for the entry that a token is in, and for the next
                self.planes[layer, use, "state"] = self.states[ratio].plane(1, 2 * width * (2 if ratio == 4 else 1))
        rotation = v4.DeepseekV4RotaryEmbedding(config)
        positions = torch.arange(config.max_position_embeddings)[None]
        self.cos_sin = {
            kind: torch.cat(rotation(torch.zeros(1), positions, layer_type=kind), dim=-1)[0]
            for kind in ("main", "compress")
        }

    def attend(self, module: nn.Module, x: Tensor, embeddings: Any, step: Step) -> Tensor:
        cos, sin = (part[0] for part in embeddings[module.rope_layer_type])
        residual = module.q_a_norm(module.q_a_proj(x))
        q = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (module.num_heads, -1)))
        window, window_table = self.windows[module.layer_idx], self.window.table(step)
        self.ops(
            "compress",
            rows=module.kv_proj(x)[:, None],
            gates=None,
            **step.lengths(),
            plane=window,
            page_table=window_table,
            stride=1,
            norm=module.kv_norm.weight,
            eps=module.kv_norm.variance_epsilon,
            cos_sin=self.cos_sin[module.rope_layer_type],
            format="fp32",
        )
        main: dict[str, Any] = {}
        if module.compressor is not None:
            ratio = module.compressor.compress_rate
            plane = self.compress(module.layer_idx, "main", module.compressor, x, step)
            table = self.entries[ratio].table(step)
            main = {"kv": plane, "page_table": table, "ratio": ratio, "format": "fp32"}
            if ratio == 4:
                main |= self.choose(module, x, residual, (cos, sin), table, step)
        out = self.ops(
            "attend",
            q=v4.apply_rotary_pos_emb(q, cos, sin),
            **step.lengths(),
            scale=module.scaling,
            v_dim=module.head_dim,
            win=window,
            win_page_table=window_table,
            win_format="fp32",
            window=module.sliding_window,
            sinks=module.sinks,
            **main,
        )
        out = v4.apply_rotary_pos_emb(out, cos, -sin)  # values are rotated, as they are the keys
        return module.o_b_proj(module.o_a_proj(out.reshape(len(x), module.config.o_groups, -1)).flatten(1))

    def compress(self, layer: int, use: str, compressor: nn.Module, x: Tensor, step: Step) -> Tensor:
        """Entries of a layer, or its index keys."""
        ratio, plane = compressor.compress_rate, self.planes[layer, use]
        self.ops(
            "compress",
            rows=compressor.kv_proj(x)[:, None],
            gates=compressor.gate_proj(x)[:, None],
            **step.lengths(),
            plane=plane,
            page_table=self.entries[ratio].table(step),
            stride=ratio,
            span=self.OVERLAP[ratio],
            bias=compressor.position_bias,
            state=self.planes[layer, use, "state"],
            state_page_table=self.states[ratio].table(step),
            max_rewind=self.MAX_REWIND,
            norm=compressor.kv_norm.weight,
            eps=compressor.kv_norm.variance_epsilon,
            cos_sin=self.cos_sin["compress"],
            format="fp32",
        )
        return plane

    def choose(
        self, module: nn.Module, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], table: Tensor, step: Step
    ) -> dict[str, Tensor]:
        indexer = module.compressor.indexer
        keys = self.compress(module.layer_idx, "index", indexer, x, step)
        q = indexer.q_b_proj(residual).unflatten(-1, (indexer.num_heads, -1))
        return self.select(
            module,
            step,
            q=v4.apply_rotary_pos_emb(q, *rotation),
            weights=indexer.scorer.weights_proj(x) * indexer.scorer.weights_scaling,
            keys=keys,
            page_table=table,
            k=indexer.index_topk,
            scale=indexer.scorer.softmax_scale,
            ratio=indexer.compress_rate,
            format="fp32",
        )
