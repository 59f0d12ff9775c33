"""DeepSeek V4.1's attention in NeMo AutoModel (PyPI ``nemo_automodel``), as an oracle for that of the demo.

NeMo AutoModel runs whole sequences, without planes, steps or a cache. Every layer gets inputs of its own, so that the
faults of one layer do not reach the next. Importing this file imports NeMo AutoModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41TextConfig
from nemo_automodel.components.models.deepseek_v41.quantization import quantize_cache
from torch import Tensor
from torch.nn.functional import pad

from ..models import Model
from ..ops import Selected
from .deepseek_v41 import Attention, Config, Layers

APART = 2.0**-7
"""How far apart two right outputs of a row may be, relative, in the 2-norm: both are rounded to bfloat16 several times,
and one of 512 elements of a window row may fall on the other side of a border of its quantiser."""
TIES = 0.05
"""Share of the rows that may be left out, as equal scores at the border let both sides be right."""

PARTS = {
    **{f"queries.{name}": name for name in ("wq_a", "q_norm", "wq_b")},
    **{f"window.{name}": name for name in ("wkv", "kv_norm")},
    **{f"output.{name}": name for name in ("wo_a", "wo_b")},
    "selector": "indexer",
    "keys": "indexer",
    "sinks": "sinks_param.weight",
}
"""Parts of the demo's layers, and their names in NeMo AutoModel."""


@dataclass
class Expected:
    """What NeMo AutoModel gives for one layer of one sequence.

    ``output [S, hidden]``; of layers that own KV: their ``planes`` as numbers, ``[entries, D]``; and of layers that
    select: ``scores [S, entries]`` (-inf: may not be selected), ``picks`` and ``candidates``, masks of the same shape.
    ``candidates`` are those of the layer that makes them.
    """

    output: Tensor
    planes: dict[str, Tensor]
    scores: Tensor | None = None
    picks: Tensor | None = None
    candidates: Tensor | None = None


def configuration(config: Config, plan: Model) -> Any:
    """The same sizes and the same plan, in their words."""
    layers = plan.layers
    selection = next(layer.selection for layer in layers[::-1] if layer.selection is not None)
    makers = [layer.number for layer in layers if layer.candidate_owner == layer.number]
    return DeepseekV41TextConfig(
        hidden_size=config.hidden,
        num_hidden_layers=len(layers),
        num_attention_heads=layers[0].q_heads,
        q_lora_rank=config.q_lora,
        o_lora_rank=config.o_lora,
        o_groups=config.o_groups,
        sliding_window=layers[0].window,
        compress_ratios=[plan.plane("main", n).ratio if "main" in layers[n].reads else 0 for n in range(len(layers))],
        kv_source_layer_ids=[layer.number for layer in layers if layer.kv_owner == layer.number],
        index_source_layer_ids=[layer.number for layer in layers if layer.selection_owner == layer.number],
        index_n_heads=selection.heads,
        index_topk=selection.k,
        candidate_source_layer_id=makers[0] if makers else -1,
        candidate_topk_blocks=selection.candidate_k,
        candidate_block_size=selection.candidate_block,
        engram_layer_ids=[],
        num_nextn_predict_layers=0,
    )


@torch.no_grad()
def run(config: Config, plan: Model, layers: Layers, inputs: Sequence[Tensor]) -> list[Expected]:
    """Their layers with the weights of ``layers`` and the whole sequence ``inputs [S, hidden]`` of each."""
    theirs, backend = configuration(config, plan), BackendConfig(attn="eager", linear="torch", rms_norm="torch_fp32")
    state = attention.DeepseekV41AttentionState()
    positions = torch.arange(len(inputs[0]))[None]
    found = []
    for number, (ours, x) in enumerate(zip(layers.layers, inputs, strict=True)):
        assert isinstance(ours, Attention)
        layer = attention.DeepseekV41Attention(theirs, number, backend)
        layer.load_state_dict({_their_name(name): value for name, value in ours.state_dict().items()})
        before, result = state, layer(x[None], position_ids=positions, state=state)
        state = result.state
        owned = ours.plan.kv_owner == number
        expected = Expected(
            result.hidden_states[0], {"main": state.compressed_kv[0], "index": state.index_keys[0]} if owned else {}
        )
        if layer.indexer is not None:
            scores = scores_of(layer, x, state, positions)
            if layer.indexer.is_candidate_source:
                expected.candidates = state.candidates[0]
            elif layer.indexer.uses_candidates:
                scores = scores.masked_fill(~before.candidates[0], -torch.inf)
            expected.scores = scores
            expected.picks = mask(state.topk_indices[0], scores.shape[1])
        found.append(expected)
    return found


def _their_name(name: str) -> str:
    part = next((part for part in PARTS if name == part or name.startswith(f"{part}.")), "")
    return PARTS.get(part, "") + name.removeprefix(part)


def scores_of(layer: Any, x: Tensor, state: Any, positions: Tensor) -> Tensor:
    """Scores ``[S, entries]`` of the entries that each token sees, which their indexer does not tell, by its parts."""
    indexer = layer.indexer
    queries = indexer.wq_b(layer.q_norm(layer.wq_a(x[None]))).unflatten(-1, (indexer.num_heads, indexer.head_dim))
    queries = attention._apply_rope(queries, layer.rotary_emb(positions))
    products = torch.einsum(
        "bshd,btd->bsht", quantize_cache(queries, format="mxfp4", block_size=32), state.index_keys
    ).relu()
    weights = indexer.weights_proj(x[None]) * (indexer.head_dim**-0.5 * indexer.num_heads**-0.5)
    scores = (products * weights.unsqueeze(-1)).sum(dim=2)[0]
    visible = (positions[0] + 1) // layer.compress_ratio
    return scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)


def mask(indices: Tensor, size: int) -> Tensor:
    """Which of ``size`` entries (or blocks) ``indices [S, K]`` name; -1 names none."""
    found = torch.zeros(len(indices), size + 1, dtype=torch.bool)
    return found.scatter(1, indices.long().masked_fill(indices < 0, size), True)[:, :size]


# --- Comparison ------------------------------------------------------------------------------------------------------


def mistakes(
    plan: Model,
    expectations: Sequence[Expected],
    outputs: Sequence[Tensor],
    selections: Sequence[Selected | None],
    bound: float = APART,
) -> dict[int, str]:
    """By layer, what is wrong with ``outputs`` and ``selections`` of the whole sequence; empty if nothing is.

    A row may select another entry of exactly the score at the border, and have another candidate block likewise. What
    follows from that is another right answer, so such a row is left out from there on, but only few may be.
    """
    wrong: dict[int, str] = {}
    same: dict[int, Tensor] = {}  # rows that select what NeMo AutoModel selects, by layer
    same_candidates: dict[int, Tensor] = {}
    for layer, expected, output, selected in zip(plan.layers, expectations, outputs, selections, strict=True):
        number, rows = layer.number, torch.ones(len(output), dtype=torch.bool)
        if layer.selection_owner == number:
            assert selected is not None and expected.scores is not None and expected.picks is not None
            if layer.candidate_owner not in (None, number):
                rows = same_candidates[layer.candidate_owner]
            size = expected.scores.shape[1]
            picks = mask(selected.indices[:, 0], size)
            legal, equal = compare(picks, expected.picks, expected.scores)
            if not bool((legal | ~rows).all()):
                wrong[number] = f"selects otherwise in rows {(rows & ~legal).nonzero().flatten().tolist()}"
            rows = same[number] = rows & equal
            if expected.candidates is not None:
                assert selected.candidate_blocks is not None and layer.selection is not None
                block = layer.selection.candidate_block
                legal, same_candidates[number] = compare_blocks(
                    mask(selected.candidate_blocks[:, 0], -(-size // block)), expected, block
                )
                if not bool(legal.all()):
                    wrong[number] = f"other candidates in rows {(~legal).nonzero().flatten().tolist()}"
        elif layer.selection_owner is not None:
            rows = same[layer.selection_owner]
        if not bool(rows.float().mean() >= 1 - TIES):
            wrong.setdefault(number, f"{int((~rows).sum())} rows differ by ties")
        error = (output - expected.output).float().norm(dim=-1) / expected.output.float().norm(dim=-1)
        error = error[rows]
        if len(error) and not bool((error <= bound).all()):
            wrong.setdefault(number, f"output off by {float(error.max()):.1e}")
    return wrong


def compare(ours: Tensor, theirs: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[S]`` whose picks are right, and those whose picks are the same, of masks ``[S, N]``."""
    border = scores.masked_fill(~theirs, torch.inf).amin(1, keepdim=True)
    tied = (scores == border) & scores.isfinite()
    equal = (ours == theirs).all(1)
    return (ours.sum(1) == theirs.sum(1)) & ((ours == theirs) | tied).all(1), equal


def compare_blocks(ours: Tensor, expected: Expected, block: int) -> tuple[Tensor, Tensor]:
    """The same for candidate blocks, whose score is that of their best entry."""
    assert expected.scores is not None and expected.candidates is not None

    def blocks(x: Tensor, fill: Any) -> Tensor:
        return pad(x, (0, -x.shape[1] % block), value=fill).unflatten(1, (-1, block))

    scores = blocks(expected.scores, -torch.inf).amax(-1)
    theirs = blocks(expected.candidates.int(), 0).any(-1)
    # the newest block is in whatever its score is, and is no border
    visible = expected.scores.isfinite().sum(1)
    newest = ((visible - 1).clamp(min=0) // block)[:, None] == torch.arange(scores.shape[1])
    return compare(ours, theirs, scores.masked_fill(newest, 1e30))
