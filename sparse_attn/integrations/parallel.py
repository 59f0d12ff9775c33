"""Attention over several devices: heads split by tensor parallelism, entries dealt out by context parallelism.

``select`` and ``attend`` here take the arguments of one device, and each rank's own planes and page tables. What they
are made of is public too, for engines that place their own collectives. Everything travels through
``torch.distributed``, as bytes, so that any backend of it carries every dtype: NCCL, HCCL, gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..checks import expect, expect_one_of
from ..ops import Selected

Count = TypeVar("Count", int, Tensor)
Group = Any
"""``torch.distributed.ProcessGroup``, or None for all processes."""


@dataclass(frozen=True)
class Shard:
    """Which entries of a plane one rank holds: runs of ``run`` entries are dealt to the ranks in turns.

    Entry ``e`` belongs to rank ``e // run % ranks``, and is its entry ``e // (run * ranks) * run + e % run``: ranks
    hold their entries in order, without gaps. With ``run * ranks`` at least the longest sequence each rank holds one
    contiguous part. The rule is that of ``select_merge``, and holds for every plane in its own entries.
    """

    rank: int
    ranks: int
    run: int
    group: Group = None

    def __post_init__(self) -> None:
        expect(self.ranks >= 1, "Shard", "ranks", "at least 1", self.ranks)
        expect(0 <= self.rank < self.ranks, "Shard", "rank", f"0 to {self.ranks - 1}", self.rank)
        expect(self.run >= 1, "Shard", "run", "at least 1 entry", self.run)

    @staticmethod
    def of(run: int, group: Group = None) -> Shard:
        """The shard of this process in ``group``."""
        return Shard(dist.get_rank(group), dist.get_world_size(group), run, group)

    @property
    def stride(self) -> int:
        """Entries from one run of a rank to its next."""
        return self.run * self.ranks

    def held(self, entries: Count) -> Count:
        """How many of a sequence's first ``entries`` this rank holds; an integer, or a tensor of them. Negative: 0."""
        whole, rest = entries // self.stride, entries % self.stride - self.rank * self.run
        if isinstance(entries, Tensor):
            return (whole * self.run + rest.clamp(0, self.run)).clamp(min=0)
        return max(whole * self.run + min(max(rest, 0), self.run), 0)

    def local(self, numbers: Tensor) -> Tensor:
        """Global numbers of entries as this rank's; -1 for those of others, and for negative ones. Any shape."""
        mine = (numbers >= 0) & (numbers // self.run % self.ranks == self.rank)
        return torch.where(mine, numbers // self.stride * self.run + numbers % self.run, -1)

    def globals(self, numbers: Tensor) -> Tensor:
        """This rank's numbers of entries as global ones; negative ones stay. Any shape."""
        found = self.rank * self.run + numbers // self.run * self.stride + numbers % self.run
        return torch.where(numbers < 0, numbers, found)

    def local_range(self, ranges: Tensor) -> Tensor:
        """Ranges ``[lo, hi)`` of global numbers, int32 ``[T, 2]``, as ranges of this rank's."""
        return self.held(ranges)

    def slots(self, entries: Tensor, sequences: Tensor, page_table: Tensor, page_size: int) -> Tensor:
        """Where ``store`` writes entries on this rank, int64 ``[N]``; -1, which it skips, for those of others.

        Args:
            entries: global numbers ``[N]``; a negative one has no slot.
            sequences: the sequence ``[N]`` of each, a row of the page table.
            page_table: int32 ``[B, max_pages]`` of this rank's plane.
            page_size: entries of its pages.
        """
        local = self.local(entries.long())
        if not page_table.numel():
            return torch.full_like(local, -1)
        at = local.clamp(min=0)
        page = page_table[sequences.long(), (at // page_size).clamp(max=page_table.shape[1] - 1)]
        return torch.where(local >= 0, page * page_size + at % page_size, -1)

    def blocks(self, size: int) -> Shard:
        """The same dealing, counted in blocks of ``size`` entries, of which every rank must hold whole ones."""
        whole = self.ranks == 1 or self.run % size == 0
        expect(whole, "Shard", "run", f"a multiple of the block of {size} entries", self.run)
        return Shard(self.rank, self.ranks, max(self.run // size, 1), self.group)


class Heads(NamedTuple):
    """Heads of a tensor-parallel rank."""

    query: slice
    """Query heads it computes. Sinks and outputs are split alike."""
    kv: slice
    """KV heads it stores. Ranks that share one store it each."""
    group: slice
    """Query heads of the whole model that read those KV heads: ``select`` needs all of them for a list for each KV
    head."""


def heads(q_heads: int, kv_heads: int, rank: int, ranks: int) -> Heads:
    """The heads of one of ``ranks`` tensor-parallel ranks.

    Raises:
        InvalidCall: the query heads do not divide, or neither of KV heads and ranks divides the other.
    """
    expect(0 <= rank < ranks, "heads", "rank", f"0 to {ranks - 1}", rank)
    expect(q_heads % ranks == 0, "heads", "q_heads", f"a multiple of the {ranks} ranks", q_heads)
    expect(q_heads % kv_heads == 0, "heads", "q_heads", f"a multiple of the {kv_heads} KV heads", q_heads)
    divides = kv_heads % ranks == 0 or ranks % kv_heads == 0
    expect(divides, "heads", "kv_heads", f"a multiple or a divisor of the {ranks} ranks", kv_heads)
    own, size = q_heads // ranks, q_heads // kv_heads
    first = rank * own // size
    last = max(first + 1, (rank + 1) * own // size)
    return Heads(slice(rank * own, (rank + 1) * own), slice(first, last), slice(first * size, last * size))


def gather(x: Tensor, shard: Shard) -> Tensor:
    """``x`` of every rank, ``[ranks, *x.shape]``, in the order of ranks. All ranks call it with one shape."""
    if shard.ranks == 1 or not x.numel():
        return x.expand(shard.ranks, *x.shape)
    data = x.contiguous().view(torch.uint8).flatten()
    gathered = data.new_empty(shard.ranks * data.numel())
    dist.all_gather_into_tensor(gathered, data, group=shard.group)
    return gathered.view(x.dtype).view(shard.ranks, *x.shape)


def gather_heads(q: Tensor, shard: Shard) -> Tensor:
    """Queries ``[T, H, D]`` of all ranks' heads ``[T, ranks * H, D]``, in the order of ranks."""
    return gather(q, shard).transpose(0, 1).flatten(1, 2)


def visible(
    cu_seqlens_q: Tensor, seq_lens: Tensor, rows: int, *, ratio: int = 1, causal: bool = True, window: int = 0
) -> Tensor:
    """Global entries ``[lo, hi)`` that each query row sees, int32 ``[T, 2]``; ``[0, 0)`` for rows without a token.

    Reads nothing back to the host. Layers with the same ratio and window share the result.

    Args:
        cu_seqlens_q, seq_lens: as ``attend`` takes them.
        rows: T.
        ratio: tokens of an entry.
        causal: False: every entry of the sequence.
        window: only the last so many tokens; 0: all.
    """
    t = torch.arange(rows, dtype=torch.int32, device=seq_lens.device)
    if not len(seq_lens):
        return t.new_zeros(rows, 2)
    b = torch.searchsorted(cu_seqlens_q[1:], t, right=True).clamp(max=len(seq_lens) - 1)
    tokens = seq_lens[b] - cu_seqlens_q[1:][b] + t + 1
    real = (t < cu_seqlens_q[-1]) & (tokens > 0)
    high = torch.where(real, tokens if causal else seq_lens[b], 0) // ratio
    low = (high - window).clamp(min=0) if window else torch.zeros_like(high)
    return torch.stack([low, high], 1)


def keep_ends(
    selected: Selected, shard: Shard, ranges: Tensor, k: int, first: int, last: int, row_k: Tensor | None
) -> Selected:
    """A rank's selection in which its share of each row's ``first`` and ``last`` units has value +inf.

    Args:
        selected: of this rank, by the same budget, with values, and without anything kept.
        shard: in units.
        ranges: global units that each row sees, int32 ``[T, 2]``.
        k, row_k: the budget. Where it is smaller than what is kept, the newest come first, then the first ones.
        first, last: units kept at either end, as ``keep_first`` and ``keep_last`` of ``select``.
    """
    low, high = (ranges[:, i, None, None] for i in (0, 1))
    count = (high - low).clamp(min=0)
    room = torch.full_like(count, k) if row_k is None else row_k[:, None, None].clamp(0, k)
    place = torch.arange(first + last, dtype=torch.int32, device=ranges.device)
    number = torch.where(place < last, high - 1 - place, low + place - last)
    kept = torch.where(place < torch.minimum(count, room), number, -1)
    kept = shard.local(kept).expand(-1, selected.indices.shape[1], -1)
    given = shard.globals(selected.indices)
    assert selected.values is not None
    free = (given >= low + first) & (given < high - last)
    values = [selected.values.masked_fill(~free, float("-inf")), torch.where(kept >= 0, float("inf"), float("-inf"))]
    return Selected(torch.cat([selected.indices, kept], -1), selected.counts, torch.cat(values, -1))


def join_selected(
    selected: Selected,
    shard: Shard,
    k: int,
    *,
    row_k: Tensor | None = None,
    order: str = "any",
    backend: str = "auto",
) -> Selected:
    """One selection from those of all ranks: the same bits on every one of them.

    Args:
        selected: of this rank, in its own numbers, with values.
        shard: in the units of the selection.
        k, row_k, order, backend: as ``select_merge`` takes them.

    Returns:
        What ``select_merge`` returns: global numbers.
    """
    assert selected.values is not None
    both = gather(torch.stack([selected.indices, selected.values.view(torch.int32)]), shard)
    offsets = torch.arange(shard.ranks, dtype=torch.int32, device=both.device)[:, None] * shard.run
    return ops.select_merge(
        both[:, 0],
        both[:, 1].view(torch.float32),
        offsets.expand(-1, both.shape[2]),
        k,
        run=shard.run,
        stride=shard.stride,
        row_k=row_k,
        order=order,
        backend=backend,
    )


def join_attended(
    out: Tensor, lse: Tensor, shard: Shard, *, sinks: Tensor | None = None, keep: str = "all", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over all entries from that over each rank's, computed without sinks.

    Parts are summed in the order of ranks, so that all of them get the same bits.

    Args:
        out, lse: of this rank, ``[T, H, Dv]`` and float32 ``[T, H]``.
        sinks: float32, of the heads that are kept.
        keep: ``all``: every rank gets all heads. ``own``: each rank gets its ``H / ranks`` of them, in the order of
            ranks, which moves and joins that much less.

    Returns:
        ``out`` and ``lse`` of the heads that are kept.
    """
    expect_one_of("join_attended", "keep", keep, ("all", "own"))
    move = gather if keep == "all" else exchange_heads
    return ops.merge(move(out, shard), move(lse, shard), sinks=sinks, backend=backend)


def exchange_heads(x: Tensor, shard: Shard) -> Tensor:
    """Every rank's ``x [T, H, ...]`` for the heads of this rank, ``[ranks, T, H / ranks, ...]``."""
    count = x.shape[1]
    expect(count % shard.ranks == 0, "exchange_heads", "x", f"a multiple of {shard.ranks} heads (axis 1)", count)
    parts = torch.stack(x.chunk(shard.ranks, 1))
    if shard.ranks == 1 or not x.numel():
        return parts
    data = parts.view(torch.uint8).flatten()
    received = torch.empty_like(data)
    dist.all_to_all_single(received, data, group=shard.group)
    return received.view(x.dtype).view(parts.shape)


def select(
    shard: Shard,
    q: Tensor,
    weights: Tensor | None,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    keys: Tensor,
    page_table: Tensor,
    k: int,
    scale: float,
    max_seqlen_q: int,
    max_seq_len: int,
    *,
    ratio: int = 1,
    span: int = 0,
    kv_range: Tensor | None = None,
    row_k: Tensor | None = None,
    score: str = "relu_sum",
    block: int = 1,
    keep_first: int = 0,
    keep_last: int = 0,
    tail: str = "none",
    candidates: Tensor | None = None,
    candidate_block: int = 8,
    candidate_k: int = 0,
    order: str = "any",
    causal: bool = True,
    backend: str = "auto",
    **options: Any,
) -> Selected:
    """``sparse_attn.select`` over the entries of all ranks of a shard's group: the same bits on every rank.

    Every rank calls it with the same queries, lengths, ranges, candidates and options, all global, and with its own
    ``keys``, ``key_scale`` and ``page_table``. Scores are always computed, as with ``return_values=True``.

    Raises:
        InvalidCall: for what cannot be decided from scores of parts: ``softmax_sum`` (normalised over all entries),
            spans over the ratio, tails, candidate blocks made by the call; for blocks that ranks do not hold whole.
    """
    op = "parallel.select"
    expect(score != "softmax_sum", op, "score", "scores that need no sum over all entries", repr(score), "pass 'max'")
    expect(span in (0, ratio), op, "span", f"0 or the ratio of {ratio}, as other ranks hold neighbours", span)
    expect(tail == "none", op, "tail", "'none'", repr(tail))
    do = "select blocks with pool='max' in a call of their own, and pass them on"
    expect(candidate_k == 0, op, "candidate_k", "0", candidate_k, do)
    kept = keep_first + keep_last
    expect(kept <= k, op, "k", f"at least the {kept} that are always kept, as they count in it", k)
    if kv_range is None:
        kv_range = visible(cu_seqlens_q, seq_lens, len(q), ratio=ratio, causal=causal)
    units = shard.blocks(block)
    selected = ops.select(
        q,
        weights,
        cu_seqlens_q,
        seq_lens,
        keys,
        page_table,
        k,
        scale,
        max_seqlen_q,
        max_seq_len,
        ratio=ratio,
        kv_range=shard.local_range(kv_range),
        row_k=row_k,
        score=score,
        block=block,
        candidates=None if candidates is None else shard.blocks(candidate_block).local(candidates),
        candidate_block=candidate_block,
        return_values=True,
        causal=causal,
        backend=backend,
        **options,
    )
    if keep_first or keep_last:
        seen = torch.stack([kv_range[:, 0].clamp(min=0) // block, -(-kv_range[:, 1] // block)], 1)
        real = visible(cu_seqlens_q, seq_lens, len(q), causal=causal)[:, 1:] > 0
        selected = keep_ends(selected, units, torch.where(real, seen, 0), k, keep_first, keep_last, row_k)
    return join_selected(selected, units, k, row_k=row_k, order=order, backend=backend)


def attend(
    shard: Shard,
    q: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    v_dim: int,
    max_seqlen_q: int,
    max_seq_len: int,
    *,
    kv: Tensor | None = None,
    ratio: int = 1,
    kv_range: Tensor | None = None,
    indices: Tensor | None = None,
    select_block: int = 1,
    win: Tensor | None = None,
    window: int = 0,
    win_range: Tensor | None = None,
    win_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    heads: str = "all",
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``sparse_attn.attend`` over the entries of all ranks of a shard's group; always returns ``(out, lse)``.

    Every rank calls it with the same lengths, ranges, indices and options, all global, and with its own planes, scales
    and page tables. ``heads="all"``: with the same queries, and all ranks get the same bits. ``heads="own"``: with the
    queries ``[T, H / ranks, D]`` and the sinks of its own heads, and it gets their result; the planes and ``indices``
    are those of all heads.

    A part has the dtype of ``q``, so that 16-bit parts are rounded before they are joined.
    """
    op = "parallel.attend"
    expect_one_of(op, "heads", heads, ("all", "own"))
    if kv is not None:
        if kv_range is None:
            kv_range = visible(cu_seqlens_q, seq_lens, len(q), ratio=ratio, causal=causal)
        kv_range = shard.local_range(kv_range)
        indices = None if indices is None else shard.blocks(select_block).local(indices)
    if win is not None:
        if win_range is None:
            bounded = causal and (window > 0 or win_indices is not None)
            expect(bounded, op, "win_range", "explicit ranges without a causal window", "None")
            win_range = visible(cu_seqlens_q, seq_lens, len(q), window=window)
        win_range = shard.local_range(win_range)
        win_indices = None if win_indices is None else shard.local(win_indices)
    out, lse = ops.attend(
        q if heads == "all" else gather_heads(q, shard),
        cu_seqlens_q,
        seq_lens,
        scale,
        v_dim,
        max_seqlen_q,
        max_seq_len,
        kv=kv,
        ratio=ratio,
        kv_range=kv_range,
        indices=indices,
        select_block=select_block,
        win=win,
        window=window,
        win_range=win_range,
        win_indices=win_indices,
        causal=causal,
        return_lse=True,
        backend=backend,
        **options,
    )
    return join_attended(out, lse, shard, sinks=sinks, keep=heads, backend=backend)
