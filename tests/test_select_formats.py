"""`select` reads every format in place: the same as on the numbers that the plane holds."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from selections import Batch

import sparse_attn
from sparse_attn import Selected, layout, registry
from sparse_attn.ops.select import Select, facts

CALLS: dict[str, dict[str, Any]] = {
    "values": dict(k=6, order="index", return_values=True),
    "candidates": dict(k=5, candidate_k=2, candidate_block=4, order="index"),
    "block means": dict(k=3, block=4, pool="mean", order="score"),
}


def packed_call(format: str, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """A call on a plane in ``format``, and what the same call on its numbers takes instead."""
    f = layout.FORMATS[format]
    heads, dim = (1, f.dim) if f.packed else (2, 16)
    batch = Batch(options, 4, heads, True, [29, 0, 40], [3, 0, 1], page=3, dim=dim)
    args, kwargs = batch.arguments()
    rows = args[4].nan_to_num(9.0)  # slots that no sequence owns
    plane, scale = torch.zeros(f.shape(len(rows), 3, heads, dim), dtype=getattr(torch, f.dtype)), None
    if f.scale_dtype:
        scale = torch.zeros(len(rows), 3, heads, dtype=torch.half)
    slots, stored = torch.arange(3 * len(rows)), dict(scale=scale, format=format, page_size=3, backend="reference")
    sparse_attn.store(rows.flatten(0, 1), plane, slots, **stored)
    numbers = dict(keys=sparse_attn.load(plane, slots, **stored).unflatten(0, (-1, 3)), format="fp32")
    given = dict(kwargs, key_scale=scale, format=format, page_size=3)
    return (*args[:4], plane, *args[5:]), given, numbers


def run(impl: registry.Impl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Selected:
    cases.skip_unless(impl, facts(Select(*args, **kwargs)))
    return sparse_attn.select(*args, **kwargs, backend=impl.backend)


def same(a: Selected, b: Selected, values: tuple[float, float] = (0.0, 0.0)) -> bool:
    """The same lists, and values within (absolute, relative) errors."""
    close = a.values is b.values or torch.allclose(a.values, b.values, atol=values[0], rtol=values[1])
    lists = zip(a._replace(values=None), b._replace(values=None), strict=True)
    return close and all(x is y or torch.equal(x, y) for x, y in lists)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("format", layout.FORMATS)
def test_equals_select_on_the_numbers(select_impl, format: str, call: str) -> None:
    args, kwargs, numbers = packed_call(format, CALLS[call])
    plain = dict(kwargs, format="fp32", key_scale=None, page_size=0)
    expected = run(select_impl, (*args[:4], numbers["keys"], *args[5:]), plain)
    assert (expected.counts[:3] > 0).all() and (expected.indices[:3] > 0).any()
    # a kernel may multiply by the scale after the product, the numbers were multiplied before
    tolerance = select_impl.tolerance.get("float32", (0.0, 0.0))
    assert same(run(select_impl, args, kwargs), expected, tolerance)


@pytest.mark.parametrize("format", layout.names("index", packed=True))
def test_only_visible_bytes_count(select_impl, format: str) -> None:
    """NaN scales in all other entries, and the page's padding, change no bit."""
    args, kwargs, _ = packed_call(format, dict(k=4, kv_range=lambda b, p: (2, 23), return_values=True))
    clean = run(select_impl, args, kwargs)
    f, table = layout.FORMATS[format], args[5]
    spoilt = torch.full_like(args[4], 0xFF)
    planes = dict(src_format=format, dst_format=format, src_page_size=3, dst_page_size=3, backend="reference")
    seen = torch.tensor([int(table[b, e // 3]) * 3 + e % 3 for b in (0, 2) for e in range(2, 23)])
    sparse_attn.convert(args[4], spoilt, seen, seen, **planes)
    assert not torch.equal(spoilt, args[4]) and f.packed
    assert same(run(select_impl, (*args[:4], spoilt, *args[5:]), kwargs), clean)


def test_what_the_plane_does_not_say_must_be_given() -> None:
    args, kwargs, _ = packed_call("fp4_index_planar", CALLS["values"])
    for size, sentence in (
        (0, "select: page_size: expected the entries of a page, as planar format 'fp4_index_planar' does not show"),
        (4, "select: keys: expected uint8 .pages, page_bytes. with page_bytes = 272"),
    ):
        with pytest.raises(sparse_attn.InvalidCall, match=sentence):
            torch.ops.sparse_attn.select(*args, **dict(kwargs, page_size=size))
    with pytest.raises(sparse_attn.InvalidCall, match="select: keys: expected rows of 128 elements for format"):
        torch.ops.sparse_attn.select(*args, **dict(kwargs, bounds=True))


def test_facts_name_the_pages() -> None:
    args, kwargs, _ = packed_call("fp8_index_planar", CALLS["values"])
    found = dict(facts(Select(*args, **kwargs)).facts)
    assert (found["format"], found["page_size"], found["key_heads"]) == ("fp8_index_planar", 3, 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("format", ["int8_index_h", "int8_index", "fp32"])
def test_int8_queries_are_their_numbers(select_impl, format: str, call: str) -> None:
    args, kwargs, _ = packed_call(format, CALLS[call])
    q = torch.randint(-127, 128, args[0].shape, dtype=torch.int8)
    q_scale = torch.rand(q.shape[:2]).half() / 64
    numbers = q.float() * q_scale.float()[..., None]
    expected = run(select_impl, (numbers, *args[1:]), kwargs)
    assert (expected.counts[:3] > 0).all()
    got = run(select_impl, (q, *args[1:]), kwargs | dict(q_scale=q_scale))
    tolerance = select_impl.tolerance.get("float32", (0.0, 0.0))
    assert same(got, expected, tolerance)


def test_queries_without_their_scales_are_refused() -> None:
    args, kwargs, _ = packed_call("int8_index_h", CALLS["values"])
    q = torch.zeros(args[0].shape, dtype=torch.int8)
    for given, scale, sentence in (
        (q, None, "select: q_scale: expected a scale for each head of int8 queries, got None"),
        (q, torch.ones(2, 4), r"select: q_scale: expected float32 or bfloat16 or float16 \[T, Hi\] with T = "),
        (args[0], torch.ones(args[0].shape[:2]), "select: q_scale: expected None with queries that are not int8, got "),
    ):
        with pytest.raises(sparse_attn.InvalidCall, match=sentence):
            sparse_attn.select(given, *args[1:], **kwargs, q_scale=scale)
