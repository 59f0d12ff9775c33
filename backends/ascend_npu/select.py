"""``select`` of entries by torch's own operations: every option but pooled units and probabilities, for where no
operator takes the call.

All visible entries of a row are scored in float32, a bounded number at a time. What is selected is found by comparison
with the last score that has room, and among equal ones by counting, so the order of a device's sort does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .memory import Plane
from .rows import Rows, place, ranges, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.select import Select

WORKSPACE = 1 << 28
"""Bytes of scores, and of keys in float32, at a time."""
COLUMNS = 256
"""Entries that are scored at a time, always as many, so that products do not depend on other rows' lengths."""
INF = float("inf")


def select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    """Lists of the best entries; values are their scores."""
    a = a.with_float_queries
    outputs = [(indices, -1), (counts, 0), (values, -INF), (candidate_blocks, -1)]
    for output, nothing in outputs:
        if output is not None:
            output.fill_(nothing)
    plane = Plane(a.keys, a.format, a.key_scale, a.page_size)
    width = a.page_table.shape[1] * plane.page_size if a.kv_range is not None else a.max_seq_len // a.ratio
    width += a.tail != "none"  # what no entry covers yet is a unit too
    if not counts.numel() or len(a.seq_lens) == 0 or not width:
        return
    width = -(-width // COLUMNS) * COLUMNS
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    each = max(width * a.out_heads, COLUMNS * plane.heads * a.q.shape[2])
    most = max(WORKSPACE // (4 * each), 1)
    for first in range(0, len(a.q), most):
        part = slice(first, first + most)
        units = units_of(a, rows, part, width)
        scores = scores_of(a, plane, rows.sequence[part], units, part)
        chosen = chosen_of(a, units, scores, part)
        packed, count = listed(chosen, a.k)
        found = torch.where(units.kept[:, None], INF, scores).gather(-1, packed.clamp(min=0))
        found = torch.where(packed < 0, -INF, found)
        if a.order == "score":
            order = found.sort(dim=-1, descending=True, stable=True).indices
            packed, found = packed.gather(-1, order), found.gather(-1, order)
        indices[part] = packed.to(torch.int32)
        counts[part] = count.to(torch.int32)
        if values is not None:
            values[part] = found
        if candidate_blocks is not None:
            candidate_blocks[part] = listed(best_blocks(a, units, scores), a.candidate_k)[0].to(torch.int32)


class Units(NamedTuple):
    """The units of R rows, as masks ``[R, width]``, and numbers of each row ``[R, 1]``."""

    entries: Tensor
    """Visible ones, which have a score."""
    kept: Tensor
    """Those that are selected whatever they score."""
    free: Tensor
    """The others, without those that the row's last tokens have no entry for."""
    room: Tensor
    """Places of the list."""
    end: Tensor
    """One more than the newest unit, 0 where there is none."""


def units_of(a: Select, rows: Rows, part: slice, width: int) -> Units:
    """What some rows may select."""
    tokens = rows.tokens if a.causal else rows.length
    low, high = (x[part, None] for x in ranges(a.kv_range, tokens // a.ratio, rows))
    high = torch.maximum(low, high)
    end = high if a.tail == "none" else torch.maximum(high, (tokens[part, None] + a.ratio - 1) // a.ratio)
    tail = end - high
    room = torch.full_like(low, a.k) if a.row_k is None else a.row_k[part, None].long().clamp(0, a.k)
    if a.tail == "reserved":
        room = (room - (tail == 0).long()).clamp(min=0)
    numbers = torch.arange(width, device=low.device)
    newest, oldest = end - 1 - numbers, numbers - low  # how many lie before and behind
    there = (newest >= 0) & (oldest >= 0)
    last = torch.minimum(tail.clamp(min=a.keep_last), end - low)
    order = torch.where(newest < last, newest, torch.where(oldest < a.keep_first, last + oldest, a.k + 1))
    kept = there & (order < room)
    entries = there & (numbers < high)
    return Units(entries, kept, entries & ~kept, room, torch.where(end > low, end, 0))


def scores_of(a: Select, plane: Plane, sequence: Tensor, units: Units, part: slice) -> Tensor:
    """Scores of the units of each list, ``[R, lists, width]``; -inf for what is no entry, and for NaN."""
    q = a.q[part].float().unflatten(1, (plane.heads, -1))  # [R, key heads, heads of one, D]
    heads = torch.arange(plane.heads, device=q.device)[:, None]
    weights = None if a.weights is None else a.weights[part].float()[..., None]
    width, pieces = units.entries.shape[1], []
    for first in range(0, width, COLUMNS):
        columns = torch.arange(first, first + COLUMNS, device=q.device)
        wanted = units.entries[:, None, first : first + COLUMNS]
        entries, owner = columns.expand_as(wanted), sequence[:, None, None]
        page, offset, lost = place(a.page_table, owner, entries, wanted, plane.pages, plane.page_size)
        keys = torch.where(wanted[..., None], plane.rows(page, offset, heads), 0.0)
        products = rounded(a, (q @ keys.transpose(-1, -2)).flatten(1, 2))  # [R, heads, C]
        if a.score == "relu_sum":
            products = torch.where(products < 0, 0.0, products)  # a NaN stays
        if weights is not None:
            products = rounded(a, products * weights)
        each = products.unflatten(1, (a.out_heads, -1))
        total = rounded(a, (each.amax(2) if a.score == "max" else each.sum(2)) * a.scale)
        nothing = ~wanted | lost | each.isnan().any(2) | total.isnan()
        pieces.append(torch.where(nothing, -INF, total))
    return torch.cat(pieces, -1)


def rounded(a: Select, x: Tensor) -> Tensor:
    return x.bfloat16().float() if a.score_dtype == "bf16" else x


def chosen_of(a: Select, units: Units, scores: Tensor, part: slice) -> Tensor:
    """Which units each list holds, ``[R, lists, width]``."""
    free = units.free[:, None].expand_as(scores)
    if a.candidates is not None:
        free = free & candidates_of(a, scores.shape[-1], part)
    spare = (units.room - units.kept.sum(-1, keepdim=True))[:, None]  # [R, 1, 1]
    best = largest(torch.where(free, scores, -INF), spare, a.k)
    if not (a.return_values or a.candidate_k or a.order == "score"):
        best = torch.where(free.sum(-1, keepdim=True) <= spare, free, best)  # a row that fits is not scored
    return best | units.kept[:, None]


def candidates_of(a: Select, width: int, part: slice) -> Tensor:
    """Which entries lie in the candidate blocks, ``[R, lists or 1, width]``."""
    assert a.candidates is not None
    blocks = a.candidates[part].long()
    count = width // a.candidate_block + 1
    blocks = torch.where((blocks >= 0) & (blocks < count), blocks, count)  # the last column takes what is none
    listed = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.int32, device=blocks.device)
    listed.scatter_(-1, blocks, torch.ones_like(blocks, dtype=torch.int32))
    return listed.index_select(-1, torch.arange(width, device=blocks.device) // a.candidate_block) > 0


def best_blocks(a: Select, units: Units, scores: Tensor) -> Tensor:
    """The candidate blocks to return, ``[R, lists, blocks]``: the newest unit's, and those with the largest maximum."""
    count = -(-scores.shape[-1] // a.candidate_block)
    spare = count * a.candidate_block - scores.shape[-1]
    maxima = torch.nn.functional.pad(scores, (0, spare), value=-INF).unflatten(-1, (count, -1)).amax(-1)
    pinned = torch.arange(count, device=scores.device) == (units.end - 1) // a.candidate_block
    pinned = (pinned & (units.end > 0))[:, None]
    room = torch.full_like(units.end, a.candidate_k - 1)[:, None]
    others = largest(torch.where(pinned, -INF, maxima), room, a.candidate_k)
    return (others & (units.end > 0)[:, None]) | pinned


def largest(scores: Tensor, count: Tensor, most: int) -> Tensor:
    """Which are the ``count`` (at most ``most``) largest above -inf, of equal ones those of the lowest index."""
    most = min(most, scores.shape[-1])
    if not most:
        return torch.zeros_like(scores, dtype=torch.bool)
    count = count.clamp(max=most)
    ordered = scores.topk(most, -1).values
    least = ordered.gather(-1, (count - 1).clamp(min=0).expand(*scores.shape[:-1], 1))
    above, equal = scores > least, scores == least
    among = equal.long().cumsum(-1) <= count - above.sum(-1, keepdim=True)
    return (above | (equal & among)) & (scores > -INF) & (count > 0)


def listed(chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The numbers of what is ``chosen``, ascending and then -1, int64 ``[..., width]``, and how many they are."""
    position = torch.where(chosen, chosen.long().cumsum(-1) - 1, width)  # the last column takes what is not chosen
    numbers = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(chosen)
    found = torch.full((*chosen.shape[:-1], width + 1), -1, device=chosen.device)
    found.scatter_(-1, position, torch.where(chosen, numbers, -1))
    return found[..., :width], chosen.sum(-1)
