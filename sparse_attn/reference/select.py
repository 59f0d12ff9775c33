"""``select``: score what a row may select, keep the best; one query row and one list at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..planes import Plane
from .rows import query_rows, read, where

if TYPE_CHECKING:
    from ..ops.select import Select

INF = float("inf")


def select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    """Lists of the best units; values are their scores."""
    if a.q_scale is not None:
        a = a._replace(q=a.q.double() * a.q_scale.double()[..., None], q_scale=None)
    indices.fill_(-1)
    counts.zero_()
    if values is not None:
        values.fill_(-INF)
    if candidate_blocks is not None:
        candidate_blocks.fill_(-1)
    for t, b, position in query_rows("select", a):
        entries, units, tail = visible(a, t, b, position)
        for head in range(a.out_heads):
            room = budget(a, t, tail)
            kept = always_kept(a, units, tail)[:room]
            candidates = candidate_entries(a, t, head, entries)
            free = [u for u in (units if candidates is None else candidates) if u not in kept]
            scores: dict[int, float] = {}
            if a.scores_all or len(kept) + len(free) > room:
                scores = unit_scores(a, t, b, head, entries if candidates is None else candidates, units)
                free = best(free, scores, room - len(kept))
            found = scores | dict.fromkeys(kept, INF)
            chosen = sorted([*kept, *free])
            if a.order == "score":
                chosen = best(chosen, found, len(chosen))
            counts[t, head] = len(chosen)
            indices[t, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            if values is not None:
                values[t, head, : len(chosen)] = torch.tensor([found[u] for u in chosen])
            if candidate_blocks is not None and len(units):
                blocks = torch.tensor(best_blocks(a, scores, units[-1]), dtype=torch.int32)
                candidate_blocks[t, head, : len(blocks)] = blocks


def visible(a: Select, t: int, b: int, position: int) -> tuple[range, range, range]:
    """Entries that row ``t`` may read, units that it may select, and those of them that hold none of the entries."""
    tokens = position + 1 if a.causal else int(a.seq_lens[b])
    if a.kv_range is not None:
        low, high = a.kv_range[t].tolist()
    else:
        low, high = 0, tokens // a.ratio - a.strides + 1  # an entry is visible with the last of its tokens
    entries = range(max(low, 0), max(high, low, 0))
    first = entries.start // a.block
    covered = units_up_to(entries.stop + a.strides - 1, a.block) if entries else first
    last = units_up_to(tokens, a.ratio * a.block) if a.tail != "none" else covered
    return entries, range(first, max(covered, last)), range(covered, max(covered, last))


def units_up_to(size: int, unit: int) -> int:
    return -(-size // unit)


def budget(a: Select, t: int, tail: range) -> int:
    """Places that row ``t`` may fill."""
    places = a.k if a.row_k is None else min(max(int(a.row_k[t]), 0), a.k)
    empty = a.tail == "reserved" and not tail
    return max(places - empty, 0)


def always_kept(a: Select, units: range, tail: range) -> list[int]:
    """Units that are selected whatever they score, the newest first, then the first ones."""
    newest = units[::-1][: max(a.keep_last, len(tail))]
    return [*newest, *(u for u in units[: a.keep_first] if u not in newest)]


def candidate_entries(a: Select, t: int, head: int, entries: range) -> list[int] | None:
    """Entries of the candidate blocks; None if every entry is a candidate."""
    if a.candidates is None:
        return None
    blocks = a.candidates[t, head if a.candidates.shape[1] > 1 else 0].tolist()
    return [e for e in entries if e // a.candidate_block in blocks]


def best(units: Iterable[int], scores: dict[int, float], count: int) -> list[int]:
    """The ``count`` units with the largest scores, of equal ones the lowest; never one with score -inf."""
    numbers = [u for u in units if scores.get(u, -INF) > -INF]
    return sorted(numbers, key=lambda u: (-scores[u], u))[:count]


def best_blocks(a: Select, scores: dict[int, float], newest: int) -> list[int]:
    """Candidate blocks, ascending: the newest unit's, and those with the largest maximum."""
    pinned = newest // a.candidate_block
    maxima: dict[int, float] = {}
    for entry, score in scores.items():
        block = entry // a.candidate_block
        maxima[block] = max(maxima.get(block, -INF), score)
    return sorted([pinned, *best((b for b in maxima if b != pinned), maxima, a.candidate_k - 1)])


def unit_scores(a: Select, t: int, b: int, head: int, entries: range | list[int], units: range) -> dict[int, float]:
    """Scores of the units that hold one of ``entries``, rounded to float32; a NaN is -inf."""
    numbers = torch.tensor([*entries], dtype=torch.int64, device=a.q.device)
    at = where("select", a.page_table[b], numbers, key_plane(a), "page_table", b)
    if a.block == a.strides == 1:
        return dict(zip(entries, as_numbers(entry_scores(a, t, head, at)).float().tolist(), strict=True))
    place = {e: i for i, e in enumerate(entries)}
    shares: dict[int, dict[int, int]] = {}  # of each unit: strides that it shares with each of the entries
    for unit in units:
        start, end = unit * a.block, (unit + 1) * a.block
        near = [e for e in range(start - a.strides + 1, end) if e in place]
        if near:
            shares[unit] = {place[e]: min(e + a.strides, end) - max(e, start) for e in near}
    if not shares:
        return {}
    if a.pool == "mean":
        scores = entry_scores(a, t, head, at, [[*some] for some in shares.values()])
    else:
        each = as_numbers(entry_scores(a, t, head, at))
        scores = torch.stack([pooled(a, each[[*some]], [*some.values()]) for some in shares.values()])
    return dict(zip(shares, as_numbers(scores).float().tolist(), strict=True))


def pooled(a: Select, scores: Tensor, times: list[int]) -> Tensor:
    return scores.max() if a.pool == "max" else (scores * torch.tensor(times, device=scores.device)).sum()


def entry_scores(
    a: Select, t: int, head: int, at: tuple[Tensor, Tensor], groups: list[list[int]] | None = None
) -> Tensor:
    """Score of each entry, or of the mean key of each group of entries, for one list."""
    size = a.q.shape[1] // a.out_heads
    heads = range(head * size, (head + 1) * size)
    plane = key_plane(a)
    keys: dict[int, Tensor] = {}
    products = []
    for h in heads:
        key_head = h * plane.heads // a.q.shape[1]
        if key_head not in keys:
            rows = read(plane, at, key_head)
            keys[key_head] = rows if groups is None else torch.stack([rows[g].mean(0) for g in groups])
        products.append(product(a, a.q[t, h].double(), keys[key_head]))
    x = rounded(a, torch.stack(products))
    if a.score == "softmax_sum":
        x = a.scale * x
        x = torch.exp(x - as_numbers(x).logsumexp(-1, keepdim=True))
    elif a.score == "relu_sum":
        x = x.clamp(min=0)
    if a.weights is not None:
        x = rounded(a, x * a.weights[t, heads.start : heads.stop, None].double())
    total = x.amax(0) if a.score == "max" else x.sum(0)
    return total if a.score == "softmax_sum" else rounded(a, a.scale * total)


def key_plane(a: Select) -> Plane:
    return Plane(a.keys, a.format, a.key_scale, a.page_size)


def product(a: Select, q: Tensor, keys: Tensor) -> Tensor:
    """``q . key`` of each key, or its upper bound over keys between two bounds."""
    if not a.bounds:
        return keys @ q
    lower, upper = keys.split(len(q), -1)
    return torch.maximum(q * lower, q * upper).sum(-1)


def rounded(a: Select, x: Tensor) -> Tensor:
    return x.bfloat16().double() if a.score_dtype == "bf16" else x


def as_numbers(scores: Tensor) -> Tensor:
    """A NaN as -inf."""
    return scores.nan_to_num(-INF, INF, -INF)
