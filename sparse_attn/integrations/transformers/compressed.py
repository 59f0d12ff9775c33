"""Layers of DeepSeek V4 over a window of raw rows and entries of several tokens, selected in some layers.

What they project is theirs; ``compress`` norms, rotates and stores it. Tokens are rotated to their place among those of
their sequence, so that padding changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from ... import attend, compress, select
from ...checks import expect
from ...layout import pages_for
from .attention import FORMATS, Rows
from .planes import Planes, Step, numbered, ring_table

POSITIONS = 4096
"""By so many at a time the tables of rotations grow."""


def prepare(model: Any, planes: Planes, position_ids: Tensor | None) -> None:
    """Before a step: check positions, and have rotations for them."""
    step = planes.step
    assert step is not None
    if position_ids is None:
        position_ids = torch.arange(step.shape[1], device=step.positions.device)[None] + planes.places
    given = step.pack(position_ids.to(step.positions.device)) - step.positions
    planes.shift(given)
    length = step.lengths["max_seq_len"]
    for kind, type in model.rotary_emb.rope_type.items():
        expected, do = "rotations that do not depend on the length", "use the model's own cache"
        expect(type not in ("dynamic", "longrope"), "PagedCache", "rope_type", expected, type, do)
        if kind not in planes.rotations or len(planes.rotations[kind]) < length:
            positions = torch.arange(pages_for(length, POSITIONS) * POSITIONS, device=step.positions.device)
            like = torch.zeros(1, device=positions.device)
            planes.rotations[kind] = torch.cat(model.rotary_emb(like, positions[None], layer_type=kind), -1)[0]


def forward(module: Any, planes: Planes, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """What the attention module returns, for ``hidden_states [B, S, hidden]``."""
    assert planes.step is not None
    step = planes.step.on(hidden_states.device)
    x = step.pack(hidden_states)
    if not len(x):  # padding alone, which its grouped projection cannot take
        return torch.zeros_like(hidden_states), None
    rows = planes.of(module.layer_idx, x)
    turns = planes.rotations[module.rope_layer_type].to(x.device)
    cos, sin = turns[step.positions].chunk(2, -1)

    residual = module.q_a_norm(module.q_a_proj(x))
    q = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (-1, module.head_dim)))
    window = Window(rows["window"], module.sliding_window, step)
    compress(
        module.kv_proj(x)[:, None],
        None,
        **step.lengths,
        plane=window.rows,
        page_table=window.table,
        stride=1,
        norm=module.kv_norm.weight.float(),
        eps=module.kv_norm.variance_epsilon,
        cos_sin=turns,
        dtype=FORMATS[x.dtype],
        format=rows["window"].format,
    )
    main: dict[str, Any] = {}
    if module.compressor is not None:
        ratio = module.compressor.compress_rate
        entries(module.compressor, x, rows["main"], rows["state"], turns, planes, step)
        main = dict(kv=rows["main"].rows, page_table=step.page_table, ratio=ratio, format=rows["main"].format)
        if "index" in rows:
            indexer = module.compressor.indexer
            entries(indexer, x, rows["index"], rows["index_state"], turns, planes, step)
            main |= choose(indexer, x, residual, (cos, sin), rows["index"], step)
    out = attend(
        apply_rotary_pos_emb(q, cos, sin),
        **step.lengths,
        scale=module.scaling,
        v_dim=module.head_dim,
        win=window.rows,
        win_page_table=window.table,
        win_format=rows["window"].format,
        window=module.sliding_window,
        sinks=module.sinks.detach().float().contiguous(),
        **main,
    )
    assert isinstance(out, Tensor)
    window.keep()
    out = apply_rotary_pos_emb(out, cos, -sin)  # values are rotated, as they are the keys
    out = module.o_b_proj(module.o_a_proj(out.flatten(1).unflatten(1, (module.config.o_groups, -1))).flatten(1))
    return step.unpack(out), None


def entries(compressor: Any, x: Tensor, plane: Rows, state: Rows, turns: Tensor, planes: Planes, step: Step) -> None:
    """Write the entries that the step completes, or their index keys."""
    values, ratio = compressor.kv_proj(x)[:, None], compressor.compress_rate
    columns = pages_for(max(step.lengths["max_seq_len"], 1), state.rows.shape[1])
    compress(
        values,
        compressor.gate_proj(x)[:, None],
        **step.lengths,
        plane=plane.rows,
        page_table=step.page_table,
        stride=ratio,
        span=ratio * (values.shape[-1] // compressor.head_dim),
        bias=compressor.position_bias.detach().float(),
        state=state.rows,
        state_page_table=ring_table(len(step.spans), 1, columns, x.device),
        max_rewind=planes.rewind,
        norm=compressor.kv_norm.weight.float(),
        eps=compressor.kv_norm.variance_epsilon,
        cos_sin=turns,
        dtype=FORMATS[x.dtype],
        format=plane.format,
    )


def choose(
    indexer: Any, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], keys: Rows, step: Step
) -> dict[str, Tensor]:
    """The list of each token, for ``attend``; none if every entry fits the budget."""
    if step.lengths["max_seq_len"] // indexer.compress_rate <= indexer.index_topk:
        return {}
    q = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim))
    found = select(
        apply_rotary_pos_emb(q, *rotation),
        indexer.scorer.weights_proj(x).float() * indexer.scorer.weights_scaling,
        keys=keys.rows,
        page_table=step.page_table,
        k=indexer.index_topk,
        scale=indexer.scorer.softmax_scale,
        ratio=indexer.compress_rate,
        format=keys.format,
        **step.lengths,
    )
    return dict(indices=found.indices, index_counts=found.counts)


class Window:
    """Raw rows of the last tokens: a ring, of one page for each sequence.

    A step that needs more rows at once has a longer ring for its time, from which ``keep`` brings back what later steps
    need.
    """

    def __init__(self, plane: Rows, window: int, step: Step) -> None:
        self.ring, self.spans, self.reach = plane.rows, step.spans, window - 1
        sequences, size = self.ring.shape[:2]
        lengths = step.lengths
        pages = pages_for(self.reach + max(lengths["max_seqlen_q"], 1), size)
        columns = pages_for(max(lengths["max_seq_len"], 1), size)
        self.table = ring_table(sequences, pages, columns, self.ring.device)
        self.rows = self.ring
        if pages > 1:
            self.rows = self.ring.new_zeros(sequences * pages, *self.ring.shape[1:])
            self._copy(self.ring, self.rows, [(max(start - self.reach, 0), start) for start, _ in self.spans])

    def keep(self) -> None:
        """Bring back the last rows of each sequence."""
        if self.rows is not self.ring:
            size = self.ring.shape[1]
            spans = [(max(end - size, start - self.reach, 0), end) for start, end in self.spans]
            self._copy(self.rows, self.ring, spans)

    def _copy(self, source: Tensor, target: Tensor, spans: list[tuple[int, int]]) -> None:
        which, numbers = numbered(spans, source.device)
        size = source.shape[1]

        def places(plane: Tensor) -> tuple[Tensor, Tensor]:
            pages = len(plane) // len(spans)
            return which * pages + numbers // size % pages, numbers % size

        target[places(target)] = source[places(source)]
