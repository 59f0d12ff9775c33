"""Every packed format byte by byte, in both orders, against `golden`; and what `store` and `load` promise of all."""

from __future__ import annotations

import struct
from dataclasses import astuple

import golden
import pytest
import torch
from cases import skip_unless, skip_where_values_stay_on_the_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparse_attn
from sparse_attn import layout
from sparse_attn.layout import FORMATS
from sparse_attn.ops.load import Load
from sparse_attn.ops.load import facts as load_facts
from sparse_attn.ops.store import Store
from sparse_attn.ops.store import facts as store_facts

PAGES, PAGE_SIZES = 3, (1, 3, 64)
FILL = 0xA5
AT = {0: 4, 5: 0, 2: 6, 8: 1, 7: 3}  # slot: entry
SCALE_PLANE = [name for name, f in FORMATS.items() if f.scale_dtype]


def to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def shaped(name: str, content: bytes, page_size: int) -> Tensor:
    """A plane of these bytes."""
    width = golden.PACKED[name].place(1)[0]
    flat = to_tensor(content).view(PAGES, -1)
    return flat if golden.PACKED[name].planar else flat.view(PAGES, page_size, 1, width)


def slots_within(page_size: int) -> dict[int, int]:
    return {slot: entry for slot, entry in AT.items() if slot < PAGES * page_size}


def golden_rows(name: str, entries: list[int]) -> Tensor:
    return torch.tensor([golden.PACKED[name].entry(e)[0] for e in entries])[:, None]


def new_plane(name: str, pages: int = 4, page_size: int = 3, heads: int = 2, dim: int = 20, fill: int = 0):
    """An unpacked format's plane has ``heads`` and ``dim``, a packed one its own."""
    f = FORMATS[name]
    shape = f.shape(pages, page_size, 1 if f.packed else heads, f.dim or dim)
    plane = torch.full(shape, fill, dtype=getattr(torch, f.dtype))
    return plane, (torch.full(shape[:3], fill, dtype=torch.half) if f.scale_dtype else None)


def store(impl, rows, plane, slots, scale=None, format="bf16", page_size=0) -> None:
    skip_unless(impl, store_facts(Store(rows, plane, slots, scale, format, page_size)))
    sparse_attn.store(rows, plane, slots, scale=scale, format=format, page_size=page_size, backend=impl.backend)


def load(impl, plane, slots, scale=None, format="bf16", page_size=0, dtype=None) -> Tensor:
    skip_unless(impl, load_facts(Load(plane, slots, scale, format, page_size, dtype)))
    return sparse_attn.load(
        plane, slots, scale=scale, format=format, page_size=page_size, dtype=dtype, backend=impl.backend
    )


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


# the description


def test_every_packed_format_has_golden_rows() -> None:
    assert set(golden.PACKED) == {name for name, f in FORMATS.items() if f.packed}


@pytest.mark.parametrize("name", golden.PACKED)
def test_the_description_agrees(name: str) -> None:
    f, g = FORMATS[name], golden.PACKED[name]
    row, parts = g.entry(2)
    assert f.dim == len(row) and f.planar == g.planar
    for page_size in (1, 2, 3, 53, 64, 256):
        assert f.page_bytes(page_size) == g.place(page_size)[0]
    assert f.entry_bytes(f.dim) == sum(length for _, _, length in g.place(1)[1].values())
    flat = {part: size for section in f.sections for part, size in section}
    assert {part: len(content) for part, content in parts.items()} == {p: n for p, n in flat.items() if p != "pad"}
    with pytest.raises(ValueError, match=f"format '{name}': expected rows of {f.dim} elements, got 7"):
        f.entry_bytes(7)


def test_parts_are_as_long_as_their_codec_needs() -> None:
    for f in FORMATS.values():
        c, sizes = f.codec, {part: size for section in f.sections for part, size in section}
        if not f.packed:
            continue
        assert sizes["values"] * 8 == c.dim * layout.BITS[c.element], f.name
        assert sizes["scales"] * 8 == c.dim // c.group * layout.BITS[c.scale], f.name
        assert sizes.get("rope", 0) == 2 * c.rope and c.dim % c.group == 0, f.name


def test_entry_bytes_are_those_published() -> None:
    published = dict(fp8_v32=656, int8_v32=656, fp8_v4=584, fp8_v41=528, fp4_v41=288)
    published |= dict(fp8_index=132, int8_index=130, fp4_index=68, fp8_v4_640=640, fp8_v4_608=608)
    for name, size in published.items():
        assert FORMATS[name].entry_bytes(FORMATS[name].dim) == size
        planar = FORMATS.get(f"{name}_planar")
        assert planar is None or planar.entry_bytes(planar.dim) == size
    assert [FORMATS[name].entry_bytes(64) for name in ("fp32", "bf16", "fp16", "int8")] == [256, 128, 128, 66]
    assert [FORMATS[name].entry_bytes(128) for name in ("int8_index_h", "int4_index_h")] == [130, 66]


def test_codes_and_names_are_stable() -> None:
    """Native kernels and stored planes hold them: never change one, append."""
    assert list(FORMATS) == [
        "fp32",
        "bf16",
        "fp16",
        "int8",
        "int8_index_h",
        "int4_index_h",
        "fp8_v32",
        "int8_v32",
        "fp8_v4",
        "fp8_v4_planar",
        "fp8_v4_640",
        "fp8_v4_608",
        "fp8_v41",
        "fp8_v41_planar",
        "fp4_v41",
        "fp4_v41_planar",
        "fp8_index",
        "fp8_index_planar",
        "int8_index",
        "int8_index_planar",
        "fp4_index",
        "fp4_index_planar",
    ]
    assert [f.code for f in FORMATS.values()] == list(range(22))
    assert {f.version for f in FORMATS.values()} == {1}


def test_native_kernels_mirror_the_formats() -> None:
    native = pytest.importorskip("sparse_attn._cpu_native")
    described = [(f.name, f.code, astuple(f.codec), f.sections, f.page_multiple) for f in FORMATS.values()]
    assert native.formats() == described
    assert native.numbers() == layout.BITS


# golden bytes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", golden.PACKED)
def test_store_writes_these_bytes(store_impl, name: str, page_size: int) -> None:
    at = slots_within(page_size)
    plane = shaped(name, golden.plane(golden.PACKED[name], PAGES, page_size, {}, FILL), page_size)
    rows = golden_rows(name, [*at.values(), 5, 5])
    slots = torch.tensor([*at, -1, -(1 << 40)])
    store(store_impl, rows, plane, slots, format=name, page_size=page_size)
    expected = golden.plane(golden.PACKED[name], PAGES, page_size, at, FILL)
    assert bytes(plane.flatten().tolist()) == expected


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", golden.PACKED)
def test_load_reads_these_rows(load_impl, name: str, page_size: int) -> None:
    at = slots_within(page_size)
    plane = shaped(name, golden.plane(golden.PACKED[name], PAGES, page_size, at, FILL), page_size)
    slots = torch.tensor([*reversed(at), -1, *at])
    expected = golden_rows(name, [*reversed(at.values()), 0, *at.values()])
    expected[len(at)] = 0
    rows = load(load_impl, plane, slots, format=name, page_size=page_size)
    assert torch.equal(bits(rows), bits(expected))
    rows = load(load_impl, plane, slots, format=name, page_size=page_size, dtype=torch.bfloat16)
    assert rows.dtype == torch.bfloat16 and torch.equal(bits(rows), bits(expected.bfloat16()))


@pytest.mark.parametrize("name", SCALE_PLANE)
def test_formats_with_a_scale_plane(store_impl, load_impl, name: str) -> None:
    heads, dim, entries = 3, 20, [4, 0, 6]
    largest = 7 if name == "int4_index_h" else 127
    made = [golden.scale_plane(largest, heads, dim, e) for e in entries]
    rows = torch.tensor([row for row, _, _ in made])
    plane, scale = new_plane(name, heads=heads, dim=dim)
    slots = torch.tensor([7, 0, 11])
    store(store_impl, rows, plane, slots, scale, name)
    stored, scales = bits(plane).view(12, -1), bits(scale).view(12, -1)
    for slot, (_, values, factors) in zip(slots.tolist(), made, strict=True):
        assert bytes(stored[slot].tolist()) == b"".join(values)
        assert bytes(scales[slot].tolist()) == factors
    assert torch.equal(load(load_impl, plane, slots, scale, name), rows)


def test_scales_that_others_write_are_read(load_impl) -> None:
    """Not every writer rounds the scales of fp8_v32 to powers of two: the product is rounded to float32."""
    factor = struct.unpack("<f", struct.pack("<f", 0.1234))[0]
    for name, start in (("fp8_v32", 512), ("fp8_index", 128)):
        plane = shaped(name, golden.plane(golden.PACKED[name], PAGES, 1, {0: 1}, 0), 1)
        plane[0, 0, 0, start : start + 4] = to_tensor(struct.pack("<f", factor))
        row = load(load_impl, plane, torch.tensor([0]), format=name)[0, 0, :128]
        codes = golden.PACKED[name].entry(1)[1]["values"][:128]
        assert (
            row.tolist() == torch.tensor([golden.e4m3(c) * factor for c in codes], dtype=torch.double).float().tolist()
        )


# what any format promises


def bound(name: str, rows: Tensor) -> Tensor:
    """The largest error of each element, from `docs/formats.md`: half a step of its stored number."""
    c = FORMATS[name].codec
    exact = rows.double()
    plain = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
    if not c.scale:
        return exact.abs() * plain[c.element] + (2.0**-25 if c.element == "fp16" else 0.0)
    head, tail = exact.split([c.dim or exact.shape[-1], c.rope], -1)
    groups = head.unflatten(-1, (-1, c.group or head.shape[-1]))
    amax = groups.abs().amax(-1, keepdim=True)
    if c.element == "e4m3":
        scale = 2.0 ** torch.ceil(torch.log2(amax.clamp(min=1e-4) / 448))
        limit = torch.maximum(groups.abs() * 2.0**-4, scale * 2.0**-10)
    elif c.scale == "e8m0":
        scale = 2.0 ** torch.ceil(torch.log2(amax.clamp(min=6 * 2.0**-126) / 6))
        limit = torch.maximum(scale / 4, groups.abs() / 4)
    elif c.element == "e2m1":
        scale = (amax / 6).clamp(2.0**-9, 448)
        scale = torch.maximum(scale * (1 + 2.0**-4), scale + 2.0**-10)  # rounded up by half a step at most
        saturated = groups.abs() - 6 * (amax / 6).clamp(2.0**-9, 448) * (1 - 2.0**-4) + 6 * 2.0**-10
        limit = torch.maximum(torch.maximum(scale / 4, groups.abs() / 4), saturated)
    else:
        step = amax / (127 if c.element == "int8" else 7)
        limit = (step * (1 + 2.0**-10) / 2 + 2.0**-24 * (c.scale == "fp16")).expand_as(groups)
    return torch.cat([limit.flatten(-2), tail.abs() * 2.0**-8 + 2.0**-134], -1)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_is_stored_is_read_within_the_bound(name: str, data) -> None:
    page_size, pages = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    magnitude = data.draw(st.integers(-12, 15))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    chosen = data.draw(st.lists(st.integers(0, pages * page_size - 1), min_size=1, unique=True))
    heads, dim = data.draw(st.integers(1, 3)), 2 * data.draw(st.integers(1, 20))
    f = FORMATS[name]
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    rows = torch.randn(len(chosen), 1 if f.packed else heads, f.dim or dim, generator=g)
    limit = 60000.0 if "fp16" in (f.codec.element, f.codec.scale) or dtype == torch.float16 else 3e38
    rows = (rows * 2.0**magnitude).clamp(-limit, limit).to(dtype)
    plane, scale = new_plane(name, pages, page_size, heads, dim, fill=7)
    before = plane.clone()
    options = dict(scale=scale, format=name, page_size=page_size, backend="reference")
    slots = torch.tensor(chosen)
    sparse_attn.store(rows, plane, slots, **options)
    read = sparse_attn.load(plane, slots, **options)
    assert ((read.double() - rows.double()).abs() <= bound(name, rows)).all()
    # read and stored again, the same numbers
    first = plane.clone()
    sparse_attn.store(read, plane, slots, **options)
    again = sparse_attn.load(plane, slots, **options)
    if name.startswith("int8_v32"):
        torch.testing.assert_close(again, read, rtol=2.0**-22, atol=0)
    elif f.codec.scale not in ("fp16", "e4m3") or magnitude >= 0:
        assert torch.equal(again, read)
        if f.codec.scale in ("fp16", "e4m3") or not f.codec.scale:
            assert torch.equal(plane, first)
    # the other slots are as they were
    rest = torch.tensor([s for s in range(pages * page_size) if s not in chosen], dtype=torch.int64)
    untouched, _ = new_plane(name, pages, page_size, heads, dim, fill=7)
    empty = sparse_attn.load(untouched, rest, **options)
    assert torch.equal(bits(sparse_attn.load(plane, rest, **options)), bits(empty))
    assert plane.shape == before.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", golden.PACKED)
def test_a_fault_shows_in_its_group(store_impl, load_impl, name: str, bad: float) -> None:
    c = FORMATS[name].codec
    rows = golden_rows(name, [0, 1, 2])
    clean = rows.clone()
    rows[1, 0, c.group + 3 if c.group < c.dim else 3] = bad
    plane, _ = new_plane(name)
    slots = torch.tensor([4, 5, 6])
    store(store_impl, rows, plane, slots, format=name, page_size=3)
    read = load(load_impl, plane, slots, format=name, page_size=3)
    group = slice(c.group, 2 * c.group) if c.group < c.dim else slice(0, c.group)
    assert read[1, 0, group].isnan().all()
    read[1, 0, group] = clean[1, 0, group]
    assert torch.equal(read, clean)
    if c.rope:
        rows = clean.clone()
        rows[1, 0, -1] = bad
        store(store_impl, rows, plane, slots, format=name, page_size=3)
        read = load(load_impl, plane, slots, format=name, page_size=3)
        assert torch.equal(read.nan_to_num(1.5), rows.nan_to_num(1.5)) and not read[1, 0, -1].isfinite()


@pytest.mark.parametrize("name", golden.PACKED)
def test_a_page_axis_with_strides(store_impl, load_impl, name: str) -> None:
    """Pages that are views into a larger pool, as of several layers."""
    on_device = {"ascend_triton", "cuda_triton"} & {store_impl.backend, load_impl.backend}
    if on_device and layout.FORMATS[name].codec.scale == "fp32":
        pytest.skip("a device loads aligned numbers only; where it is at home, the refusal is tested")
    rows, slots = golden_rows(name, [3, 1, 2]), torch.tensor([0, 4, 11])
    plane, _ = new_plane(name)
    pool = torch.full((4, 2, plane[0].numel() + 5), FILL, dtype=torch.uint8)
    view = pool[:, 1, 3:-2].unflatten(1, plane.shape[1:]) if plane.dim() > 2 else pool[:, 1, 3:-2]
    assert view.shape == plane.shape and not view.is_contiguous()
    view.zero_()
    for p in (plane, view):
        store(store_impl, rows, p, slots, format=name, page_size=3)
    assert torch.equal(view, plane)
    assert (pool[:, 0] == FILL).all() and (pool[:, 1, :3] == FILL).all() and (pool[:, 1, -2:] == FILL).all()
    options = dict(format=name, page_size=3)
    assert torch.equal(load(load_impl, view, slots, **options), load(load_impl, plane, slots, **options))


@pytest.mark.parametrize("name", ["fp8_v41", "fp8_v41_planar", "int8"])
def test_slots_past_2_to_the_31(store_impl, load_impl, name: str) -> None:
    """Almost 2**31 pages that begin one item apart: 2**33 entries in a few GiB, of which little is touched."""
    pages = (1 << 31) - 21  # 32-bit slots would wrap to another page

    def many(page: Tensor | None) -> Tensor | None:
        if page is None:
            return None
        pool = torch.empty(pages + page.numel(), dtype=page.dtype)
        return pool.as_strided((pages, *page.shape[1:]), (1, *page.stride()[1:]))

    page, page_scale = new_plane(name, 1, 4, 1, 16)
    plane, scale = many(page), many(page_scale)
    assert plane is not None
    rows = golden_rows(name, [2]) if name in golden.PACKED else torch.randn(1, 1, 16)
    far, near = torch.tensor([4 * pages - 2]), torch.tensor([2])
    store(store_impl, rows, page, near, page_scale, name, 4)
    store(store_impl, rows, plane, far, scale, name, 4)
    expected = load(load_impl, page, near, page_scale, name, 4)
    assert torch.equal(load(load_impl, plane, far, scale, name, 4), expected)
    assert torch.equal(load(load_impl, plane[-1:], near, None if scale is None else scale[-1:], name, 4), expected)
    skip_where_values_stay_on_the_device(load_impl)
    with pytest.raises(sparse_attn.InvalidCall, match=f"less than pages \\* page_size = {4 * pages}, got {4 * pages}"):
        load(load_impl, plane, far + 2, scale, name, 4)


# refusals


def refused(call, sentence: str) -> None:
    with pytest.raises(sparse_attn.InvalidCall) as error:
        call()
    assert str(error.value).startswith(sentence), str(error.value)


def test_a_wrong_tag_is_refused() -> None:
    """Another order, another number of bytes, another dtype."""
    rows, slots = golden_rows("fp8_v41", [0]), torch.tensor([0])
    interleaved, planar = new_plane("fp8_v41")[0], new_plane("fp8_v41_planar")[0]
    for plane, name, got in (
        (planar, "fp8_v41", "uint8 [pages, page_size, heads, row], got uint8 [4, 2048]"),
        (interleaved, "fp8_v41_planar", "uint8 [pages, page_bytes], got uint8 [4, 3, 1, 528]"),
        (interleaved, "fp4_v41", "uint8 [pages, page_size, heads, row] with row = 288, got uint8 [4, 3, 1, 528]"),
        (planar, "fp4_v41_planar", "uint8 [pages, page_bytes] with page_bytes = 1024, got uint8 [4, 2048]"),
        (interleaved, "int8", "int8 elements for format 'int8', got uint8 [4, 3, 1, 528]; pass the plane's own format"),
        (interleaved.view(torch.int8), "fp8_v41", "uint8 elements for format 'fp8_v41', got int8 [4, 3, 1, 528]"),
    ):
        scale = torch.zeros(4, 3, 1, dtype=torch.half) if name == "int8" else None
        options = dict(scale=scale, format=name, page_size=3)
        for op in (
            lambda o=options, p=plane: sparse_attn.store(rows, p, slots, **o),
            lambda o=options, p=plane: sparse_attn.load(p, slots, **o),
        ):
            with pytest.raises(sparse_attn.InvalidCall) as error:
                op()
            assert str(error.value).partition(": expected ")[2].startswith(got), str(error.value)


def test_one_shape_two_formats_is_found_by_debug_checks(debug_checks) -> None:
    """fp8_v32 and int8_v32 both have 576 elements in 656 bytes: shapes cannot tell, but no scale is negative."""
    slots = torch.arange(6)
    names = ("fp8_v32", "int8_v32")
    for name, other in (names, names[::-1]):
        plane, _ = new_plane(name)
        sparse_attn.store(torch.randn(6, 1, 576), plane, slots, format=name)
        sparse_attn.load(plane, torch.cat([slots, slots - 6]), format=name)
        sentence = f"load: plane: expected no negative scale, as in every plane of format '{other}', got one in slot ["
        refused(lambda p=plane, o=other: sparse_attn.load(p, slots, format=o), sentence)
        target, _ = new_plane(other)
        refused(
            lambda p=plane, o=other, t=target: sparse_attn.convert(p, t, slots, slots, src_format=o, dst_format=o),
            sentence.replace("load: plane", "convert: src"),
        )


def test_refusals_of_packed_formats() -> None:
    rows, slots = golden_rows("fp8_v41", [0]), torch.tensor([0])
    planar = new_plane("fp8_v41_planar")[0]
    plane = new_plane("fp8_v41")[0]
    refused(
        lambda: sparse_attn.store(rows, planar, slots, format="fp8_v41_planar"),
        "store: page_size: expected the entries of a page, as planar format 'fp8_v41_planar' does not show them, got 0",
    )
    refused(
        lambda: sparse_attn.store(rows, plane, slots, format="fp8_v41", page_size=4),
        "store: page_size: expected 0 or the plane's 3, got 4",
    )
    refused(
        lambda: sparse_attn.store(rows[..., :448], plane, slots, format="fp8_v41"),
        "store: plane: expected rows of 512 elements for format 'fp8_v41', got 448",
    )
    refused(
        lambda: sparse_attn.store(rows.expand(1, 2, 512), plane, slots, format="fp8_v41"),
        "store: plane: expected 1 head for format 'fp8_v41', got 2",
    )
    refused(
        lambda: sparse_attn.store(rows, plane, slots, format="fp8_v41", scale=torch.zeros(4, 3, 1)),
        "store: scale: expected None, as format 'fp8_v41' has no scale plane, got a tensor",
    )
    odd = torch.zeros(4, 3, 1, 10, dtype=torch.uint8), torch.zeros(4, 3, 1, dtype=torch.half)
    refused(
        lambda: sparse_attn.store(torch.zeros(1, 1, 21), odd[0], slots, scale=odd[1], format="int4_index_h"),
        "store: plane: expected rows of whole bytes in format 'int4_index_h', got 21",
    )
    refused(
        lambda: sparse_attn.load(plane, slots, format="fp8_v41", dtype=torch.float16),
        "load: dtype: expected float32 or bfloat16, got float16",
    )
    refused(
        lambda: sparse_attn.load(plane, slots.int(), format="fp8_v41"),
        "load: slots: expected int64 [T], got int32 [1]",
    )
    refused(
        lambda: sparse_attn.load(plane, torch.tensor([3, 12]), format="fp8_v41"),
        "load: slots: expected less than pages * page_size = 12, got 12",
    )
    out = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    refused(
        lambda: torch.ops.sparse_attn.load.out(plane, slots, format="fp8_v41", out=out),
        "load: out: expected float32 [T, H, D], got bfloat16 [1, 1, 512]",
    )
