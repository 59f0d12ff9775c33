"""``select`` on Triton: arguments of the op to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sparse_attn.layout import FORMATS, Codec

from . import planes
from .choose import Candidates, Goals, Lists, choose, put_in_order
from .device import device_of
from .kernels.goals import goals_kernel, sort_kernel
from .kernels.score import join_kernel, pool_kernel, score_kernel, sum_kernel
from .schedule import ScoreTile, score_tile_of, shape_of

if TYPE_CHECKING:
    from sparse_attn.ops.select import Select

MOST_SCORES = 1 << 23
"""Scores that stand in memory at a time, unless a single row has more: 32 MiB, which caches of a device hold."""

CHUNK = 1024
"""Entries that a program scores."""

GOALS_BLOCK, SORT_BLOCK, POOL_BLOCK = 64, 64, 128
JOIN_CELLS, JOIN_CHUNKS = 16, 64


class Sight(NamedTuple):
    """Of each row, int32 ``[rows]`` each: its sequence (-1: none), the entries ``[low, high)`` that it sees, and its
    units ``[free_low, free_high)`` that are not kept whatever they score."""

    sequence: Tensor
    low: Tensor
    high: Tensor
    free_low: Tensor
    free_high: Tensor


class Query(NamedTuple):
    """Queries and their weights. Steps count elements."""

    data: Tensor
    step: int
    head_step: int
    weights: Tensor | None
    weight_step: int
    weight_head_step: int


class How(NamedTuple):
    """What kernels are compiled for. A segment is heads of a list that read one key head, in ``pieces`` of
    ``block_h``."""

    heads: int
    key_heads: int
    lists: int
    candidate_lists: int
    rows: int
    step: int
    block_h: int
    pieces: int
    segments: int
    block_n: int
    chunk: int
    page: int
    score: str
    weighted: bool
    rounded: bool
    bounds: bool
    mean: bool
    pooled: bool
    scores_all: bool
    row_scale: str
    hardware_fp8: bool


def select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    """Runs one call on the current stream, without waiting for it: some rows at a time, so that scores need bounded
    memory."""
    a = a.with_float_queries
    tokens = a.q.shape[0]
    # of blocks larger than this only the first has entries, and all of them
    largest = _entries(a) + a.strides
    a = a._replace(block=min(a.block, largest), candidate_block=min(a.candidate_block, largest))
    row_scores = a.out_heads * max(_entries(a), _candidates(a), 1)
    step = max(MOST_SCORES // row_scores, 1)
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        lists = Lists(indices[part], counts[part], None if values is None else values[part])
        blocks = None if candidate_blocks is None else candidate_blocks[part]
        _Rows(a, first, part.stop - first).select(lists, blocks)


def _entries(a: Select) -> int:
    """Bound of the entries that a row sees. One past the page table is enough to show that its page is not there."""
    held = a.page_table.shape[1] * a.paging[1] + 1
    return held if a.kv_range is not None else min(max(a.max_seq_len // a.ratio - a.strides + 1, 0), held)


def _candidates(a: Select) -> int:
    """Entries in the candidate blocks of a list."""
    return 0 if a.candidates is None else a.candidates.shape[2] * a.candidate_block


def _scales_products(codec: Codec) -> bool:
    """Whether a row has one scale, which products are multiplied by, so that they are of the numbers as they are
    stored."""
    return bool(codec.scale) and codec.group in (0, codec.dim) and not codec.rope


def _compute(a: Select) -> torch.dtype:
    """Type of the numbers of a product, which holds queries and keys as they are. Scores that are rounded to bfloat16
    move a whole step where a product lies between two numbers, so products of float32 must not err."""
    if a.q.dtype == torch.float32:
        return torch.float64 if a.score_dtype == "bf16" else torch.float32
    codec = FORMATS[a.format].codec
    if codec.scale:
        powers = codec.scale == "e8m0" and a.q.dtype == torch.bfloat16
        exact = powers or _scales_products(codec)
    else:
        exact = a.keys.dtype == a.q.dtype
    return a.q.dtype if exact else torch.float32


class _Rows:
    """Some rows of a call, and the memory that they need."""

    def __init__(self, a: Select, first: int, rows: int) -> None:
        self.a, self.first, self.rows = a, first, rows
        self.codec = FORMATS[a.format].codec
        self.pooled = (a.block > 1 or a.strides > 1) and a.pool != "mean"
        self.mean = a.block > 1 and a.pool == "mean"
        self.entries = _entries(a)
        self.units = -(-(self.entries + a.strides - 1) // a.block)
        self.width = max(_candidates(a) if a.candidates is not None else self.units if self.mean else self.entries, 1)
        self.sight = Sight(*self._integers(5))
        self.goals = Goals(*self._integers(7))
        self.block_goals = Goals(*self._integers(7)) if a.candidate_k else None

    def _integers(self, count: int) -> Tensor:
        return torch.empty(count, self.rows, dtype=torch.int32, device=self.a.q.device)

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.a.q.device)

    def select(self, to: Lists, candidate_blocks: Tensor | None) -> None:
        a = self.a
        self._set_goals()
        candidates = self._sorted_candidates()
        scores = self._scores(candidates)
        units = scores
        if self.pooled:
            units = self._pool(scores, self.goals, a.strides, a.block, max(self.units, 1), a.pool == "sum")
        if a.order == "score":
            found = Lists(torch.empty_like(to.indices), to.counts, self._floats(*to.indices.shape))
            choose(units, self.goals, found, candidates=candidates)
            if a.k:
                put_in_order(found, True, to.indices, to.values)
        else:
            choose(units, self.goals, to, candidates=candidates)
        if candidate_blocks is not None:
            assert self.block_goals is not None
            width = max(-(-self.entries // a.candidate_block), 1)
            blocks = self._pool(scores, self.block_goals, 1, a.candidate_block, width, False)
            choose(blocks, self.block_goals, Lists(candidate_blocks, torch.empty_like(to.counts), None))

    def _set_goals(self) -> None:
        a, batch = self.a, self.a.seq_lens.shape[0]
        goals_kernel[(-(-self.rows // GOALS_BLOCK),)](
            a.cu_seqlens_q,
            a.seq_lens,
            batch,
            batch.bit_length(),
            self.first,
            self.rows,
            a.kv_range,
            a.row_k,
            a.ratio,
            a.strides,
            a.block,
            a.k,
            a.keep_first,
            a.keep_last,
            a.candidate_block,
            a.candidate_k,
            self.entries,
            self.width,
            self.units,
            self.sight,
            self.goals,
            self.block_goals,
            CAUSAL=a.causal,
            TAIL=a.tail,
            TAKES_CANDIDATES=a.candidates is not None,
            BLOCK=GOALS_BLOCK,
            num_warps=2,
        )

    def _sorted_candidates(self) -> Candidates | None:
        if self.a.candidates is None:
            return None
        given = self.a.candidates[self.first : self.first + self.rows]
        _, lists, count = given.shape
        blocks = torch.full(given.shape, -1, dtype=torch.int32, device=given.device)
        if count:
            sort_kernel[self.rows * lists, -(-count // SORT_BLOCK)](
                given, *given.stride(), blocks, HEADS=lists, COUNT=count, BLOCK=SORT_BLOCK, num_warps=4
            )
        return Candidates(blocks, self.a.candidate_block, lists, count)

    def _scores(self, candidates: Candidates | None) -> Tensor:
        a = self.a
        _, page_size, key_heads = a.paging
        dim = (2 if a.bounds else 1) * a.q.shape[2]
        shape, compute = shape_of(dim, 1, None), _compute(a)
        heads_a_list, heads_a_key = a.q.shape[1] // a.out_heads, a.q.shape[1] // key_heads
        apart = a.max_seqlen_q == 1 or candidates is not None  # rows have no keys in common
        softmax = a.score == "softmax_sum"
        tile = score_tile_of(min(heads_a_list, heads_a_key), shape, compute.itemsize, apart, self.mean, softmax)
        how = self._how(tile, heads_a_list, heads_a_key, candidates, device_of(a.q).hardware_fp8)
        keys, key = planes.rows("select", "keys", a.keys, a.format, page_size, a.key_scale), planes.codes(a.format, dim)
        if how.row_scale:
            key = key._replace(scale="", group=0)
        chunks = -(-self.width // how.chunk)
        groups = -(-self.rows // tile.step)
        call = (
            self._query(),
            self.sight,
            self.goals,
            None if candidates is None else candidates.blocks,
            a.candidate_block,
            a.block,
            planes.pages(a.page_table, a.paging[0]),
            *keys,
            a.scale,
            self.rows,
            self.width,
        )
        kind = dict(
            KEY=key,
            SHAPE=shape,
            HOW=how,
            COMPUTE=getattr(tl, str(compute).removeprefix("torch.")),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        largest = total = None
        if softmax:
            cells = self.rows * a.q.shape[1]
            largest, total = self._floats(cells, chunks), self._floats(cells, chunks)
            sum_kernel[groups * a.out_heads * how.segments, chunks](*call, largest, total, **kind)
            join_kernel[(-(-cells // JOIN_CELLS),)](
                largest, total, cells, chunks, BLOCK=JOIN_CELLS, CHUNKS=JOIN_CHUNKS, num_warps=4
            )
        scores = self._floats(self.rows, a.out_heads, self.width)
        score_kernel[groups * a.out_heads, chunks](*call, largest, total, chunks, scores, **kind)
        return scores

    def _query(self) -> Query:
        part = slice(self.first, self.first + self.rows)
        q, weights = self.a.q[part], None if self.a.weights is None else self.a.weights[part]
        steps = (0, 0) if weights is None else weights.stride()
        return Query(q, q.stride(0), q.stride(1), weights, *steps)

    def _how(
        self, tile: ScoreTile, heads_a_list: int, heads_a_key: int, candidates: Candidates | None, hardware_fp8: bool
    ) -> How:
        a = self.a
        _, page_size, key_heads = a.paging
        pieces = -(-min(heads_a_list, heads_a_key) // tile.heads)
        # key heads that a list may read
        reads = max(
            -(-((n + 1) * heads_a_list) // heads_a_key) - n * heads_a_list // heads_a_key for n in range(a.out_heads)
        )
        return How(
            heads=a.q.shape[1],
            key_heads=key_heads,
            lists=a.out_heads,
            candidate_lists=1 if candidates is None else candidates.lists,
            rows=tile.rows,
            step=tile.step,
            block_h=tile.heads,
            pieces=pieces,
            segments=reads * pieces,
            block_n=tile.places,
            chunk=max(CHUNK // (a.block if self.mean else 1) // tile.places, 1) * tile.places,
            page=page_size,
            score=a.score,
            weighted=a.weights is not None,
            rounded=a.score_dtype == "bf16",
            bounds=a.bounds,
            mean=self.mean,
            pooled=self.pooled,
            scores_all=a.scores_all,
            row_scale=self.codec.scale if _scales_products(self.codec) else "",
            hardware_fp8=hardware_fp8,
        )

    def _pool(self, scores: Tensor, goals: Goals, strides: int, block: int, units: int, sums: bool) -> Tensor:
        pooled = self._floats(self.rows, self.a.out_heads, units)
        pool_kernel[self.rows * self.a.out_heads, -(-units // POOL_BLOCK)](
            scores,
            self.width,
            self.sight,
            goals,
            strides,
            block,
            pooled,
            units,
            LISTS=self.a.out_heads,
            SUMS=sums,
            SCORES_ALL=self.a.scores_all,
            BLOCK=POOL_BLOCK,
            num_warps=4,
        )
        return pooled
