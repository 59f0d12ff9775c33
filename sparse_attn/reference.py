"""The specification: every op in plain float64 PyTorch, one query row and one group of heads at a time.

Written to be read. It runs anywhere, is slow, and is what every kernel is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import layout
from .checks import expect, refuse
from .planes import Plane
from .registry import Impl

if TYPE_CHECKING:
    from .ops.attend import Attend
    from .ops.convert import Convert
    from .ops.load import Load
    from .ops.merge import Merge
    from .ops.store import Store

NEG_INF = float("-inf")
CHUNK = 4096
"""Entries that ``convert`` holds at a time."""


def attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """``out = sum_n exp(s_n) v_n / (exp(sink) + sum_n exp(s_n))``, ``lse = ln sum_n exp(s_n)``, ``s_n = scale * q .
    k_n``."""
    out.zero_()
    if lse is not None:
        lse.fill_(NEG_INF)
    for t, b, position in query_rows(a):
        for heads, kv_head, index_head in head_groups(a):
            planes = []
            if a.win is not None:
                planes.append(read_window(a, b, window_entries(a, t, position), kv_head))
            if a.kv is not None:
                planes.append(read_main(a, b, main_entries(a, t, b, position, index_head), kv_head))
            keys, values = (torch.cat(parts) for parts in zip(*planes, strict=True))
            if len(keys) == 0:
                continue
            scores = a.scale * a.q[t, heads].double() @ keys.T
            total = scores.logsumexp(-1)
            if lse is not None:
                lse[t, heads] = total.float()
            if a.sinks is not None:
                total = torch.logaddexp(total, a.sinks[heads].double())
            out[t, heads] = (torch.exp(scores - total[:, None]) @ values).to(out.dtype)


def query_rows(a: Attend) -> Iterator[tuple[int, int, int]]:
    """(row, sequence, token position) of every row that may attend something."""
    starts, lengths = a.cu_seqlens_q.tolist(), a.seq_lens.tolist()
    expect(starts[0] == 0, "attend", "cu_seqlens_q", "a first value of 0", starts[0])
    expect(
        starts[-1] <= a.q.shape[0], "attend", "cu_seqlens_q", f"a last value of at most T = {a.q.shape[0]}", starts[-1]
    )
    for b, length in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        expect(start <= end, "attend", "cu_seqlens_q", "ascending values", starts)
        expect(end - start <= a.max_seqlen_q, "attend", "max_seqlen_q", f"at least {end - start}", a.max_seqlen_q)
        expect(length <= a.max_seq_len, "attend", "max_seq_len", f"at least {length}", a.max_seq_len)
        for t in range(start, end):
            position = length - (end - t)
            if position >= 0:
                yield t, b, position


def head_groups(a: Attend) -> Iterator[tuple[slice, int, int]]:
    """(query heads, KV head, index head) of heads that read the same entries of the same KV head."""
    q_heads, index_heads = a.q.shape[1], 1 if a.indices is None else a.indices.shape[1]
    groups = max(a.kv_heads, index_heads)
    size = q_heads // groups
    for g in range(groups):
        yield slice(g * size, (g + 1) * size), g * a.kv_heads // groups, g * index_heads // groups


def main_entries(a: Attend, t: int, b: int, position: int, index_head: int) -> Tensor:
    """Entries of the main plane that row ``t`` attends."""
    if a.kv_range is not None:
        low, high = a.kv_range[t].tolist()
    else:
        tokens = position + 1 if a.causal else int(a.seq_lens[b])
        low, high = 0, tokens // a.ratio
    if a.indices is None:
        return torch.arange(max(low, 0), max(high, low, 0), device=a.q.device)
    chosen = a.indices[t, index_head]
    if a.index_counts is not None:
        chosen = chosen[: max(int(a.index_counts[t, index_head]), 0)]
    offsets = torch.arange(a.select_block, device=a.q.device)
    return visible((chosen.long()[:, None] * a.select_block + offsets).flatten(), low, high)


def window_entries(a: Attend, t: int, position: int) -> Tensor:
    """Entries (token positions) of the window plane that row ``t`` attends."""
    if a.win_range is not None:
        low, high = a.win_range[t].tolist()
    else:
        low, high = position - a.window + 1 if a.window else 0, position + 1
    if a.win_indices is None:
        return torch.arange(max(low, 0), max(high, low, 0), device=a.q.device)
    return visible(a.win_indices[t, 0].long(), low, high)


def visible(entries: Tensor, low: int, high: int) -> Tensor:
    return entries[(entries >= max(low, 0)) & (entries < high)]


def read_main(a: Attend, b: int, entries: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of entries of the main plane."""
    assert a.kv is not None and a.page_table is not None
    plane = Plane(a.kv, a.format, a.kv_scale, a.page_size)
    at = where(a.page_table[b], entries, plane, "page_table", b)
    rows = read(plane, at, kv_head)
    keys = rows if a.kv_rope is None else torch.cat([rows, a.kv_rope[:, :, kv_head][at].double()], dim=-1)
    values = rows[:, : a.v_dim] if a.v is None else read(Plane(a.v, a.value_format, a.v_scale), at, kv_head)
    return keys, values


def read_window(a: Attend, b: int, entries: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of entries of the window plane."""
    assert a.win is not None and a.win_page_table is not None
    plane = Plane(a.win, a.win_format, None, a.win_page_size)
    rows = read(plane, where(a.win_page_table[b], entries, plane, "win_page_table", b), kv_head)
    return rows, rows[:, : a.v_dim]


def where(table: Tensor, entries: Tensor, plane: Plane, name: str, b: int) -> tuple[Tensor, Tensor]:
    """Page and offset of entries of sequence ``b``, refused where the table has no page for them."""
    if len(entries) == 0:
        return entries, entries
    pages, page_size = plane.pages, plane.page_size
    last = int(entries.max())
    if last >= len(table) * page_size:
        raise refuse(
            "attend", name, f"a page for entry {last} of sequence {b}", f"{len(table)} pages of {page_size} entries"
        )
    page, offset = layout.locate(table.long(), entries, page_size)
    valid = (page >= 0) & (page < pages)
    if not bool(valid.all()):
        raise refuse("attend", name, f"pages from 0 to {pages - 1} in sequence {b}", int(page[~valid][0]))
    return page, offset


def read(plane: Plane, at: tuple[Tensor, Tensor], head: int) -> Tensor:
    """Rows of one head as float64."""
    return plane.rows(at, slice(head, head + 1))[:, 0].double()


def store(a: Store) -> None:
    """Write each row into its slot, quantised as its format says."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    kept = a.slots >= 0
    slots = a.slots[kept]
    inside("store", "slots", slots, plane)
    plane.put_rows(plane.at(slots), a.rows[kept].float())


def load(a: Load, out: Tensor) -> None:
    """Read each slot's row; a negative slot gives zeros."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    kept = a.slots >= 0
    slots = a.slots[kept]
    inside("load", "slots", slots, plane)
    out.zero_()
    out[kept] = plane.rows(plane.at(slots)).to(out.dtype)


def convert(a: Convert) -> None:
    """Move the parts of entries where both formats have one codec, else read rows and quantise them anew."""
    src, dst = (
        Plane(a.src, a.src_format, a.src_scale, a.src_page_size),
        Plane(a.dst, a.dst_format, a.dst_scale, a.dst_page_size),
    )
    every = torch.arange(src.slots, device=a.src.device)
    src_slots, dst_slots = (every if slots is None else slots for slots in (a.src_slots, a.dst_slots))
    kept = (src_slots >= 0) & (dst_slots >= 0)
    src_slots, dst_slots = src_slots[kept], dst_slots[kept]
    inside("convert", "src_slots", src_slots, src)
    inside("convert", "dst_slots", dst_slots, dst)
    for origin, target in zip(src_slots.split(CHUNK), dst_slots.split(CHUNK), strict=True):
        if src.format.codec == dst.format.codec:
            dst.write(dst.at(target), src.read(src.at(origin)))
        else:
            dst.put_rows(dst.at(target), src.rows(src.at(origin)))


def inside(op: str, name: str, slots: Tensor, plane: Plane) -> None:
    """Refuse slots past the plane."""
    last = int(slots.max()) if len(slots) else -1
    expect(last < plane.slots, op, name, f"less than pages * page_size = {plane.slots}", last)


def merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    """``lse = ln sum_i exp(lse_i)``, ``out = sum_i exp(lse_i) out_i / (exp(sink) + sum_i exp(lse_i))``, in the order of
    the parts."""
    lses = a.lses.double() * (math.log(2) if a.base == "2" else 1.0)
    if a.inf_is_empty:
        lses = lses.where(lses != math.inf, NEG_INF)
    total = torch.full_like(lses[0], NEG_INF)
    for part in lses:
        total = torch.logaddexp(total, part)
    lse.copy_(total)
    if a.sinks is not None:
        total = torch.logaddexp(total, a.sinks.double())
    joined = torch.zeros_like(a.outs[0], dtype=torch.float64)
    for part, part_out in zip(lses, a.outs, strict=True):
        weighted = torch.exp(part - total)[..., None] * part_out.double()
        joined += weighted.where((part != NEG_INF)[..., None], 0.0)  # what an empty part holds counts for nothing
    out.copy_(joined)


# priority below every kernel: registry.choose tries the reference last
IMPLS = (
    Impl(
        "attend",
        "reference",
        limits={},
        run=attend,
        tolerance={"float32": (2e-6, 2e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
        priority=-1,
    ),
    Impl("store", "reference", limits={}, run=store, priority=-1),
    Impl("load", "reference", limits={}, run=load, priority=-1),
    Impl("convert", "reference", limits={}, run=convert, priority=-1),
    Impl(
        "merge",
        "reference",
        limits={},
        run=merge,
        tolerance={"float32": (2e-6, 2e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
        priority=-1,
    ),
)
