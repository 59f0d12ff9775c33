"""Device code shared by the kernels of ``select`` that read an index plane: keys of entries, and their products with
queries."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import unscaled
from .numbers import scale_numbers


@triton.jit
def entries_at(
    begin,
    entry,
    seen,
    page_row,
    table_width,
    page_size,
    pages,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Page and offset of entries, and which of those that are ``seen`` have a page. WHOLE: they are COLUMNS
    consecutive ones from ``begin`` on, and lie in one page."""
    if WHOLE:
        in_table = tl.where(begin // page_size < table_width, begin // page_size, 0)
        page = tl.load(page_row + in_table)
        good = (begin // page_size < table_width) & (page >= 0) & (page < pages)
        page = tl.where(good, page, 0).to(tl.int64)
        return page, begin % page_size + tl.arange(0, COLUMNS), seen & good
    else:
        valid = seen & (entry // page_size < table_width)
        in_table = tl.where(valid, entry // page_size, 0)
        page = tl.load(page_row + in_table, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < pages)
        page = tl.where(valid, page, 0).to(tl.int64)
        return page, tl.where(valid, entry % page_size, 0), valid


@triton.jit
def stored_keys(
    values,
    value_at,
    valid,
    size,
    WHOLE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """The ``size`` elements from ``values`` on of each entry, without their scales: ``[COLUMNS, BLOCK_D]``. WHOLE:
    every entry is read."""
    PACKED: tl.constexpr = 2 if ELEMENT == "int4" or ELEMENT == "e2m1" else 1
    item = tl.arange(0, BLOCK_D // PACKED)
    in_row = (item < size // PACKED)[None, :]
    at = values + value_at[:, None] + item[None, :]
    stored = tl.load(at, mask=in_row, other=0) if WHOLE else tl.load(at, mask=valid[:, None] & in_row, other=0)
    return stored if ELEMENT == "" else unscaled(stored, ELEMENT)


@triton.jit
def products_of_group(
    q,
    q_head_step,
    run,
    values,
    value_at,
    scales,
    upper_step,
    upper_scale_step,
    valid,
    size,
    like,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """``products`` of one group, to whose elements and scales the pointers point."""
    COMPUTE: tl.constexpr = like.dtype.element_ty
    h = tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    mask_q = (h < run)[:, None] & (d < size)[None, :]
    x_q = tl.load(q + h[:, None] * q_head_step + d[None, :], mask=mask_q, other=0).to(COMPUTE)
    key = stored_keys(values, value_at, valid, size, WHOLE, BLOCK_D, ELEMENT)
    if BOUNDS:
        other = stored_keys(values + upper_step, value_at, valid, size, WHOLE, BLOCK_D, ELEMENT).to(tl.float32)
        key = key.to(tl.float32)
        if SCALE != "":
            key *= scale_numbers(tl.load(scales, mask=valid, other=0), SCALE)[:, None]
            other *= scale_numbers(tl.load(scales + upper_scale_step, mask=valid, other=0), SCALE)[:, None]
        above = tl.where(key > other, key, other).to(COMPUTE)
        below = tl.where(key > other, other, key).to(COMPUTE)
        positive = tl.where(x_q > 0, x_q, 0.0).to(COMPUTE)
        negative = tl.where(x_q > 0, 0.0, x_q).to(COMPUTE)
        x = tl.dot(positive, tl.trans(above), input_precision="ieee")
        return x + tl.dot(negative, tl.trans(below), input_precision="ieee")
    else:
        x = tl.dot(x_q, tl.trans(key.to(COMPUTE)), input_precision="ieee")
        if SCALE != "":
            x = x * scale_numbers(tl.load(scales, mask=valid, other=0), SCALE)[None, :]
        return x


@triton.jit
def products(
    q,
    q_head_step,
    run,
    values,
    value_at,
    value_piece_step,
    scales,
    scale_at,
    scale_piece_step,
    upper_step,
    upper_scale_step,
    valid,
    size,
    like,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """``x [HEADS, COLUMNS]`` of the ``run`` heads from ``q`` on with keys of GROUPS groups of ``size`` elements.

    BOUNDS: a key is a lower and, ``upper_step`` elements behind it, an upper bound, and the product the larger one of
    each element: that of a positive element of the query with the upper bound, else with the lower. The type of
    ``like`` is the one in which numbers are multiplied.
    """
    key_scales = None if SCALE == "" else scales + scale_at
    if GROUPS == 1:
        return products_of_group(
            q, q_head_step, run, values, value_at, key_scales, upper_step, upper_scale_step, valid, size, like, HEADS,
            BLOCK_D, ELEMENT, SCALE, WHOLE, BOUNDS
        )  # fmt: skip
    else:
        x = tl.zeros((HEADS, COLUMNS), tl.float32)
        for g in range(0, GROUPS):
            x += products_of_group(
                q + g * size, q_head_step, run, values + g * value_piece_step, value_at,
                key_scales + g * scale_piece_step, upper_step, upper_scale_step, valid, size, like, HEADS, BLOCK_D,
                ELEMENT, SCALE, WHOLE, BOUNDS
            )  # fmt: skip
        return x
