"""Tiny random DeepSeek-V3.2 and GLM-5 on ``attend``: absorbed MLA at the released 576 to 512.

The models expand keys and values per head; ``attend`` reads the latents that their cache holds.
Queries go through the key half of ``kv_b_proj`` before the op, its output through the value half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hf import VOCABULARY, Selections, attention, build, hooks, lengths, logits, packed
from paged import Pages, attend
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparse_attn.registry import Impl

v32 = pytest.importorskip("transformers.models.deepseek_v32")
glm = pytest.importorskip("transformers.models.glm_moe_dsa")

LATENT, ROPE, NOPE, VALUE = 512, 64, 32, 48
TOKENS, TOPK = 150, 24
STEPS = {
    "one step": [TOKENS],
    "prefill and decode": [120] + [1] * 30,
    "ragged chunks": [61, 1, 37, 1, 1, 49],
}
PAGE_SIZE = {"one step": 53, "prefill and decode": 4, "ragged chunks": 1}
TOLERANCE = 1e-4
SEEN = 0.1
"""What a fault must move some logit by."""

MODELS = ("deepseek_v32", "glm_moe_dsa")
Alter = Callable[[dict[str, Any]], None]


@cache
def model(name: str) -> nn.Module:
    layers = 4
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "mlp_layer_types": ["dense"] * layers,  # rounding cannot send a token to another expert
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 48,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        # with few index heads many scores are exactly 0 after the relu
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": TOPK,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
    }
    if name == "deepseek_v32":
        return build(v32.DeepseekV32ForCausalLM, v32.DeepseekV32Config(**sizes))
    # a shared layer attends what the layer before it chose
    sizes["indexer_types"] = ["full", "shared", "full", "shared"]
    return build(glm.GlmMoeDsaForCausalLM, glm.GlmMoeDsaConfig(**sizes))


def attentions(name: str) -> list[nn.Module]:
    return [layer.self_attn for layer in model(name).model.layers]


class Attention:
    """The model's attention by ``attend``. ``alter`` may falsify the arguments of a call."""

    def __init__(self, impl: Impl, page_size: int, rope_apart: bool = False, alter: Alter | None = None) -> None:
        self.impl, self.page_size, self.rope_apart, self.alter = impl, page_size, rope_apart, alter
        self.cache: Any = None

    def watch(self, module: nn.Module) -> RemovableHandle:
        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.cache = kwargs["cache"]

        return module.register_forward_pre_hook(before, with_kwargs=True)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        indices: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, heads, rows, _ = query.shape
        layer = self.cache.layers[module.layer_idx]
        latent, rope = (part.transpose(1, 2) for part in (layer.keys, layer.values))
        tokens = latent.shape[1]
        w_k, w_v = module.kv_b_proj.weight.unflatten(0, (heads, NOPE + VALUE)).split([NOPE, VALUE], dim=1)
        q = packed(query)
        q = torch.cat([torch.einsum("thn,hnc->thc", q[..., :NOPE], w_k), q[..., NOPE:]], dim=-1)
        pages = Pages([(0, tokens)] * batch, self.page_size, seed=module.layer_idx)
        arguments: dict[str, Any] = {
            "page_table": pages.table,
            "format": "fp32",
            "indices": indices.flatten(0, 1)[:, None],
        }
        if self.rope_apart:
            arguments |= {"kv": pages.lay(latent), "kv_rope": pages.lay(rope)}
        else:
            arguments["kv"] = pages.lay(torch.cat([latent, rope], dim=-1))
        if self.alter is not None:
            self.alter(arguments)
        out, _ = attend(
            self.impl,
            q.contiguous(),
            *lengths(batch, rows, tokens),
            scaling,
            LATENT,
            rows,
            tokens,
            **arguments,
        )
        out = torch.einsum("thc,hvc->thv", out, w_v)
        return out.unflatten(0, (batch, rows)), None


@cache
def eager(name: str, schedule: str) -> tuple[Tensor, Tensor, Selections]:
    """Tokens, the model's own logits, and what its indexers chose."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    indexers = [module.indexer for module in attentions(name)]
    selections = Selections([indexer for indexer in indexers if indexer is not None])
    with selections.record():
        return tokens, logits(model(name), tokens, STEPS[schedule]), selections


def difference(name: str, schedule: str, function: Attention) -> float:
    """Largest difference of any logit between the model's own attention and ``attend``."""
    tokens, expected, selections = eager(name, schedule)
    with (
        selections.replay(),
        hooks([function.watch(module) for module in attentions(name)]),
        attention(model(name), function),
    ):
        return float((logits(model(name), tokens, STEPS[schedule]) - expected).abs().max())


@pytest.mark.parametrize("rope_apart", [False, True], ids=["rope in the row", "rope apart"])
@pytest.mark.parametrize("schedule", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_logits(attend_impl: Impl, name: str, schedule: str, rope_apart: bool) -> None:
    function = Attention(attend_impl, PAGE_SIZE[schedule], rope_apart)
    assert difference(name, schedule, function) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_selections_reach_past_the_query(name: str) -> None:
    """Early rows have fewer visible tokens than the indexer returns: ``attend`` masks the rest."""
    _, _, selections = eager(name, "one step")
    for (chosen,) in selections.chosen.values():
        assert (chosen > torch.arange(TOKENS)[:, None]).any()


def other_tokens(arguments: dict[str, Any]) -> None:
    arguments["indices"] = arguments["indices"] - 1


def selection_ignored(arguments: dict[str, Any]) -> None:
    del arguments["indices"]


def not_causal(arguments: dict[str, Any]) -> None:
    arguments["causal"] = False


@pytest.mark.parametrize("fault", [other_tokens, selection_ignored, not_causal])
@pytest.mark.parametrize("name", MODELS)
def test_faults_are_seen(attend_impl: Impl, name: str, fault: Alter) -> None:
    assert difference(name, "one step", Attention(attend_impl, 16, alter=fault)) > SEEN
