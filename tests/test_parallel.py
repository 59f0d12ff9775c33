"""Heads and entries over 2 and 4 processes against one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import sparse_attn
from sparse_attn.checks import InvalidCall
from sparse_attn.integrations import parallel
from sparse_attn.integrations.parallel import Shard
from sparse_attn.ops import Selected

ROOT = Path(__file__).parent.parent
PHASES = {
    # tokens of each sequence, query rows of each sequence
    "prefill": ([21, 0, 2, 33], [21, 0, 2, 33]),
    "decode": ([37, 1, 0, 61], [1, 1, 1, 1]),
    "draft": ([37, 3, 50, 4], [4, 3, 1, 0]),
}
NOWHERE, PADDING, PAGE = 1 << 30, 2, 3
ALONE = Shard(0, 1, 1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.stop()


class Batch:
    """The same random sequences in every process, of which each stores what its shard holds."""

    def __init__(self, phase: str, shard: Shard, heads: slice = slice(None)) -> None:
        self.lengths, news = PHASES[phase]
        self.shard, self.heads = shard, heads
        self.generator = torch.Generator().manual_seed(7)
        starts = [sum(news[:b]) for b in range(len(news) + 1)]
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        self.rows = starts[-1] + PADDING
        self.sequences = dict(cu_seqlens_q=torch.tensor(starts, dtype=torch.int32), seq_lens=lengths)
        self.sequences |= dict(max_seqlen_q=max(news), max_seq_len=max(self.lengths))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def queries(self, heads: int, dim: int) -> Tensor:
        """With NaN in rows of padding."""
        q = self.normal(self.rows, heads, dim)
        q[-PADDING:] = float("nan")
        return q

    def plane(self, heads: int, dim: int, ratio: int = 1, whole: bool = False) -> tuple[Tensor, Tensor]:
        """A plane with NaN where nothing is stored, and its page table with wild numbers where no page is."""
        entries = [n // ratio for n in self.lengths]
        rows = self.normal(sum(entries), heads, dim).bfloat16().float()  # so that some scores are equal
        held = [self.shard.held(n) for n in entries]
        counts = [-(-n // PAGE) for n in held]
        table = torch.full((len(entries), max(counts)), NOWHERE, dtype=torch.int32)
        pages = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).tolist()
        for b, count in enumerate(counts):
            for i in range(count):
                table[b, i] = pages.pop()
        plane = torch.full((sum(counts) + 2, PAGE, heads, dim), float("nan"))
        numbers = torch.cat([torch.arange(n) for n in entries])
        owners = torch.repeat_interleave(torch.arange(len(entries)), torch.tensor(entries))
        slots = self.shard.slots(numbers, owners, table, PAGE)
        assert int((slots >= 0).sum()) == sum(held)
        sparse_attn.store(rows, plane, slots, format="fp32")
        return plane, table


Result = tuple[list[Selected], Tensor, Tensor]


def latent(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """DeepSeek V3.2: the indexer's choice on one latent plane."""
    q, index_q, weights = b.queries(8, 24), b.queries(4, 8), b.normal(b.rows, 4)
    keys, key_table = b.plane(1, 8)
    kv, table = b.plane(1, 24)
    chosen = select(
        index_q, weights, keys=keys, page_table=key_table, format="fp32", k=6, scale=0.3, order="index", **b.sequences
    )
    planes = dict(kv=kv, page_table=table, format="fp32", indices=chosen.indices, index_counts=chosen.counts)
    return [chosen], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=16, **planes, **b.sequences)


def compressed(b: Batch, select: Callable, attend: Callable, heads: slice, chosen: bool = True) -> Result:
    """DeepSeek V4: a window and compressed entries in one softmax, with sinks."""
    q, index_q, weights, sinks = b.queries(8, 16), b.queries(4, 8), b.normal(b.rows, 4), b.normal(8) * 2
    (win, win_table), (kv, table), (keys, key_table) = b.plane(1, 16), b.plane(1, 16, 4), b.plane(1, 8, 4)
    selected = []
    planes: dict[str, Any] = dict(kv=kv, page_table=table, format="fp32", ratio=4, win=win, win_page_table=win_table)
    if chosen:
        options = dict(keys=keys, page_table=key_table, format="fp32", ratio=4, k=3, scale=0.3, order="index")
        selected = [select(index_q, weights, **options, **b.sequences)]
        planes |= dict(indices=selected[0].indices, index_counts=selected[0].counts)
    planes |= dict(win_format="fp32", window=7, sinks=sinks[heads])
    return selected, *attend(q[:, heads].contiguous(), scale=0.2, v_dim=16, **planes, **b.sequences)


def tokens(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """A dense model with lists for each KV head, budgets for each row, and tokens that are always kept."""
    q, budget = b.queries(8, 8), torch.arange(b.rows, dtype=torch.int32) % 12
    (k, table), (v, _) = b.plane(2, 8), b.plane(2, 8)
    options = dict(keys=k, page_table=table, format="fp32", k=9, scale=0.3, score="max", out_heads=2)
    chosen = select(q, None, **options, keep_first=2, keep_last=3, row_k=budget, order="index", **b.sequences)
    planes = dict(kv=k, v=v, page_table=table, format="fp32", indices=chosen.indices, index_counts=chosen.counts)
    return [chosen], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=8, **planes, **b.sequences)


def blocks(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """MiniMax-M3: blocks for each KV head, the newest among them."""
    q, index_q = b.queries(8, 8), b.queries(2, 8)
    (k, table), (v, _), (keys, key_table) = b.plane(2, 8), b.plane(2, 8), b.plane(1, 8)
    options = dict(keys=keys, page_table=key_table, format="fp32", k=3, scale=0.3, score="dot", out_heads=2)
    chosen = select(index_q, None, **options, block=4, pool="max", keep_last=1, order="index", **b.sequences)
    planes = dict(kv=k, v=v, page_table=table, format="fp32", indices=chosen.indices, select_block=4)
    return [chosen], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=8, **planes, **b.sequences)


def candidates(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """DeepSeek V4.1: blocks by their best entry, then entries of them; equal scores are common."""
    q, index_q, weights = b.queries(8, 16), b.queries(4, 8).round(), b.normal(b.rows, 4).round()
    (keys, key_table), (kv, table) = b.plane(1, 8), b.plane(1, 16)
    options = dict(keys=keys, page_table=key_table, format="fp32", scale=0.5, score_dtype="bf16", order="index")
    first = select(index_q, weights, **options, k=4, block=4, pool="max", keep_last=1, **b.sequences)
    limits = dict(candidates=first.indices, candidate_block=4)
    chosen = select(index_q, weights, **options, **limits, k=5, **b.sequences)
    planes = dict(kv=kv, page_table=table, format="fp32", indices=chosen.indices, index_counts=chosen.counts)
    return [first, chosen], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=16, **planes, **b.sequences)


def window(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """A window alone."""
    q, (win, table) = b.queries(8, 16), b.plane(1, 16)
    planes = dict(win=win, win_page_table=table, win_format="fp32", window=5)
    return [], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=16, **planes, **b.sequences)


def encoder(b: Batch, select: Callable, attend: Callable, heads: slice) -> Result:
    """Explicit ranges, wild in rows of padding, and no causality."""
    q, index_q = b.queries(8, 8), b.queries(2, 8)
    (k, table), (keys, key_table) = b.plane(2, 8), b.plane(1, 8)
    ranges = parallel.visible(b.sequences["cu_seqlens_q"], b.sequences["seq_lens"], b.rows, causal=False)
    ranges[:, 0] = -3
    ranges[:, 1].sub_(1).clamp_(min=-2)
    ranges[-PADDING:] = torch.tensor([-5, NOWHERE])
    options = dict(keys=keys, page_table=key_table, format="fp32", k=7, scale=0.3, score="dot", kv_range=ranges)
    chosen = select(index_q, None, **options, keep_first=1, causal=False, order="index", **b.sequences)
    planes = dict(kv=k, page_table=table, format="fp32", indices=chosen.indices, kv_range=ranges, causal=False)
    return [chosen], *attend(q[:, heads].contiguous(), scale=0.2, v_dim=8, **planes, **b.sequences)


KINDS = {
    "V3.2": latent,
    "V4 ratio 4": compressed,
    "V4 ratio 128": partial(compressed, chosen=False),
    "tokens": tokens,
    "blocks": blocks,
    "V4.1": candidates,
    "window": window,
    "encoder": encoder,
}
CASES = [(kind, phase, run) for kind in KINDS for phase in PHASES for run in (1, 4, 16, 64)]
CASES = [(kind, phase, run) for kind, phase, run in CASES if run > 1 or kind not in ("blocks", "V4.1")]


def one(kind: str, phase: str) -> Result:
    """The result of one process."""
    attend = partial(sparse_attn.attend, return_lse=True)
    return KINDS[kind](Batch(phase, ALONE), sparse_attn.select, attend, slice(None))


def of_shard(group: Any, cases: list[tuple[str, str, int]], heads: str) -> list[Result]:
    """What one rank of a context-parallel group gets."""
    found = []
    for kind, phase, run in cases:
        shard = Shard.of(run, group)
        own = 8 // shard.ranks
        mine = slice(None) if heads == "all" else slice(shard.rank * own, (shard.rank + 1) * own)
        attend = partial(parallel.attend, shard, heads=heads)
        found.append(KINDS[kind](Batch(phase, shard), partial(parallel.select, shard), attend, mine))
    return found


def assert_same_lists(got: list[Selected], expected: list[Selected], where: str) -> None:
    assert len(got) == len(expected)
    for some, other in zip(got, expected, strict=True):
        assert torch.equal(some.counts, other.counts), where
        assert torch.equal(some.indices, other.indices), where


@pytest.mark.parametrize("heads", ["all", "own"])
@pytest.mark.parametrize("count", [2, 4])
def test_entries_over_ranks(ranks: Ranks, count: int, heads: str) -> None:
    """Every rank selects the same entries as one process, in the same bits, and attends to the same result."""
    cases = CASES if heads == "all" else [case for case in CASES if case[2] == 4]
    everyone = ranks.run(count, of_shard, cases, heads)
    for i, (kind, phase, run) in enumerate(cases):
        where = f"{kind}, {phase}, run {run}"
        selected, out, lse = one(kind, phase)
        of_ranks = [found[i] for found in everyone]
        for mine, _, _ in of_ranks:
            assert_same_lists(mine, selected, where)
            for some, first in zip(mine, of_ranks[0][0], strict=True):
                assert torch.equal(some.values.view(torch.int32), first.values.view(torch.int32)), where
        if heads == "all":
            for _, other, other_lse in of_ranks[1:]:
                assert torch.equal(other, of_ranks[0][1]) and torch.equal(other_lse, of_ranks[0][2]), where
            got, got_lse = of_ranks[0][1:]
        else:
            got, got_lse = (torch.cat(parts, 1) for parts in list(zip(*of_ranks, strict=True))[1:])
        torch.testing.assert_close(got, out, atol=2e-6, rtol=2e-6, msg=lambda text, w=where: f"{w}: {text}")
        torch.testing.assert_close(got_lse, lse, atol=2e-6, rtol=2e-6, msg=lambda text, w=where: f"{w}: {text}")


def of_heads(group: Any, phase: str) -> list[Tensor]:
    """What one tensor-parallel rank computes of a dense model's heads, and of latent attention's; then of all heads."""
    shard = Shard.of(1, group)
    found: list[Tensor] = []
    own = parallel.heads(8, 2, shard.rank, shard.ranks)
    b = Batch(phase, ALONE)
    q, (k, table), sinks = b.queries(8, 8), b.plane(2, 8), b.normal(8)
    k = k[:, :, own.kv]  # what the rank would store
    options = dict(page_table=table, format="fp32", scale=0.3, **b.sequences)
    lists = own.kv.stop - own.kv.start
    chosen = sparse_attn.select(
        q[:, own.group].contiguous(), None, keys=k, k=9, out_heads=lists, score="softmax_sum", **options
    )
    mine = dict(kv=k, v_dim=8, indices=chosen.indices, index_counts=chosen.counts, sinks=sinks[own.query])
    found.append(sparse_attn.attend(q[:, own.query].contiguous(), **mine, **options))
    own = parallel.heads(8, 1, shard.rank, shard.ranks)
    selected, out, _ = latent(
        Batch(phase, ALONE), sparse_attn.select, partial(sparse_attn.attend, return_lse=True), own.query
    )
    found.append(out)
    return [parallel.gather_heads(x, shard) for x in found] + [parallel.gather(selected[0].indices, shard)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", [2, 4])
def test_heads_over_ranks(ranks: Ranks, count: int, phase: str) -> None:
    b = Batch(phase, ALONE)
    q, (k, table), sinks = b.queries(8, 8), b.plane(2, 8), b.normal(8)
    options = dict(page_table=table, format="fp32", scale=0.3, **b.sequences)
    chosen = sparse_attn.select(q, None, keys=k, k=9, out_heads=2, score="softmax_sum", **options)
    dense = sparse_attn.attend(
        q, kv=k, v_dim=8, indices=chosen.indices, index_counts=chosen.counts, sinks=sinks, **options
    )
    (selected,), out, _ = one("V3.2", phase)
    for got, got_latent, lists in ranks.run(count, of_heads, phase):
        torch.testing.assert_close(got, dense, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(got_latent, out, atol=2e-6, rtol=2e-6)
        assert all(torch.equal(mine, selected.indices) for mine in lists)


def in_16_bits(group: Any) -> tuple[Tensor, Tensor]:
    shard = Shard.of(4, group)
    b = Batch("draft", shard)
    q, (kv, table) = b.queries(8, 16), b.plane(1, 16)
    options = dict(kv=kv.bfloat16(), page_table=table, scale=0.2, v_dim=16, **b.sequences)
    found = parallel.attend(shard, q.bfloat16(), **options)[0]
    b = Batch("draft", ALONE)
    q, (kv, table) = b.queries(8, 16), b.plane(1, 16)
    options = dict(kv=kv.bfloat16(), page_table=table, scale=0.2, v_dim=16, **b.sequences)
    return found, sparse_attn.attend(q.bfloat16(), **options)


def test_16_bits(ranks: Ranks) -> None:
    for got, expected in ranks.run(2, in_16_bits):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [1, 3, 5, 40])
def test_shards_hold_every_entry_once(count: int, run: int) -> None:
    shards = [Shard(rank, count, run) for rank in range(count)]
    numbers = torch.arange(-2, 37, dtype=torch.int32)
    local = torch.stack([shard.local(numbers) for shard in shards])
    assert (local >= 0).sum(0).tolist() == [0, 0] + [1] * 37
    for shard, mine in zip(shards, local, strict=True):
        own = mine[mine >= 0]
        assert own.tolist() == list(range(len(own)))  # in order, without gaps
        assert torch.equal(shard.globals(own), numbers[mine >= 0]) and shard.globals(numbers[:2]).tolist() == [-2, -1]
        for n, held in zip(numbers.tolist(), shard.held(numbers).tolist(), strict=True):
            assert held == shard.held(n) == int((mine[: max(n, 0) + 2] >= 0).sum())


def test_slots() -> None:
    shard = Shard(1, 2, 2)  # holds 2, 3, 6, 7, ...
    table = torch.tensor([[5, 4], [9, NOWHERE]], dtype=torch.int32)
    entries = torch.tensor([2, 3, 6, 7, 3, 0, -1, 1000])
    sequences = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0])
    assert shard.slots(entries, sequences, table, 3).tolist() == [15, 16, 17, 12, 28, -1, -1, -1]
    assert shard.slots(entries[:0], sequences[:0], table[:, :0], 3).tolist() == []


def test_visible_ranges() -> None:
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 5, 9], [7, 4, 1, 0]))
    rows = parallel.visible(starts, lengths, 11)
    assert rows.tolist() == [[0, n] for n in (5, 6, 7, 0, 1, 0, 0, 0, 0, 0, 0)]
    assert parallel.visible(starts, lengths, 11, ratio=2)[:, 1].tolist() == [2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0]
    assert parallel.visible(starts, lengths, 11, causal=False)[:, 1].tolist() == [7, 7, 7, 0, 1] + [0] * 6
    assert parallel.visible(starts, lengths, 11, window=6)[:5].tolist() == [[0, 5], [0, 6], [1, 7], [0, 0], [0, 1]]
    assert parallel.visible(starts[:1], lengths[:0], 2).tolist() == [[0, 0], [0, 0]]


def test_heads() -> None:
    assert parallel.heads(8, 2, 1, 2) == (slice(4, 8), slice(1, 2), slice(4, 8))
    assert parallel.heads(8, 2, 1, 4) == (slice(2, 4), slice(0, 1), slice(0, 4))
    assert parallel.heads(8, 4, 1, 2) == (slice(4, 8), slice(2, 4), slice(4, 8))
    assert parallel.heads(128, 1, 3, 8) == (slice(48, 64), slice(0, 1), slice(0, 128))
    for arguments, message in (
        ((6, 2, 0, 4), "heads: q_heads: expected a multiple of the 4 ranks, got 6"),
        ((12, 3, 0, 2), "heads: kv_heads: expected a multiple or a divisor of the 2 ranks, got 3"),
        ((8, 2, 2, 2), "heads: rank: expected 0 to 1, got 2"),
        ((8, 3, 0, 2), "heads: q_heads: expected a multiple of the 3 KV heads, got 8"),
    ):
        with pytest.raises(InvalidCall, match=message):
            parallel.heads(*arguments)


def test_refusals() -> None:
    b = Batch("decode", ALONE)
    keys, table = b.plane(1, 8)
    options: dict[str, Any] = dict(keys=keys, page_table=table, format="fp32", k=4, scale=1.0, **b.sequences)
    q = b.queries(4, 8)
    for change, message in (
        (dict(score="softmax_sum"), "parallel.select: score: expected scores that need no sum over all entries"),
        (dict(ratio=2, span=4), "parallel.select: span: expected 0 or the ratio of 2, as other ranks hold neighbours"),
        (dict(ratio=2, tail="counted"), "parallel.select: tail: expected 'none', got 'counted'"),
        (dict(candidate_k=2), "parallel.select: candidate_k: expected 0, got 2; select blocks"),
        (dict(keep_last=5), "parallel.select: k: expected at least the 5 that are always kept"),
    ):
        with pytest.raises(InvalidCall, match=message):
            parallel.select(ALONE, q, None, **(options | change))
    with pytest.raises(InvalidCall, match="Shard: run: expected a multiple of the block of 4 entries, got 6"):
        parallel.select(Shard(0, 2, 6), q, None, **options, block=4, pool="max")
    with pytest.raises(InvalidCall, match="Shard: rank: expected 0 to 1, got 2"):
        Shard(2, 2, 1)
    options = dict(scale=1.0, v_dim=8, **b.sequences)
    with pytest.raises(InvalidCall, match="win_range: expected explicit ranges without a causal window"):
        parallel.attend(ALONE, q, win=keys, win_page_table=table, win_format="fp32", window=3, causal=False, **options)
    with pytest.raises(InvalidCall, match="attend: indices: expected None without a main plane"):
        indices = torch.zeros(len(q), 1, 1, dtype=torch.int32)
        planes = dict(win=keys, win_page_table=table, win_format="fp32", window=3, indices=indices)
        parallel.attend(ALONE, q, **planes, **options)
    with pytest.raises(InvalidCall, match=r"exchange_heads: x: expected a multiple of 2 heads \(axis 1\), got 3"):
        parallel.join_attended(q[:, :3], q[:, :3, 0], Shard(0, 2, 1), keep="own")


def of_page(group: Any, blocks: list[str]) -> dict[str, Any]:
    """The code of the page on one rank, and the same on one device."""
    shard = Shard.of(64, group)
    generator = torch.Generator().manual_seed(5)
    normal = partial(torch.randn, generator=generator)
    lengths = [300, 1, 150]
    names: dict[str, Any] = dict(sparse_attn=sparse_attn, group=group, rank=shard.rank, ranks=shard.ranks)
    names |= dict(seq_lens=torch.tensor(lengths, dtype=torch.int32), cu_seqlens_q=torch.arange(4, dtype=torch.int32))
    names["positions"] = torch.cat([torch.arange(n) for n in lengths])
    names["sequences"] = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    names |= dict(latent_rows=normal(451, 1, 40), key_rows=normal(451, 1, 16), weights=normal(3, 4), q=normal(3, 8, 40))
    names |= dict(index_q=normal(3, 4, 16), q_all=normal(3, 8, 8), sinks=normal(8))
    k, table = normal(60, 16, 2, 8), torch.arange(60, dtype=torch.int32).view(3, 20)
    batch = dict(cu_seqlens_q=names["cu_seqlens_q"], seq_lens=names["seq_lens"], max_seqlen_q=1, max_seq_len=300)
    names |= dict(k=k, dense=batch | dict(page_table=table))
    width = max(-(-shard.held(n) // 16) for n in lengths)
    names["page_table"] = torch.arange(3 * width, dtype=torch.int32).view(3, width)
    names |= dict(latent=torch.zeros(3 * width, 16, 1, 40), keys=torch.zeros(3 * width, 16, 1, 16))
    own = 8 // shard.ranks
    names["own_heads"] = slice(shard.rank * own, (shard.rank + 1) * own)
    found: dict[str, Any] = {}
    for i, block in enumerate(blocks):
        exec(block, names)
        found |= {f"{name} {i}": names[name] for name in ("out", "everything") if name in names}
    found |= dict(room=names["room"], indices=names["selected"].indices)

    slots = table[names["sequences"], names["positions"] // 16] * 16 + names["positions"] % 16
    latent, keys = torch.zeros(60, 16, 1, 40), torch.zeros(60, 16, 1, 16)
    for rows, plane in (("latent_rows", latent), ("key_rows", keys)):
        sparse_attn.store(names[rows], plane, slots.long(), format="fp32")
    batch |= dict(page_table=table, format="fp32", scale=0.1)
    chosen = sparse_attn.select(names["index_q"], names["weights"], keys=keys, k=16, **batch)
    out = sparse_attn.attend(names["q"], kv=latent, v_dim=32, indices=chosen.indices, **batch)
    everything = sparse_attn.attend(names["q_all"], kv=k, v_dim=8, sinks=names["sinks"], **batch)
    return found | dict(chosen=chosen.indices, expected=out, heads=names["own_heads"], dense=everything)


@pytest.mark.parametrize("count", [2, 4])
def test_the_code_of_the_page(ranks: Ranks, count: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parallel.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    found = ranks.run(count, of_page, blocks)
    assert [sum(room) for room in zip(*(f["room"] for f in found), strict=True)] == [300, 1, 150]
    for f in found:
        assert torch.equal(f["indices"].sort().values, f["chosen"].sort().values)
        torch.testing.assert_close(f["out 0"], f["expected"], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(f["everything 1"], f["dense"], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(f["out 2"], f["expected"][:, f["heads"]], atol=2e-6, rtol=2e-6)
