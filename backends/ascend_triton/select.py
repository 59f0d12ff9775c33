"""``select`` on triton-ascend: arguments of the op to launches of the kernels, for some rows at a time."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

from . import soc
from .pieces import Plane, located, padded, pieces

if TYPE_CHECKING:
    from sparse_attn.ops.select import Select

SCORE_BYTES = 64 << 20
"""Scores, or mean keys, in memory at a time, at most, unless one row has more."""
PRODUCTS = 4096
"""Products of a tile of queries and keys."""
FEW = 32
"""Keys of a tile where each is two bounds, or has several scales."""
WIDE = 8192
"""Elements of a tile of keys that are multiplied in float32."""
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
    if a.order == "score" and values is None:
        values = indices.new_full(indices.shape, float("-inf"), dtype=torch.float32)
    if a.q.shape[0] == 0 or a.seq_lens.shape[0] == 0:
        return
    candidates = None if a.candidates is None else a.candidates.sort(-1).values
    columns = _columns(a)
    near = padded(a.block + a.strides - 1)
    of_means = a.pool == "mean" and a.block > 1
    each = -(-columns // a.block) * a.paging[2] * a.q.shape[2] if of_means else a.out_heads * columns
    chunk = max(SCORE_BYTES // (4 * each), 1)
    for first in range(0, a.q.shape[0], chunk):
        rows = min(chunk, a.q.shape[0] - first)
        if of_means:
            unit_scores, units = _score_means(a, first, rows, columns)
            _choose(a, None, first, rows, unit_scores, units, indices, counts, values, False)
            continue
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
    if a.order == "score" and values is not None:
        in_order(indices, counts, values, True)


def in_order(indices: Tensor, counts: Tensor, values: Tensor, by_score: bool) -> None:
    """Lists by number, or by descending score and then by number."""
    nothing = torch.arange(indices.shape[2], device=indices.device) >= counts[..., None]
    order = torch.where(nothing, torch.iinfo(torch.int32).max, indices).sort(dim=-1, stable=True).indices
    if by_score:
        order = order.gather(-1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    for numbers in (indices, values):
        numbers.copy_(numbers.gather(-1, order))


def _score_means(a: Select, first: int, rows: int, columns: int) -> tuple[Tensor, int]:
    """Scores of units by their mean keys, which are a plane of one page for each row."""
    from .kernels.mean import mean_kernel

    pages, page_size, heads = a.paging
    units, keys = -(-columns // a.block), _keys(a)
    means = a.q.new_empty((rows, units, heads, a.q.shape[2]), dtype=torch.float32)
    ranges = a.seq_lens.new_empty(rows, 2)
    mean_kernel[(min(soc.current().vector_cores, rows * units * heads),)](
        *_rows(a),
        first,
        rows,
        a.seq_lens.shape[0],
        a.ratio,
        a.block,
        *located(keys.values),
        *located(keys.scales),
        a.page_table,
        a.page_table.stride(0),
        a.page_table.shape[1],
        pages,
        page_size,
        means,
        ranges,
        units,
        heads,
        keys.size,
        keys.groups,
        BLOCK_D=max(padded(keys.size), 16),
        ENTRIES=max(min(POOLED // 2 // max(padded(keys.size), 16), 128), 1),
        ELEMENT=keys.element,
        SCALE=keys.scale,
        CAUSAL=a.causal,
    )
    every = torch.arange(rows + 1, dtype=torch.int32, device=a.q.device)
    part = slice(first, first + rows)
    call = a._replace(
        q=a.q[part],
        weights=None if a.weights is None else a.weights[part],
        cu_seqlens_q=every,
        seq_lens=torch.ones_like(every[1:]),
        keys=means,
        page_table=every[:-1, None],
        key_scale=None,
        format="fp32",
        page_size=0,
        kv_range=ranges,
        row_k=None,
        block=1,
        tail="none",
        return_values=True,
    )
    scores = means.new_empty(rows * a.out_heads * units)
    _score(call, None, 0, rows, scores, units)
    return scores, units


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
    """Scores of ``columns`` of each row, ``[rows, lists, columns]``."""
    from .kernels.score import score_kernel

    pages, page_size, key_heads = a.paging
    heads = a.q.shape[1]
    run = gcd(heads // a.out_heads, heads // key_heads)
    keys = _keys(a)
    tile = min(PRODUCTS // max(padded(run), 16), 128)
    if a.bounds or keys.groups > 1:
        tile = min(tile, FEW)
    if keys.multiplied == torch.float32:
        tile = min(tile, max(WIDE // padded(keys.size), 16))
    tiles = -(-columns // tile)

    def launch(score: str, norms: Tensor | None, sums: Tensor | None) -> None:
        score_kernel[(min(soc.current().cores, rows * tiles),)](
            a.q,
            *a.q.stride()[:2],
            a.weights,
            0 if a.weights is None else a.weights.stride(0),
            *_rows(a),
            *_units(a, first, rows),
            *located(keys.values),
            *located(keys.scales),
            a.page_table,
            a.page_table.stride(0),
            a.page_table.shape[1],
            pages,
            *_lists(candidates),
            a.candidate_block,
            scores,
            norms,
            sums,
            a.q.new_empty(0, dtype=keys.multiplied),
            columns,
            columns,
            a.scale,
            a.out_heads,
            heads // a.out_heads // run,
            run,
            heads // key_heads,
            keys.size,
            keys.upper,
            keys.upper_scale,
            page_size,
            GROUPS=keys.groups,
            HEADS=max(padded(run), 16),
            BLOCK_D=max(padded(keys.size), 16),
            COLUMNS=tile,
            WHOLE=page_size % tile == 0 and candidates is None,
            ELEMENT=keys.element,
            SCALE=keys.scale,
            SCORE=score,
            BOUNDS=a.bounds,
            NARROW=a.score_dtype == "bf16",
            TAIL=a.tail,
            CAUSAL=a.causal,
            ALL=a.scores_all,
        )

    if a.score != "softmax_sum":
        return launch(a.score, None, None)
    largest = scores.new_full((rows, tiles, heads), float("-inf"))
    sums = torch.zeros_like(largest)
    launch("norms", largest, sums)
    most = largest.amax(1)
    shares = sums * torch.exp(largest - torch.where(most == float("-inf"), 0.0, most)[:, None])
    launch(a.score, most + shares.sum(1).log(), None)
    return None


class Keys(NamedTuple):
    """An index plane as kernels read it: keys of ``groups`` groups of ``size`` elements, each group with a scale."""

    values: Tensor
    scales: Tensor | None
    element: str
    scale: str
    size: int
    groups: int
    upper: int
    """Elements of ``values`` from a lower bound to its upper one."""
    upper_scale: int
    multiplied: torch.dtype


def _keys(a: Select) -> Keys:
    _, page_size, _ = a.paging
    values, scales, _, _ = pieces("select", Plane("keys", a.keys, a.format, page_size, a.key_scale))
    codec, dim = FORMATS[a.format].codec, a.q.shape[2]
    whole = 2 * dim if a.bounds else dim
    grouped = 0 < codec.group < whole  # else a scale is that of a head, or of a packed entry
    groups, size = (dim // codec.group, codec.group) if grouped else (1, dim)
    packed = 2 if codec.element in ("int4", "e2m1") else 1
    upper, upper_scale = dim // packed, 0
    if grouped and scales is not None:
        upper, upper_scale = groups * values.stride(2), groups * scales.stride(2)
    scaled = bool(codec.scale)
    # Numbers of 8 bits are exact in both types of 16, and those of both bounds in float32 alone, once scaled.
    exact = a.q.dtype == values.dtype or scaled and not a.bounds
    return Keys(
        values,
        scales,
        codec.element if scaled else "",
        codec.scale,
        size,
        groups,
        upper,
        upper_scale,
        a.q.dtype if exact else torch.float32,
    )


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
    """The best of ``scores [rows, lists, columns]`` into the lists of these rows."""
    shape = columns, a.out_heads
    lists = (*_lists(candidates), a.candidate_block)
    kind = dict(TAIL=a.tail, CAUSAL=a.causal, ALL=a.scores_all, MAKE=make)
    choose(_rows(a), _units(a, first, rows), scores, None, shape, lists, (indices, counts, values), **kind)


def choose(
    rows: tuple[Any, ...],
    units: tuple[Any, ...],
    scores: Tensor,
    numbers: Tensor | None,
    shape: tuple[int, int],
    candidates: tuple[Any, ...],
    to: tuple[Tensor, Tensor | None, Tensor | None],
    **kind: Any,
) -> None:
    """The best of ``scores`` of ``shape`` (columns, lists) into lists, under the numbers of their columns."""
    from .kernels.choose import choose_kernel

    columns, lists = shape
    places = to[0].shape[2]
    choose_kernel[(min(soc.current().vector_cores, units[2] * lists),)](
        *rows, *units, scores, numbers, columns, columns, *candidates, *to, places, lists, **kind, TILE=TILE
    )
