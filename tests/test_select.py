"""`select` on every kernel: against a selection found entry by entry, ties, hostile input, repeatability, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import skip_unless, skip_where_values_stay_on_the_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selections import Batch, mistakes
from torch import Tensor

import sparse_attn
from sparse_attn import Selected, env
from sparse_attn.ops.select import Select, facts
from sparse_attn.registry import Impl

NAN, INF = float("nan"), float("inf")
EXAMPLES = 15 if env.TRITON_INTERPRET.get() == "1" else 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(impl: Impl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Selected:
    skip_unless(impl, facts(Select(*args, **kwargs)))
    return sparse_attn.select(*args, **kwargs, backend=impl.backend)


def check(impl: Impl, batch: Batch) -> None:
    """The kernel's selection is the expected one, with and without values."""
    args, kwargs = batch.arguments()
    dtype = str(batch.dtype).removeprefix("torch.")
    slack = (0.0, 0.0) if impl.backend == "reference" else impl.tolerance[dtype]
    for scored in (False, True):
        selected = run(impl, args, dict(kwargs, return_values=scored))
        assert mistakes(batch, selected, batch.expected_all(scored), slack) == []


def simple(keys: Tensor, k: int, q: Tensor | None = None, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One row with one head of dimension 1 over one sequence: with ``q`` 1 the scores are the keys."""
    n = len(keys)
    q = torch.ones(1, 1, 1) if q is None else q
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    table = torch.arange(n, dtype=torch.int32).view(1, n)
    args = (q, None, starts, lens, keys.float().view(n, 1, 1, 1), table, k, 1.0, 1, n)
    return args, dict(dict(format="fp32", score="dot"), **kwargs)


def chosen(selected: Selected, row: int = 0, head: int = 0) -> list[int]:
    return selected.indices[row, head, : int(selected.counts[row, head])].tolist()


def same(a: Selected, b: Selected) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


# agreement


@pytest.mark.parametrize("format", ["", "int8", "int8_index_h"], ids=["plain", "int8", "int8_index_h"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formats(select_impl, dtype: torch.dtype, format: str) -> None:
    for options in (dict(k=7), dict(k=6, score="softmax_sum", out_heads=2), dict(k=3, block=4, pool="mean")):
        options |= dict(format=format) if format else {}
        check(select_impl, Batch(options, 8, 2, True, [29, 0, 40], [3, 0, 1], page=3, dtype=dtype))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any call that the contract allows, small."""
    key_heads = draw(st.sampled_from([1, 2]))
    q_heads = key_heads * draw(st.sampled_from([1, 2, 3]))
    lists = draw(st.sampled_from([n for n in range(1, q_heads + 1) if q_heads % n == 0]))
    options: dict[str, Any] = dict(
        out_heads=lists, score=draw(st.sampled_from(["relu_sum", "dot", "max", "softmax_sum"]))
    )
    if options["score"] in ("relu_sum", "dot"):
        options["score_dtype"] = draw(st.sampled_from(["fp32", "bf16"]))
    options["ratio"] = ratio = draw(st.sampled_from([1, 1, 2, 3]))
    options["causal"] = draw(st.sampled_from([True, True, False]))
    options["bounds"] = draw(st.sampled_from([False, False, True]))
    options["order"] = draw(st.sampled_from(["any", "index", "score"]))
    if draw(st.booleans()):
        options["span"] = ratio * draw(st.integers(1, 3))
        options["block"] = draw(st.integers(1, 4))
        pools = ["max", "sum"] + ["mean"] * (options["span"] == ratio and not options["bounds"])
        options["pool"] = draw(st.sampled_from(pools))
    elif draw(st.booleans()):
        options["candidate_block"] = draw(st.integers(1, 5))
        if draw(st.booleans()):
            options["candidate_k"] = draw(st.integers(1, 4))
        else:
            options |= dict(candidates="", candidate_heads=draw(st.sampled_from([1, lists])))
    if ratio > 1:
        options["tail"] = draw(st.sampled_from(["none", "counted", "reserved"]))
    if options.get("tail", "none") == "none" and draw(st.booleans()):
        low, size = draw(st.integers(0, 5)), draw(st.integers(0, 30))
        options["kv_range"] = lambda b, p: (low, min(low + size, max(p + 1 - options.get("span", 0), 0) // ratio))
    options["keep_first"], options["keep_last"] = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    fewest = options["keep_first"] + options["keep_last"] + (options.get("tail") == "reserved")
    options["k"] = draw(st.integers(fewest, 9))
    if draw(st.booleans()):
        options["row_k"] = ""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    news = [draw(st.integers(0, min(n + 1, 4))) for n in lengths]  # perhaps a row before the first token
    faulty = [(b, 1) for b, n in enumerate(lengths) if n >= 9 * ratio and draw(st.sampled_from([False, False, True]))]
    return Batch(
        options,
        q_heads,
        key_heads,
        draw(st.booleans()),
        lengths,
        news,
        page=draw(st.integers(1, 5)),
        dim=4,
        seed=draw(st.integers(0, 99)),
        draw=draw(st.sampled_from([torch.randn, integers])),
        faulty=faulty,
    )


def integers(*shape: int, generator: torch.Generator) -> Tensor:
    """Small numbers, so that many scores are equal."""
    return torch.randint(-1, 2, shape, generator=generator).float()


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=batches())
def test_any_call(select_impl, batch: Batch) -> None:
    check(select_impl, batch)


# ties, order, large k


@pytest.mark.parametrize("k", [1, 512, 2048, 8192])
def test_equal_scores_go_to_the_lowest_index(select_impl, k: int) -> None:
    """More equal scores than any buffer for ties holds, above and at the last selected score."""
    n = 9000
    selected = run(select_impl, *simple(torch.zeros(n), k))
    assert chosen(selected) == list(range(k))
    keys = torch.arange(n) % 2
    order = [*range(1, n, 2), *range(0, n, 2)]
    selected = run(select_impl, *simple(keys, k))
    assert sorted(chosen(selected)) == sorted(order[:k])
    selected = run(select_impl, *simple(keys, k, order="score", return_values=True))
    assert chosen(selected) == order[:k] and selected.values[0, 0].tolist() == keys[order[:k]].tolist()


def test_negative_zero_is_zero(select_impl) -> None:
    selected = run(select_impl, *simple(torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0]), 2))
    assert chosen(selected) == [1, 2]


def test_zeros_of_either_sign_are_equal(select_impl) -> None:
    """The best heads score -0 for the first key and 0 for the second."""
    keys = torch.tensor([[-5.0, 0.0], [0.0, 5.0]])
    args, kwargs = simple(torch.zeros(2), 1, torch.eye(2)[None], score="max")
    args = (args[0], torch.tensor([[1.0, -1.0]]), *args[2:4], keys.view(2, 1, 1, 2), *args[5:])
    assert chosen(run(select_impl, args, kwargs)) == [0]


def test_large_k(select_impl) -> None:
    keys = torch.randn(10_000)
    selected = run(select_impl, *simple(keys, 8192, order="index"))
    assert chosen(selected) == keys.topk(8192).indices.sort().values.tolist()
    selected = run(select_impl, *simple(keys, 20_000, order="score", return_values=True))
    assert chosen(selected) == keys.sort(descending=True, stable=True).indices.tolist()
    assert (selected.values[0, 0, 10_000:] == -INF).all()


def test_bf16_scores_round_as_torch_rounds(select_impl) -> None:
    """V4.1's own expression, on numbers whose products are exact."""
    g = torch.Generator().manual_seed(0)
    q, keys = (torch.randint(-9, 10, (n, 32, 16), generator=g).bfloat16() for n in (1, 64))
    weights = torch.randn(1, 32, generator=g).bfloat16()
    keys = keys[:, :1]
    scores = ((torch.einsum("thd,nd->thn", q, keys[:, 0]).relu()) * weights[..., None]).sum(1)[0]
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    args = (q, weights, starts, lens, keys[:, None], torch.arange(64, dtype=torch.int32)[None], 64, 1.0, 1, 64)
    selected = run(select_impl, args, dict(score_dtype="bf16", order="index", return_values=True))
    assert selected.values[0, 0].tolist() == scores.float().tolist()
    exact = run(select_impl, args, dict(order="index", return_values=True)).values
    assert not torch.equal(exact, selected.values)


# numbers that are none


def test_nan_and_minus_infinity_are_never_selected(select_impl) -> None:
    keys = torch.tensor([1.0, NAN, -INF, 5.0, NAN, -3.0, 2.0, -INF])
    assert chosen(run(select_impl, *simple(keys, 7))) == [0, 3, 5, 6]
    assert chosen(run(select_impl, *simple(keys, 2))) == [3, 6]
    selected = run(select_impl, *simple(keys, 7, keep_last=1, keep_first=2, order="score", return_values=True))
    assert chosen(selected) == [0, 1, 7, 3, 6, 5]
    assert selected.values[0, 0].tolist() == [INF, INF, INF, 5.0, 2.0, -3.0, -INF]


def test_a_row_that_fits_is_not_scored(select_impl) -> None:
    """So it needs neither keys nor pages; but values and order need both, and then a NaN counts."""
    keys = torch.tensor([1.0, NAN, 3.0])
    args, kwargs = simple(keys, 3)
    nowhere = (*args[:5], torch.full_like(args[5], 1 << 30), *args[6:])
    assert chosen(run(select_impl, nowhere, kwargs)) == [0, 1, 2]
    assert chosen(run(select_impl, args, dict(kwargs, order="score"))) == [2, 0]
    assert chosen(run(select_impl, args, dict(kwargs, return_values=True))) == [0, 2]
    skip_where_values_stay_on_the_device(select_impl)
    with pytest.raises(sparse_attn.InvalidCall, match="select: page_table: expected pages from 0 to 2 in sequence 0"):
        run(select_impl, nowhere, dict(kwargs, return_values=True))


def test_a_nan_in_one_block_leaves_the_others(select_impl) -> None:
    keys = torch.arange(16.0)
    keys[5], keys[9] = NAN, 99.0
    for pool, expected in (("max", [2, 3]), ("mean", [2, 3]), ("sum", [2, 3])):
        assert chosen(run(select_impl, *simple(keys, 2, block=4, pool=pool))) == expected
    selected = run(select_impl, *simple(keys, 3, block=4, pool="max", order="score", return_values=True))
    assert chosen(selected) == [2, 3, 1] and selected.values[0, 0].tolist() == [99.0, 15.0, 7.0]
    assert chosen(run(select_impl, *simple(keys, 3, block=4, pool="mean", order="score"))) == [2, 3, 0]
    made = run(select_impl, *simple(keys, 1, candidate_k=3, candidate_block=4)).candidate_blocks
    assert made[0, 0].tolist() == [1, 2, 3]
    keys[4:8] = NAN
    made = run(select_impl, *simple(keys, 1, candidate_k=4, candidate_block=4)).candidate_blocks
    assert made[0, 0].tolist() == [0, 2, 3, -1]


def test_a_nan_query_or_weight_selects_what_is_kept(select_impl) -> None:
    batch = Batch(dict(k=5, keep_first=1, keep_last=2), 4, 1, True, [30], [3], dim=4)
    (q, weights, *rest), kwargs = batch.arguments()
    clean = run(select_impl, (q, weights, *rest), kwargs)
    for broken in ((q.clone(), weights), (q, weights.clone())):
        broken[0 if broken[0] is not q else 1][1, 2] = NAN
        selected = run(select_impl, (*broken, *rest), kwargs)
        assert chosen(selected, 1) == [0, 27, 28]
        assert chosen(selected, 0) == chosen(clean, 0) and chosen(selected, 2) == chosen(clean, 2)


def test_infinite_scores_rank_first(select_impl) -> None:
    keys = torch.tensor([1.0, INF, 5.0, 2.0, INF])
    selected = run(select_impl, *simple(keys, 3, order="score", return_values=True))
    assert chosen(selected) == [1, 4, 2] and selected.values[0, 0].tolist() == [INF, INF, 5.0]
    assert chosen(run(select_impl, *simple(keys, 1, keep_last=1))) == [4], "what is kept precedes an infinite score"


@pytest.mark.parametrize("kind", ["relu_sum", "dot", "max", "softmax_sum"])
@pytest.mark.parametrize("pool", ["none", "mean", "max", "sum"])
def test_what_is_not_visible_changes_no_bit(select_impl, kind: str, pool: str) -> None:
    """NaN in every entry that no row may read, of the same pages too."""
    options = dict(k=2 if pool != "none" else 4, score=kind, pool=pool, block=1 if pool == "none" else 4)
    options |= dict(kv_range=lambda b, p: (3, p - 4), return_values=True)
    batch = Batch(options, 4, 2, True, [37, 0, 19], [2, 0, 3], dim=4)
    args, kwargs = batch.arguments()
    clean = run(select_impl, args, kwargs)
    plane, table = args[4].clone(), args[5]
    seen = torch.zeros(plane.shape[:2], dtype=torch.bool)
    for t, (b, _) in enumerate(batch.rows):
        for e in batch.visible(t):
            seen[table[b, e // batch.page], e % batch.page] = True
    plane[~seen] = NAN
    assert seen.any() and plane.isnan().any()
    assert same(run(select_impl, (*args[:4], plane, *args[5:]), kwargs), clean)
    assert (clean.counts[: len(batch.rows)] > 0).all()


@pytest.mark.parametrize("options", [dict(k=4), dict(k=2, block=4, pool="max"), dict(k=3, ratio=2)], ids=str)
def test_every_visible_entry_can_be_selected(select_impl, options: dict[str, Any]) -> None:
    """So "pairs scored" is a fact: each entry, raised alone, is selected by the rows that may read it."""
    batch = Batch(dict(options, score="dot"), 1, 1, False, [23], [3], dim=4)
    args, kwargs = batch.arguments()
    for entry in range(len(batch.keys[0])):
        plane = args[4].clone()
        page, offset = int(args[5][0, entry // batch.page]), entry % batch.page
        for t in range(3):
            plane[page, offset] = 99 * args[0][t].sign()
            lists = chosen(run(select_impl, (*args[:4], plane, *args[5:]), kwargs), t)
            assert (entry // options.get("block", 1) in lists) == (entry in batch.visible(t))


# rows


def test_rows_without_tokens(select_impl) -> None:
    batch = Batch(dict(k=3, keep_last=1, candidate_k=2), 2, 1, True, [2, 0, -3, 15], [4, 2, 1, 2], dim=4)
    args, kwargs = batch.arguments()
    selected = run(select_impl, args, dict(kwargs, return_values=True))
    empty = [0, 1, 4, 5, 6, 9, 10]  # before the first token, length 0, negative length, padding
    live = [t for t in range(11) if t not in empty]
    assert (selected.indices[empty] == -1).all() and (selected.counts[empty] == 0).all()
    assert (selected.values[empty] == -INF).all() and (selected.candidate_blocks[empty] == -1).all()
    assert (selected.counts[live] > 0).all() and (selected.candidate_blocks[live, 0, 0] >= 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_do(select_impl, tokens: int) -> None:
    args, kwargs = Batch(dict(k=4, candidate_k=2), 2, 1, True, [9], [3], dim=4, padding=0).arguments()
    q, weights, starts, lens, keys, table, *rest = args
    none = torch.empty(0, dtype=torch.int32)
    no_sequence = (q[:tokens], weights[:tokens], starts[:1], none, keys, table[:0], *rest)
    selected = run(select_impl, no_sequence, kwargs)
    assert selected.indices.shape == (tokens, 1, 4) and (selected.indices == -1).all()
    assert (selected.counts == 0).all() and (selected.candidate_blocks == -1).all()
    selected = run(select_impl, (*args[:6], 0, *args[7:]), dict(kwargs, return_values=True))
    assert selected.indices.shape == selected.values.shape == (3, 1, 0) and (selected.counts == 0).all()
    assert (selected.candidate_blocks[..., 0] >= 0).all()


@pytest.mark.parametrize("budget", [-(1 << 31), -1, 0, 1, 3, 5, (1 << 31) - 1])
def test_budgets_of_rows(select_impl, budget: int) -> None:
    args, kwargs = simple(torch.tensor([4.0, 9.0, 1.0, 7.0, 0.0, 3.0]), 4, keep_first=1, keep_last=1)
    selected = run(select_impl, args, dict(kwargs, row_k=torch.tensor([budget], dtype=torch.int32)))
    assert chosen(selected) == {1: [5], 3: [0, 1, 5]}.get(budget, [0, 1, 3, 5] if budget > 3 else [])


def test_rows_do_not_depend_on_steps_or_neighbours(select_impl) -> None:
    """Prefill, chunks and decode of one sequence give the same lists, as rows of any batch."""
    options = dict(k=6, candidate_k=2, ratio=2, keep_last=1, tail="counted", return_values=True, order="score")
    whole = Batch(options, 4, 1, True, [41], [41], padding=0)
    (q, weights, starts, lens, keys, table, *rest), kwargs = whole.arguments()
    expected = run(select_impl, (q, weights, starts, lens, keys, table, *rest), kwargs)
    start = 0
    for size in (7, 1, 1, 20, 12):
        part, end = slice(start, start + size), start + size
        lengths = torch.tensor([0, size], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        got = run(select_impl, (q[part], weights[part], *lengths, keys, table, 6, whole.scale, size, end), kwargs)
        assert same(got, Selected(*(x[part] for x in expected)))
        start = end
    order = torch.randperm(41)
    lengths = torch.arange(42, dtype=torch.int32), (order + 1).int()
    batched = (q[order], weights[order], *lengths, keys, table.expand(41, -1).contiguous(), 6, whole.scale, 1, 41)
    assert same(run(select_impl, batched, kwargs), Selected(*(x[order] for x in expected)))


def test_same_bits_over_runs_and_threads(select_impl) -> None:
    options = dict(k=40, score="softmax_sum", out_heads=2, order="any", return_values=True)
    args, kwargs = Batch(options, 8, 2, False, [500, 300], [4, 1]).arguments()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(select_impl, args, kwargs))
    finally:
        torch.set_num_threads(threads)
    assert all(same(result, results[0]) for result in results[1:])


# memory


def test_strided_planes_and_queries(select_impl) -> None:
    batch = Batch(dict(k=5, score="softmax_sum", out_heads=2, return_values=True), 4, 2, True, [29, 13], [2, 1])
    (q, weights, starts, lens, keys, *rest), kwargs = batch.arguments()
    clean = run(select_impl, (q, weights, starts, lens, keys, *rest), kwargs)
    wide = torch.cat([q] * 2, 1)[:, :4], torch.cat([weights] * 2, 1)[:, :4]
    head_major = torch.cat([keys] * 2, -1).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)[..., :16]
    assert not head_major.is_contiguous()
    assert same(run(select_impl, (*wide, starts, lens, head_major, *rest), kwargs), clean)


def test_pages_at_the_end_of_a_large_strided_pool(select_impl) -> None:
    """Over 4 GiB and over 2**31 elements into the pool: 32-bit arithmetic would read elsewhere."""
    batch = Batch(dict(k=5, return_values=True), 4, 1, True, [29, 0, 13], [2, 0, 1], dtype=torch.bfloat16)
    args, kwargs = batch.arguments()
    pages, page, heads, dim = args[4].shape
    stride = (5 << 30) // 2 // pages
    large = torch.empty(stride * pages, dtype=torch.bfloat16).as_strided(args[4].shape, (stride, heads * dim, dim, 1))
    large.copy_(args[4])
    assert args[5][:, :1].max() >= 0 and stride * (pages - 2) > 1 << 31
    assert same(run(select_impl, (*args[:4], large, *args[5:]), kwargs), run(select_impl, args, kwargs))


# refusals


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "q rank": (
        dict(q=torch.zeros(5, 16)),
        "select: q: expected float32 or bfloat16 or float16 or int8 [T, Hi, D], got float32 [5, 16]",
    ),
    "129 heads": (dict(q=torch.zeros(5, 129, 16)), "select: q: expected 1 to 128 heads (axis 1), got 129"),
    "heads": (dict(q=torch.zeros(5, 3, 16), weights=None), "select: q: expected a multiple of the 2 key heads, got 3"),
    "lists": (dict(out_heads=3), "select: out_heads: expected a divisor of the 4 query heads, got 3"),
    "weights": (
        dict(weights=torch.zeros(5, 1)),
        "select: weights: expected float32 or bfloat16 or float16 [T, Hi] with Hi = 4, got float32 [5, 1]",
    ),
    "wrong tag": (dict(format="bf16"), "select: keys: expected bfloat16 elements for format 'bf16', got float32"),
    "unknown tag": (
        dict(format="fp8"),
        "select: format: expected one of fp32, bf16, fp16, int8, int8_index_h, int4_index_h, fp8_v32,",
    ),
    "no scale": (
        dict(keys=torch.zeros(25, 4, 2, 16, dtype=torch.int8), format="int8_index_h"),
        "select: key_scale: expected a scale plane for format 'int8_index_h', got None",
    ),
    "bounds": (dict(bounds=True), "select: keys: expected float32 [pages, page_size, heads, row] with row = 32"),
    "page size": (dict(page_size=16), "select: page_size: expected 0 or the plane's 4, got 16"),
    "scale": (dict(scale=-1.0), "select: scale: expected a finite float32 number above 0, got -1.0"),
    "nan scale": (dict(scale=NAN), "select: scale: expected a finite float32 number above 0, got nan"),
    "k": (dict(k=-1), "select: k: expected at least 0, got -1"),
    "kept": (
        dict(k=3, keep_first=2, keep_last=2),
        "select: k: expected at least the 4 that are always kept, as they count in it, got 3",
    ),
    "reserved": (
        dict(k=0, ratio=2, tail="reserved"),
        "select: k: expected at least the 1 that are always kept, as they count in it, got 0",
    ),
    "row_k": (dict(row_k=torch.zeros(5, 1, dtype=torch.int32)), "select: row_k: expected int32 [T], got int32 [5, 1]"),
    "ratio": (dict(ratio=0), "select: ratio: expected at least 1 token an entry, got 0"),
    "span": (dict(ratio=2, span=3, pool="max"), "select: span: expected 0 or a multiple of the ratio 2, got 3"),
    "no pool": (
        dict(block=4),
        "select: pool: expected mean, max or sum where a block takes in several entries (block > 1 or span > ratio), "
        "got 'none'",
    ),
    "pool": (dict(block=4, pool="avg"), "select: pool: expected one of none, mean, max, sum, got 'avg'"),
    "mean of spans": (
        dict(span=2, pool="mean"),
        "select: pool: expected max or sum with bounds or span > ratio, got 'mean'",
    ),
    "score": (dict(score="relu"), "select: score: expected one of relu_sum, dot, max, softmax_sum, got 'relu'"),
    "bf16": (
        dict(score="max", score_dtype="bf16"),
        "select: score: expected 'relu_sum' or 'dot' with score_dtype='bf16', got 'max'",
    ),
    "ties": (dict(ties="highest"), "select: ties: expected one of lowest, any, got 'highest'"),
    "order": (dict(order="value"), "select: order: expected one of any, index, score, got 'value'"),
    "tail of tokens": (
        dict(tail="counted"),
        "select: tail: expected 'none' with ratio 1, which leaves no incomplete entry, got 'counted'",
    ),
    "tail of a range": (
        dict(ratio=2, tail="counted", kv_range=torch.zeros(5, 2, dtype=torch.int32)),
        "select: tail: expected 'none' with kv_range, got 'counted'; let kv_range include it",
    ),
    "both": (
        dict(candidates=torch.zeros(5, 1, 2, dtype=torch.int32), candidate_k=2),
        "select: candidate_k: expected 0 in a call that takes candidates, got 2",
    ),
    "candidates of blocks": (
        dict(candidate_k=2, block=2, pool="max"),
        "select: block: expected 1, and span = ratio, with candidates or candidate_k, got 2",
    ),
    "candidate lists": (
        dict(candidates=torch.zeros(5, 2, 2, dtype=torch.int32), out_heads=4),
        "select: candidates: expected Hc = 1 (shared) or 4 (one for each list), got 2",
    ),
}


def call() -> dict[str, Any]:
    args, kwargs = Batch(dict(k=4), 4, 2, True, [9, 21], [1, 2], padding=2).arguments()
    return dict(zip(Select._fields, args, strict=False), **kwargs)


@pytest.mark.parametrize("name", BROKEN)
def test_refusals_say_what_to_do(name: str) -> None:
    changes, sentence = BROKEN[name]
    with pytest.raises(sparse_attn.InvalidCall) as refused:
        torch.ops.sparse_attn.select(**(call() | changes))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(max_seqlen_q=1), "select: max_seqlen_q: expected at least 2, got 1"),
        (dict(max_seq_len=20), "select: max_seq_len: expected at least 21, got 20"),
        (
            dict(cu_seqlens_q=torch.tensor([0, 2, 1], dtype=torch.int32)),
            "select: cu_seqlens_q: expected ascending values",
        ),
        (
            dict(cu_seqlens_q=torch.tensor([0, 1, 9], dtype=torch.int32)),
            "select: cu_seqlens_q: expected a last value of",
        ),
        (
            dict(page_table=torch.zeros(2, 5, dtype=torch.int32)),
            "select: page_table: expected a page for entry 20 of sequence 1, got 5 pages of 4 entries",
        ),
        (dict(page_table=torch.full((2, 6), -1, dtype=torch.int32)), "select: page_table: expected pages from 0 to"),
    ],
)
def test_values_that_would_read_elsewhere_are_refused(select_impl, changes: dict[str, Any], sentence: str) -> None:
    skip_where_values_stay_on_the_device(select_impl)
    with pytest.raises(sparse_attn.InvalidCall) as refused:
        torch.ops.sparse_attn.select(**(call() | changes | dict(backend=select_impl.backend)))
    assert str(refused.value).startswith(sentence)


def test_debug_checks_find_candidates_listed_twice(monkeypatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_CHECKS", "debug")
    sparse_attn.registry.reset()
    try:
        twice = torch.tensor([3, -1, 0, -1, 3], dtype=torch.int32).expand(5, 1, 5)
        with pytest.raises(sparse_attn.InvalidCall, match="select: candidates: expected no index twice in a row"):
            torch.ops.sparse_attn.select(**call(), candidates=twice)
        torch.ops.sparse_attn.select(**call(), candidates=twice[..., :4])
    finally:
        monkeypatch.undo()
        sparse_attn.registry.reset()
