"""`attend` reads every KV format in place: the same as on the numbers that the planes hold."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from torch import Tensor

import sparse_attn
from sparse_attn import layout, registry
from sparse_attn.ops.attend import Attend, facts

V41 = dict(planes="main+window", q_heads=4, kv_heads=1, qk_dim=512, v_dim=512, sinks=True)
SHAPES: dict[str, dict[str, Any]] = {
    "v4.1, ratio 2": dict(V41, format="fp4_v41", win_format="fp8_v41", ratio=2, index_heads=1),
    "v4.1, ratio 1, planar": dict(V41, format="fp4_v41_planar", win_format="fp8_v41_planar", index_heads=1),
    "v4.1, one plane of each order": dict(V41, format="fp4_v41_planar", win_format="fp8_v41", index_heads=1),
    "v4.1, all in fp8": dict(V41, format="fp8_v41", win_format="fp8_v41", ratio=2),
    "v4.1, window alone": dict(V41, planes="window", win_format="fp8_v41"),
    "v4, ratio 4": dict(V41, format="fp8_v4_planar", win_format="fp8_v4_planar", ratio=4, index_heads=1),
    "v4, interleaved": dict(V41, format="fp8_v4", win_format="fp8_v4", ratio=4, page_size=3, win_page_size=5),
    "v4, 640 and 608 bytes": dict(V41, format="fp8_v4_640", win_format="fp8_v4_608", ratio=2),
    "v4, raw window": dict(V41, format="fp8_v4_planar", win_format="bf16", ratio=4),
    "v3.2": dict(format="fp8_v32", q_heads=4, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1),
    "v3.2, draft tokens on every entry": dict(format="fp8_v32", q_heads=2, kv_heads=1, qk_dim=576, v_dim=512),
    "v3.2 on Ascend": dict(format="int8_v32", q_heads=4, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1),
    "blocks": dict(format="fp8_v41", q_heads=4, kv_heads=1, qk_dim=512, v_dim=16, index_heads=1, select_block=4),
    "not causal": dict(V41, format="fp8_v41", win_format="fp8_v41", causal=False),
    "gqa in int8": dict(format="int8", v_format="int8", index_heads=2),
}


def packed_call(shape: str, impl: registry.Impl, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leading, kwargs = cases.attend(**dict(SHAPES[shape], **options))
    cases.skip_unless(impl, facts(Attend(*leading, **kwargs)))
    return leading, kwargs


def entries(kwargs: dict[str, Any], plane: str) -> tuple[int, int]:
    """Pages and entries a page of one plane of a call."""
    name, size = ("win_format", "win_page_size") if plane == "win" else ("format", "page_size")
    return layout.FORMATS[kwargs[name]].paging(kwargs[plane].shape, kwargs.get(size, 0))[:2]


def numbers(kwargs: dict[str, Any], plane: str, format: str, page_size: int) -> Tensor:
    """A plane as `load` reads it, in plain float32."""
    pages, size = entries(kwargs, "win" if plane == "win" else "kv")
    rows = sparse_attn.load(
        kwargs[plane],
        torch.arange(pages * size),
        scale=kwargs.get(f"{plane}_scale"),
        format=format,
        page_size=page_size,
        backend="reference",
    )
    return rows.unflatten(0, (pages, size))


def plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same call on plain float32 planes."""
    changed = dict(kwargs, page_size=0, win_page_size=0)
    if "kv" in kwargs:
        changed |= dict(kv=numbers(kwargs, "kv", kwargs["format"], kwargs.get("page_size", 0)), format="fp32")
        changed["kv_scale"] = None
    if "v" in kwargs:
        changed |= dict(v=numbers(kwargs, "v", kwargs["v_format"], 0), v_format="fp32", v_scale=None)
    if "win" in kwargs:
        changed["win"] = numbers(kwargs, "win", kwargs["win_format"], kwargs.get("win_page_size", 0))
        changed["win_format"] = "fp32"
    return changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_attend_on_the_numbers(attend_impl, shape: str, dtype: str) -> None:
    leading, kwargs = packed_call(shape, attend_impl, dtype=dtype, lengths=(9, 0, 14), rows=(3, 1, 2), padding=1)
    result, expected = cases.run(attend_impl, leading, kwargs), cases.run(attend_impl, leading, plain(kwargs))
    if attend_impl.backend == "reference":
        cases.assert_same_bits(result, expected, shape)
    cases.assert_agrees(attend_impl, leading, kwargs)
    atol, rtol = attend_impl.tolerance[dtype]
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), atol=2 * atol, rtol=2 * rtol)


@pytest.mark.parametrize("format", layout.names("kv", packed=True))
def test_every_packed_format_is_read(attend_impl, format: str) -> None:
    dim = layout.FORMATS[format].dim
    options = dict(format=format, win_format=format, q_heads=2, kv_heads=1, qk_dim=dim, v_dim=512)
    options |= dict(lengths=(9, 6), rows=(2, 1), padding=0)
    for planes in ("main", "window"):
        leading, kwargs = cases.attend(**options, planes=planes)
        cases.skip_unless(attend_impl, facts(Attend(*leading, **kwargs)))
        result, expected = cases.run(attend_impl, leading, kwargs), cases.run(attend_impl, leading, plain(kwargs))
        assert result[0].abs().sum() > 0
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def slot_bytes(format: str, slot: int, page_size: int) -> list[tuple[int, Any]]:
    """(page, index within it) of every byte of an entry."""
    f = layout.FORMATS[format]
    page, offset = slot // page_size, slot % page_size
    if not f.planar:
        return [(page, (offset, 0))]
    starts = [sum(f.widths()[:s]) * page_size for s in range(len(f.sections))]
    return [
        (page, slice(start + offset * width, start + (offset + 1) * width))
        for start, width in zip(starts, f.widths(), strict=True)
    ]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s not in ("gqa in int8", "v4, raw window", "not causal")])
def test_only_attended_bytes_count_and_all_of_them_do(attend_impl, shape: str) -> None:
    from test_attend import read_slots

    leading, kwargs = packed_call(shape, attend_impl, lengths=(9, 6), rows=(2, 1), padding=0)
    clean = cases.run(attend_impl, leading, kwargs)
    poisoned = dict(kwargs)
    for plane, name in (("kv", "format"), ("win", "win_format")):
        if plane not in kwargs:
            continue
        pages, size = entries(kwargs, plane)
        keep = read_slots(leading, dict(kwargs, **{plane: torch.zeros(pages, size, 1, 1)}), plane).flatten()
        filled = torch.full_like(kwargs[plane], 0xFF)  # NaN in e4m3, in e8m0, in bf16 and fp32; page padding too
        assert keep.any() and not keep.all()
        for slot in keep.nonzero().flatten().tolist():
            for page, index in slot_bytes(kwargs[name], slot, size):
                filled[page][index] = kwargs[plane][page][index]
            changed = dict(kwargs, **{plane: kwargs[plane].clone()})
            page, index = slot_bytes(kwargs[name], slot, size)[0]
            changed[plane][page][index] ^= 0x11
            assert not torch.equal(cases.run(attend_impl, leading, changed)[1], clean[1]), (plane, slot)
        poisoned[plane] = filled
    cases.assert_same_bits(cases.run(attend_impl, leading, poisoned), clean)


def test_facts_name_what_a_kernel_must_know() -> None:
    leading, kwargs = cases.attend(**SHAPES["v4.1, ratio 1, planar"], page_size=8, win_page_size=4)
    found = dict(facts(Attend(*leading, **kwargs)).facts)
    assert found["format"] == "fp4_v41_planar" and found["win_format"] == "fp8_v41_planar"
    assert (found["page_size"], found["win_page_size"], found["kv_heads"], found["qk_dim"]) == (8, 4, 1, 512)
