"""Device code of ``load``: a program takes slots in turn, and PIECES pieces of one at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import unscaled
from .numbers import scale_numbers


@triton.jit
def piece_numbers(
    piece,
    mask_p,
    values,
    value_step,
    scales,
    scale_step,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pieces ``[P, BLOCK]`` of the entry to which ``values`` and ``scales`` point, in float32."""
    PACKED: tl.constexpr = 2 if ELEMENT == "e2m1" or ELEMENT == "int4" else 1
    item = tl.arange(0, BLOCK // PACKED)
    mask = mask_p[:, None] & (item < PIECE // PACKED)[None, :]
    x = unscaled(tl.load(values + piece[:, None] * value_step + item[None, :], mask=mask, other=0), ELEMENT)
    if SCALE != "":
        x = x * scale_numbers(tl.load(scales + piece * scale_step, mask=mask_p, other=0), SCALE)[:, None]
    return x


@triton.jit(do_not_specialize=["count", "pieces", "page_size", "end"])
def load_kernel(
    values,
    value_page_step,
    value_entry_step,
    value_piece_step,
    scales,
    scale_page_step,
    scale_entry_step,
    scale_piece_step,
    rope,
    rope_page_step,
    rope_entry_step,
    slots,
    count,
    pieces,
    page_size,
    end,
    out,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STORED: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Rows of negative slots are zeros, of slots past the plane NaN."""
    parts = tl.cdiv(pieces, PIECES)
    for task in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        t = (task // parts).to(tl.int64)
        piece = (task % parts) * PIECES + tl.arange(0, PIECES)
        mask_p = piece < pieces
        n = tl.arange(0, BLOCK)
        rest = tl.arange(0, ROPE if ROPE > 0 else 1)
        to = out + t * (pieces * PIECE + ROPE)
        to_pieces = to + piece[:, None] * PIECE + n[None, :]
        mask = mask_p[:, None] & (n < PIECE)[None, :]
        slot = tl.load(slots + t)
        if (slot >= 0) & (slot < end):
            page = slot // page_size
            offset = slot % page_size
            x = piece_numbers(
                piece,
                mask_p,
                values + (page * value_page_step + offset * value_entry_step),
                value_piece_step,
                None if SCALE == "" else scales + (page * scale_page_step + offset * scale_entry_step),
                scale_piece_step,
                ELEMENT,
                SCALE,
                PIECE,
                BLOCK,
            )
            tl.store(to_pieces, x.to(out.dtype.element_ty), mask=mask)
            if ROPE > 0:
                tail = tl.load(rope + (page * rope_page_step + offset * rope_entry_step) + rest)
                tl.store(to + STORED + rest, tail.to(out.dtype.element_ty))
        else:
            nothing = tl.where(slot < 0, 0.0, float("nan"))
            tl.store(to_pieces, (tl.zeros((PIECES, BLOCK), tl.float32) + nothing).to(out.dtype.element_ty), mask=mask)
            if ROPE > 0:
                tl.store(to + STORED + rest, (tl.zeros((ROPE,), tl.float32) + nothing).to(out.dtype.element_ty))
