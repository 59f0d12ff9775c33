"""What `select` of `ascend_triton` does where it cannot refuse, and how it cuts rows and breaks ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selections import Batch

import sparse_attn
from sparse_attn.backends.ascend_triton import select as host


@pytest.mark.parametrize("page", [2, 64])  # pages of fewer entries than a tile, and of a whole one
def test_entries_of_pages_that_the_plane_lacks_are_never_selected(page: int) -> None:
    batch = Batch(dict(k=5, score="dot"), 64, 1, False, [150], [1], page=page)
    (*leading, table, k, scale, new, longest), keywords = batch.arguments()
    table = table.clone()
    table[0, 1] = 1 << 30
    selected = sparse_attn.select(*leading, table, k, scale, new, longest, **keywords, backend="ascend_triton")
    scores = batch.expected(0, 0, scored=True).scores
    there = [e for e in scores if not page <= e < 2 * page]
    best = sorted(there, key=lambda e: (-scores[e], e))[:5]
    assert sorted(selected.indices[0, 0].tolist()) == sorted(best)


def test_rows_are_taken_in_chunks(monkeypatch) -> None:
    options = dict(k=6, block=3, pool="max", keep_last=1, return_values=True)
    args, keywords = Batch(options, 4, 2, True, [29, 0, 40], [3, 0, 4], page=3).arguments()
    whole = sparse_attn.select(*args, **keywords, backend="ascend_triton")
    monkeypatch.setattr(host, "SCORE_BYTES", 2 * 4 * 40)  # two rows at a time
    cut = sparse_attn.select(*args, **keywords, backend="ascend_triton")
    assert all(torch.equal(x, y) for x, y in zip(whole[:3], cut[:3], strict=True))


def test_mean_keys_are_made_in_chunks(monkeypatch) -> None:
    options = dict(k=6, block=3, pool="mean", score="dot", return_values=True)
    args, keywords = Batch(options, 4, 2, True, [29, 0, 40], [3, 0, 4], page=3).arguments()
    whole = sparse_attn.select(*args, **keywords, backend="ascend_triton")
    made = []
    means = host._score_means
    monkeypatch.setattr(
        host, "_score_means", lambda a, first, rows, columns: made.append(rows) or means(a, first, rows, columns)
    )
    monkeypatch.setattr(host, "SCORE_BYTES", 2 * 4 * 14 * 2 * args[0].shape[2])  # 14 units of 2 key heads
    cut = sparse_attn.select(*args, **keywords, backend="ascend_triton")
    assert len(made) > 1 and max(made) == 2
    assert all(torch.equal(x, y) for x, y in zip(whole[:3], cut[:3], strict=True))


@pytest.mark.parametrize("options", [{}, dict(block=2, pool="mean")], ids=["entries", "mean keys"])
def test_key_heads_that_lie_far_apart(options: dict[str, Any]) -> None:
    """Each within 31 bits of the one before, the last more than 31 bits from the first."""
    heads, step = 6, 1 << 29
    keys = torch.empty(heads * step, dtype=torch.int8).as_strided((1, 4, heads, 16), (64, 16, step, 1))
    best = [1 + h % 2 for h in range(heads)]
    for h, e in enumerate(best):
        keys[0, :, h] = 0
        keys[0, e, h] = 1
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    args = (torch.ones(1, heads, 16), None, starts, lens, keys, torch.zeros(1, 1, dtype=torch.int32), 1, 1.0, 1, 4)
    options = options | dict(score="dot", out_heads=heads, format="int8", key_scale=torch.ones(1, 4, heads).half())
    selected = sparse_attn.select(*args, **options, backend="ascend_triton")
    assert selected.indices.flatten().tolist() == [e // options.get("block", 1) for e in best]


@pytest.mark.parametrize("k", [5, 4500])
def test_more_equal_scores_than_any_buffer_holds_go_to_the_lowest_index(k: int) -> None:
    n = 9000
    keys = (torch.arange(n) % 2).float().view(n, 1, 1, 1)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    args = (torch.ones(1, 1, 1), None, starts, lens, keys, torch.arange(n, dtype=torch.int32)[None], k, 1.0, 1, n)
    selected = sparse_attn.select(*args, format="fp32", score="dot", backend="ascend_triton", return_values=True)
    expected = sorted([*range(1, n, 2), *range(0, n, 2)][:k])
    assert selected.indices[0, 0].tolist() == expected
    assert selected.values[0, 0].tolist() == [float(e % 2) for e in expected]


@pytest.mark.parametrize("k", [5, 5000, 9000])
def test_merged_equal_scores_go_to_the_lowest_number(k: int) -> None:
    """Whatever shard and place they come from; numbers of 31 bits, of which float32 would make some equal."""
    numbers = (torch.randperm(9000) * 238609 + 3).int().view(3, 1, 1, 3000)
    values = (torch.rand(3, 1, 1, 3000) < 0.3).float()
    values[0, 0, 0, :100] = float("nan")
    merged = sparse_attn.select_merge(numbers, values, torch.zeros(3, 1, dtype=torch.int32), k, backend="ascend_triton")
    given = zip(numbers.flatten().tolist(), values.flatten().tolist(), strict=True)
    best = sorted((n for n in given if n[1] == n[1]), key=lambda n: (-n[1], n[0]))[:k]
    assert merged.indices[0, 0, : len(best)].tolist() == sorted(n for n, _ in best)
    assert merged.counts.item() == len(best) and (merged.indices[0, 0, len(best) :] == -1).all()


def test_probabilities_over_many_tiles() -> None:
    """The sum that every product is divided by runs over all entries, whatever program scores them."""
    batch = Batch(dict(k=7, score="softmax_sum", out_heads=2), 4, 2, True, [700, 3], [2, 1], page=16)
    args, keywords = batch.arguments()
    got = sparse_attn.select(*args, **keywords, return_values=True, backend="ascend_triton")
    want = sparse_attn.select(*args, **keywords, return_values=True, backend="reference")
    assert torch.equal(got.counts, want.counts)
    torch.testing.assert_close(got.values.sort(-1).values, want.values.sort(-1).values, atol=4e-6, rtol=4e-6)
