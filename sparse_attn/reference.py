"""The specification: every op in plain float64 PyTorch, one query row and one group of heads at a time.

Written to be read. It runs anywhere, is slow, and is what every kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import layout
from .checks import expect, refuse
from .registry import Impl

if TYPE_CHECKING:
    from .ops.attend import Attend
    from .ops.store import Store

NEG_INF = float("-inf")


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
    at = where(a.page_table[b], entries, a.kv, "page_table", b)
    rows = read(a.kv, a.kv_scale, at, kv_head)
    keys = rows if a.kv_rope is None else torch.cat([rows, read(a.kv_rope, None, at, kv_head)], dim=-1)
    values = rows[:, : a.v_dim] if a.v is None else read(a.v, a.v_scale, at, kv_head)
    return keys, values


def read_window(a: Attend, b: int, entries: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of entries of the window plane."""
    assert a.win is not None and a.win_page_table is not None
    rows = read(a.win, None, where(a.win_page_table[b], entries, a.win, "win_page_table", b), kv_head)
    return rows, rows[:, : a.v_dim]


def where(table: Tensor, entries: Tensor, plane: Tensor, name: str, b: int) -> tuple[Tensor, Tensor]:
    """Page and offset of entries of sequence ``b``, refused where the table has no page for them."""
    if len(entries) == 0:
        return entries, entries
    pages, page_size = plane.shape[:2]
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


def read(plane: Tensor, scale: Tensor | None, at: tuple[Tensor, Tensor], head: int) -> Tensor:
    """Rows of one head as float64."""
    page, offset = at
    rows = plane[page, offset, head].double()
    return rows if scale is None else rows * scale[page, offset, head, None].double()


def store(a: Store) -> None:
    """Write each row into its slot; formats with scales are quantised row by row."""
    pages, page_size = a.plane.shape[:2]
    kept = a.slots >= 0
    slots, rows = a.slots[kept], a.rows[kept].float()
    last = int(slots.max()) if len(slots) else -1
    expect(last < pages * page_size, "store", "slots", f"less than pages * page_size = {pages * page_size}", last)
    at = slots // page_size, slots % page_size
    if a.scale is not None:
        rows, a.scale[at] = quantise_int8(rows)
    a.plane[at] = rows.to(a.plane.dtype)


def quantise_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127..127 (as float32) and the float16 scale ``amax / 127``, rounded up so that nothing is clipped."""
    amax = rows.abs().amax(-1)
    scale = (amax / 127).half()
    clips = (scale.float() * 127 < amax) & scale.isfinite()
    scale = torch.where(clips, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    usable = scale.isfinite() & (scale > 0)
    divisor = torch.where(usable, scale.float(), 1.0)[..., None]
    stored = (rows / divisor).round().clamp(-127, 127)
    return torch.where(usable[..., None], stored, 0.0), scale


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
)
