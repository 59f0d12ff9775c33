"""``attend``: one softmax over the entries that a row attends, one query row and one group of heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..planes import Plane
from .rows import query_rows, read, where

if TYPE_CHECKING:
    from ..ops.attend import Attend

NEG_INF = float("-inf")


def attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """``out = sum_n exp(s_n) v_n / (exp(sink) + sum_n exp(s_n))``, ``lse = ln sum_n exp(s_n)``, ``s_n = scale * q .
    k_n``."""
    out.zero_()
    if lse is not None:
        lse.fill_(NEG_INF)
    for t, b, position in query_rows("attend", a):
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
            weights = torch.exp(scores - total[:, None]).where(total[:, None] != NEG_INF, 0.0)  # every score -inf
            out[t, heads] = (weights @ values).to(out.dtype)


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
    offsets = torch.arange(min(a.select_block, max(high, 0)), device=a.q.device)  # the rest of block 0 is invisible
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
    at = where("attend", a.page_table[b], entries, plane, "page_table", b)
    rows = read(plane, at, kv_head)
    keys = rows if a.kv_rope is None else torch.cat([rows, a.kv_rope[:, :, kv_head][at].double()], dim=-1)
    values = rows[:, : a.v_dim] if a.v is None else read(Plane(a.v, a.value_format, a.v_scale), at, kv_head)
    return keys, values


def read_window(a: Attend, b: int, entries: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of entries of the window plane."""
    assert a.win is not None and a.win_page_table is not None
    plane = Plane(a.win, a.win_format, None, a.win_page_size)
    rows = read(plane, where("attend", a.win_page_table[b], entries, plane, "win_page_table", b), kv_head)
    return rows, rows[:, : a.v_dim]
