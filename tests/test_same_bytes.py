"""`store`, `load` and `convert` of every kernel against the reference, byte by byte, in every format: all bfloat16
numbers, every amax, ties, and bytes that no quantiser of ours writes."""

from __future__ import annotations

import pytest
import torch
from cases import skip_unless
from test_codecs import ALL_BF16
from test_formats import load, new_plane, store
from torch import Tensor

import sparse_attn
from sparse_attn import codecs, registry
from sparse_attn.layout import BITS, FORMATS
from sparse_attn.ops.convert import Convert, facts
from sparse_attn.planes import Plane

DIM, PAGE_SIZE = 32, 5
REFERENCE, REFERENCE_LOAD = (registry.implementations(op)[-1] for op in ("store", "load"))


def kernels(op: str):
    """A mark: each kernel but the reference."""
    impls = [i for i in registry.implementations(op) if i.backend != "reference" and registry.availability(i) is None]
    return pytest.mark.parametrize("impl", impls, ids=lambda impl: impl.backend)


def dim_of(format: str) -> int:
    return FORMATS[format].dim or DIM


def in_groups(format: str, numbers: Tensor) -> Tensor:
    """Rows ``[T, 1, D]`` in whose groups the numbers follow each other; the last row is filled up with zeros."""
    dim = dim_of(format)
    rows = torch.zeros(-(-len(numbers) // dim), dim)
    rows.view(-1)[: len(numbers)] = numbers
    return rows[:, None]


def each_the_largest(format: str) -> Tensor:
    """Rows ``[T, 1, D]``: every magnitude of bfloat16 as the first of a group of smaller ones."""
    codec, dim = FORMATS[format].codec, dim_of(format)
    group = codec.group or dim
    parts = torch.cat([torch.ones(1), torch.rand(group - 1) * 2 - 1])
    groups = ALL_BF16[torch.randperm(1 << 15), None] * parts
    if not codec.group:
        return groups[:, None]
    spare = -len(groups) % (codec.dim // group)
    rows = torch.cat([groups, groups[:spare]]).view(-1, codec.dim)
    return torch.cat([rows, rows.flip(-1)[:, : codec.rope]], -1)[:, None]


def beside_the_ties(format: str) -> Tensor:
    """Rows with the halves between stored numbers, and what lies beside them, times scales of e4m3 and fp16."""
    codec = FORMATS[format].codec
    largest = codecs.LARGEST.get(codec.element, 1)
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codecs.from_bytes(codec.element if BITS[codec.element] <= 8 else "e4m3", codes)
    exact = exact[exact.isfinite()].sort().values.unique()
    ties = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([ties, *(ties.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)), exact])
    near = near[near.abs() <= largest]
    group = codec.group or DIM
    numbers = torch.nn.functional.pad(near, (0, -len(near) % (group - 1))).view(-1, group - 1)
    groups = torch.nn.functional.pad(numbers, (0, 1), value=largest).flatten()
    return torch.cat([in_groups(format, groups * scale) for scale in (1, 1.125, 1.875, 1 + 2.0**-10)])


def any_bits(format: str) -> Tensor:
    """Rows of random bits of float32, each group of one magnitude, and of all."""
    bits = torch.randint(-(1 << 31), 1 << 31, (40, dim_of(format)), dtype=torch.int64).int()
    rows = torch.cat([bits, bits & ~0x7F800000 | 0x7F000000 & bits[:, :1]]).view(torch.float32)
    return rows[:, None]


ROWS = {
    "all of bfloat16": lambda format: in_groups(format, ALL_BF16),
    "all of bfloat16, mixed": lambda format: in_groups(format, ALL_BF16[torch.randperm(1 << 16)]),
    "each the largest": each_the_largest,
    "ties": beside_the_ties,
    "any bits": any_bits,
}


def assert_same_parts(format: str, slots: Tensor, got: Plane, expected: Plane) -> None:
    """The same bytes, but that a NaN may be any NaN."""
    codec = FORMATS[format].codec
    types = {"values": codec.element, "scales": codec.scale, "rope": "bf16", "pad": "int8"}
    for name, stored in got.read(got.at(slots)).items():
        ours, theirs = stored, expected.read(expected.at(slots))[name]
        if BITS[types[name]] >= 8:
            size = BITS[types[name]] // 8
            nan = codecs.from_bytes(types[name], ours).isnan() & codecs.from_bytes(types[name], theirs).isnan()
            ours, theirs = (x.unflatten(-1, (-1, size)).masked_fill(nan[..., None], 0) for x in (ours, theirs))
        assert torch.equal(ours, theirs), f"{name} of {format} differ"


def planes(format: str, entries: int, dim: int) -> Plane:
    pages = -(-entries // PAGE_SIZE)
    data, scale = new_plane(format, pages, PAGE_SIZE, 1, dim, fill=7)
    return Plane(data, format, scale, PAGE_SIZE)


def assert_stored_as_by_the_reference(impl, format: str, numbers: Tensor) -> None:
    slots = torch.randperm(len(numbers))
    stored = [planes(format, len(numbers), numbers.shape[-1]) for _ in range(2)]
    for kernel, plane in zip((impl, REFERENCE), stored, strict=True):
        store(kernel, numbers, plane.data, slots, plane.scale, format, PAGE_SIZE)
    assert_same_parts(format, slots, *stored)


@kernels("store")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_store(impl, format: str, rows: str) -> None:
    assert_stored_as_by_the_reference(impl, format, ROWS[rows](format))


@kernels("store")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_short_numbers(impl, format: str, dtype: torch.dtype) -> None:
    for rows in ROWS.values():
        assert_stored_as_by_the_reference(impl, format, rows(format).to(dtype))


@kernels("store")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_number_over_every_scale(impl, dtype: torch.dtype) -> None:
    """Of bfloat16, over each scale of e4m3: from numbers that are stored as nothing to the largest."""
    scales = codecs.from_bytes("e4m3", torch.arange(1, 127, dtype=torch.uint8))
    octaves = torch.arange(128).add(128)[:, None] * 2.0 ** torch.arange(-12, -4)  # 1/16 to 8
    numbers = octaves.flatten()[: 64 * 15] * torch.tensor([1.0, -1.0]).repeat(32 * 15)
    exponents = scales.log2().floor().exp2()
    groups = numbers.view(64, 15)[None] * exponents[:, None, None]
    largest = (6 * scales)[:, None, None].expand(-1, 64, 1)
    groups = torch.where(groups.abs() > largest, 0.0, groups)
    rows = torch.cat([largest, groups], -1).reshape(-1, 1, 512)
    assert_stored_as_by_the_reference(impl, "fp4_v41", rows.to(dtype))


@kernels("store")
@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if not f.packed])
def test_rows_that_fill_no_vectors(impl, format: str) -> None:
    """Of two heads: what a vector writes past a row would lie in the next."""
    for dim in (2, 6, 10, 14, 22, 30, 34, 62) if BITS[FORMATS[format].codec.element] < 8 else (1, 3, 5, 7, 15, 17, 33):
        rows, slots = torch.randn(7, 2, dim), torch.randperm(7)
        stored = [new_plane(format, 2, PAGE_SIZE, 2, dim, fill=7) for _ in range(2)]
        for kernel, plane in zip((impl, REFERENCE), stored, strict=True):
            store(kernel, rows, plane[0], slots, plane[1], format, PAGE_SIZE)
        (got, scale), (expected, expected_scale) = stored
        assert torch.equal(got, expected), dim
        assert scale is None or torch.equal(scale, expected_scale), dim


def random_bytes(format: str, entries: int, dim: int) -> Plane:
    """A plane of any bytes, or in wide types any bits."""
    plane = planes(format, entries, dim)
    for t in (plane.data, plane.scale):
        if t is not None:
            t.view(torch.uint8).random_(0, 256)
    return plane


@kernels("load")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_load(impl, format: str, dtype: torch.dtype) -> None:
    plane = random_bytes(format, 300, dim_of(format))
    slots = torch.randperm(300)
    options = dict(scale=plane.scale, format=format, page_size=PAGE_SIZE, dtype=dtype)
    got = load(impl, plane.data, slots, **options)
    expected = sparse_attn.load(plane.data, slots, **options, backend="reference")
    assert torch.equal(got.isnan(), expected.isnan()) and expected.isfinite().any()
    numbers = [x.masked_fill(x.isnan(), 0) for x in (got, expected)]
    assert torch.equal(*numbers) and torch.equal(*(x.signbit() for x in numbers))


@kernels("load")
@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if not f.packed])
def test_rows_that_fill_no_vectors_are_read(impl, format: str) -> None:
    for dim in (2, 6, 10, 22, 34, 62) if BITS[FORMATS[format].codec.element] < 8 else (1, 3, 5, 7, 17, 33):
        plane, scale = new_plane(format, 2, PAGE_SIZE, 2, dim)
        store(REFERENCE, torch.randn(7, 2, dim), plane, torch.arange(7), scale, format, PAGE_SIZE)
        for dtype in (torch.float32, torch.bfloat16):
            options = dict(scale=scale, format=format, page_size=PAGE_SIZE, dtype=dtype)
            got, expected = (load(i, plane, torch.tensor([3, -1, 6]), **options) for i in (impl, REFERENCE_LOAD))
            assert torch.equal(got, expected) and expected.any(), dim


@kernels("load")
def test_a_nan_stays_one(impl) -> None:
    """Whatever its bits, which rounding could make an infinity or a zero."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -(1 << 23) + 1] * 8, dtype=torch.int32)
    plane = bits.view(torch.float32).view(1, 1, 1, -1)
    assert load(impl, plane, torch.tensor([0]), format="fp32", dtype=torch.bfloat16).isnan().all()


@kernels("convert")
@pytest.mark.parametrize("src", FORMATS)
def test_convert(impl, src: str) -> None:
    """To every format that takes the rows, from some entries to others, and all of them."""
    for dst in FORMATS:
        sizes = {FORMATS[name].dim for name in (src, dst)} - {0}
        if len(sizes) > 1:
            continue
        dim = next(iter(sizes), DIM)
        origin = random_bytes(src, 60, dim)
        slots, targets = torch.randperm(60), torch.randperm(60)
        slots[:3], targets[5:9] = -1, -(1 << 40)
        runs = torch.arange(60), torch.arange(60)  # what is copied at once
        for chosen in ((slots, targets), runs, (None, None)):
            stored = [planes(dst, 60, dim) for _ in range(2)]
            for backend, plane in zip((impl.backend, "reference"), stored, strict=True):
                kwargs = dict(src_scale=origin.scale, dst_scale=plane.scale, src_format=src, dst_format=dst)
                kwargs |= dict(src_page_size=PAGE_SIZE, dst_page_size=PAGE_SIZE)
                skip_unless(impl, facts(Convert(origin.data, plane.data, *chosen, **kwargs)))
                sparse_attn.convert(origin.data, plane.data, *chosen, **kwargs, backend=backend)
            assert_same_parts(dst, torch.arange(60), *stored)


@kernels("convert")
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4_index_h"])
def test_convert_copies_runs(impl, format: str) -> None:
    """Runs that cross pages of other sizes, rows with gaps between pages, entries or heads."""
    for gap in range(4):
        items = FORMATS[format].row(6)
        axes = [9, 4, 3, items]
        if gap < 3:
            axes[gap] *= 2
        pool = torch.zeros(axes, dtype=getattr(torch, FORMATS[format].dtype))
        pool.view(torch.uint8).random_(0, 256)
        src = pool[tuple(slice(None, None, 2) if axis == gap < 3 else slice(None) for axis in range(4))]
        dst = torch.zeros(6, 8, 3, items, dtype=pool.dtype)[:, :7]
        scales = [None, None]
        if FORMATS[format].scale_dtype:
            scales = [torch.rand(9, 4, 3).half(), torch.zeros(6, 7, 3).half()]
        options = dict(src_format=format, dst_format=format, src_scale=scales[0], dst_scale=scales[1])
        slots = torch.cat([torch.arange(5, 25), torch.arange(0, 3), torch.tensor([35])])
        targets = torch.arange(3, 27)
        sparse_attn.convert(src, dst, slots, targets, **options, backend=impl.backend)
        moved = src.flatten(0, 1)[slots].contiguous().view(torch.uint8)
        assert torch.equal(dst.flatten(0, 1)[3:27].contiguous().view(torch.uint8), moved)
        assert not dst.flatten(0, 1)[:3].any() and not dst.flatten(0, 1)[27:].any()
        if scales[1] is not None:
            assert torch.equal(scales[1].flatten(0, 1)[3:27], scales[0].flatten(0, 1)[slots])
