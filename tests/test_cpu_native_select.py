"""`select` of cpu_native on every instruction set: long rows, which are cut for the sake of threads, ties,
repeatability, hostile pages. That it selects what the contract says is tested by `test_select.py` and
`test_selections.py`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from selections import Batch, mistakes
from torch import Tensor

import sparse_attn
from sparse_attn import Selected, registry

native = next((impl for impl in registry.implementations("select") if impl.backend == "cpu_native"), None)
if native is None or registry.availability(native) is not None:
    pytest.skip("cpu_native is not built", allow_module_level=True)

cpu_native = import_module("sparse_attn.backends.cpu_native")
ISAS = import_module("sparse_attn._cpu_native").instruction_sets()
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=ISAS, autouse=True)
def isa(request, monkeypatch) -> str:
    monkeypatch.setattr(cpu_native, "_isa", lambda wanted: ISAS[request.param])
    return request.param


def run(args: tuple[Any, ...], kwargs: dict[str, Any], threads: int = 1) -> Selected:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return sparse_attn.select(*args, **kwargs, backend="cpu_native")
    finally:
        torch.set_num_threads(before)


def same(a: Selected, b: Selected) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def long(
    length: int = 100_000,
    rows: int = 1,
    heads: int = 4,
    dim: int = 16,
    page: int = 64,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One sequence, its pages in random order."""
    g = torch.Generator().manual_seed(1)
    pages = -(-length // page)
    keys = torch.randn(pages, page, 1, dim, generator=g)
    table = torch.randperm(pages, generator=g).int()[None]
    q, weights = torch.randn(rows, heads, dim, generator=g), torch.randn(rows, heads, generator=g)
    starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    format = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8_index_h"}[dtype]
    options = dict(dict(format=format, k=2048), **options)
    if dtype == torch.int8:
        q, keys = q * 30, keys * 30
        scales = dict(q_scale=torch.rand(rows, heads, generator=g) / 30)
        scales["key_scale"] = torch.rand(pages, page, 1, generator=g).half() / 30
        options = dict(options, **scales)
    q, keys = q.to(dtype), keys.to(dtype)
    return (q, weights, starts, lens, keys, table, options.pop("k"), 0.25, rows, length), options


def entries(args: tuple[Any, ...]) -> Tensor:
    """Keys of the sequence in float64, ``[L, D]``."""
    return args[4][args[5][0].long()].flatten(0, 2)[: args[9]].double()


CANDIDATES = (torch.arange(600) * 7919 % 12_600).int().view(1, 1, -1)
SPLIT: dict[str, dict[str, Any]] = {
    "tokens": dict(),
    "by score": dict(order="score", keep_first=3, keep_last=5),
    "probabilities": dict(score="softmax_sum", out_heads=2),
    "probabilities, keys read twice": dict(length=40_000, heads=128, dim=2, score="softmax_sum"),
    "probabilities, blocks of two rows and of one": dict(length=9000, rows=3, heads=64, dim=2, score="softmax_sum"),
    "probabilities, lists apart": dict(length=40_000, heads=128, dim=2, score="softmax_sum", out_heads=2),
    "best head": dict(score="max", out_heads=2),
    "bf16, makes candidates": dict(score_dtype="bf16", candidate_k=300),
    "wide candidate blocks": dict(candidate_k=30, candidate_block=1024),
    "uneven candidate blocks": dict(candidate_k=300, candidate_block=7),
    "takes candidates": dict(k=900, candidates=CANDIDATES),
    "probabilities of candidates": dict(k=900, score="softmax_sum", candidates=CANDIDATES),
    "best of a block": dict(k=100, block=128, pool="max", keep_last=1),
    "sum of an uneven block": dict(k=100, block=100, pool="sum"),
    "mean keys": dict(k=100, block=16, pool="mean", score="softmax_sum"),
    "overlapping entries": dict(k=100, ratio=4, span=8, block=4, pool="sum", score="softmax_sum", tail="counted"),
    "bf16": dict(dtype=torch.bfloat16, dim=50, score="softmax_sum"),
    "bf16, heads that fill registers": dict(dtype=torch.bfloat16, length=9000, rows=3, heads=64, dim=96),
    "bf16, lists apart": dict(dtype=torch.bfloat16, length=40_000, heads=64, dim=32, score="dot", out_heads=2),
    "integers": dict(dtype=torch.int8, length=40_000, rows=2, heads=32, dim=70),
    "a range": dict(kv_range=torch.tensor([[777, 90_001]], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_threads_change_no_bit(name: str) -> None:
    for values in (False, True):
        args, kwargs = long(**SPLIT[name], return_values=values)
        first = run(args, kwargs)
        assert int(first.counts.min()) > 0
        for threads in (2, 3):
            assert same(run(args, kwargs, threads), first)


@pytest.mark.parametrize("k", [1, 2048, 8192])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_long_rows_against_torch(k: int, rows: int) -> None:
    length = 100_000 if rows < 40 else 9000
    args, kwargs = long(length, rows, k=k, order="index", return_values=True)
    products = torch.einsum("thd,nd->thn", args[0].double(), entries(args)).relu()
    scores = 0.25 * (products * args[1].double()[..., None]).sum(1)
    scores.masked_fill_(torch.arange(length) > torch.arange(length - rows, length)[:, None], -INF)
    selected = run(args, kwargs, threads=2)
    expected = scores.topk(k)
    for t in range(rows):
        assert int(selected.counts[t, 0]) == k
        chosen = selected.indices[t, 0].long()
        assert (chosen.diff() > 0).all()
        torch.testing.assert_close(selected.values[t, 0].double(), scores[t, chosen], atol=2e-5, rtol=2e-5)
        others = set(chosen.tolist()) ^ set(expected.indices[t].tolist())
        last = expected.values[t, -1]
        assert all(abs(scores[t, u] - last) <= 1e-5 for u in others)


def test_long_probabilities_against_torch() -> None:
    args, kwargs = long(50_000, 2, score="softmax_sum", out_heads=2, k=500, order="index", return_values=True)
    logits = 0.25 * torch.einsum("thd,nd->thn", args[0].double(), entries(args))
    logits[0, :, -1] = -INF
    scores = (logits.softmax(-1) * args[1].double()[..., None]).view(2, 2, 2, -1).sum(2)
    selected = run(args, kwargs, threads=2)
    torch.testing.assert_close(
        selected.values.double(), scores.gather(-1, selected.indices.long()), atol=1e-9, rtol=2e-5
    )
    kept = selected.values.double().sum(-1)
    torch.testing.assert_close(kept, scores.topk(500).values.sum(-1), atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_equal_scores(threads: int) -> None:
    """More than a buffer holds, equal to the last selected score and above it, spread over parts of a row."""
    for count in (5000, 90_000):
        args, kwargs = long(heads=1, dim=1, k=8192, score="dot", order="index")
        args[0].fill_(1)
        args[1].fill_(1)
        values = torch.zeros(100_000)
        values[torch.randperm(100_000)[:count]] = 1
        flat = torch.zeros(args[4].shape[0] * 64)
        flat[:100_000] = values
        args[4][args[5][0].long()] = flat.view(-1, 64, 1, 1)
        best, rest = (values == 1).nonzero()[:8192, 0], (values == 0).nonzero()[:, 0]
        expected = torch.cat([best, rest[: 8192 - len(best)]]).sort().values
        assert run(args, kwargs, threads).indices[0, 0].tolist() == expected.tolist()


def test_ascending_scores_are_taken_in_turn() -> None:
    """Each score is better than all before, so that every buffer is cut again and again."""
    args, kwargs = long(20_000, heads=1, dim=1, page=1, k=700, score="dot", candidate_k=50)
    args[0].fill_(1)
    args[1].fill_(1)
    args[4][args[5][0].long(), 0, 0, 0] = torch.arange(20_000.0)
    selected = run(args, kwargs)
    assert selected.indices[0, 0].tolist() == list(range(19_300, 20_000))
    assert selected.candidate_blocks[0, 0].tolist() == list(range(2450, 2500))


@pytest.mark.parametrize("dim", [1, 3, 4, 15, 16, 33, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_dimension(dim: int, dtype: torch.dtype) -> None:
    for options in (dict(k=9), dict(k=9, bounds=True), dict(k=4, block=3, pool="mean"), dict(k=9, score_dtype="bf16")):
        for format in ({}, dict(format="int8_index_h")):
            batch = Batch(options | format, 6, 2, True, [70, 3], [3, 1], dim=dim, dtype=dtype)
            args, kwargs = batch.arguments()
            selected = run(args, dict(kwargs, return_values=True))
            assert mistakes(batch, selected, batch.expected_all(True), (2e-5, 2e-5)) == []


@pytest.mark.parametrize("heads", [(1, 1), (128, 1), (128, 128), (24, 3), (6, 2), (5, 5)], ids=str)
def test_any_heads(heads: tuple[int, int]) -> None:
    for lists in sorted({1, heads[0], max(heads[1] // 2, 1)}):
        if heads[0] % lists:
            continue
        batch = Batch(dict(k=5, score="softmax_sum", out_heads=lists), *heads, True, [50], [2], dim=4)
        args, kwargs = batch.arguments()
        selected = run(args, dict(kwargs, return_values=True))
        assert mistakes(batch, selected, batch.expected_all(True), (2e-5, 2e-5)) == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("score", ["relu_sum", "softmax_sum"])
def test_infinite_and_missing_numbers_in_long_rows(score: str, threads: int) -> None:
    args, kwargs = long(30_000, heads=2, score=score, k=100)
    clean = run(args, kwargs)
    page = args[5][0].long()
    chosen = clean.indices[0, 0, 7].item()
    args[4][page[chosen // 64], chosen % 64] = NAN
    selected = run(args, kwargs, threads).indices[0, 0].tolist()
    assert chosen not in selected and len(set(selected) & set(clean.indices[0, 0].tolist())) == 99
    args[0].fill_(NAN)
    assert run(args, kwargs, threads).counts.item() == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_an_infinite_score_leaves_other_entries_no_probability(threads: int) -> None:
    args, kwargs = long(30_000, heads=2, score="softmax_sum", k=100, order="index", return_values=True)
    args[0].fill_(1)
    args[4][args[5][0, 100].long(), 3] = INF
    selected = run((*args[:6], 30_000, *args[7:]), kwargs, threads)
    assert selected.counts.item() == 29_999 and 100 * 64 + 3 not in selected.indices[0, 0].tolist()
    assert not selected.values[0, 0, :29_999].any()
    assert run(args, kwargs, threads).indices[0, 0].tolist() == list(range(100))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (-1, "select: page_table: expected pages from 0 to 1562 in sequence 0, got -1"),
        (1563, "select: page_table: expected pages from 0 to 1562 in sequence 0, got 1563"),
        ((1 << 31) - 1, "select: page_table: expected pages from 0 to 1562 in sequence 0, got 2147483647"),
    ],
)
def test_pages_that_do_not_exist(page: int, sentence: str, threads: int) -> None:
    for options in (dict(), dict(score="softmax_sum"), dict(k=100, block=64, pool="mean")):
        args, kwargs = long(**options)
        args[5][0, 1234] = page
        with pytest.raises(sparse_attn.InvalidCall) as refused:
            run(args, kwargs, threads)
        assert str(refused.value) == sentence
    low = dict(kv_range=torch.tensor([[0, 1234 * 64]], dtype=torch.int32))
    assert run(args, dict(kwargs, **low), threads).counts.item() == 100, "a page that no row reads may not exist"


@pytest.mark.parametrize("threads", [1, 3])
def test_entries_past_the_page_table(threads: int) -> None:
    args, kwargs = long()
    far = torch.tensor([[-(1 << 31), (1 << 31) - 1]], dtype=torch.int32)
    sentence = "expected a page for entry 2147483646 of sequence 0, got 1563 pages of 64 entries"
    with pytest.raises(sparse_attn.InvalidCall, match=sentence):
        run(args, dict(kwargs, kv_range=far), threads)
    hostile = torch.tensor([[[-1, (1 << 31) - 1, -(1 << 31), 5, 5, 1 << 30]]], dtype=torch.int32)
    args, kwargs = long(k=3, candidates=hostile)
    chosen = run(args, kwargs, threads).indices[0, 0].tolist()
    assert len(set(chosen)) == 3 and set(chosen) <= set(range(40, 48))
    wide = dict(kwargs, candidate_block=(1 << 31) - 1)
    assert run(args, wide, threads).counts.item() == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("score", ["relu_sum", "dot"])
@pytest.mark.parametrize("dim", [128, 50, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_heads_that_fill_vectors_and_scaled_keys(dtype: torch.dtype, dim: int, score: str, threads: int) -> None:
    """Two rows and two lists of heads, and scales of either sign, which come out of no ReLU, of zero and NaN."""
    g = torch.Generator().manual_seed(2)
    length, pages, heads = 700, 50, 64
    keys = torch.randint(-128, 128, (pages, 16, 1, dim), generator=g, dtype=torch.int8)
    key_scale = (torch.rand(pages, 16, 1, generator=g) - 0.2).half()
    table = torch.randperm(pages, generator=g).int()[None]
    key_scale[table[0, 3].long(), 5] = NAN
    key_scale[table[0, 4].long(), :3] = 0
    weights = torch.randn(2, heads, generator=g)
    q_scale = (torch.rand(2, heads, generator=g) - 0.2).half()
    if dtype == torch.int8:
        q = torch.randint(-128, 128, (2, heads, dim), generator=g, dtype=torch.int8)
        numbers = q.double() * q_scale.double()[..., None]
    else:
        q = torch.randn(2, heads, dim, generator=g).to(dtype)
        numbers = q.double()
    places = table[0].long()
    seen = (keys[places].double() * key_scale[places].double()[..., None]).flatten(0, 2)[:length]
    products = torch.einsum("thd,nd->thn", numbers, seen)
    terms = weights.double()[..., None] * (products.relu() if score == "relu_sum" else products)
    expected = (terms.view(2, 2, heads // 2, -1).sum(2) / 8).nan_to_num(-INF, INF, -INF)
    expected[0, :, -1] = -INF
    size = (terms.abs().view(2, 2, heads // 2, -1).sum(2) / 8).nan_to_num(0)
    options: dict[str, Any] = dict(
        q_scale=q_scale if dtype == torch.int8 else None, key_scale=key_scale, format="int8_index_h", score=score
    )
    options |= dict(out_heads=2, order="index", return_values=True)
    starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    selected = run((q, weights, starts, lens, keys, table, length, 1 / 8, 2, length), options, threads)
    for t in range(2):
        for o in range(2):
            chosen = selected.indices[t, o, : int(selected.counts[t, o])].long()
            assert chosen.tolist() == (expected[t, o] > -INF).nonzero()[:, 0].tolist()
            error = (selected.values[t, o, : len(chosen)].double() - expected[t, o, chosen]).abs()
            assert bool((error <= 1e-6 * size[t, o, chosen] + 1e-6).all())


@pytest.mark.parametrize(("page", "table", "blocks"), [(8, [10, 7, 3, 13], None), (16, [10, 3, 7, 11], [0, 2, 4, 7])])
def test_scales_of_keys_whose_ends_alone_lie_as_far_apart_as_neighbours(page, table, blocks) -> None:
    g = torch.Generator().manual_seed(1)
    keys = torch.randint(-127, 128, (16, page, 1, 128), generator=g).to(torch.int8)
    key_scale = torch.rand(16, page, 1, generator=g).half() + 0.1
    numbers = (keys * key_scale.float()[..., None])[torch.tensor(table)].flatten(0, 2).double()
    q = torch.randint(-127, 128, (1, 32, 128), generator=g).to(torch.int8)
    q_scale = torch.rand(1, 32, generator=g)
    queries = (q * q_scale[..., None]).double()
    entries = torch.arange(len(numbers))
    if blocks is not None:
        entries = entries.view(-1, 8)[torch.tensor(blocks)].flatten()
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([len(numbers)], dtype=torch.int32)
    options: dict[str, Any] = dict(key_scale=key_scale, format="int8", score="dot", order="index", return_values=True)
    if blocks is not None:
        options["candidates"] = torch.tensor(blocks, dtype=torch.int32).view(1, 1, -1)
    for given, scale in ((q, q_scale), (queries.float(), None)):
        args = (given, None, starts, lens, keys, torch.tensor([table], dtype=torch.int32), 32, 0.01, 1, len(numbers))
        selected = run(args, dict(options, q_scale=scale))
        assert selected.indices[0, 0].tolist() == entries.tolist()
        expected = 0.01 * (queries[0] @ numbers[entries].T).sum(0)
        assert selected.values is not None
        torch.testing.assert_close(selected.values[0, 0].double(), expected, atol=1e-3, rtol=1e-4)
