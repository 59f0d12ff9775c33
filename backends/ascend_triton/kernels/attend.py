"""Device code of ``attend``: cube units multiply, vector units keep the softmax.

A task is one query row, up to BLOCK_H heads that share a KV head and a selection, and one part of what the row attends.
Keys and values come in tiles of BLOCK_N rows that lie one behind the other, so that a cube unit fetches each once, by
itself, for both products: in pages, or in the workspace to which ``gather`` has copied them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .visible import entries_of, listed_of, position_of, window_of, within_table

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-3.0e38)
"""Stands for -inf, so that no infinity is subtracted from another."""


@triton.jit
def columns(q, head_at, mask, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Columns of the queries ``[BLOCK_H, WIDTH]``, 0 past DIM."""
    column = START + tl.arange(0, WIDTH)
    at = head_at[:, None] + column[None, :]
    return tl.load(q + at, mask=mask[:, None] & (column < DIM)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def rows(data, at, step, first, last, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Columns of a tile ``[ROWS, WIDTH]``, 0 outside rows ``first`` to ``last`` and past DIM."""
    row = tl.arange(0, ROWS)
    column = START + tl.arange(0, WIDTH)
    within = row.to(tl.int64)[:, None] * step + column[None, :]
    mask = ((row >= first) & (row < last))[:, None]
    if START + WIDTH > DIM:
        mask = mask & (column < DIM)[None, :]
    return tl.load(data + at + within, mask=mask, other=0.0)


@triton.jit
def put(to, at, acc, mask, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Write columns of the result."""
    column = START + tl.arange(0, WIDTH)
    cell = at[:, None] + column[None, :]
    tl.store(to + cell, acc.to(to.dtype.element_ty), mask=mask[:, None] & (column < DIM)[None, :])


@triton.jit
def attend_tiles(
    m,
    total,
    acc0,
    acc1,
    acc2,
    q0,
    q1,
    q2,
    scale,
    first,
    last,
    low,
    high,
    chosen,
    chosen_step,
    table,
    width,
    pages,
    k,
    k_page,
    k_entry,
    rope,
    rope_page,
    rope_entry,
    v,
    v_page,
    v_entry,
    live,
    PLANE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Tiles ``first`` to ``last`` of one plane, joined to the running softmax."""
    MODE: tl.constexpr = PLANE.value.mode
    PAGE: tl.constexpr = PLANE.value.page
    SELECT: tl.constexpr = PLANE.value.select_block
    BLOCK_N: tl.constexpr = PLANE.value.tile
    K_DIM: tl.constexpr = PLANE.value.k_dim
    LEAD: tl.constexpr = SHAPE.value.lead
    LEADS: tl.constexpr = SHAPE.value.leads
    TAIL: tl.constexpr = SHAPE.value.tail
    V_LEAD: tl.constexpr = SHAPE.value.v_lead
    V_LEADS: tl.constexpr = SHAPE.value.v_leads
    V_TAIL: tl.constexpr = SHAPE.value.v_tail
    DIM: tl.constexpr = SHAPE.value.dim
    V_DIM: tl.constexpr = SHAPE.value.v_dim
    TAIL_AT: tl.constexpr = LEADS * LEAD
    V_TAIL_AT: tl.constexpr = V_LEADS * V_LEAD
    row = tl.arange(0, BLOCK_N).to(tl.float32)
    for tile in tl.range(first, last):
        if MODE == "workspace":
            begin, end = 0, BLOCK_N
            at = tile.to(tl.int64) * BLOCK_N * k_entry
            v_at = tile.to(tl.int64) * BLOCK_N * v_entry
            rope_at = at
            bias = tl.load(live + tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))
            attended = bias != FLOOR
            fault = tl.where(attended, bias, 0.0)[None, :]
        else:
            if MODE == "blocks":
                index = tl.load(chosen + (tile // (SELECT // BLOCK_N)).to(tl.int64) * chosen_step)
                entry = index.to(tl.int64) * SELECT + tile % (SELECT // BLOCK_N) * BLOCK_N
                wanted = (index >= 0) & (entry < high)
            else:
                entry = tile.to(tl.int64) * BLOCK_N
                wanted = entry < high
            begin = tl.minimum(tl.maximum(low - entry, 0), BLOCK_N)
            wanted = wanted & (begin < high - entry)
            column = tl.where(wanted, entry // PAGE, 0)
            page = tl.load(table + tl.minimum(column, width - 1))
            # A page that the plane lacks is not read. It makes the row NaN, so that the fault is seen.
            there = wanted & (column < width) & (page >= 0) & (page < pages)
            fault = tl.where(wanted & (there == 0), float("nan"), 0.0)
            begin = begin.to(tl.int32)
            end = tl.where(there, tl.minimum(high - entry, BLOCK_N), 0).to(tl.int32)
            attended = (row >= begin.to(tl.float32)) & (row < end.to(tl.float32))
            page = tl.where(there, page, 0).to(tl.int64)
            offset = tl.where(there, entry % PAGE, 0)
            at = page * k_page + offset * k_entry
            rope_at = page * rope_page + offset * rope_entry
            v_at = page * v_page + offset * v_entry
        k0 = rows(k, at, k_entry, begin, end, 0, LEAD, K_DIM, BLOCK_N)
        score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if LEADS == 2:
            k1 = rows(k, at, k_entry, begin, end, LEAD, LEAD, K_DIM, BLOCK_N)
            score = tl.dot(q1, tl.trans(k1), score, input_precision="ieee")
        if TAIL > 0:
            if rope is not None:
                k2 = rows(rope, rope_at, rope_entry, begin, end, 0, TAIL, DIM - TAIL_AT, BLOCK_N)
            else:
                k2 = rows(k, at, k_entry, begin, end, TAIL_AT, TAIL, K_DIM, BLOCK_N)
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
        score = tl.where(attended[None, :], score * scale, FLOOR) + fault
        largest = tl.maximum(m, tl.max(score, 1))
        weight = tl.where(score <= FLOOR, 0.0, tl.exp2(score - largest[:, None]))
        decay = tl.exp2(m - largest)
        m = largest
        total = total * decay + tl.sum(weight, 1)
        weight = weight.to(k.dtype.element_ty)
        v0 = k0 if v is None else rows(v, v_at, v_entry, begin, end, 0, V_LEAD, V_DIM, BLOCK_N)
        acc0 = tl.dot(weight, v0, acc0 * decay[:, None], input_precision="ieee")
        if V_LEADS == 2:
            v1 = k1 if v is None else rows(v, v_at, v_entry, begin, end, V_LEAD, V_LEAD, V_DIM, BLOCK_N)
            acc1 = tl.dot(weight, v1, acc1 * decay[:, None], input_precision="ieee")
        if V_TAIL > 0:
            v2 = k2 if v is None else rows(v, v_at, v_entry, begin, end, V_TAIL_AT, V_TAIL, V_DIM, BLOCK_N)
            acc2 = tl.dot(weight, v2, acc2 * decay[:, None], input_precision="ieee")
    return m, total, acc0, acc1, acc2


@triton.jit
def tiles_of(low, high, listed, segment, room, PLANE: tl.constexpr):
    """(first tile, its end) of what a row attends in one plane: of its range, of its list, or of the segment of its
    list that lies in the workspace."""
    MODE: tl.constexpr = PLANE.value.mode
    BLOCK_N: tl.constexpr = PLANE.value.tile
    if MODE == "pages":
        first = low // BLOCK_N
        last = tl.where(low < high, (high + BLOCK_N - 1) // BLOCK_N, first)
    elif MODE == "blocks":
        first = low * 0
        last = listed // BLOCK_N
    else:
        first = low * 0
        here = tl.minimum(tl.maximum(listed - segment, 0), room)
        last = (here + BLOCK_N - 1) // BLOCK_N
    return first.to(tl.int32), last.to(tl.int32)


_VARYING = [
    *("batch", "steps", "table_width", "pages", "index_width", "win_table_width", "win_pages", "win_index_width"),
    *("room", "win_room", "first_row", "rows_here", "segment", "win_segment", "part_tiles"),
]


@triton.jit(do_not_specialize=_VARYING)
def attend_kernel(
    q,
    q_step,
    q_head_step,
    cu_seqlens_q,
    seq_lens,
    batch,
    steps,
    scale,
    ratio,
    table,
    table_step,
    table_width,
    pages,
    k,
    k_page,
    k_entry,
    k_head,
    rope,
    rope_page,
    rope_entry,
    rope_head,
    v,
    v_page,
    v_entry,
    v_head,
    live,
    kv_range,
    indices,
    index_row,
    index_head,
    index_step,
    index_width,
    index_counts,
    win_table,
    win_table_step,
    win_table_width,
    win_pages,
    win,
    win_page,
    win_entry,
    win_head,
    win_live,
    window,
    win_range,
    win_index_width,
    room,
    win_room,
    sinks,
    out,
    lse,
    first_row,
    rows_here,
    segment,
    win_segment,
    part_tiles,
    MAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    APART: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Writes result and LSE of part p of row r to row ``p * rows_here + r`` of ``out`` and ``lse``."""
    GROUPS: tl.constexpr = KV_HEADS if KV_HEADS > INDEX_HEADS else INDEX_HEADS
    SIZE: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (SIZE + BLOCK_H - 1) // BLOCK_H
    LEAD: tl.constexpr = SHAPE.value.lead
    LEADS: tl.constexpr = SHAPE.value.leads
    TAIL: tl.constexpr = SHAPE.value.tail
    DIM: tl.constexpr = SHAPE.value.dim
    V_LEAD: tl.constexpr = SHAPE.value.v_lead
    V_LEADS: tl.constexpr = SHAPE.value.v_leads
    V_TAIL: tl.constexpr = SHAPE.value.v_tail
    V_DIM: tl.constexpr = SHAPE.value.v_dim
    COMPUTE: tl.constexpr = win.dtype.element_ty if MAIN is None else k.dtype.element_ty
    for task in tl.range(tl.program_id(0), rows_here * (GROUPS * BLOCKS * PARTS), tl.num_programs(0)):
        part = task % PARTS
        head_block = task // PARTS % BLOCKS
        group = task // (PARTS * BLOCKS) % GROUPS
        near = (task // (PARTS * BLOCKS * GROUPS)).to(tl.int64)  # the row among those of this launch
        row = first_row + near
        within = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
        head = group * SIZE + within
        in_group = within < SIZE
        kv_head = (group * KV_HEADS // GROUPS).to(tl.int64)
        sequence, length, position = position_of(cu_seqlens_q, seq_lens, row, batch, steps)
        sequence = sequence.to(tl.int64)

        q_at = row * q_step + head.to(tl.int64) * q_head_step
        q0 = columns(q, q_at, in_group, 0, LEAD, DIM, COMPUTE)
        q1 = q0
        q2 = q0
        if LEADS == 2:
            q1 = columns(q, q_at, in_group, LEAD, LEAD, DIM, COMPUTE)
        if TAIL > 0:
            q2 = columns(q, q_at, in_group, LEADS * LEAD, TAIL, DIM, COMPUTE)
        m = tl.full((BLOCK_H,), FLOOR, tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc0 = tl.zeros((BLOCK_H, V_LEAD), tl.float32)
        acc1 = acc0
        acc2 = acc0
        if V_LEADS == 2:
            acc1 = tl.zeros((BLOCK_H, V_LEAD), tl.float32)
        if V_TAIL > 0:
            acc2 = tl.zeros((BLOCK_H, V_TAIL), tl.float32)

        # Parts cut the tiles of both planes as one list, those of the window first.
        begin = part * part_tiles
        end = tl.where(part == PARTS - 1, 1 << 30, begin + part_tiles)
        if WINDOW is not None:
            WIN_MODE: tl.constexpr = WINDOW.value.mode
            low, high = window_of(win_range, row, position, window)
            low, high = within_table(low, high, win_table_width, WINDOW.value.page)
            listed = listed_of(low, high, None, 0, win_index_width, 1)
            first, last = tiles_of(low, high, listed, win_segment, win_room, WINDOW)
            place = (near * GROUPS + group) * win_room
            win_rows = win + (place * win_entry if WIN_MODE == "workspace" else kv_head * win_head)
            m, total, acc0, acc1, acc2 = attend_tiles(
                m,
                total,
                acc0,
                acc1,
                acc2,
                q0,
                q1,
                q2,
                scale * LOG2E,
                tl.minimum(first + begin, last),
                tl.minimum(first + end, last),
                low,
                high,
                None,
                0,
                win_table + sequence * win_table_step,
                win_table_width,
                win_pages,
                win_rows,
                win_page,
                win_entry,
                None,
                0,
                0,
                win_rows if APART else None,
                win_page,
                win_entry,
                win_live + place if WIN_MODE == "workspace" else None,
                WINDOW,
                SHAPE,
            )
            begin = tl.maximum(begin - (last - first), 0)
            end = tl.maximum(end - (last - first), 0)
        if MAIN is not None:
            MODE: tl.constexpr = MAIN.value.mode
            low, high = entries_of(kv_range, row, position, length, ratio, CAUSAL)
            low, high = within_table(low, high, table_width, MAIN.value.page)
            index_group = (group * INDEX_HEADS // GROUPS).to(tl.int64)
            at = row * INDEX_HEADS + index_group
            listed = listed_of(low, high, index_counts, at, index_width, MAIN.value.select_block)
            first, last = tiles_of(low, high, listed, segment, room, MAIN)
            place = (near * GROUPS + group) * room
            m, total, acc0, acc1, acc2 = attend_tiles(
                m,
                total,
                acc0,
                acc1,
                acc2,
                q0,
                q1,
                q2,
                scale * LOG2E,
                tl.minimum(first + begin, last),
                tl.minimum(first + end, last),
                low,
                high,
                indices + row * index_row + index_group * index_head if MODE == "blocks" else None,
                index_step,
                table + sequence * table_step,
                table_width,
                pages,
                k + (place * k_entry if MODE == "workspace" else kv_head * k_head),
                k_page,
                k_entry,
                None if rope is None else rope + kv_head * rope_head,
                rope_page,
                rope_entry,
                None if v is None else v + (place * v_entry if MODE == "workspace" else kv_head * v_head),
                v_page,
                v_entry,
                live + place if MODE == "workspace" else None,
                MAIN,
                SHAPE,
            )

        to = (part * rows_here.to(tl.int64) + near) * HEADS + head
        sum_log = tl.where(total == 0, 0.0, (m + tl.log2(total)) * LN2)
        share = tl.where(total == 0, 0.0, 1.0 / total)
        kept = tl.full((BLOCK_H,), 1.0, tl.float32)  # what the sink leaves
        if sinks is not None:
            kept = 1.0 / (1.0 + tl.exp(tl.load(sinks + head, mask=in_group, other=0.0) - sum_log))
        if lse is not None:
            tl.store(lse + to, tl.where(total == 0, float("-inf"), sum_log), mask=in_group)
        put(out, to * V_DIM, acc0 * share[:, None] * kept[:, None], in_group, 0, V_LEAD, V_DIM)
        if V_LEADS == 2:
            put(out, to * V_DIM, acc1 * share[:, None] * kept[:, None], in_group, V_LEAD, V_LEAD, V_DIM)
        if V_TAIL > 0:
            put(out, to * V_DIM, acc2 * share[:, None] * kept[:, None], in_group, V_LEADS * V_LEAD, V_TAIL, V_DIM)
