"""A tiny random MiniMax-M3 on ``attend``: GQA, dense and over blocks chosen for each KV head."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hf import VOCABULARY, Selections, attention, build, lengths, logits, packed
from paged import Pages, attend
from torch import Tensor, nn

from sparse_attn.registry import Impl

m3 = pytest.importorskip("transformers.models.minimax_m3_vl")

LAYERS = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
TOKENS = {16: 150, 128: 400}
"""Tokens for each size of a block; the last block is ragged."""
TOPK = 3
STEPS = {
    "one step": lambda n: [n],
    "prefill and decode": lambda n: [n - 20] + [1] * 20,
    "ragged chunks": lambda n: [61, 1, 37, 1, 1, n - 101],
}
PAGE_SIZE = {"one step": 53, "prefill and decode": 4, "ragged chunks": 1}
TOLERANCE = 1e-4
SEEN = 0.1
"""What a fault must move some logit by."""

Alter = Callable[[dict[str, Any]], None]


@cache
def model(block: int) -> nn.Module:
    config = m3.MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        dense_intermediate_size=128,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        mlp_layer_types=["dense"] * len(LAYERS),  # rounding cannot send a token to another expert
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        rotary_dim=64,
        index_n_heads=2,
        index_head_dim=64,
        index_block_size=block,
        index_topk_blocks=TOPK,
        index_local_blocks=1,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    return build(m3.MiniMaxM3VLForCausalLM, config)


class Attention:
    """The model's attention by ``attend``. ``alter`` may falsify the arguments of a call."""

    def __init__(self, impl: Impl, page_size: int, alter: Alter | None = None) -> None:
        self.impl, self.page_size, self.alter = impl, page_size, alter

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        block_indices: Tensor | None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, _, rows, dim = query.shape
        tokens = key.shape[2]
        pages = Pages([(0, tokens)] * batch, self.page_size, seed=module.layer_idx)
        arguments: dict[str, Any] = {
            "kv": pages.lay(key.transpose(1, 2)),
            "v": pages.lay(value.transpose(1, 2)),
            "page_table": pages.table,
            "format": "fp32",
        }
        if block_indices is not None:
            arguments["indices"] = block_indices.transpose(1, 2).flatten(0, 1).int()
            arguments["select_block"] = module.indexer.block_size
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


@cache
def eager(block: int, schedule: str) -> tuple[Tensor, Tensor, Selections]:
    """Tokens, the model's own logits, and what its indexers chose."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, TOKENS[block]), generator=generator)
    indexers = [layer.self_attn.indexer for layer in model(block).model.layers]
    selections = Selections([indexer for indexer in indexers if indexer is not None])
    with selections.record():
        return tokens, logits(model(block), tokens, STEPS[schedule](TOKENS[block])), selections


def difference(impl: Impl, block: int, schedule: str, page_size: int, alter: Alter | None = None) -> float:
    """Largest difference of any logit between the model's own attention and ``attend``."""
    tokens, expected, selections = eager(block, schedule)
    function = Attention(impl, page_size, alter)
    with selections.replay(), attention(model(block), function):
        actual = logits(model(block), tokens, STEPS[schedule](TOKENS[block]))
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("schedule", STEPS)
@pytest.mark.parametrize("block", TOKENS)
def test_logits(attend_impl: Impl, block: int, schedule: str) -> None:
    assert difference(attend_impl, block, schedule, PAGE_SIZE[schedule]) < TOLERANCE


@pytest.mark.parametrize("block", TOKENS)
def test_selections_differ_by_kv_head(block: int) -> None:
    """And early rows have fewer blocks than slots: the rest is -1."""
    _, _, selections = eager(block, "one step")
    for (chosen,) in selections.chosen.values():
        assert (chosen[:, 0].sort().values != chosen[:, 1].sort().values).any()
        assert (chosen == -1).any()


def other_blocks(arguments: dict[str, Any]) -> None:
    if "indices" in arguments:
        arguments["indices"] = arguments["indices"] - 1


def other_kv_heads_blocks(arguments: dict[str, Any]) -> None:
    if "indices" in arguments:
        arguments["indices"] = arguments["indices"].flip(1)


def selection_ignored(arguments: dict[str, Any]) -> None:
    if "indices" in arguments:
        del arguments["indices"], arguments["select_block"]


@pytest.mark.parametrize("fault", [other_blocks, other_kv_heads_blocks, selection_ignored])
def test_faults_are_seen(attend_impl: Impl, fault: Alter) -> None:
    assert difference(attend_impl, 16, "one step", 16, fault) > SEEN
