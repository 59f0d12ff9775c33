"""`select_merge` on every kernel: against a merge found entry by entry, and as one `select` over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merges import Merge, merges
from selections import Batch

import sparse_attn

INF = float("inf")
SHARDS, TOKENS, NEW, K = 3, 61, 7, 9


@pytest.mark.parametrize("call", merges(), ids=str)
def test_agrees_entry_by_entry(call: Merge, select_merge_impl) -> None:
    args, kwargs = call.arguments()
    merged = sparse_attn.select_merge(*args, **kwargs, backend=select_merge_impl.backend)
    for got, expected in zip(merged, call.expected(), strict=False):
        assert torch.equal(got, expected)
    assert merged.candidate_blocks is None


@pytest.mark.parametrize("ties", [False, True], ids=["distinct scores", "equal scores"])
@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("dealing", ["contiguous", "entry by entry", "in runs of 4", "two chunks a shard"])
def test_merged_shards_are_one_selection(dealing: str, order: str, ties: bool, select_impl, select_merge_impl) -> None:
    draw = integers if ties else torch.randn
    options = dict(k=K, return_values=True, score="dot", out_heads=2, order=order)
    whole = Batch(options, 4, 2, True, [TOKENS, 0, 20], [NEW, 0, 2], dim=4, draw=draw)
    args, kwargs = whole.arguments()
    expected = sparse_attn.select(*args, **kwargs, backend=select_impl.backend)
    parts, offsets, dealt = [], [], {}
    for numbers, offset, rule in shards(dealing):
        plane = torch.full((2 * TOKENS, 1, 2, 4), float("nan"))
        table = torch.arange(2 * TOKENS, dtype=torch.int32).view(2, -1)
        table = torch.cat([table[:1], table[:1], table[1:]])  # the second sequence has no token
        for b, rows in enumerate(whole.keys):
            mine = [e for e in numbers if e < len(rows)]
            plane[table[b, : len(mine)].long(), 0] = rows[mine]
        held = [sum(e <= p for e in numbers) for _, p in whole.rows] + [0] * whole.padding
        ranges = torch.tensor([[0, n] for n in held], dtype=torch.int32)
        local = (*args[:4], plane, table, *args[6:])
        parts.append(sparse_attn.select(*local, **kwargs, kv_range=ranges, backend=select_impl.backend))
        offsets.append(offset)
        dealt = rule
    joined = sparse_attn.select_merge(
        torch.stack([part.indices for part in parts]),
        torch.stack([part.values for part in parts]),
        torch.tensor(offsets, dtype=torch.int32)[:, None].expand(-1, len(whole.q)),
        K,
        **dealt,
        order=order,
        backend=select_merge_impl.backend,
    )
    assert torch.equal(joined.counts, expected.counts) and torch.equal(joined.indices, expected.indices)
    torch.testing.assert_close(joined.values, expected.values, atol=1e-5, rtol=1e-5)
    assert (joined.counts == K).any()


def integers(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=generator).float()


def shards(dealing: str) -> list[tuple[list[int], int, dict[str, int]]]:
    """Of each shard: the global numbers of its entries in local order, its offset, and how entries are dealt."""
    part = -(-TOKENS // SHARDS)
    if dealing == "contiguous":
        return [([*range(s * part, min((s + 1) * part, TOKENS))], s * part, {}) for s in range(SHARDS)]
    if dealing == "two chunks a shard":  # each counted as a shard
        chunk = -(-TOKENS // (2 * SHARDS))
        return [([*range(s * chunk, min((s + 1) * chunk, TOKENS))], s * chunk, {}) for s in range(2 * SHARDS)]
    run = 1 if dealing == "entry by entry" else 4
    rule = dict(run=run, stride=run * SHARDS)
    return [([e for e in range(TOKENS) if e // run % SHARDS == s], s * run, rule) for s in range(SHARDS)]


def test_merging_in_two_steps_is_merging_in_one(select_merge_impl) -> None:
    call = Merge(4, 8, order="score")
    (indices, values, offsets, k), _ = call.arguments()
    once = sparse_attn.select_merge(indices, values, offsets, k, backend=select_merge_impl.backend)
    halves = [
        sparse_attn.select_merge(indices[i], values[i], offsets[i], k, backend=select_merge_impl.backend)
        for i in (slice(0, 2), slice(2, 4))
    ]
    none = torch.zeros(2, call.rows, dtype=torch.int32)
    twice = sparse_attn.select_merge(
        torch.stack([half.indices for half in halves]), torch.stack([half.values for half in halves]), none, k
    )
    for x, y in zip(once[:3], twice[:3], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("order", ["index", "score"])
def test_hostile_values(select_merge_impl, order: str) -> None:
    """Any index, value, offset and budget, in strided memory: as the reference has them."""
    shape = (3, 40, 2, 30)
    indices = torch.randint(-(1 << 31), 1 << 31, (*shape[:3], 60)).int()[..., ::2]
    indices = torch.where(torch.rand(shape) < 0.8, indices % 1000, indices)
    values = torch.randn(40, 3, 30, 2).transpose(0, 1).transpose(2, 3)
    rare = torch.tensor([float("nan"), -INF, INF, 3e38, -3e38, 1e-42, 0.0])
    values = torch.where(torch.rand(shape) < 0.2, rare[torch.randint(7, shape)], values)
    values = values + torch.arange(values.numel()).view(shape) * 1e-3  # no ties, whose order is tested elsewhere
    offsets = torch.randint(-900, 900, (40, 3)).int().T
    offsets[:, 0] = -(1 << 31)
    offsets[:, 1] = (1 << 31) - 1
    budgets = torch.randint(-5, 30, (40,)).int()
    budgets[:3] = torch.tensor([(1 << 31) - 1, -(1 << 31), 25])
    for dealt in ({}, dict(run=7, stride=1 << 20), dict(run=1 << 20, stride=(1 << 31) - 1)):
        args, kwargs = (indices, values, offsets, 25), dict(dealt, row_k=budgets, order=order)
        expected = sparse_attn.select_merge(*args, **kwargs, backend="reference")
        got = [torch.full_like(x, 7) for x in expected[:3]]
        names = dict(zip(("indices", "counts", "values"), got, strict=True), backend=select_merge_impl.backend)
        torch.ops.sparse_attn.select_merge.out(*args, **kwargs, **names)
        assert torch.equal(got[1], expected.counts)
        if order == "score":  # by number, those that int32 cannot hold have no order
            assert torch.equal(got[2], expected.values)
        if not dealt:
            assert torch.equal(got[0][2:], expected.indices[2:]) and (expected.indices[2:] < -1).any()
            sorted_values = (x[2:].sort(-1).values for x in (got[2], expected.values))  # a number may come twice
            assert torch.equal(*sorted_values)


@pytest.mark.parametrize("order", ["index", "score"])
def test_equal_scores_beyond_a_buffer(select_merge_impl, order: str) -> None:
    """Many candidates of few scores, those of later shards with lower numbers; and the same candidates again."""
    indices = torch.rand(5, 2, 1, 500).argsort(-1).int()
    values = torch.randint(0, 3, indices.shape).float()
    offsets = torch.arange(4, -1, -1).int()[:, None].expand(-1, 2) * 500
    for again in (1, 2):
        args = (indices.repeat(again, 1, 1, 1), values.repeat(again, 1, 1, 1), offsets.repeat(again, 1), 130)
        merged = sparse_attn.select_merge(*args, order=order, backend=select_merge_impl.backend)
        expected = sparse_attn.select_merge(*args, order=order, backend="reference")
        for x, y in zip(merged[:3], expected[:3], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(0, 2, 1, 3), (2, 0, 1, 3), (2, 2, 1, 0)])
def test_nothing_to_merge(shape: tuple[int, ...], select_merge_impl) -> None:
    indices, values = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
    merged = sparse_attn.select_merge(indices, values, torch.zeros(shape[:2], dtype=torch.int32), 4)
    assert merged.indices.shape == (shape[1], 1, 4) and (merged.indices == -1).all() and (merged.counts == 0).all()
    merged = sparse_attn.select_merge(indices, values, torch.zeros(shape[:2], dtype=torch.int32), 0)
    assert merged.indices.shape == (shape[1], 1, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            dict(shard_values=torch.zeros(3, 5, 2, 4)),
            "select_merge: shard_values: expected float32 [S, T, H, K] with K = 6, got float32 [3, 5, 2, 4]",
        ),
        (
            dict(shard_offsets=torch.zeros(3, dtype=torch.int32)),
            "select_merge: shard_offsets: expected int32 [S, T], got int32 [3]",
        ),
        (dict(run=4), "select_merge: stride: expected the run of 4 to 2**31 - 1, got 1"),
        (dict(stride=1 << 62), "select_merge: stride: expected the run of 1 to 2**31 - 1, got 4611686018427387904"),
        (dict(run=0), "select_merge: run: expected at least 1, got 0"),
        (dict(k=-1), "select_merge: k: expected at least 0, got -1"),
        (dict(order="value"), "select_merge: order: expected one of any, index, score, got 'value'"),
        (dict(row_k=torch.zeros(5)), "select_merge: row_k: expected int32 [T], got float32 [5]"),
    ],
)
def test_refusals_say_what_to_do(changes: dict[str, Any], sentence: str) -> None:
    args, kwargs = Merge(3, 8).arguments()
    names = ("shard_indices", "shard_values", "shard_offsets", "k")
    with pytest.raises(sparse_attn.InvalidCall) as refused:
        sparse_attn.select_merge(**(dict(zip(names, args, strict=True), **kwargs) | changes))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(("offset", "number"), [(2**31 - 1, 2**31 + 1), (-3, -1)])
def test_debug_checks_find_numbers_outside_of_int32(debug_checks, offset: int, number: int) -> None:
    indices = torch.tensor([[[[2, 1, -1]]]], dtype=torch.int32)
    values, offsets = torch.tensor([[[[1.0, -torch.inf, 2.0]]]]), torch.tensor([[offset]], dtype=torch.int32)
    with pytest.raises(
        sparse_attn.InvalidCall, match="select_merge: shard_offsets: expected global numbers"
    ) as refused:
        sparse_attn.select_merge(indices, values, offsets, 2)
    assert str(refused.value).endswith(f"got [{number}]")
    assert sparse_attn.select_merge(indices, values, offsets.clamp(0, 9), 2).counts.item() == 1
