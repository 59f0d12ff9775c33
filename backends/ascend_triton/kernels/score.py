"""Device code of ``select``: scores of entries. A program takes some columns of one row; products run on the cube."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import unscaled
from .numbers import scale_numbers
from .units import entries_of, sequence_of, units_of


@triton.jit
def bf16_rounded(x, NARROW: tl.constexpr):
    return x.to(tl.bfloat16).to(tl.float32) if NARROW else x


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "batch", "ratio", "strides", "block", "k", "keep_first", "keep_last"),
        *("table_width", "pages", "candidate_block", "width", "row_width", "scale"),
        *("lists", "runs", "run", "shared", "dim", "page_size"),
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
    value_head_step,
    scales,
    scale_page_step,
    scale_entry_step,
    scale_head_step,
    page_table,
    table_step,
    table_width,
    pages,
    candidates,
    candidate_row_step,
    candidate_list_step,
    candidate_block,
    scores,
    like,
    width,
    row_width,
    scale,
    lists,
    runs,
    run,
    shared,
    dim,
    page_size,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    SCORE: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALL: tl.constexpr,
):
    """``scores [rows, lists, row_width]``, of columns below ``width``: -inf where a score is none. With candidates a
    column is a place in the list of their entries, and NaN where it holds none that may be selected.

    A list belongs to ``runs`` runs of ``run`` heads that share a key head, as ``shared`` heads in all do. WHOLE: the
    columns of a program lie in one page. Rows that fit their budget are left out, unless ALL. The type of ``like`` is
    the one in which numbers are multiplied.
    """
    PACKED: tl.constexpr = 2 if ELEMENT == "int4" else 1
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
                    seen = (entry >= low) & (entry < high)
                else:
                    blocks = candidates + t * candidate_row_step + o * candidate_list_step
                    number = tl.load(blocks + column // candidate_block, mask=column < width, other=-1)
                    entry = number.to(tl.int64) * candidate_block + column % candidate_block
                    seen = (number >= 0) & (entry >= low) & (entry < high)
                    seen = seen & (entry >= first + oldest) & (entry < end - newest)
                if WHOLE:
                    # the columns lie in one page
                    in_table = tl.where(begin // page_size < table_width, begin // page_size, 0)
                    page = tl.load(page_table + b.to(tl.int64) * table_step + in_table)
                    good = (begin // page_size < table_width) & (page >= 0) & (page < pages)
                    page = tl.where(good, page, 0).to(tl.int64)
                    offset = begin % page_size + tl.arange(0, COLUMNS)
                    valid = seen & good
                    value_at = page * value_page_step + offset * value_entry_step
                    scale_at = page * scale_page_step + offset * scale_entry_step
                else:
                    valid = seen & (entry // page_size < table_width)
                    in_table = tl.where(valid, entry // page_size, 0)
                    page = tl.load(page_table + b.to(tl.int64) * table_step + in_table, mask=valid, other=-1)
                    valid = valid & (page >= 0) & (page < pages)
                    page = tl.where(valid, page, 0).to(tl.int64)
                    offset = tl.where(valid, entry % page_size, 0)
                    value_at = page * value_page_step + offset * value_entry_step
                    scale_at = page * scale_page_step + offset * scale_entry_step
                total = tl.full((COLUMNS,), float("-inf") if SCORE == "max" else 0.0, tl.float32)
                faults = tl.zeros((COLUMNS,), tl.float32)
                for part in range(0, runs):
                    head = (o * runs + part) * run
                    key_head = head // shared
                    h = tl.arange(0, HEADS)
                    d = tl.arange(0, BLOCK_D)
                    mask_q = (h < run)[:, None] & (d < dim)[None, :]
                    x_q = tl.load(q + t * q_step + (head + h)[:, None] * q_head_step + d[None, :], mask=mask_q, other=0)
                    item = tl.arange(0, BLOCK_D // PACKED)
                    in_row = (item < dim // PACKED)[None, :]
                    key_at = values + key_head * value_head_step + value_at[:, None] + item[None, :]
                    if WHOLE:
                        stored = tl.load(key_at, mask=in_row, other=0)
                    else:
                        stored = tl.load(key_at, mask=valid[:, None] & in_row, other=0)
                    key = stored if ELEMENT == "" else unscaled(stored, ELEMENT)
                    COMPUTE: tl.constexpr = like.dtype.element_ty
                    x = tl.dot(x_q.to(COMPUTE), tl.trans(key.to(COMPUTE)), input_precision="ieee")
                    if SCALE != "":
                        key_scales = scales + key_head * scale_head_step + scale_at
                        x = x * scale_numbers(tl.load(key_scales, mask=valid, other=0), SCALE)[None, :]
                    x = bf16_rounded(x, NARROW)
                    if SCORE == "relu_sum":
                        x = tl.where(x < 0, 0.0, x)
                    if weights is not None:
                        w = tl.load(weights + t * weight_step + head + h, mask=h < run, other=0).to(tl.float32)
                        x = bf16_rounded(x * w[:, None], NARROW)
                    mine = (h < run)[:, None]
                    if SCORE == "max":
                        faults += tl.sum(tl.where(mine & (x != x), 1.0, 0.0), 0)
                        best = tl.max(tl.where(mine & (x == x), x, float("-inf")), 0)
                        total = tl.where(best > total, best, total)
                    else:
                        total += tl.sum(tl.where(mine, x, 0.0), 0)
                total = bf16_rounded(total * scale, NARROW)
                total = tl.where(valid & (total == total) & (faults == 0), total, float("-inf"))
                if candidates is not None:
                    total = tl.where(seen, total, float("nan"))
                tl.store(scores + (r * lists + o).to(tl.int64) * row_width + column, total, mask=column < width)
