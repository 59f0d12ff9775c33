"""Device code that scores what rows may select.

A *place* is where a score stands: an entry, a unit whose mean key is scored, or an entry of the row's candidate
blocks, in ascending order. A program takes one list of ``HOW.step`` query rows and a chunk of places, whose borders
depend on the call's options alone, and block after block of keys; rows of one sequence share them. Products are
``[places, rows * heads]``: keys are decoded into registers that a matrix product reads, queries lie still, and a sum
over heads stays within a few lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_start, row_tile, scale_numbers
from .paging import paged

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def query_tile(data, at, mask, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, HOW: tl.constexpr):
    """Columns of the queries of all lanes, ``[lanes, WIDTH]``, 0 past DIM. For bounds, the negative elements and then
    the positive ones: their product with lower and upper bounds, side by side, is the largest with what lies
    between."""
    column = START + tl.arange(0, WIDTH)
    mask = mask[:, None] & (column < DIM)[None, :]
    if HOW.bounds:
        upper = column >= DIM // 2
        source = tl.where(upper, column - DIM // 2, column)
        x = tl.load(data + at[:, None] + source[None, :], mask=mask, other=0)
        x = tl.where(((x > 0) == upper[None, :]) | (x != x), x, 0)
    else:
        x = tl.load(data + at[:, None] + column[None, :], mask=mask, other=0)
    return x


@triton.jit
def heads_of(list, segment, HOW: tl.constexpr):
    """Of a segment, which is heads of one list that read one key head: key head, query heads, and which of them there
    are."""
    SIZE: tl.constexpr = HOW.heads // HOW.lists
    SHARING: tl.constexpr = HOW.heads // HOW.key_heads
    key_head = list * SIZE // SHARING + segment // HOW.pieces
    low = tl.maximum(list * SIZE, key_head * SHARING)
    high = tl.minimum(list * SIZE + SIZE, key_head * SHARING + SHARING)
    head = low + segment % HOW.pieces * HOW.block_h + tl.arange(0, HOW.block_h)
    return tl.minimum(key_head, HOW.key_heads - 1).to(tl.int64), head, head < high


@triton.jit
def query_tiles(query, row, active, head, exists, SHAPE: tl.constexpr, HOW: tl.constexpr, COMPUTE: tl.constexpr):
    """Queries of all lanes, as up to three tiles of columns."""
    LANES: tl.constexpr = HOW.rows * HOW.block_h
    at = tl.reshape(row.to(tl.int64)[:, None] * query.step + head[None, :] * query.head_step, (LANES,))
    mask = tl.reshape(active[:, None] & exists[None, :], (LANES,))
    q0 = query_tile(query.data, at, mask, 0, SHAPE.lead, SHAPE.dim, HOW).to(COMPUTE)
    # tiles that the shape lacks are never used, but a tuple has no room for None
    q1 = q0
    q2 = q0
    if SHAPE.leads == 2:
        q1 = query_tile(query.data, at, mask, SHAPE.lead, SHAPE.lead, SHAPE.dim, HOW).to(COMPUTE)
    if SHAPE.tail > 0:
        q2 = query_tile(query.data, at, mask, SHAPE.leads * SHAPE.lead, SHAPE.tail, SHAPE.dim, HOW).to(COMPUTE)
    return q0, q1, q2


@triton.jit
def segment_of(
    query,
    row,
    active,
    list,
    segment,
    largest,
    total,
    chunks,
    SHAPE: tl.constexpr,
    HOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Of a segment: key head, which heads there are, queries, weights ``[rows, heads]`` (1 if none are given), and for
    softmax_sum the largest exponents, by whose sums weights are divided."""
    key_head, head, exists = heads_of(list, segment, HOW)
    tiles = query_tiles(query, row, active, head, exists, SHAPE, HOW, COMPUTE)
    mask = active[:, None] & exists[None, :]
    weight = mask.to(tl.float32)
    if HOW.weighted:
        at = row.to(tl.int64)[:, None] * query.weight_step + head[None, :] * query.weight_head_step
        weight = tl.load(query.weights + at, mask=mask, other=0).to(tl.float32)
    m = weight
    if HOW.score == "softmax_sum":
        at = (row.to(tl.int64)[:, None] * HOW.heads + head[None, :]) * chunks
        m = tl.load(largest + at, mask=mask, other=0)
        # infinite exponents have no sum: they become NaN, and others 0
        weight = weight / tl.where(m == float("inf"), 1.0, tl.load(total + at, mask=mask, other=1))
    return key_head, exists, tiles, weight, m


@triton.jit
def entry_products(tiles, entry, active, low, high, keys, KEY: tl.constexpr, SHAPE: tl.constexpr, HOW: tl.constexpr):
    """``q . key`` of entries, ``[N, rows, heads]``; which of them each active row sees, ``[N, rows]``; which of those
    have no page, ``[N]``."""
    q0, q1, q2 = tiles
    values, rope, scales, key_head, pages, sequence = keys
    N: tl.constexpr = entry.shape[0]
    COMPUTE: tl.constexpr = q0.dtype
    SUM: tl.constexpr = tl.float64 if q0.dtype == tl.float64 else tl.float32
    seen = active[None, :] & (entry[:, None] >= low[None, :]) & (entry[:, None] < high[None, :])
    wanted = tl.max(seen.to(tl.int32), 1) > 0
    entry = tl.where(wanted, entry, 0).to(tl.int32)
    page, offset, there = paged(pages, sequence, entry, wanted, HOW.page)
    k0 = row_tile(values, rope, scales, page, offset, key_head, there, KEY, 0, SHAPE.lead, HOW.hardware_fp8, COMPUTE)
    x = tl.dot(k0, tl.trans(q0), input_precision="ieee", out_dtype=SUM)
    if SHAPE.leads == 2:
        k1 = row_tile(
            values, rope, scales, page, offset, key_head, there, KEY, SHAPE.lead, SHAPE.lead, HOW.hardware_fp8, COMPUTE
        )
        x = tl.dot(k1, tl.trans(q1), x, input_precision="ieee", out_dtype=SUM)
    if SHAPE.tail > 0:
        TAIL: tl.constexpr = SHAPE.leads * SHAPE.lead
        k2 = row_tile(
            values, rope, scales, page, offset, key_head, there, KEY, TAIL, SHAPE.tail, HOW.hardware_fp8, COMPUTE
        )
        x = tl.dot(k2, tl.trans(q2), x, input_precision="ieee", out_dtype=SUM)
    if HOW.row_scale != "":
        at = row_start(scales, page, offset, key_head)
        x = x * scale_numbers(scales, at, there, HOW.row_scale, HOW.hardware_fp8)[:, None]
    return tl.reshape(x, (N, HOW.rows, HOW.block_h)), seen, wanted & (there == 0)


@triton.jit
def entry_at(place, units):
    """The entry that stands at a place, -1 for one of no candidate block."""
    _, _, candidates, candidate_block, width, _ = units
    if candidates is None:
        return place
    else:
        candidate = tl.load(candidates + place // candidate_block, mask=place < width, other=-1).to(tl.int64)
        return tl.where(candidate < 0, -1, candidate * candidate_block + place % candidate_block)


@triton.jit
def place_products(tiles, place, active, units, keys, KEY: tl.constexpr, SHAPE: tl.constexpr, HOW: tl.constexpr):
    """The same of places. Of a unit's mean key: the mean over the entries that the row sees."""
    low, high, _, _, _, block = units
    if HOW.mean:
        N: tl.constexpr = place.shape[0]
        SUM: tl.constexpr = tl.float64 if tiles[0].dtype == tl.float64 else tl.float32
        x = tl.full((N, HOW.rows, HOW.block_h), 0, SUM)
        count = tl.full((N, HOW.rows), 0, tl.int32)
        lost = tl.zeros((N,), tl.int32)
        for n in tl.range(0, block):
            entry = place.to(tl.int64) * block + n
            one, seen, unpaged = entry_products(tiles, entry, active, low, high, keys, KEY, SHAPE, HOW)
            x += tl.where(seen[:, :, None], one, 0)
            count += seen.to(tl.int32)
            lost = lost | unpaged.to(tl.int32)
        return x / tl.maximum(count, 1)[:, :, None], count > 0, lost > 0
    else:
        return entry_products(tiles, entry_at(place, units), active, low, high, keys, KEY, SHAPE, HOW)


@triton.jit
def narrow(x, HOW: tl.constexpr):
    """As bfloat16 holds it, where scores are rounded so."""
    if HOW.rounded:
        return x.to(tl.float32).to(tl.bfloat16).to(tl.float32)
    else:
        return x


@triton.jit
def joined(x, weight, exists, HOW: tl.constexpr):
    """What heads of a list add to its scores, ``[N, rows]``, from their products, or of softmax_sum their shares. NaN
    if one is."""
    if HOW.score == "softmax_sum":
        return tl.sum(tl.where(exists[None, None, :], x * weight[None, :, :], 0), 2)
    elif HOW.score == "max":
        y = x * weight[None, :, :]
        faulty = tl.max((exists[None, None, :] & (y != y)).to(tl.int32), 2) > 0
        best = tl.max(tl.where(exists[None, None, :], y, float("-inf")), 2)
        return tl.where(faulty, float("nan"), best)
    else:
        y = narrow(x, HOW)
        if HOW.score == "relu_sum":
            y = tl.where(y < 0, 0, y)  # keeps NaN
        if HOW.weighted:
            y = narrow(y * weight[None, :, :], HOW)
        return tl.sum(tl.where(exists[None, None, :], y, 0).to(x.dtype), 2)


@triton.jit
def candidates_in(candidates, candidate_block, count, low, high):
    """Entries of candidate blocks in each of the ranges ``[low, high)``."""
    total = low.to(tl.int64) * 0
    for first in tl.range(0, count, 256):
        n = first + tl.arange(0, 256)
        candidate = tl.load(candidates + n, mask=n < count, other=-1).to(tl.int64)[:, None]
        begin = tl.maximum(candidate * candidate_block, low[None, :])
        end = tl.minimum((candidate + 1) * candidate_block, high[None, :])
        total += tl.sum(tl.where((candidate >= 0) & (begin < end), end - begin, 0), 0)
    return total


@triton.jit
def rows_of(sight, goals, candidates, candidate_block, width, list, first_row, rows, block, HOW: tl.constexpr):
    """Rows of a program: their numbers, which of them there are, sequences, which are scored, their places, and what
    gives the entries of places."""
    if candidates is not None:
        candidates += (first_row.to(tl.int64) * HOW.candidate_lists + list % HOW.candidate_lists) * (
            width // candidate_block
        )
    row = first_row + tl.arange(0, HOW.rows)
    inside = row < tl.minimum(rows, first_row + HOW.step)
    sequence = tl.load(sight.sequence + row, mask=inside, other=-1)
    low = tl.load(sight.low + row, mask=inside, other=0)
    high = tl.load(sight.high + row, mask=inside, other=0)
    if HOW.scores_all:
        scored = inside
    else:
        # What fits its budget is not scored.
        free_low = tl.load(sight.free_low + row, mask=inside, other=0)
        free_high = tl.load(sight.free_high + row, mask=inside, other=0)
        others = free_high - free_low
        if candidates is not None:
            others = candidates_in(candidates, candidate_block, width // candidate_block, free_low, free_high)
        scored = inside & (others > tl.load(goals.wanted + row, mask=inside, other=0))
    place_low = low
    place_high = high
    if HOW.mean:
        place_low = low // block
        place_high = (high + block - 1) // block
    elif candidates is not None:
        place_low = low * 0
        place_high = low * 0 + width
    place_high = tl.where(low < high, place_high, 0)
    units = low, high, candidates, candidate_block, width, block
    return row, inside, sequence, scored, place_low, place_high, units


@triton.jit
def blocks_of(active, place_low, place_high, chunk, HOW: tl.constexpr):
    """The blocks of a chunk in which an active row has places."""
    low = tl.min(tl.where(active & (place_low < place_high), place_low, FAR), 0)
    high = tl.max(tl.where(active, place_high, 0), 0)
    first = tl.maximum(low, chunk * HOW.chunk) // HOW.block_n
    return first, (tl.minimum(high, (chunk + 1) * HOW.chunk) + HOW.block_n - 1) // HOW.block_n


@triton.jit
def first_of_sequence(sight, row, first_row, rows):
    """The sequence of a row, and whether it is the first of it in a program."""
    sequence = tl.load(sight.sequence + row, mask=row < rows, other=-1).to(tl.int64)
    before = tl.load(sight.sequence + row - 1, mask=(row > first_row) & (row <= rows), other=-1)
    return sequence, (sequence >= 0) & (sequence != before)


@triton.jit(do_not_specialize=["rows", "width"])
def sum_kernel(
    query,
    sight,
    goals,
    candidates,
    candidate_block,
    block,
    pages,
    values,
    rope,
    scales,
    scale,
    rows,
    width,
    largest,
    total,
    KEY: tl.constexpr,
    SHAPE: tl.constexpr,
    HOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The softmax of a chunk of places, for heads of one segment: its largest exponent (base 2), and its sum."""
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    segment = program % HOW.segments
    list = program // HOW.segments % HOW.lists
    first_row = program // HOW.segments // HOW.lists * HOW.step
    row, inside, sequence, scored, place_low, place_high, units = rows_of(
        sight, goals, candidates, candidate_block, width, list, first_row, rows, block, HOW
    )
    key_head, head, exists = heads_of(list, segment, HOW)
    tiles = query_tiles(query, row, scored, head, exists, SHAPE, HOW, COMPUTE)
    m = tl.full((HOW.rows, HOW.block_h), float("-inf"), tl.float32)
    sums = tl.full((HOW.rows, HOW.block_h), 0, tl.float32)
    for r in tl.range(0, HOW.step):
        number, begins = first_of_sequence(sight, first_row + r, first_row, rows)
        active = scored & (sequence == number) & begins
        first, last = blocks_of(active, place_low, place_high, chunk, HOW)
        for n in tl.range(first, last):
            place = n * HOW.block_n + tl.arange(0, HOW.block_n)
            keys = values, rope, scales, key_head, pages, number
            x, seen, _ = place_products(tiles, place, active, units, keys, KEY, SHAPE, HOW)
            x = (x * (scale * LOG2E)).to(tl.float32)
            x = tl.where(seen[:, :, None] & (x == x), x, float("-inf"))
            new = tl.maximum(m, tl.max(x, 0))
            floor = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp2(m - floor) + tl.sum(tl.exp2(x - floor[None, :, :]), 0)
            m = new
    to = (row.to(tl.int64)[:, None] * HOW.heads + head[None, :]) * tl.num_programs(1) + chunk
    mask = inside[:, None] & exists[None, :]
    tl.store(largest + to, m, mask=mask)
    tl.store(total + to, sums, mask=mask)


@triton.jit(do_not_specialize=["cells", "chunks"])
def join_kernel(largest, total, cells, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """A program joins the softmax of all chunks for BLOCK rows and heads, in a fixed order, into the first chunk."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = cell * chunks
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, chunks, CHUNKS):
        n = first + tl.arange(0, CHUNKS)
        mask = (cell < cells)[:, None] & (n < chunks)[None, :]
        x = tl.load(largest + start[:, None] + n[None, :], mask=mask, other=float("-inf"))
        y = tl.load(total + start[:, None] + n[None, :], mask=mask, other=0)
        new = tl.maximum(m, tl.max(x, 1))
        floor = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp2(m - floor) + tl.sum(y * tl.exp2(x - floor[:, None]), 1)
        m = new
    tl.store(largest + start, m, mask=cell < cells)
    tl.store(total + start, sums, mask=cell < cells)


@triton.jit(do_not_specialize=["rows", "width", "chunks"])
def score_kernel(
    query,
    sight,
    goals,
    candidates,
    candidate_block,
    block,
    pages,
    values,
    rope,
    scales,
    scale,
    rows,
    width,
    largest,
    total,
    chunks,
    scores,
    KEY: tl.constexpr,
    SHAPE: tl.constexpr,
    HOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Scores of a chunk of places; -inf where nothing is to be selected, NaN where an entry has no page."""
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    list = program % HOW.lists
    first_row = program // HOW.lists * HOW.step
    row, inside, sequence, scored, place_low, place_high, units = rows_of(
        sight, goals, candidates, candidate_block, width, list, first_row, rows, block, HOW
    )
    free_low = tl.load(sight.free_low + row, mask=inside, other=0)
    free_high = tl.load(sight.free_high + row, mask=inside, other=0)
    to = scores + (row.to(tl.int64) * HOW.lists + list) * width

    if HOW.scores_all == 0 and HOW.pooled == 0:
        # What is not scored is selected as if all scored alike.
        unscored = inside & (scored == 0)
        first, last = blocks_of(unscored, place_low, place_high, chunk, HOW)
        for n in tl.range(first, last):
            place = n * HOW.block_n + tl.arange(0, HOW.block_n)
            unit = entry_at(place, units)
            free = (unit[:, None] >= free_low[None, :]) & (unit[:, None] < free_high[None, :])
            mask = unscored[None, :] & (place < width)[:, None]
            tl.store(to[None, :] + place[:, None], tl.where(free, 0.0, float("-inf")), mask=mask)

    if HOW.segments == 1:
        key_head, exists, tiles, weight, m = segment_of(
            query, row, scored, list, 0, largest, total, chunks, SHAPE, HOW, COMPUTE
        )
    for r in tl.range(0, HOW.step):
        number, begins = first_of_sequence(sight, first_row + r, first_row, rows)
        active = scored & (sequence == number) & begins
        first, last = blocks_of(active, place_low, place_high, chunk, HOW)
        for n in tl.range(first, last):
            place = n * HOW.block_n + tl.arange(0, HOW.block_n)
            START: tl.constexpr = float("-inf") if HOW.score == "max" else 0.0
            score = tl.full((HOW.block_n, HOW.rows), START, tl.float64 if tl.float64 == COMPUTE else tl.float32)
            seen = tl.full((HOW.block_n, HOW.rows), 0, tl.int1)
            lost = tl.full((HOW.block_n,), 0, tl.int1)
            for segment in tl.range(0, HOW.segments):
                if HOW.segments > 1:
                    key_head, exists, tiles, weight, m = segment_of(
                        query, row, scored, list, segment, largest, total, chunks, SHAPE, HOW, COMPUTE
                    )
                keys = values, rope, scales, key_head, pages, number
                x, seen, lost = place_products(tiles, place, active, units, keys, KEY, SHAPE, HOW)
                if HOW.score == "softmax_sum":
                    x = tl.exp2((x * (scale * LOG2E)).to(tl.float32) - m[None, :, :])
                x = joined(x, weight, exists, HOW)
                if HOW.score == "max":
                    score = tl.where((x != x) | (score != score), float("nan"), tl.maximum(score, x))
                else:
                    score += x
            if HOW.score != "softmax_sum":
                score = narrow((score * scale).to(tl.float32), HOW)
            score = tl.where(seen & (score == score), score, float("-inf"))
            score = tl.where(seen & lost[:, None], float("nan"), score)
            if candidates is not None:
                entry = entry_at(place, units)[:, None]
                score = tl.where((entry >= free_low[None, :]) & (entry < free_high[None, :]), score, float("-inf"))
            mask = active[None, :] & (place < width)[:, None]
            tl.store(to[None, :] + place[:, None], score.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["width", "units"])
def pool_kernel(
    scores,
    width,
    sight,
    goals,
    strides,
    block,
    out,
    units,
    LISTS: tl.constexpr,
    SUMS: tl.constexpr,
    SCORES_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program pools the scores of entries for BLOCK units of a list: the largest, or their sum, each entry as often
    as it shares a stride."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // LISTS
    low = tl.load(sight.low + row)
    high = tl.load(sight.high + row)
    free = tl.load(goals.high + row) - tl.load(goals.low + row)
    scored = SCORES_ALL or (free > tl.load(goals.wanted + row))
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = unit.to(tl.int64) * block
    pooled = tl.full((BLOCK,), 0.0 if SUMS else float("-inf"), tl.float32)
    some = tl.zeros((BLOCK,), tl.int1)
    lost = some
    for n in tl.range(0, tl.where(scored, block + strides - 1, 0)):
        entry = begin - (strides - 1) + n
        seen = (entry >= low) & (entry < high)
        score = tl.load(scores + cell * width + entry, mask=seen, other=float("-inf"))
        lost = lost | (seen & (score != score))
        if SUMS:
            shared = tl.minimum(entry + strides, begin + block) - tl.maximum(entry, begin)
            pooled += tl.where(seen, score * shared.to(tl.float32), 0.0)
        else:
            pooled = tl.where(seen, tl.maximum(pooled, score), pooled)
        some = some | seen
    pooled = tl.where(some & (pooled == pooled), pooled, float("-inf"))
    pooled = tl.where(lost, float("nan"), tl.where(scored, pooled, 0.0))
    tl.store(out + cell * units + unit, pooled, mask=unit < units)
