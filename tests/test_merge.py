"""`merge` against one softmax over everything, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from cases import skip_unless
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import refused
from torch import Tensor

import sparse_attn
from sparse_attn.ops.merge import Merge, facts

INF = math.inf


def merge(impl, *args, **kwargs) -> tuple[Tensor, Tensor]:
    skip_unless(impl, facts(Merge(*args, **kwargs)))
    return sparse_attn.merge(*args, **kwargs, backend=impl.backend)


def parts_of(scores: Tensor, values: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of each part of the last axis of ``scores [T, H, N]``; ``values [N, Dv]``."""
    outs, lses = [], []
    for low, high in zip([0, *cuts], [*cuts, scores.shape[-1]], strict=True):
        s, v = scores[..., low:high].double(), values[low:high].double()
        lses.append(s.logsumexp(-1) if high > low else torch.full(scores.shape[:2], -INF, dtype=torch.float64))
        outs.append(s.softmax(-1).nan_to_num(0) @ v)
    return torch.stack(outs), torch.stack(lses)


def whole(scores: Tensor, values: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = scores.double().logsumexp(-1)
    denominator = total if sinks is None else torch.logaddexp(total, sinks.double())
    return (scores.double() - denominator[..., None]).exp() @ values.double(), total


def case(tokens: int = 5, heads: int = 3, entries: int = 40, dim: int = 8, spread: float = 4.0):
    return torch.randn(tokens, heads, entries) * spread, torch.randn(entries, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("cuts", [[], [13], [0, 7, 7, 30], [1, 2, 3, 4, 5, 6, 40]])
def test_parts_make_one_softmax(merge_impl, cuts: list[int], base: str, sinks: bool, dtype: torch.dtype) -> None:
    scores, values = case()
    sink = torch.tensor([0.5, -2.0, 7.0]) if sinks else None
    outs, lses = parts_of(scores, values, cuts)
    lses = (lses / math.log(2) if base == "2" else lses).float()
    out, lse = merge(merge_impl, outs.to(dtype), lses, sinks=sink, base=base)
    expected, expected_lse = whole(scores, values, sink)
    atol, rtol = merge_impl.tolerance[str(dtype).removeprefix("torch.")]
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=4 * atol, rtol=4 * rtol)
    torch.testing.assert_close(lse.double(), expected_lse, atol=4e-6, rtol=4e-6)


def test_one_part_is_itself(merge_impl) -> None:
    scores, values = case()
    outs, lses = (x.float() for x in parts_of(scores, values, []))
    out, lse = merge(merge_impl, outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


@pytest.mark.parametrize("mark", [-INF, INF])
def test_empty_parts_and_rows(merge_impl, mark: float) -> None:
    """What an empty part holds counts for nothing, be it NaN; a row that is empty in all is 0 and -inf."""
    scores, values = case(tokens=4)
    outs, lses = (x.float() for x in parts_of(scores, values, [10, 20]))
    lses[1, 0], outs[1, 0] = mark, torch.nan
    lses[:, 2], outs[:, 2] = mark, torch.inf
    for sinks in (None, torch.tensor([0.0, INF, -INF]), torch.tensor([1e30, -1e30, 3.0])):
        out, lse = merge(merge_impl, outs, lses, sinks=sinks, inf_is_empty=mark > 0)
        assert (out[2] == 0).all() and (lse[2] == -INF).all()
        assert not out.isnan().any() and lse[[0, 1, 3]].isfinite().all()
        shown = torch.cat([scores[0, :, :10], scores[0, :, 20:]], -1)[None], torch.cat([values[:10], values[20:]])
        expected, expected_lse = whole(*shown, sinks)
        torch.testing.assert_close(out[:1].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:1].double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_a_fault_shows(merge_impl) -> None:
    scores, values = case(tokens=3)
    clean, clean_lse = (x.float() for x in parts_of(scores, values, [10]))
    for name, fault in (("lse", INF), ("lse", torch.nan), ("out", torch.nan), ("out", INF)):
        outs, lses = clean.clone(), clean_lse.clone()
        (lses if name == "lse" else outs)[1, 1] = fault
        out, lse = merge(merge_impl, outs, lses)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("sink", [INF, -INF, 1e30, -1e30])
def test_extreme_sinks(merge_impl, sink: float) -> None:
    scores, values = case()
    outs, lses = (x.float() for x in parts_of(scores, values, [10]))
    plain, plain_lse = merge(merge_impl, outs, lses)
    out, lse = merge(merge_impl, outs, lses, sinks=torch.full((3,), sink))
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out, torch.zeros_like(out) if sink > 0 else plain)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.floats(0.1, 60.0), st.integers(0, 999))
def test_the_order_of_parts_matters_little_and_never_the_bits_of_a_repeat(parts: int, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    scores, values = case(spread=spread)
    cuts = sorted(torch.randint(0, 41, (parts - 1,)).tolist())
    outs, lses = (x.float() for x in parts_of(scores, values, cuts))
    order = torch.randperm(parts)
    out, lse = sparse_attn.merge(outs, lses)
    again, again_lse = sparse_attn.merge(outs, lses)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)
    other, other_lse = sparse_attn.merge(outs[order], lses[order])
    torch.testing.assert_close(other, out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(other_lse, lse, atol=2e-6, rtol=2e-6)
    expected, _ = whole(scores, values)
    torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=3e-5)


def test_parts_of_attend(attend_impl, merge_impl) -> None:
    """A prefix, its rest and the sink, applied once at the end."""
    from test_torch_contract import gqa

    leading, kwargs = gqa(7, 2)
    del kwargs["indices"]
    sinks = torch.randn(4)
    names = dict(backend=attend_impl.backend)
    expected, expected_lse = sparse_attn.attend(*leading, **kwargs, sinks=sinks, **names)
    ends = [(9, 4), (10, 3)]
    ranges = [
        torch.tensor([part(length - rows + i) for length, rows in ends for i in range(rows)], dtype=torch.int32)
        for part in (lambda p: (0, min(4, p + 1)), lambda p: (4, 4), lambda p: (4, p + 1))
    ]
    parts = [sparse_attn.attend(*leading, **kwargs, kv_range=r, **names) for r in ranges]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = merge(merge_impl, outs, lses, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_strided_lse(merge_impl) -> None:
    """FlashMLA returns [batch, heads, rows]: the transposed view is taken as it is."""
    scores, values = case()
    outs, lses = (x.float() for x in parts_of(scores, values, [10]))
    transposed = lses.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    for a, b in zip(merge(merge_impl, outs, transposed), merge(merge_impl, outs, lses), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, dict(base="2"), dict(inf_is_empty=True)], ids=str)
def test_hostile_values(merge_impl, options: dict, dtype: torch.dtype) -> None:
    """Empty parts, faults, sinks and weights of any size, in strided memory: as the reference has them."""
    lses = torch.randn(4, 300, 3) * 5
    rare = torch.tensor([-INF, -INF, INF, torch.nan, 3e4, -3e4, 900.0, -900.0])
    lses = torch.where(torch.rand(lses.shape) < 0.4, rare[torch.randint(8, lses.shape)], lses)
    outs = torch.randn(4, 300, 3, 40)[..., 1:38]
    outs = torch.where(torch.rand(4, 300, 3, 1) < 0.1, torch.tensor([torch.nan, INF])[torch.randint(2, (37,))], outs)
    outs = torch.nn.functional.pad(outs, (0, 3)).to(dtype)[..., :37]
    for sinks in (None, torch.tensor([0.5, INF, -INF]), torch.tensor([1e30, -1e30, torch.nan])):
        args, kwargs = (outs, lses), dict(options, sinks=sinks)
        out, lse = torch.full((300, 3, 37), 7.0, dtype=dtype), torch.full((300, 3), 7.0)
        skip_unless(merge_impl, facts(Merge(*args, **kwargs)))
        torch.ops.sparse_attn.merge.out(*args, **kwargs, backend=merge_impl.backend, out=out, lse=lse)
        expected, expected_lse = sparse_attn.merge(*args, **kwargs, backend="reference")
        atol, rtol = merge_impl.tolerance[str(dtype).removeprefix("torch.")]
        finite = expected.isfinite()  # an infinity whose weight is almost 0 gives NaN or stays
        assert torch.equal(out.isfinite(), finite)
        torch.testing.assert_close(out[finite], expected[finite], atol=atol, rtol=rtol)
        torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-6, equal_nan=True)
        assert out.isfinite().any() and out.isnan().any()


def test_refusals() -> None:
    outs, lses = torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3)
    for changes, sentence in (
        (
            dict(outs=outs[0]),
            "merge: outs: expected float32 or bfloat16 or float16 [S, T, H, Dv], got float32 [5, 3, 8]",
        ),
        (dict(outs=outs[:0]), "merge: outs: expected at least 1 part (axis 0), got 0"),
        (dict(lses=lses.transpose(1, 2)), "merge: lses: expected float32 [S, T, H] with T = 5, got float32 [2, 3, 5]"),
        (dict(lses=lses.double()), "merge: lses: expected float32 [S, T, H], got float64 [2, 5, 3]"),
        (dict(sinks=torch.zeros(2)), "merge: sinks: expected float32 [H] with H = 3, got float32 [2]"),
        (dict(base="10"), "merge: base: expected one of e, 2, got '10'"),
    ):
        arguments = dict(dict(outs=outs, lses=lses), **changes)
        refused(lambda a=arguments: torch.ops.sparse_attn.merge(**a), sentence)
    out = torch.zeros(5, 3, 8, dtype=torch.bfloat16)
    refused(
        lambda: torch.ops.sparse_attn.merge.out(outs, lses, out=out, lse=lses[0]),
        "merge: out: expected float32 [T, H, Dv], got bfloat16 [5, 3, 8]",
    )


def test_debug_checks_find_an_infinite_lse(debug_checks) -> None:
    outs, lses = torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3)
    lses[0, 0] = INF
    refused(
        lambda: sparse_attn.merge(outs, lses),
        "merge: lses: expected less than +inf, got +inf; pass inf_is_empty=True if it marks empty rows",
    )
    sparse_attn.merge(outs, lses, inf_is_empty=True)
