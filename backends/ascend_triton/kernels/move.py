"""Device code of ``convert`` between formats of one codec. A program takes entries in turn, PIECES pieces at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "pieces", "page_size", "end", "to_page_size", "to_end"])
def move_kernel(
    slots,
    to_slots,
    count,
    pieces,
    page_size,
    end,
    to_page_size,
    to_end,
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
    to_values,
    to_value_page_step,
    to_value_entry_step,
    to_value_piece_step,
    to_scales,
    to_scale_page_step,
    to_scale_entry_step,
    to_scale_piece_step,
    to_rope,
    to_rope_page_step,
    to_rope_entry_step,
    pad,
    pad_page_step,
    pad_entry_step,
    ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    ROPE: tl.constexpr,
    PAD: tl.constexpr,
):
    parts = tl.cdiv(pieces, PIECES)
    for task in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        t = (task // parts).to(tl.int64)
        slot = tl.load(slots + t)
        to_slot = tl.load(to_slots + t)
        if (slot >= 0) & (slot < end) & (to_slot >= 0) & (to_slot < to_end):
            page = slot // page_size
            offset = slot % page_size
            to_page = to_slot // to_page_size
            to_offset = to_slot % to_page_size
            piece = (task % parts) * PIECES + tl.arange(0, PIECES)
            item = tl.arange(0, BLOCK)
            mask = (piece < pieces)[:, None] & (item < ITEMS)[None, :]
            from_ = values + (page * value_page_step + offset * value_entry_step)
            x = tl.load(from_ + piece[:, None] * value_piece_step + item[None, :], mask=mask, other=0)
            to = to_values + (to_page * to_value_page_step + to_offset * to_value_entry_step)
            tl.store(to + piece[:, None] * to_value_piece_step + item[None, :], x, mask=mask)
            if scales is not None:
                from_scales = scales + (page * scale_page_step + offset * scale_entry_step)
                scale = tl.load(from_scales + piece * scale_piece_step, mask=piece < pieces, other=0)
                into_scales = to_scales + (to_page * to_scale_page_step + to_offset * to_scale_entry_step)
                tl.store(into_scales + piece * to_scale_piece_step, scale, mask=piece < pieces)
            if ROPE > 0:
                rest = tl.arange(0, ROPE)
                tail = tl.load(rope + (page * rope_page_step + offset * rope_entry_step) + rest)
                tl.store(to_rope + (to_page * to_rope_page_step + to_offset * to_rope_entry_step) + rest, tail)
            if PAD > 0:
                zero = tl.arange(0, 64)
                into_pad = pad + (to_page * pad_page_step + to_offset * pad_entry_step) + zero
                tl.store(into_pad, tl.zeros((64,), tl.int8), mask=zero < PAD)
