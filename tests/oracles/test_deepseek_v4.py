"""A tiny random DeepSeek-V4 on ``attend``: a sliding window, and entries of 4 and of 128 tokens.

Window rows and compressed entries lie in two paged planes and share one softmax with the sinks.
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

v4 = pytest.importorskip("transformers.models.deepseek_v4")

LAYERS = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
]
TOKENS, WINDOW = 270, 128
STEPS = {
    "one step": [TOKENS],
    "prefill and decode": [250] + [1] * 20,  # passes 256, where an entry of 128 tokens is completed
    "ragged chunks": [131, 1, 57, 1, 1, 79],
}
PAGE_SIZE = {"one step": 53, "prefill and decode": 4, "ragged chunks": 1}
TOLERANCE = 1e-4
SEEN = 0.1
"""What a fault must move some logit by."""

Alter = Callable[[dict[str, Any]], None]


@cache
def model() -> nn.Module:
    config = v4.DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        # by token, not by score: rounding cannot send a token to another expert
        mlp_layer_types=["hash_moe"] * len(LAYERS),
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=8,
        head_dim=512,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=32,
        # with few index heads many scores are exactly 0 after the relu
        index_n_heads=16,
        index_head_dim=128,
        index_topk=16,
        sliding_window=WINDOW,
        hc_mult=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    return build(v4.DeepseekV4ForCausalLM, config)


class Attention:
    """The model's attention by ``attend``. ``alter`` may falsify the arguments of a call."""

    def __init__(self, impl: Impl, page_size: int, alter: Alter | None = None) -> None:
        self.impl, self.page_size, self.alter = impl, page_size, alter
        self.tokens: dict[int, int] = {}
        self.entries: dict[int, Tensor] = {}
        self.indices: dict[int, Tensor] = {}

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks that catch what the model does not hand over: length, entries, indices."""
        layer = module.layer_idx

        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.tokens[layer] = int(kwargs["position_ids"][0, -1]) + 1

        def compressed(_: nn.Module, args: Any, result: tuple[Tensor, Any]) -> None:
            self.entries[layer] = result[0]

        def chosen(_: nn.Module, args: Any, result: Tensor) -> None:
            self.indices[layer] = result

        handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
        if module.compressor is not None:
            handles.append(module.compressor.register_forward_hook(compressed))
        if hasattr(module.compressor, "indexer"):
            handles.append(module.compressor.indexer.register_forward_hook(chosen))
        return handles

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        s_aux: Tensor,
        sliding_window: int,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, _, rows, dim = query.shape
        layer = module.layer_idx
        tokens = self.tokens[layer]
        entries = self.entries.get(layer)
        count = 0 if entries is None else entries.shape[2]
        # the cache holds the newest rows of the window first, then every compressed entry
        window, main = key[:, 0].split([key.shape[2] - count, count], dim=1)
        win_pages = Pages([(tokens - window.shape[1], tokens)] * batch, self.page_size, seed=layer)
        arguments: dict[str, Any] = {
            "win": win_pages.lay(window[:, :, None]),
            "win_page_table": win_pages.table,
            "win_format": "fp32",
            "window": sliding_window,
            "sinks": s_aux,
        }
        if entries is not None:
            pages = Pages([(0, count)] * batch, self.page_size + 1, seed=layer)
            arguments |= {
                "kv": pages.lay(main[:, :, None]),
                "page_table": pages.table,
                "format": "fp32",
                "ratio": module.compressor.compress_rate,
            }
        if layer in self.indices:
            arguments["indices"] = self.indices[layer].flatten(0, 1)[:, None].int()
        if self.alter is not None:
            self.alter(arguments)
        out, _ = attend(
            self.impl,
            packed(query),
            *lengths(batch, rows, tokens),
            scaling,
            dim,
            rows,
            tokens,
            **arguments,
        )
        return out.unflatten(0, (batch, rows)), None


def attentions() -> list[nn.Module]:
    return [layer.self_attn for layer in model().model.layers]


@cache
def eager(schedule: str) -> tuple[Tensor, Tensor, Selections]:
    """Tokens, the model's own logits, and what its indexers chose."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    compressors = [module.compressor for module in attentions()]
    selections = Selections([c.indexer for c in compressors if hasattr(c, "indexer")])
    with selections.record():
        return tokens, logits(model(), tokens, STEPS[schedule]), selections


def difference(impl: Impl, schedule: str, page_size: int, alter: Alter | None = None) -> float:
    """Largest difference of any logit between the model's own attention and ``attend``."""
    tokens, expected, selections = eager(schedule)
    function = Attention(impl, page_size, alter)
    # the replay comes first, so that the watching hooks see what it chose
    with (
        selections.replay(),
        hooks([handle for module in attentions() for handle in function.watch(module)]),
        attention(model(), function),
    ):
        return float((logits(model(), tokens, STEPS[schedule]) - expected).abs().max())


@pytest.mark.parametrize("schedule", STEPS)
def test_logits(attend_impl: Impl, schedule: str) -> None:
    assert difference(attend_impl, schedule, PAGE_SIZE[schedule]) < TOLERANCE


def no_sinks(arguments: dict[str, Any]) -> None:
    del arguments["sinks"]


def shorter_window(arguments: dict[str, Any]) -> None:
    arguments["window"] -= 1


def longer_window(arguments: dict[str, Any]) -> None:
    arguments["window"] += 1


def entries_too_late(arguments: dict[str, Any]) -> None:
    if arguments.get("ratio") == 128:
        arguments["ratio"] = 129


def other_entries(arguments: dict[str, Any]) -> None:
    if "indices" in arguments:
        arguments["indices"] = (arguments["indices"] - 1).clamp(min=-1)


def selection_ignored(arguments: dict[str, Any]) -> None:
    arguments.pop("indices", None)


@pytest.mark.parametrize(
    "fault",
    [no_sinks, shorter_window, longer_window, entries_too_late, other_entries, selection_ignored],
)
def test_faults_are_seen(attend_impl: Impl, fault: Alter) -> None:
    assert difference(attend_impl, "one step", 16, fault) > SEEN
