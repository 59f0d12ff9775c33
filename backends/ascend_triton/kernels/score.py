"""Device code of ``select``: scores of entries. A program takes some columns of one row; products run on the cube."""

from __future__ import annotations

import triton
import triton.language as tl

from .keys import entries_at, products
from .units import entries_of, sequence_of, units_of


@triton.jit
def bf16_rounded(x, NARROW: tl.constexpr):
    return x.to(tl.bfloat16).to(tl.float32) if NARROW else x


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "batch", "ratio", "strides", "block", "k", "keep_first", "keep_last"),
        *("table_width", "pages", "candidate_block", "width", "row_width", "scale"),
        *("lists", "runs", "run", "shared", "size", "upper_step", "upper_scale_step", "page_size"),
    ]
)
def score_kernel(
    q,
    q_step,
    q_head_step,
    weights,
    weight_step,
    cu_seqlens_q,
    seq_lens,
    kv_range,
    row_k,
    first_row,
    rows,
    batch,
    ratio,
    strides,
    block,
    k,
    keep_first,
    keep_last,
    values,
    value_page_step,
    value_entry_step,
    value_piece_step,
    scales,
    scale_page_step,
    scale_entry_step,
    scale_piece_step,
    page_table,
    table_step,
    table_width,
    pages,
    candidates,
    candidate_row_step,
    candidate_list_step,
    candidate_block,
    scores,
    norms,
    sums,
    like,
    width,
    row_width,
    scale,
    lists,
    runs,
    run,
    shared,
    size,
    upper_step,
    upper_scale_step,
    page_size,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    SCORE: tl.constexpr,
    BOUNDS: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALL: tl.constexpr,
):
    """``scores [rows, lists, row_width]``, of columns below ``width``: -inf where a score is none. With candidates a
    column is a place in the list of their entries, and NaN where it holds none that may be selected.

    A list belongs to ``runs`` runs of ``run`` heads that share a key head, as ``shared`` heads in all do. WHOLE: the
    columns of a program lie in one page. Rows that fit their budget are left out, unless ALL.

    SCORE "softmax_sum" wants ``norms [rows, heads]``, the logarithm of each head's sum. "norms" makes them of a part
    of a row: the largest scaled product into ``norms [rows, tiles, heads]``, and what the exponentials of all
    differences from it sum up to into ``sums``.
    """
    tiles = tl.cdiv(width, COLUMNS)
    for task in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        r = task // tiles
        t = (first_row + r).to(tl.int64)
        begin = (task % tiles) * COLUMNS
        b, length, position = sequence_of(cu_seqlens_q, seq_lens, t, batch)
        tokens, low, high = entries_of(kv_range, t, length, position, ratio, strides, CAUSAL)
        first, end, newest, oldest, want = units_of(
            tokens, low, high, row_k, t, k, ratio, strides, block, keep_first, keep_last, TAIL
        )
        needed = position >= 0
        if candidates is None:
            needed = needed & (begin < high) & (begin + COLUMNS > low)
            if not ALL:
                needed = needed & (end - newest - first - oldest > want)
        if needed:
            column = begin + tl.arange(0, COLUMNS)
            for o in range(0, lists):
                if candidates is None:
                    entry = column.to(tl.int64)
                    there = (entry >= low) & (entry < high)
                    seen = there
                else:
                    blocks = candidates + t * candidate_row_step + o * candidate_list_step
                    number = tl.load(blocks + column // candidate_block, mask=column < width, other=-1)
                    entry = number.to(tl.int64) * candidate_block + column % candidate_block
                    there = (number >= 0) & (entry >= low) & (entry < high)
                    seen = there & (entry >= first + oldest) & (entry < end - newest)
                read = there if SCORE == "norms" else seen
                page_row = page_table + b.to(tl.int64) * table_step
                page, offset, valid = entries_at(
                    begin, entry, read, page_row, table_width, page_size, pages, COLUMNS, WHOLE
                )
                value_at = page * value_page_step + offset * value_entry_step
                scale_at = page * scale_page_step + offset * scale_entry_step
                total = tl.full((COLUMNS,), float("-inf") if SCORE == "max" else 0.0, tl.float32)
                faults = tl.zeros((COLUMNS,), tl.float32)
                for part in range(0, runs):
                    head = (o * runs + part) * run
                    piece = (head // shared * GROUPS).to(tl.int64)
                    h = tl.arange(0, HEADS)
                    x = products(
                        q + t * q_step + head * q_head_step,
                        q_head_step,
                        run,
                        values + piece * value_piece_step,
                        value_at,
                        value_piece_step,
                        None if SCALE == "" else scales + piece * scale_piece_step,
                        scale_at,
                        scale_piece_step,
                        upper_step,
                        upper_scale_step,
                        valid,
                        size,
                        like,
                        GROUPS,
                        HEADS,
                        COLUMNS,
                        BLOCK_D,
                        ELEMENT,
                        SCALE,
                        WHOLE,
                        BOUNDS,
                    )
                    mine = (h < run)[:, None]
                    if SCORE == "norms":
                        x = tl.where(mine & (valid[None, :] & (x == x)), x * scale, float("-inf"))
                        largest = tl.max(x, 1)
                        finite = tl.where(largest == float("-inf"), 0.0, largest)
                        at = (task * lists * runs + o * runs + part) * run + h
                        tl.store(norms + at, largest, mask=h < run)
                        tl.store(sums + at, tl.sum(tl.exp(x - finite[:, None]), 1), mask=h < run)
                    else:
                        x = bf16_rounded(x, NARROW)
                        if SCORE == "relu_sum":
                            x = tl.where(x < 0, 0.0, x)
                        if SCORE == "softmax_sum":
                            at = (r * lists * runs + o * runs + part) * run + h
                            norm = tl.load(norms + at, mask=h < run, other=0)
                            x = tl.exp(x * scale - norm[:, None])
                        if weights is not None:
                            w = tl.load(weights + t * weight_step + head + h, mask=h < run, other=0).to(tl.float32)
                            x = bf16_rounded(x * w[:, None], NARROW)
                        if SCORE == "max":
                            faults += tl.sum(tl.where(mine & (x != x), 1.0, 0.0), 0)
                            best = tl.max(tl.where(mine & (x == x), x, float("-inf")), 0)
                            total = tl.where(best > total, best, total)
                        else:
                            total += tl.sum(tl.where(mine, x, 0.0), 0)
                if SCORE != "norms":
                    if SCORE != "softmax_sum":
                        total = bf16_rounded(total * scale, NARROW)
                    total = tl.where(valid & (total == total) & (faults == 0), total, float("-inf"))
                    if candidates is not None:
                        total = tl.where(seen, total, float("nan"))
                    to = scores + (r * lists + o).to(tl.int64) * row_width
                    tl.store(to + column, total, mask=column < width)
