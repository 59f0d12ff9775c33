"""The indexers of Hugging Face transformers beside ``select``: the same scores, the same picks.

An indexer runs on random hidden states, in several steps. What it multiplies and what it ranks is caught on the way, so
that no line of it is written anew here. Picks are compared by score: two of nearly equal score may be swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf import lengths
from paged import Pages
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sparse_attn
from sparse_attn.registry import Impl

TOLERANCE = 1e-5
HIDDEN, LORA, HEADS, DIM, ROPE = 48, 24, 16, 32, 16
STEPS = {"one step": [45], "prefill and decode": [37] + [1] * 8, "ragged chunks": [11, 1, 18, 2, 13]}
BATCH = 2


def model(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


class Watch(TorchFunctionMode):
    """Keeps the operands of each matrix product and what is ranked by each top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Tensor, Tensor]] = []
        self.ranked: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            self.products.append((args[0], args[1]))
        elif func is torch.Tensor.topk:
            self.ranked.append(args[0])
        return func(*args, **(kwargs or {}))


class Cache:
    """What indexers ask of a cache with one layer."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.layers = [self]

    def update_indexer(self, states: Tensor, layer: int = 0) -> Tensor:
        self.keys = states if self.keys is None else torch.cat([self.keys, states], dim=-2)
        return self.keys

    update_index = update_indexer

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[-2]


@dataclass
class Step:
    """One step of an indexer, seen from outside."""

    q: Tensor
    """``[B, S, Hi, D]``"""
    weights: Tensor | None
    """``[B, S, Hi]``"""
    keys: Tensor
    """``[B, N, D]``"""
    ranked: Tensor
    """``[B, S, lists, units]``, scores, -inf or less where not selectable"""
    picks: Tensor
    """``[B, S, lists, n]``, units, and any number that is none"""
    tokens: int


@dataclass
class Indexer:
    """How to run one, and the arguments of `select` for it."""

    run: Callable[[Tensor, Tensor, int, Any], Step]
    k: int
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = DIM**-0.5
    new_cache: Callable[[], Any] = Cache


def noisy(module: nn.Module) -> nn.Module:
    """With random parameters in every place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    return module.eval()


def rotation(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` ``[B, S, dim]`` of positions up to ``tokens``."""
    angles = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(dim // 2)
    return tuple(torch.cat([f(angles)] * 2, -1).expand(BATCH, -1, -1) for f in (torch.cos, torch.sin))


def causal(start: int, end: int) -> Tensor:
    return torch.arange(end) <= torch.arange(start, end)[:, None]


CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, q_lora_rank=LORA, index_n_heads=HEADS, index_head_dim=DIM, qk_rope_head_dim=ROPE, index_topk=12
)


def lightning(name: str, kind: str) -> Indexer:
    """DeepSeek V3.2 and GLM-5: tokens."""
    indexer = noisy(getattr(model(name), kind)(CONFIG, 0))

    def run(hidden: Tensor, residual: Tensor, start: int, cache: Any) -> Step:
        end = start + hidden.shape[1]
        embeddings = tuple(x[:, start:end] for x in rotation(end, ROPE))
        mask = causal(start, end).expand(BATCH, -1, -1)
        with Watch() as watch:
            picks = indexer(hidden, residual, embeddings, mask, torch.arange(start, end).expand(BATCH, -1), cache)
        (q, keys), (weights, _) = watch.products
        return Step(q, weights[..., 0, :], keys[:, 0].mT, watch.ranked[0][:, :, None], picks[:, :, None], end)

    return Indexer(run, 12)


def deepseek_v4() -> Indexer:
    """Entries of 4 tokens, made by the indexer's own compressor."""
    v4 = model("deepseek_v4")
    sizes = dict(num_hidden_layers=1, layer_types=["compressed_sparse_attention"], mlp_layer_types=["hash_moe"])
    config = v4.DeepseekV4Config(
        hidden_size=HIDDEN, q_lora_rank=LORA, index_n_heads=HEADS, index_head_dim=DIM, index_topk=4, **sizes
    )
    config.rope_parameters["compress"]["partial_rotary_factor"] = 0.5
    config.head_dim = DIM
    indexer = noisy(v4.DeepseekV4Indexer(config))

    def run(hidden: Tensor, residual: Tensor, start: int, cache: Any) -> Step:
        end = start + hidden.shape[1]
        position_ids = torch.arange(start, end).expand(BATCH, -1)
        weights: list[Tensor] = []
        handle = indexer.scorer.weights_proj.register_forward_hook(lambda *a: weights.append(a[2] * HEADS**-0.5))
        with Watch() as watch:
            picks = indexer(hidden, residual, position_ids, cache, 0)
        handle.remove()
        q, keys = watch.products[-1]
        return Step(q, weights[0], keys[:, 0].mT, watch.ranked[0][:, :, None], picks[:, :, None], end)

    return Indexer(run, 4, dict(ratio=4), new_cache=lambda: v4.DynamicCache(config=config))


def glm5_next() -> Indexer:
    """GLM-5.3: pools of 4 tokens, and the tail."""
    config = SimpleNamespace(**vars(CONFIG), index_kpool=4, index_kpool_always_select_tail=True)
    config.index_topk = 20
    indexer = noisy(model("glm5_next").Glm5NextTextIndexer(config, 0))

    def run(hidden: Tensor, residual: Tensor, start: int, cache: Any) -> Step:
        end = start + hidden.shape[1]
        with Watch() as watch:
            picks = indexer(hidden, residual, torch.ones(BATCH, hidden.shape[1], dtype=torch.bool), cache)
        (q, keys), (weights, _) = watch.products
        pools = torch.where(picks >= 0, picks // 4, -1)  # each token of a pool is listed
        return Step(q, weights[..., 0, :], keys[:, 0].mT, watch.ranked[0][:, :, None], pools[:, :, None], end)

    return Indexer(run, 6, dict(ratio=4, tail="reserved"))


def qwen4() -> Indexer:
    """Pools of 4 tokens, and the tail; no weights."""
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        rms_norm_eps=1e-6,
        indexer_n_heads=HEADS,
        indexer_kv_heads=1,
        indexer_head_dim=DIM,
        indexer_budget=20,
        indexer_compress_ratio=4,
    )
    indexer = noisy(model("qwen4_exp").Qwen4ExpTextQSAIndexer(config, 0))

    def run(hidden: Tensor, residual: Tensor, start: int, cache: Any) -> Step:
        end, rows = start + hidden.shape[1], hidden.shape[1]
        mask = causal(start, end).expand(BATCH, 1, -1, -1)
        with Watch() as watch:
            seen = indexer(hidden, rotation(end, ROPE), mask, cache)[:, 0]
        pools = end // 4
        q, keys = torch.zeros(BATCH, rows, HEADS, DIM), torch.zeros(BATCH, pools, DIM)
        ranked = torch.full((BATCH, rows, 1, pools), -torch.inf)
        calls = iter(zip(watch.products, watch.ranked, strict=True))
        for b in range(BATCH):
            for s in range(rows):
                n = (start + s + 1) // 4
                if n:
                    (some, these), scores = next(calls)
                    q[b, s], keys[b, :n], ranked[b, s, 0, :n] = some, these.mT.view(n, DIM), scores
        tokens = torch.where(seen, torch.arange(end), -4)
        return Step(q, None, keys, ranked, (tokens // 4)[:, :, None], end)

    return Indexer(run, 6, dict(ratio=4, tail="reserved"))


def minimax_m3() -> Indexer:
    """Blocks of 8 tokens, a list for each head."""
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        rms_norm_eps=1e-6,
        index_n_heads=4,
        index_head_dim=DIM,
        index_block_size=8,
        index_topk_blocks=3,
        index_local_blocks=1,
    )
    indexer = noisy(model("minimax_m3_vl").MiniMaxM3VLIndexer(config, 0))

    def run(hidden: Tensor, residual: Tensor, start: int, cache: Any) -> Step:
        end = start + hidden.shape[1]
        embeddings = tuple(x[:, start:end] for x in rotation(end, ROPE))
        with Watch() as watch:
            picks = indexer(hidden, embeddings, cache, torch.arange(start, end).expand(BATCH, -1))
        ((q, keys),) = watch.products
        return Step(q.transpose(1, 2), None, keys[:, 0].mT, watch.ranked[0].transpose(1, 2), picks.transpose(1, 2), end)

    options = dict(score="dot", out_heads=4, block=8, pool="max", keep_last=1)
    return Indexer(run, 3, options, scale=1.0)


INDEXERS: dict[str, Callable[[], Indexer]] = {
    "DeepSeek V3.2": partial(lightning, "deepseek_v32", "DeepseekV32Indexer"),
    "GLM-5": partial(lightning, "glm_moe_dsa", "GlmMoeDsaIndexer"),
    "DeepSeek V4": deepseek_v4,
    "GLM-5.3": glm5_next,
    "Qwen4": qwen4,
    "MiniMax-M3": minimax_m3,
}


def differences(impl: Impl, indexer: Indexer, steps: list[int], **changes: Any) -> list[str]:
    """Scores and picks of `select` that differ from the indexer's."""
    cache, found, start = indexer.new_cache(), [], 0
    options = indexer.options | changes
    for size in steps:
        with torch.no_grad():
            step = indexer.run(torch.randn(BATCH, size, HIDDEN), torch.randn(BATCH, size, LORA), start, cache)
        start = step.tokens
        entries = step.keys.shape[1]
        pages = Pages([(0, entries)] * BATCH, 5)
        plane = pages.lay(step.keys[:, :, None])
        weights = None if step.weights is None else step.weights.flatten(0, 1)
        starts = lengths(BATCH, size, start)
        units = -(-start // (options.get("ratio", 1) * options.get("block", 1))) + 1
        lists = [
            sparse_attn.select(
                *(step.q.flatten(0, 1), weights, *starts, plane, pages.table, k, indexer.scale, size, start),
                **options,
                format="fp32",
                return_values=k == units,
                backend=impl.backend,
            )
            for k in (indexer.k, units)
        ]
        for t in range(BATCH * size):
            b, s = divmod(t, size)
            for o in range(lists[0].indices.shape[1]):
                where = f"row {b}, {start - size + s}, list {o}"
                every = lists[1].indices[t, o, : lists[1].counts[t, o]].tolist()
                scores = dict(zip(every, lists[1].values[t, o].tolist(), strict=False))
                unscored = tail_of(options, start - size + s)
                for unit in scores.keys() - unscored:
                    ranked = float(step.ranked[b, s, o, unit]) if unit < step.ranked.shape[-1] else torch.nan
                    if scores[unit] != ranked and not abs(scores[unit] - ranked) <= TOLERANCE * max(1.0, abs(ranked)):
                        found.append(f"{where}: unit {unit} scores {scores[unit]}, theirs {ranked}")
                ours = set(lists[0].indices[t, o, : lists[0].counts[t, o]].tolist())
                theirs = set(step.picks[b, s, o].tolist()) & set(scores)  # V3.2 picks invisible tokens too
                last = min((scores[u] for u in theirs), default=0.0)
                swapped = all(abs(scores.get(u, torch.inf) - last) <= TOLERANCE for u in ours ^ theirs)
                if len(ours) != len(theirs) or not swapped:
                    found.append(f"{where}: picks {sorted(ours)}, theirs {sorted(theirs)}")
    return found


def tail_of(options: dict[str, Any], position: int) -> set[int]:
    """The unit that is kept unscored."""
    ratio = options.get("ratio", 1)
    return {(position + 1) // ratio} if options.get("tail", "none") != "none" and (position + 1) % ratio else set()


@pytest.mark.parametrize("schedule", STEPS)
@pytest.mark.parametrize("name", INDEXERS)
def test_scores_and_picks(select_impl: Impl, name: str, schedule: str) -> None:
    assert differences(select_impl, INDEXERS[name](), STEPS[schedule]) == []


FAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "DeepSeek V3.2": {
        "no relu": dict(score="dot"),
        "own token kept": dict(keep_last=1),
        "not causal": dict(causal=False),
    },
    "DeepSeek V4": {"no relu": dict(score="dot"), "ratio": dict(ratio=5)},
    "GLM-5.3": {"no tail": dict(tail="none"), "tail counted": dict(tail="counted")},
    "Qwen4": {"tail counted": dict(tail="counted")},
    "MiniMax-M3": {"own block not kept": dict(keep_last=0), "mean": dict(pool="mean"), "one list": dict(out_heads=2)},
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAULTS for fault in FAULTS[name]])
def test_faults_are_seen(select_impl: Impl, name: str, fault: str) -> None:
    assert differences(select_impl, INDEXERS[name](), STEPS["one step"], **FAULTS[name][fault])
