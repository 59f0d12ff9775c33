"""Device code of ``compress``: a program takes one row of the step and one head.

The row of the last token that an entry stands for computes the entry; other programs of ``compress_kernel`` end at
once, so that launches depend on nothing that only the device knows. Tokens of this step come from its rows, earlier
ones from the state. ``state_kernel`` writes the state after every entry is read, as a ring of pages is written where it
was read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import row_start
from .encode import put_rows
from .paging import paged, place_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def token_rows(part, row_at, fresh, state, state_at, old, lost, column, DIM: tl.constexpr):
    """Rows of tokens ``[TOKENS, WIDTH]`` in float32: of this step, of the state, or lost, which gives NaN."""
    at = row_at[:, None] + column[None, :]
    in_row = (column < DIM)[None, :]
    x = tl.load(part + at, mask=fresh[:, None] & in_row, other=0).to(tl.float32)
    if state is not None:
        at = state_at[:, None] + column[None, :]
        x = tl.where(old[:, None], tl.load(state.data + at, mask=old[:, None] & in_row, other=0), x)
        x = tl.where(lost[:, None] & in_row, float("nan"), x)
    return x


@triton.jit
def pooled(
    rows,
    row_at,
    gates,
    gate_at,
    bias,
    bias_step,
    state_pages,
    state,
    sequence,
    head,
    position,
    before,
    span,
    stride,
    row_step,
    gate_step,
    STATE_PAGE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The mean of the last ``span`` tokens up to ``position``, weighted by the softmax of their gates: ``[1, WIDTH]``.
    Tokens from ``before`` on are of this step."""
    column = tl.arange(0, WIDTH)
    largest = tl.full((WIDTH,), float("-inf"), tl.float32)
    sum = tl.zeros((WIDTH,), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in tl.range(0, span, TOKENS):
        place = start + tl.arange(0, TOKENS)
        token = position + 1 - span + place
        exists = (place < span) & (token >= 0)
        fresh = exists & (token >= before)
        channel = tl.zeros((TOKENS,), tl.int64)
        if COLUMNS > DIM:
            channel += place // stride * DIM
        old = fresh
        lost = fresh
        state_at = channel
        if state is not None:
            wanted = exists & (token < before)
            page, offset, old = paged(state_pages, sequence, tl.where(wanted, token, 0), wanted, STATE_PAGE)
            lost = wanted & (old == 0)
            state_at = row_start(state, page, offset, head) + channel
        back = (token - position).to(tl.int64)
        value = token_rows(rows, row_at + back * row_step + channel, fresh, state, state_at, old, lost, column, DIM)
        if gates is None:
            total += tl.sum(value, 0)
        else:
            gate_row = gate_at + back * gate_step + channel
            gate = token_rows(gates, gate_row, fresh, state, state_at + COLUMNS, old, lost, column, DIM)
            if bias is not None:
                at = (place % stride).to(tl.int64) * bias_step + channel
                in_bias = exists[:, None] & (column < DIM)[None, :]
                gate += tl.load(bias + at[:, None] + column[None, :], mask=in_bias, other=0)
            gate = tl.where(exists[:, None], gate, float("-inf"))
            larger = tl.maximum(largest, tl.max(gate, 0))
            # 0 for -inf: before the first token exp2 must not see inf - inf
            floor = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2((gate - floor[None, :]) * LOG2E)
            decay = tl.exp2((largest - floor) * LOG2E)
            sum = sum * decay + tl.sum(weight, 0)
            total = total * decay + tl.sum(weight * value, 0)
            largest = larger
    if gates is None:
        sum += tl.minimum(position + 1, span).to(tl.float32)
    mean = tl.div_rn(total, sum)
    return tl.where(column < DIM, mean, 0.0)[None, :]


@triton.jit
def rotated(x, cos_sin, step, positions, position, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Adjacent pairs of the last ROTATED of DIM elements of ``x [1, WIDTH]``; NaN for a position that has no angles."""
    START: tl.constexpr = DIM - ROTATED
    column = tl.arange(0, x.shape[1])
    turns = (column >= START) & (column < DIM)
    within = tl.where(turns, column - START, 0)
    known = turns & (position < positions)
    at = cos_sin + position * step + within // 2
    cos = tl.load(at, mask=known, other=float("nan"))
    sin = tl.load(at + ROTATED // 2, mask=known, other=float("nan"))
    partner = tl.where(turns, START + (within ^ 1), column)
    other = tl.gather(x, partner[None, :], 1)
    sin = tl.where(within % 2 == 0, -sin, sin)
    return tl.where(turns[None, :], x * cos[None, :] + other * sin[None, :], x)


@triton.jit
def entries_before(cu_seqlens_q, seq_lens, sequence, stride, BLOCK: tl.constexpr):
    """How many entries the step completes in the sequences before ``sequence``."""
    count = 0
    for first in tl.range(0, sequence, BLOCK):
        s = first + tl.arange(0, BLOCK)
        there = s < sequence
        length = tl.load(seq_lens + s, mask=there, other=0)
        start = tl.load(cu_seqlens_q + s, mask=there, other=0)
        rows = tl.load(cu_seqlens_q + s + 1, mask=there, other=0) - start
        done = tl.maximum(length, 0) // stride - tl.maximum(length - rows, 0) // stride
        count += tl.sum(done, 0)
    return count


@triton.jit(do_not_specialize=["batch", "entries"])
def compress_kernel(
    rows,
    row_step,
    row_head_step,
    gates,
    gate_step,
    gate_head_step,
    cu_seqlens_q,
    seq_lens,
    batch,
    span,
    stride,
    bias,
    bias_step,
    norm,
    eps,
    cos_sin,
    cos_sin_step,
    positions,
    rope_step,
    state_pages,
    state,
    plane_pages,
    values,
    rope,
    scales,
    pad,
    latent,
    entries,
    heads,
    STATE_PAGE: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,
    PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATED: tl.constexpr,
    MODEL: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    DIM: tl.constexpr = CODES.dim
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    sequence, length, position, live = place_of(cu_seqlens_q, seq_lens, row, batch)
    position = position.to(tl.int32)
    if live & ((position + 1) % stride == 0):
        begin = tl.maximum(tl.load(cu_seqlens_q + sequence), 0)
        before = tl.maximum(position - (row - begin).to(tl.int32), 0)
        x = pooled(
            rows,
            row * row_step + head * row_head_step,
            gates,
            row * gate_step + head * gate_head_step,
            bias,
            bias_step,
            state_pages,
            state,
            sequence.to(tl.int64),
            head,
            position,
            before,
            span,
            stride,
            row_step,
            gate_step,
            STATE_PAGE,
            DIM,
            COLUMNS,
            WIDTH,
            TOKENS,
        )
        x = x.to(MODEL).to(tl.float32)
        column = tl.arange(0, WIDTH)
        if norm is not None:
            size = tl.sum(x * x, 1) / DIM + eps
            weight = tl.load(norm + column, mask=column < DIM, other=0)
            x = x * tl.div_rn(1.0, tl.sqrt_rn(size))[:, None] * weight[None, :]
            x = x.to(MODEL).to(tl.float32)
        entry = position // stride
        if latent is not None:
            number = entries_before(cu_seqlens_q, seq_lens, sequence, stride, 128) + entry - before // stride
            at = latent + (number.to(tl.int64) * heads + head) * DIM + column
            # lengths that contradict each other give any number
            inside = (column < DIM) & (number >= 0) & (number < entries)
            tl.store(at[None, :], x.to(MODEL), mask=inside[None, :])
        if cos_sin is not None:
            at = entry.to(tl.int64) * rope_step
            x = rotated(x, cos_sin, cos_sin_step, positions, at, DIM, ROTATED).to(MODEL).to(tl.float32)
        one = entry + tl.arange(0, 1)
        page, offset, there = paged(plane_pages, sequence.to(tl.int64), one, one >= 0, PAGE)
        put_rows(values, rope, scales, pad, page, offset, head, there, x, CODES, PAD)


@triton.jit(do_not_specialize=["batch"])
def state_kernel(
    rows,
    row_step,
    row_head_step,
    gates,
    gate_step,
    gate_head_step,
    cu_seqlens_q,
    seq_lens,
    batch,
    kept,
    state_pages,
    state,
    STATE_PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    sequence, length, position, live = place_of(cu_seqlens_q, seq_lens, row, batch)
    if live & (position >= length - kept):
        one = position.to(tl.int32) + tl.arange(0, 1)
        page, offset, there = paged(state_pages, sequence.to(tl.int64), one, one >= 0, STATE_PAGE)
        to = state.data + row_start(state, page, offset, head)
        for start in tl.range(0, COLUMNS, WIDTH):
            column = start + tl.arange(0, WIDTH)
            mask = there & (column < COLUMNS)
            x = tl.load(rows + row * row_step + head * row_head_step + column, mask=mask, other=0)
            tl.store(to + column, x.to(tl.float32), mask=mask)
            if gates is not None:
                x = tl.load(gates + row * gate_step + head * gate_head_step + column, mask=mask, other=0)
                tl.store(to + COLUMNS + column, x.to(tl.float32), mask=mask)
