"""``select`` on triton-ascend: arguments of the op to launches of the kernels, for some rows at a time."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

from . import soc
from .pieces import Plane, located, padded, pieces

if TYPE_CHECKING:
    from sparse_attn.ops.select import Select

SCORE_BYTES = 64 << 20
"""Scores in memory at a time, at most, unless one row has more."""
PRODUCTS = 4096
"""Products of a tile of queries and keys."""
TILE = 2048
"""Scores that a vector core takes at a time."""
POOLED = 4096
"""Scores that a vector core pools at a time."""


def select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    """Lists of the best units. An entry in a page that the plane lacks has no score."""
    a = a.with_float_queries
    indices.fill_(-1)
    counts.zero_()
    if values is not None:
        values.fill_(float("-inf"))
    if candidate_blocks is not None:
        candidate_blocks.fill_(-1)
    if a.q.shape[0] == 0 or a.seq_lens.shape[0] == 0:
        return
    candidates = None if a.candidates is None else a.candidates.sort(-1).values
    columns = _columns(a)
    near = padded(a.block + a.strides - 1)
    chunk = max(SCORE_BYTES // (4 * a.out_heads * columns), 1)
    for first in range(0, a.q.shape[0], chunk):
        rows = min(chunk, a.q.shape[0] - first)
        # pooling reads past both ends
        scores = indices.new_empty(near + rows * a.out_heads * columns + near * TILE, dtype=torch.float32)[near:]
        _score(a, candidates, first, rows, scores, columns)
        unit_scores, units = scores, columns
        if a.block > 1 or a.strides > 1:
            units = -(-(columns + a.strides - 1) // a.block)
            unit_scores = _pool(a, first, rows, scores, columns, units, a.block, a.pool == "sum")
        _choose(a, candidates, first, rows, unit_scores, units, indices, counts, values, False)
        if candidate_blocks is not None:
            blocks = -(-columns // a.candidate_block)
            maxima = _pool(a, first, rows, scores, columns, blocks, a.candidate_block, False)
            _choose(a, None, first, rows, maxima, blocks, candidate_blocks, None, None, True)


def _columns(a: Select) -> int:
    """Columns of scores of a row: places of candidates, or entries that a row can read."""
    if a.candidates is not None:
        return max(a.candidates.shape[2] * a.candidate_block, 1)
    entries = a.page_table.shape[1] * a.paging[1]
    return max(entries if a.kv_range is not None else min(entries, a.max_seq_len // a.ratio), 1)


def _rows(a: Select) -> tuple[Any, ...]:
    return a.cu_seqlens_q, a.seq_lens, a.kv_range


def _units(a: Select, first: int, rows: int) -> tuple[Any, ...]:
    sizes = a.seq_lens.shape[0], a.ratio, a.strides, a.block, a.k, a.keep_first, a.keep_last
    return a.row_k, first, rows, *sizes


def _lists(candidates: Tensor | None) -> tuple[Any, ...]:
    if candidates is None:
        return None, 0, 0
    return candidates, candidates.stride(0), candidates.stride(1) if candidates.shape[1] > 1 else 0


def _score(a: Select, candidates: Tensor | None, first: int, rows: int, scores: Tensor, columns: int) -> None:
    from .kernels.score import score_kernel

    pages, page_size, key_heads = a.paging
    _, heads, dim = a.q.shape
    run = gcd(heads // a.out_heads, heads // key_heads)
    values, scales, _, _ = pieces("select", Plane("keys", a.keys, a.format, page_size, a.key_scale))
    codec = FORMATS[a.format].codec
    block_h = max(padded(run), 16)
    tile = min(PRODUCTS // block_h, 128)
    score_kernel[(min(soc.current().cores, rows * -(-columns // tile)),)](
        a.q,
        *a.q.stride()[:2],
        a.weights,
        0 if a.weights is None else a.weights.stride(0),
        *_rows(a),
        *_units(a, first, rows),
        *located(values),
        *located(scales),
        a.page_table,
        a.page_table.stride(0),
        a.page_table.shape[1],
        pages,
        *_lists(candidates),
        a.candidate_block,
        scores,
        a.q.new_empty(0, dtype=_multiplied(a.q.dtype, values.dtype, bool(codec.scale))),
        columns,
        columns,
        a.scale,
        a.out_heads,
        heads // a.out_heads // run,
        run,
        heads // key_heads,
        dim,
        page_size,
        HEADS=block_h,
        BLOCK_D=max(padded(dim), 16),
        COLUMNS=tile,
        WHOLE=page_size % tile == 0 and candidates is None,
        ELEMENT=codec.element if codec.scale else "",
        SCALE=codec.scale,
        SCORE=a.score,
        NARROW=a.score_dtype == "bf16",
        TAIL=a.tail,
        CAUSAL=a.causal,
        ALL=a.scores_all,
    )


def _multiplied(q: torch.dtype, keys: torch.dtype, scaled: bool) -> torch.dtype:
    """The type in which products lose nothing: numbers of 8 bits are exact in both types of 16."""
    return q if scaled or q == keys else torch.float32


def _pool(a: Select, first: int, rows: int, scores: Tensor, columns: int, units: int, block: int, add: bool) -> Tensor:
    from .kernels.pool import pool_kernel

    near = padded(block + a.strides - 1)
    at_once = min(max(POOLED // near, 1), padded(units))
    out = scores.new_empty(rows * a.out_heads * units)
    tasks = rows * a.out_heads * -(-units // at_once)
    pool_kernel[(min(soc.current().vector_cores, tasks),)](
        *_rows(a),
        first,
        rows,
        a.seq_lens.shape[0],
        a.ratio,
        a.strides,
        block,
        scores,
        columns,
        out,
        units,
        a.out_heads,
        SUM=add,
        CAUSAL=a.causal,
        UNITS=at_once,
        NEAR=near,
    )
    return out


def _choose(
    a: Select,
    candidates: Tensor | None,
    first: int,
    rows: int,
    scores: Tensor,
    columns: int,
    indices: Tensor,
    counts: Tensor | None,
    values: Tensor | None,
    make: bool,
) -> None:
    from .kernels.choose import choose_kernel

    choose_kernel[(min(soc.current().vector_cores, rows * a.out_heads),)](
        *_rows(a),
        *_units(a, first, rows),
        scores,
        columns,
        columns,
        *_lists(candidates),
        a.candidate_block,
        indices,
        counts,
        values,
        indices.shape[2],
        a.out_heads,
        TAIL=a.tail,
        CAUSAL=a.causal,
        ALL=a.scores_all,
        MAKE=make,
        TILE=TILE,
    )
