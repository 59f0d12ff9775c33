"""Device code of ``attend``: a program takes up to BLOCK_H heads that share a KV head and a selection, of one query row
and one part of what it attends, or of TOKENS rows.

A row attends a list of positions: those of the window plane, then those of the main plane. Each is cut into blocks of
BLOCK_N, and all blocks into parts of one length. With one part the program finishes the softmax; with more it writes
partial results, which ``combine`` joins in a fixed order.

Rows are taken together where heads are few and lists are ranges, so that a block is read once for all of them. First
comes what every row of them sees, then what only some see, row by row: an entry that a row does not see changes nothing
of it, whatever the entry holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_tile
from .paging import paged, place_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def visible(ranges, row, low, high):
    """The row's range where ranges are given, else ``[low, high)``; from 0 on."""
    if ranges is not None:
        low = tl.load(ranges + row * 2).to(tl.int64)
        high = tl.load(ranges + row * 2 + 1).to(tl.int64)
    return tl.maximum(low, 0), high


@triton.jit
def seen(position, length, window, ratio, IN_WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """The range of a plane that a row attends where no other is given."""
    if IN_WINDOW:
        return tl.maximum(position - window + 1, 0) if window > 0 else position * 0, position + 1
    else:
        return position * 0, (position + 1 if CAUSAL else length.to(tl.int64)) // ratio


@triton.jit
def piece_of(
    piece,
    first_row,
    last_row,
    cu_seqlens_q,
    seq_lens,
    batch,
    window,
    ratio,
    IN_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """A piece of what rows attend that are taken together: its sequence and range. Piece 0 is what all rows see if they
    are of one sequence; 2i + 1 and 2i + 2 are what row i sees before and after that."""
    sequence, length, position, live = place_of(cu_seqlens_q, seq_lens, first_row, batch)
    _, high = seen(position, length, window, ratio, IN_WINDOW, CAUSAL)
    last_sequence, length, position, _ = place_of(cu_seqlens_q, seq_lens, last_row, batch)
    low, _ = seen(position, length, window, ratio, IN_WINDOW, CAUSAL)
    common = live & (sequence == last_sequence) & (low < high)
    there = common
    if piece > 0:
        row = first_row + (piece - 1) // 2
        sequence, length, position, live = place_of(cu_seqlens_q, seq_lens, row, batch)
        own_low, own_high = seen(position, length, window, ratio, IN_WINDOW, CAUSAL)
        after = piece % 2 == 0
        low, high = (
            tl.where(after, tl.where(common, high, own_high), own_low),
            tl.where(after | (common == 0), own_high, low),
        )
        there = live & (row <= last_row)
    return sequence, low, tl.where(there, high, low)


@triton.jit
def positions(low, high, indices, counts, row, head, select_block, pages, PAGE: tl.constexpr):
    """Where a row's list of entries begins, and its length. Without indices the list is the visible range, but never
    more than one entry past the table: that one is enough to make the row NaN."""
    if indices is None:
        end = pages.width.to(tl.int64) * PAGE
        return None, tl.minimum(low, end), tl.where(low < high, tl.minimum(high, end + 1) - tl.minimum(low, end), 0)
    else:
        count = indices.width
        if counts is not None:
            count = tl.minimum(tl.load(counts + row * indices.heads + head), count)
        start = indices.data + row * indices.row_step + head * indices.head_step
        return start, low, tl.maximum(count, 0).to(tl.int64) * select_block


@triton.jit
def columns(q, head_at, mask, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Columns of the queries ``[BLOCK_H, WIDTH]``, 0 past DIM."""
    column = START + tl.arange(0, WIDTH)
    at = head_at[:, None] + column[None, :]
    return tl.load(q + at, mask=mask[:, None] & (column < DIM)[None, :], other=0).to(COMPUTE)


@triton.jit
def put(to, at, column_step, acc, mask, START: tl.constexpr, DIM: tl.constexpr):
    """Write columns of the result."""
    column = START + tl.arange(0, acc.shape[1])
    cell = at[:, None] + column[None, :] * column_step
    tl.store(to + cell, acc.to(to.dtype.element_ty), mask=mask[:, None] & (column < DIM)[None, :])


@triton.jit
def summed(acc, decay, weight, v, takes):
    """The sums of rows with those of a block."""
    new = tl.dot(weight, v, acc * decay[:, None], input_precision="ieee")
    if takes is None:
        return new
    else:
        # a weight of 0 times what is not finite is not 0
        return tl.where(takes[:, None], new, acc)


@triton.jit
def attend_blocks(
    state,
    takes,
    query,
    scale,
    first,
    last,
    low,
    high,
    indices,
    chosen,
    count,
    select_block,
    sequence,
    kv_head,
    pages,
    k,
    k_rope,
    k_scales,
    v,
    v_rope,
    v_scales,
    PAGE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Blocks ``first`` to ``last`` of one plane, joined to the running softmax of all rows or of those that ``takes``.

    Columns of keys and values lie in up to two tiles of one width and a narrower tail, as a tile of 512 columns would
    fill the registers.
    """
    m, total, acc0, acc1, acc2 = state
    q0, q1, q2 = query
    for block in tl.range(first, last):
        place = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if indices is not None:
            at = (place // select_block).to(tl.int64) * indices.step
            index = tl.load(chosen + at, mask=place < count, other=-1)
            entry = index.to(tl.int64) * select_block + place % select_block
            valid = (index >= 0) & (entry >= low) & (entry < high)
        else:
            entry = low + place
            valid = place < count
        entry = tl.where(valid, entry, 0).to(tl.int32)
        page, offset, there = paged(pages, sequence, entry, valid, PAGE)
        k0 = row_tile(k, k_rope, k_scales, page, offset, kv_head, there, KEY, 0, SHAPE.lead, HARDWARE_FP8, COMPUTE)
        score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if SHAPE.leads == 2:
            k1 = row_tile(
                k, k_rope, k_scales, page, offset, kv_head, there, KEY, SHAPE.lead, SHAPE.lead, HARDWARE_FP8, COMPUTE
            )
            score = tl.dot(q1, tl.trans(k1), score, input_precision="ieee")
        if SHAPE.tail > 0:
            k2 = row_tile(
                k,
                k_rope,
                k_scales,
                page,
                offset,
                kv_head,
                there,
                KEY,
                SHAPE.leads * SHAPE.lead,
                SHAPE.tail,
                HARDWARE_FP8,
                COMPUTE,
            )
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
        score = tl.where(valid[None, :], score * scale, float("-inf"))
        # a page that is not there makes the row NaN, so that the fault is seen
        score = tl.where((valid & (there == 0))[None, :], float("nan"), score)
        if takes is not None:
            score = tl.where(takes[:, None], score, float("-inf"))
        largest = tl.maximum(m, tl.max(score, 1))
        # 0 for -inf: where nothing was attended yet, exp2 must not see inf - inf
        floor = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp2(score - floor[:, None])
        decay = tl.exp2(m - floor)
        m = largest
        total = total * decay + tl.sum(weight, 1)
        weight = weight.to(COMPUTE)
        if VALUE is None:
            v0 = k0
        else:
            v0 = row_tile(
                v, v_rope, v_scales, page, offset, kv_head, there, VALUE, 0, SHAPE.v_lead, HARDWARE_FP8, COMPUTE
            )
        acc0 = summed(acc0, decay, weight, v0, takes)
        if SHAPE.v_leads == 2:
            if VALUE is None:
                v1 = k1
            else:
                v1 = row_tile(
                    v,
                    v_rope,
                    v_scales,
                    page,
                    offset,
                    kv_head,
                    there,
                    VALUE,
                    SHAPE.v_lead,
                    SHAPE.v_lead,
                    HARDWARE_FP8,
                    COMPUTE,
                )
            acc1 = summed(acc1, decay, weight, v1, takes)
        if SHAPE.v_tail > 0:
            if VALUE is None:
                v2 = k2
            else:
                v2 = row_tile(
                    v,
                    v_rope,
                    v_scales,
                    page,
                    offset,
                    kv_head,
                    there,
                    VALUE,
                    SHAPE.v_leads * SHAPE.v_lead,
                    SHAPE.v_tail,
                    HARDWARE_FP8,
                    COMPUTE,
                )
            acc2 = summed(acc2, decay, weight, v2, takes)
    return m, total, acc0, acc1, acc2


@triton.jit(do_not_specialize=["rows", "batch", "part_blocks"])
def attend_kernel(
    q,
    q_step,
    q_head_step,
    rows,
    cu_seqlens_q,
    seq_lens,
    batch,
    scale,
    ratio,
    kv_pages,
    kv,
    kv_rope,
    kv_scales,
    v,
    v_scales,
    kv_range,
    indices,
    index_counts,
    select_block,
    win_pages,
    win,
    win_rope,
    win_scales,
    window,
    win_range,
    win_indices,
    sinks,
    out,
    lse,
    partial,
    part_blocks,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WIN_PAGE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIN_KEY: tl.constexpr,
    WIN_VALUE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float32 if WIDE else q.dtype.element_ty
    GROUPS: tl.constexpr = KV_HEADS if KV_HEADS > INDEX_HEADS else INDEX_HEADS
    SIZE: tl.constexpr = HEADS // GROUPS
    V_LEAD: tl.constexpr = SHAPE.v_lead
    V_TAIL: tl.constexpr = SHAPE.v_tail
    BLOCKS_A_GROUP: tl.constexpr = (SIZE * TOKENS + BLOCK_H - 1) // BLOCK_H
    PIECES: tl.constexpr = 1 if TOKENS == 1 else 2 * TOKENS + 1
    program = tl.program_id(0)
    part = tl.program_id(1)
    first_row = (program // (GROUPS * BLOCKS_A_GROUP)).to(tl.int64) * TOKENS
    last_row = tl.minimum(first_row + TOKENS, rows) - 1
    group = program // BLOCKS_A_GROUP % GROUPS
    within = program % BLOCKS_A_GROUP * BLOCK_H + tl.arange(0, BLOCK_H)
    token = within // SIZE
    row = tl.where(token < TOKENS, first_row + token, rows)
    head = group * SIZE + within % SIZE
    in_group = row <= last_row
    kv_head = (group * KV_HEADS // GROUPS).to(tl.int64)
    index_head = (group * INDEX_HEADS // GROUPS).to(tl.int64)

    q_at = row * q_step + head * q_head_step
    q0 = columns(q, q_at, in_group, 0, SHAPE.lead, SHAPE.dim, COMPUTE)
    # tiles that the shape lacks are never used, but a tuple has no room for None
    q1 = q0
    q2 = q0
    if SHAPE.leads == 2:
        q1 = columns(q, q_at, in_group, SHAPE.lead, SHAPE.lead, SHAPE.dim, COMPUTE)
    if SHAPE.tail > 0:
        q2 = columns(q, q_at, in_group, SHAPE.leads * SHAPE.lead, SHAPE.tail, SHAPE.dim, COMPUTE)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc0 = tl.zeros((BLOCK_H, V_LEAD), tl.float32)
    acc1 = acc0
    acc2 = acc0
    if SHAPE.v_leads == 2:
        acc1 = tl.zeros((BLOCK_H, V_LEAD), tl.float32)
    if V_TAIL > 0:
        acc2 = tl.zeros((BLOCK_H, V_TAIL), tl.float32)
    query = q0, q1, q2
    base2 = scale * LOG2E
    nothing = first_row * 0
    for piece in tl.range(0, PIECES):
        win_sequence, win_low, win_high, win_chosen, win_count = nothing, nothing, nothing, None, nothing
        sequence, low, high, chosen, count = nothing, nothing, nothing, None, nothing
        takes = None
        if TOKENS == 1:
            sequence, length, position, live = place_of(cu_seqlens_q, seq_lens, first_row, batch)
            win_sequence = sequence
            if win is not None:
                win_low, win_high = seen(position, length, window, ratio, True, CAUSAL)
                win_low, win_high = visible(win_range, first_row, win_low, win_high)
            if kv is not None:
                low, high = seen(position, length, window, ratio, False, CAUSAL)
                low, high = visible(kv_range, first_row, low, high)
        else:
            live = True
            takes = (piece == 0) | (token == (piece - 1) // 2)
            if win is not None:
                win_sequence, win_low, win_high = piece_of(
                    piece, first_row, last_row, cu_seqlens_q, seq_lens, batch, window, ratio, True, CAUSAL
                )
            if kv is not None:
                sequence, low, high = piece_of(
                    piece, first_row, last_row, cu_seqlens_q, seq_lens, batch, window, ratio, False, CAUSAL
                )
        if win is not None:
            win_chosen, win_low, win_count = positions(
                win_low, win_high, win_indices, None, first_row, 0, 1, win_pages, WIN_PAGE
            )
        if kv is not None:
            chosen, low, count = positions(
                low, high, indices, index_counts, first_row, index_head, select_block, kv_pages, PAGE
            )
        win_blocks = tl.where(live, (win_count + BLOCK_N - 1) // BLOCK_N, 0).to(tl.int32)
        blocks = win_blocks + tl.where(live, (count + BLOCK_N - 1) // BLOCK_N, 0).to(tl.int32)
        first = tl.minimum(part * part_blocks, blocks) if PARTS > 1 else blocks * 0
        last = blocks
        if PARTS > 1:
            last = tl.where(part == PARTS - 1, blocks, tl.minimum(first + part_blocks, blocks))
        state = m, total, acc0, acc1, acc2
        if win is not None:
            state = attend_blocks(
                state,
                takes,
                query,
                base2,
                tl.minimum(first, win_blocks),
                tl.minimum(last, win_blocks),
                win_low,
                win_high,
                win_indices,
                win_chosen,
                win_count,
                1,
                win_sequence.to(tl.int64),
                kv_head,
                win_pages,
                win,
                win_rope,
                win_scales,
                win,
                win_rope,
                win_scales,
                WIN_PAGE,
                WIN_KEY,
                WIN_VALUE,
                SHAPE,
                BLOCK_N,
                HARDWARE_FP8,
                COMPUTE,
            )
        if kv is not None:
            state = attend_blocks(
                state,
                takes,
                query,
                base2,
                tl.maximum(first - win_blocks, 0),
                tl.maximum(last - win_blocks, 0),
                low,
                high,
                indices,
                chosen,
                count,
                select_block,
                sequence.to(tl.int64),
                kv_head,
                kv_pages,
                kv,
                kv_rope,
                kv_scales,
                v,
                None,
                v_scales,
                PAGE,
                KEY,
                VALUE,
                SHAPE,
                BLOCK_N,
                HARDWARE_FP8,
                COMPUTE,
            )
        m, total, acc0, acc1, acc2 = state

    cell = row * HEADS + head
    if PARTS == 1:
        if lse is not None:
            # log2(0) is -inf, that of an empty row
            tl.store(lse + cell, tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * LN2), mask=in_group)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=in_group, other=0) * LOG2E
            floor = tl.where(m == float("-inf"), 0.0, m)
            whole = tl.where(total == 0, 0.0, total + tl.exp2(sink - floor))
        else:
            whole = total
        share = tl.where(total == 0, 0.0, 1.0 / whole)
        to = out
        at = cell * SHAPE.v_dim
    else:
        state_at = cell * PARTS + part
        tl.store(partial.largest + state_at, m, mask=in_group)
        tl.store(partial.total + state_at, total, mask=in_group)
        in_group = in_group & (m > float("-inf"))
        share = tl.full((BLOCK_H,), 1.0, tl.float32)
        to = partial.acc
        at = state_at * SHAPE.v_dim
    put(to, at, 1, acc0 * share[:, None], in_group, 0, SHAPE.v_dim)
    if SHAPE.v_leads == 2:
        put(to, at, 1, acc1 * share[:, None], in_group, SHAPE.v_lead, SHAPE.v_dim)
    if SHAPE.v_tail > 0:
        put(to, at, 1, acc2 * share[:, None], in_group, SHAPE.v_leads * SHAPE.v_lead, SHAPE.v_dim)
