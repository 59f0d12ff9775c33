"""Device code of ``merge``: vector units only. A task is one row and BLOCK_H heads."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-3.0e38)
"""Stands for -inf, so that no infinity is subtracted from another."""


@triton.jit
def exponent(lses, at, mask, BASE_2: tl.constexpr, INF_IS_EMPTY: tl.constexpr):
    """The natural logarithm of what a part summed up to, FLOOR for nothing."""
    x = tl.load(lses + at, mask=mask, other=FLOOR)
    if INF_IS_EMPTY:
        x = tl.where(x == float("inf"), FLOOR, x)
    if BASE_2:
        x = x * LN2
    return tl.where(x < FLOOR, FLOOR, x)


@triton.jit(do_not_specialize=["rows", "parts"])
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
    rows,
    parts,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BASE_2: tl.constexpr,
    INF_IS_EMPTY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Parts are added in their order, so the same parts give the same bits."""
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    for task in tl.range(tl.program_id(0), rows * BLOCKS, tl.num_programs(0)):
        row = (task // BLOCKS).to(tl.int64)
        head = task % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        there = head < HEADS
        lse_at = row * lse_row_step + head.to(tl.int64) * lse_head_step
        largest = tl.full((BLOCK_H,), FLOOR, tl.float32)
        for part in tl.range(0, parts):
            at = lse_at + part.to(tl.int64) * lse_part_step
            largest = tl.maximum(largest, exponent(lses, at, there, BASE_2, INF_IS_EMPTY))
        total = tl.zeros((BLOCK_H,), tl.float32)
        faulty = tl.zeros((BLOCK_H,), tl.float32)
        for part in tl.range(0, parts):
            at = lse_at + part.to(tl.int64) * lse_part_step
            x = exponent(lses, at, there, BASE_2, INF_IS_EMPTY)
            total += tl.where(x == FLOOR, 0.0, tl.exp(x - largest))
            faulty += tl.where(x != x, 1.0, 0.0)
        whole = total
        if sinks is not None:
            whole += tl.exp(tl.load(sinks + head, mask=there, other=FLOOR) - largest)
        share = tl.where(total == 0, 0.0, 1.0 / whole)
        for start in tl.range(0, V_DIM, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            cells = there[:, None] & (column < V_DIM)[None, :]
            acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
            for part in tl.range(0, parts):
                at = lse_at + part.to(tl.int64) * lse_part_step
                x = exponent(lses, at, there, BASE_2, INF_IS_EMPTY)
                from_ = part.to(tl.int64) * part_step + row * row_step + head.to(tl.int64) * head_step
                stored = tl.load(outs + from_[:, None] + column[None, :], mask=cells, other=0.0).to(tl.float32)
                weight = tl.exp(x - largest)
                # what an empty part holds counts for nothing
                acc += tl.where((x == FLOOR)[:, None], 0.0, weight[:, None] * stored)
            to = (row * HEADS + head.to(tl.int64)) * V_DIM
            tl.store(out + to[:, None] + column[None, :], (acc * share[:, None]).to(out.dtype.element_ty), mask=cells)
        if lse is not None:
            joined = tl.where(total == 0, float("-inf"), largest + tl.log(total))
            # the weights of an infinite sum are NaN, but not its logarithm
            joined = tl.where((largest == float("inf")) & (faulty == 0), largest, joined)
            tl.store(lse + row * HEADS + head, joined, mask=there)
