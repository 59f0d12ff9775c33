"""Device code: copies what rows attend, entry by entry, to a workspace in which the entries lie one behind the other.

Vector units only. Each row of a plane is a transfer of its own, numbers of any format become those that are
multiplied, and a tile is written at once. A task is one query row, one group of heads and ROWS places of the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import pairs_of, tile_of
from .visible import entries_of, listed_of, position_of, window_of, within_table

FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def start(page, offset, page_step, entry_step, head):
    """Where rows begin in one part of a plane."""
    return page.to(tl.int64) * page_step + offset.to(tl.int64) * entry_step + head


_VARYING = [
    *("batch", "steps", "table_width", "pages", "index_width", "room", "first_row", "rows_here", "segment"),
]


@triton.jit(do_not_specialize=_VARYING)
def gather_kernel(
    cu_seqlens_q,
    seq_lens,
    batch,
    steps,
    ratio,
    window,
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
    scales,
    scales_page,
    scales_entry,
    scales_head,
    v,
    v_page,
    v_entry,
    v_head,
    v_scales,
    v_scales_page,
    v_scales_entry,
    v_scales_head,
    ranges,
    indices,
    index_row,
    index_head,
    index_step,
    index_width,
    index_counts,
    target,
    pairs,
    live,
    room,
    first_row,
    rows_here,
    segment,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    SELECT: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``live`` tells what the places hold: 0 an entry, FLOOR nothing, NaN an entry in a page that the plane lacks.
    ``pairs`` is the target as numbers of 32 bits, where keys are written so."""
    COMPUTE: tl.constexpr = target.dtype.element_ty
    K_LEAD: tl.constexpr = SHAPE.value.lead
    K_LEADS: tl.constexpr = SHAPE.value.leads
    K_TAIL: tl.constexpr = SHAPE.value.tail
    K_ROW: tl.constexpr = K_LEADS * K_LEAD + K_TAIL
    V_LEAD: tl.constexpr = SHAPE.value.v_lead
    V_LEADS: tl.constexpr = SHAPE.value.v_leads
    V_TAIL: tl.constexpr = SHAPE.value.v_tail
    ROW: tl.constexpr = K_ROW if VALUE is None else K_ROW + V_LEADS * V_LEAD + V_TAIL
    blocks = room // ROWS
    for task in tl.range(tl.program_id(0), rows_here * GROUPS * blocks, tl.num_programs(0)):
        near = (task // (GROUPS * blocks)).to(tl.int64)
        row = first_row + near
        group = task // blocks % GROUPS
        head = (group * KV_HEADS // GROUPS).to(tl.int64)
        begin = task % blocks * ROWS
        sequence, length, position = position_of(cu_seqlens_q, seq_lens, row, batch, steps)
        if WINDOW:
            low, high = window_of(ranges, row, position, window)
        else:
            low, high = entries_of(ranges, row, position, length, ratio, CAUSAL)
        low, high = within_table(low, high, table_width, PAGE)
        index_group = (group * INDEX_HEADS // GROUPS).to(tl.int64)
        listed = listed_of(low, high, index_counts, row * INDEX_HEADS + index_group, index_width, SELECT)
        here = tl.minimum(tl.maximum(listed - segment, 0), room)
        if begin < (here + TILE - 1) // TILE * TILE:
            place = segment + begin + tl.arange(0, ROWS)
            if indices is not None:
                lists = indices + row * index_row + index_group * index_head
                if SELECT == 1:
                    index = tl.load(lists + place * index_step, mask=place < listed, other=-1)
                else:
                    index = tl.load(lists + tl.minimum(place, listed - 1) // SELECT * index_step)
                # only now is there room for the product in 32 bits
                good = (place < listed) & (index >= 0) & (index <= (high - 1) // SELECT)
                entry = tl.where(good, index, 0) * SELECT + place % SELECT
                good = good & (entry >= low) & (entry < high)
            else:
                entry = low + place
                good = place < listed
            entry = tl.where(good, entry, 0).to(tl.int32)
            column = entry // PAGE
            page = tl.load(table + sequence.to(tl.int64) * table_step + tl.minimum(column, table_width - 1))
            there = good & (column < table_width) & (page >= 0) & (page < pages)
            page = tl.where(there, page, 0)
            offset = tl.where(there, entry % PAGE, 0)
            slot = (near * GROUPS + group) * room + begin + tl.arange(0, ROWS)
            tl.store(live + slot, tl.where(there, 0.0, tl.where(good, float("nan"), FLOOR)))

            k_at = start(page, offset, k_page, k_entry, head * k_head)
            rope_at = k_at
            if rope is not None:
                rope_at = start(page, offset, rope_page, rope_entry, head * rope_head)
            scales_at = k_at
            if scales is not None:
                scales_at = start(page, offset, scales_page, scales_entry, head * scales_head)
            to = target + slot.to(tl.int64)[:, None] * ROW
            for at in tl.static_range(0, K_LEADS * K_LEAD, CHUNK):
                if pairs is not None:
                    tile = pairs_of(k, k_at, scales, scales_at, there, KEY, at, CHUNK, COMPUTE)
                    pair = at // 2 + tl.arange(0, CHUNK // 2)
                    tl.store(pairs + slot.to(tl.int64)[:, None] * (ROW // 2) + pair[None, :], tile)
                else:
                    tile = tile_of(k, k_at, rope, rope_at, scales, scales_at, there, KEY, at, CHUNK, ROWS, COMPUTE)
                    tl.store(to + at + tl.arange(0, CHUNK)[None, :], tile)
            if K_TAIL > 0:
                tile = tile_of(
                    k, k_at, rope, rope_at, scales, scales_at, there, KEY, K_LEADS * K_LEAD, K_TAIL, ROWS, COMPUTE
                )
                tl.store(to + K_LEADS * K_LEAD + tl.arange(0, K_TAIL)[None, :], tile)
            if VALUE is not None:
                v_at = start(page, offset, v_page, v_entry, head * v_head)
                if v_scales is not None:
                    scales_at = start(page, offset, v_scales_page, v_scales_entry, head * v_scales_head)
                for at in tl.static_range(0, V_LEADS):
                    tile = tile_of(
                        v, v_at, None, v_at, v_scales, scales_at, there, VALUE, at * V_LEAD, V_LEAD, ROWS, COMPUTE
                    )
                    tl.store(to + K_ROW + at * V_LEAD + tl.arange(0, V_LEAD)[None, :], tile)
                if V_TAIL > 0:
                    tile = tile_of(
                        v, v_at, None, v_at, v_scales, scales_at, there, VALUE, V_LEADS * V_LEAD, V_TAIL, ROWS, COMPUTE
                    )
                    tl.store(to + K_ROW + V_LEADS * V_LEAD + tl.arange(0, V_TAIL)[None, :], tile)
