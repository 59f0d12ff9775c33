"""Device code of ``store``: a program takes tokens in turn, and PIECES pieces of one at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .encode import as_byte, element, largest_magnitude, nibble, over_scale, scale_of, stored_scale


@triton.jit
def put_pieces(
    x,
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
    """Stores pieces ``x [P, BLOCK]`` of one entry, in float32, from where ``values`` and ``scales`` point."""
    n = tl.arange(0, BLOCK)
    if SCALE == "":
        at = piece[:, None] * value_step + n[None, :]
        tl.store(values + at, x.to(values.dtype.element_ty), mask=mask_p[:, None] & (n < PIECE)[None, :])
    else:
        scale = scale_of(largest_magnitude(x), ELEMENT, SCALE)
        x = over_scale(x, scale)
        if ELEMENT == "e2m1" or ELEMENT == "int4":
            PIECES: tl.constexpr = x.shape[0]
            low, high = tl.split(tl.reshape(nibble(x, ELEMENT), (PIECES, BLOCK // 2, 2)))
            byte = tl.arange(0, BLOCK // 2)
            at = piece[:, None] * value_step + byte[None, :]
            tl.store(values + at, as_byte(low + 16 * high), mask=mask_p[:, None] & (byte < PIECE // 2)[None, :])
        else:
            at = piece[:, None] * value_step + n[None, :]
            tl.store(values + at, element(x, ELEMENT), mask=mask_p[:, None] & (n < PIECE)[None, :])
        tl.store(scales + piece * scale_step, stored_scale(scale, SCALE), mask=mask_p)


@triton.jit(do_not_specialize=["row_step", "row_piece_step", "count", "pieces", "page_size", "end"])
def store_kernel(
    rows,
    row_step,
    row_piece_step,
    slots,
    count,
    pieces,
    page_size,
    end,
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
    pad,
    pad_page_step,
    pad_entry_step,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STORED: tl.constexpr,
    ROPE: tl.constexpr,
    PAD: tl.constexpr,
):
    """``end``: slots of the plane. A slot outside of it writes nothing."""
    parts = tl.cdiv(pieces, PIECES)
    for task in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        t = (task // parts).to(tl.int64)
        slot = tl.load(slots + t)
        if (slot >= 0) & (slot < end):
            page = slot // page_size
            offset = slot % page_size
            piece = (task % parts) * PIECES + tl.arange(0, PIECES)
            mask_p = piece < pieces
            n = tl.arange(0, BLOCK)
            at = rows + t * row_step + piece[:, None] * row_piece_step + n[None, :]
            x = tl.load(at, mask=mask_p[:, None] & (n < PIECE)[None, :], other=0).to(tl.float32)
            put_pieces(
                x,
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
            if ROPE > 0:
                rest = tl.arange(0, ROPE)
                tail = tl.load(rows + t * row_step + STORED + rest).to(tl.float32)
                tl.store(rope + (page * rope_page_step + offset * rope_entry_step) + rest, tail.to(tl.bfloat16))
            if PAD > 0:
                zero = tl.arange(0, 64)
                at = pad + (page * pad_page_step + offset * pad_entry_step) + zero
                tl.store(at, tl.zeros((64,), tl.int8), mask=zero < PAD)
