"""Device code that joins the parts of ``attend``: one program for one row and head, and BLOCK_D columns."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def combine_kernel(
    partial,
    sinks,
    out,
    lse,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_POWER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Parts are added in their order, so the same call gives the same bits."""
    cell = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.arange(0, PARTS_POWER)
    there = part < PARTS
    m = tl.load(partial.largest + cell * PARTS + part, mask=there, other=float("-inf"))
    totals = tl.load(partial.total + cell * PARTS + part, mask=there, other=0.0)
    # a maximum ignores NaN, which the totals keep
    largest = tl.max(m, 0)
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(totals * tl.exp2(m - floor), 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for p in tl.range(0, PARTS):
        m_part = tl.load(partial.largest + cell * PARTS + p)
        # a part that attended nothing has written no rows
        wanted = tl.where(column < V_DIM, m_part, float("-inf")) > float("-inf")
        rows = tl.load(partial.acc + (cell * PARTS + p) * V_DIM + column, mask=wanted, other=0.0)
        acc += rows * tl.exp2(m_part - floor)
    whole = total
    if sinks is not None:
        whole += tl.exp2(tl.load(sinks + cell % HEADS) * LOG2E - floor)
    share = tl.where(total == 0, 0.0, 1.0 / whole)
    tl.store(out + cell * V_DIM + column, (acc * share).to(out.dtype.element_ty), mask=column < V_DIM)
    if lse is not None:
        first = tl.program_id(1) == 0
        tl.store(lse + cell, tl.where(total == 0, float("-inf"), (largest + tl.log2(total)) * LN2), mask=first)
