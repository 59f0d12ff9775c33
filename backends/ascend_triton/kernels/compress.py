"""Device code of ``compress``: entries of a step, in float32, and the slots where they go. A program takes one head of
one entry at a time, token by token."""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCES = tl.constexpr(256)


@triton.jit
def counted(ends, n, batch):
    """How many of ``ends [batch]`` are at most ``n``."""
    count = tl.zeros((), tl.int32)
    for j in range(0, batch, SEQUENCES):
        place = j + tl.arange(0, SEQUENCES)
        end = tl.load(ends + place, mask=place < batch, other=0)
        count += tl.sum(tl.where((place < batch) & (end <= n), 1, 0), 0)
    return count


@triton.jit
def slot_of(table, column, table_width, page_size, pages):
    """Slot of an entry under one sequence's row of a table; -1 where it has no page in the plane."""
    at = column // page_size
    inside = at < table_width
    page = tl.load(table + tl.where(inside, at, 0)).to(tl.int64)
    inside = inside & (page >= 0) & (page < pages)
    return tl.where(inside, page * page_size + column % page_size, -1)


@triton.jit
def as_model(x, like):
    """``x`` rounded to the model's type."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        *("row_step", "row_head_step", "gate_step", "gate_head_step", "bias_step", "batch", "count", "heads"),
        *("stride", "span", "set_step", "table_width", "page_size", "pages", "state_pages", "state_table_width"),
        *("state_page_size", "eps"),
    ]
)
def entries_kernel(
    rows,
    row_step,
    row_head_step,
    gates,
    gate_step,
    gate_head_step,
    bias,
    bias_step,
    cu_seqlens_q,
    seq_lens,
    entry_ends,
    batch,
    count,
    heads,
    stride,
    span,
    set_step,
    page_table,
    table_step,
    table_width,
    page_size,
    pages,
    state,
    state_page_step,
    state_entry_step,
    state_head_step,
    state_table,
    state_table_step,
    state_table_width,
    state_page_size,
    state_pages,
    norm,
    eps,
    out,
    numbers,
    slots,
    latent,
    model,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out [count, heads, DIM]``, ``numbers [count]``, ``slots [count]`` and ``latent``, of the entries of all
    sequences, one behind the other; a slot is -1 behind the last. ``set_step``: channels from one stride's set to the
    next's; ``model`` has the model's type. A row that no page holds makes the entry NaN."""
    for task in range(tl.program_id(0), count * heads, tl.num_programs(0)):
        n = task // heads
        head = (task % heads).to(tl.int64)
        b = counted(entry_ends, n, batch)
        if b < batch:
            length = tl.maximum(tl.load(seq_lens + b), 0)
            end = tl.load(cu_seqlens_q + b + 1).to(tl.int64)
            new = tl.load(cu_seqlens_q + b + 1) - tl.load(cu_seqlens_q + b)
            before = tl.maximum(tl.load(seq_lens + b) - new, 0)
            entry = length // stride - (tl.load(entry_ends + b) - n)
            first = (entry + 1) * stride - span
            d = tl.arange(0, BLOCK)
            here = d < DIM
            largest = tl.full((BLOCK,), -3.0e38, tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            pooled = tl.zeros((BLOCK,), tl.float32)
            for i in range(tl.maximum(-first, 0), span):
                p = first + i
                channel = (i // stride) * set_step + d
                if p >= before:
                    at_new = rows + (end - (length - p)) * row_step + head * row_head_step
                    x = tl.load(at_new + channel, mask=here, other=0).to(tl.float32)
                    if gates is not None:
                        at_gate = gates + (end - (length - p)) * gate_step + head * gate_head_step
                        gate = tl.load(at_gate + channel, mask=here, other=0).to(tl.float32)
                    else:
                        gate = tl.zeros((BLOCK,), tl.float32)
                else:
                    gate = tl.zeros((BLOCK,), tl.float32)
                    if state is not None:
                        row = state_table + b.to(tl.int64) * state_table_step
                        slot = slot_of(row, p, state_table_width, state_page_size, state_pages)
                        kept = tl.maximum(slot, 0)
                        at_slot = kept // state_page_size * state_page_step + kept % state_page_size * state_entry_step
                        at_state = state + (at_slot + head * state_head_step)
                        x = tl.load(at_state + channel, mask=here, other=0)
                        x = x + tl.where(slot < 0, float("nan"), 0.0)
                        if gates is not None:
                            gate = tl.load(at_state + WIDTH + channel, mask=here, other=0)
                    else:
                        x = tl.zeros((BLOCK,), tl.float32)
                if bias is not None:
                    gate += tl.load(bias + (p % stride) * bias_step + channel, mask=here, other=0)
                above = tl.where(gate > largest, gate, largest)
                shrink = tl.exp(largest - above)
                weight = tl.exp(gate - above)
                total = total * shrink + weight
                pooled = pooled * shrink + weight * x
                largest = above
            x = as_model(tl.where(here, pooled / total, 0.0), model)
            if norm is not None:
                mean = tl.sum(x * x, 0) / DIM
                x = as_model(x / tl.sqrt(mean + eps) * tl.load(norm + d, mask=here, other=0), model)
            at_row = (n.to(tl.int64) * heads + head) * DIM
            if latent is not None:
                tl.store(latent + at_row + d, x.to(latent.dtype.element_ty), mask=here)
            tl.store(out + at_row + d, x, mask=here)
            row = page_table + b.to(tl.int64) * table_step
            tl.store(numbers + n, entry.to(tl.int64))
            tl.store(slots + n, slot_of(row, entry, table_width, page_size, pages))
        else:
            tl.store(slots + n, tl.full((), -1, tl.int64))


@triton.jit(do_not_specialize=["count", "heads", "dim", "cos_sin_step", "positions", "rope_step"])
def rotate_kernel(
    out,
    numbers,
    slots,
    count,
    heads,
    dim,
    cos_sin,
    cos_sin_step,
    positions,
    rope_step,
    model,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotates the last ROPE elements of the rows of ``out``, in place. A position that ``cos_sin`` lacks gives NaN."""
    for task in range(tl.program_id(0), count * heads, tl.num_programs(0)):
        n = task // heads
        if tl.load(slots + n) >= 0:
            position = tl.load(numbers + n) * rope_step
            known = position < positions
            pair = tl.arange(0, BLOCK // 2)
            angle = cos_sin + tl.where(known, position, 0) * cos_sin_step + pair
            cosine = tl.load(angle, mask=pair < ROPE // 2, other=0) + tl.where(known, 0.0, float("nan"))
            sine = tl.load(angle + ROPE // 2, mask=pair < ROPE // 2, other=0)
            d = tl.arange(0, BLOCK)
            head = (task % heads).to(tl.int64)
            row = out + (n.to(tl.int64) * heads + head + 1) * dim - ROPE + d
            even, odd = tl.split(tl.reshape(tl.load(row, mask=d < ROPE, other=0), (BLOCK // 2, 2)))
            turned = tl.interleave(even * cosine - odd * sine, odd * cosine + even * sine)
            tl.store(row, as_model(turned, model), mask=d < ROPE)


@triton.jit(do_not_specialize=["tokens", "batch", "kept", "table_width", "page_size", "pages"])
def state_slots_kernel(
    cu_seqlens_q,
    seq_lens,
    tokens,
    batch,
    kept,
    table,
    table_step,
    table_width,
    page_size,
    pages,
    slots,
):
    """Where the state keeps the rows of a step: its last ``kept`` of each sequence; -1 for others."""
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        b = counted(cu_seqlens_q + 1, t, batch)
        slot = tl.full((), -1, tl.int64)
        if b < batch:
            after = tl.load(cu_seqlens_q + b + 1) - t
            position = tl.load(seq_lens + b) - after
            if (position >= 0) & (after <= kept):
                slot = slot_of(table + b.to(tl.int64) * table_step, position, table_width, page_size, pages)
        tl.store(slots + t, slot)
