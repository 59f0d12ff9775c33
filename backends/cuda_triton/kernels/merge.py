"""Device code of ``merge``: a program takes one row and head, and BLOCK_D columns."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponent(lses, at, BASE_2: tl.constexpr, INF_IS_EMPTY: tl.constexpr):
    """The natural logarithm of what a part summed up to."""
    x = tl.load(lses + at)
    if INF_IS_EMPTY:
        x = tl.where(x == float("inf"), float("-inf"), x)
    return x * LN2 if BASE_2 else x


@triton.jit
def merge_kernel(
    outs,
    part_step,
    row_step,
    head_step,
    lses,
    lse_part_step,
    lse_row_step,
    lse_head_step,
    sinks,
    out,
    lse,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BASE_2: tl.constexpr,
    INF_IS_EMPTY: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Parts are added in their order."""
    cell = tl.program_id(0).to(tl.int64)
    row = cell // HEADS
    head = cell % HEADS
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse_at = row * lse_row_step + head * lse_head_step
    at = row * row_step + head * head_step
    largest = exponent(lses, lse_at, BASE_2, INF_IS_EMPTY)
    for part in tl.range(1, PARTS):
        largest = tl.maximum(largest, exponent(lses, lse_at + part * lse_part_step, BASE_2, INF_IS_EMPTY))
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    total = 0.0
    faulty = largest != largest
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for part in tl.range(0, PARTS):
        x = exponent(lses, lse_at + part * lse_part_step, BASE_2, INF_IS_EMPTY)
        weight = tl.exp(x - floor)
        total += weight
        faulty = faulty | (x != x)
        # what an empty part holds counts for nothing
        wanted = tl.where(column < V_DIM, x, float("-inf")) != float("-inf")
        acc += weight * tl.load(outs + at + part * part_step + column, mask=wanted, other=0.0).to(tl.float32)
    whole = total
    if sinks is not None:
        whole += tl.exp(tl.load(sinks + head) - floor)
    share = tl.where(total == 0, 0.0, 1.0 / whole)
    tl.store(out + cell * V_DIM + column, (acc * share).to(out.dtype.element_ty), mask=column < V_DIM)
    joined = tl.where(total == 0, float("-inf"), floor + tl.log(total))
    # the weights of an infinite sum are NaN, but not its logarithm
    joined = tl.where((largest == float("inf")) & (faulty == 0), largest, joined)
    tl.store(lse + cell, joined, mask=tl.program_id(1) == 0)
