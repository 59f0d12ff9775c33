"""`convert`: bytes kept between orders of one codec, numbers kept as well as the target can elsewhere."""

from __future__ import annotations

import golden
import pytest
import torch
from cases import skip_unless
from test_formats import FILL, bits, golden_rows, new_plane, refused, shaped

import sparse_attn
from sparse_attn.layout import FORMATS
from sparse_attn.ops.convert import Convert, facts

SAME_CODEC = [
    (a, b) for a in FORMATS for b in FORMATS if a != b and FORMATS[a].codec == FORMATS[b].codec and FORMATS[a].packed
]


def convert(impl, *args, **kwargs) -> None:
    skip_unless(impl, facts(Convert(*args, **kwargs)))
    sparse_attn.convert(*args, **kwargs, backend=impl.backend)


def test_orders_are_pairs_of_one_codec() -> None:
    pairs = {(a, b) for a, b in SAME_CODEC if a < b}
    expected = {
        (f"{n}", f"{n}_planar") for n in ("fp8_v4", "fp8_v41", "fp4_v41", "fp8_index", "int8_index", "fp4_index")
    }
    assert pairs == expected | {("fp8_v4", "fp8_v4_640"), ("fp8_v4_640", "fp8_v4_planar")}


@pytest.mark.parametrize(("src", "dst"), SAME_CODEC)
def test_bytes_are_moved_to_the_other_order(convert_impl, src: str, dst: str) -> None:
    """Any bytes, also those that no quantiser of ours writes, between pages of other sizes."""
    src_page, dst_page = 3, 5
    at = {0: 4, 5: 0, 2: 6, 8: 1, 7: 3}
    to = {0: 14, 5: 0, 2: 6, 8: 3, 7: 11}
    plane = shaped(src, golden.plane(golden.PACKED[src], 3, src_page, at, 0), src_page)
    target = shaped(dst, golden.plane(golden.PACKED[dst], 3, dst_page, {}, FILL), dst_page)
    slots, targets = torch.tensor([*to, -1, 1]), torch.tensor([*to.values(), 2, -1])
    options = dict(src_format=src, dst_format=dst, src_page_size=src_page, dst_page_size=dst_page)
    convert(convert_impl, plane, target, slots, targets, **options)
    expected = golden.plane(golden.PACKED[dst], 3, dst_page, {to[s]: e for s, e in at.items()}, FILL)
    assert bytes(target.flatten().tolist()) == expected


@pytest.mark.parametrize(("src", "dst"), SAME_CODEC)
def test_there_and_back_is_the_same_plane(convert_impl, src: str, dst: str) -> None:
    """Random bytes: codes that no store writes, NaN among them."""
    page_size = 4
    plane, _ = new_plane(src, 3, page_size)
    zeros = bits(plane.clone())
    sparse_attn.store(golden_rows(src, [*range(12)]), plane, torch.arange(12), format=src, page_size=page_size)
    wide = torch.randint(0, 256, plane.shape, dtype=torch.uint8)
    plane = torch.where(plane != 0, wide, plane)  # only where parts lie, so that no padding is touched
    assert not torch.equal(bits(plane), zeros)
    between, _ = new_plane(dst, 3, 6)
    back, _ = new_plane(src, 3, page_size)
    sizes = dict(src_page_size=page_size, dst_page_size=6)
    convert(convert_impl, plane, between, src_format=src, dst_format=dst, **sizes)
    sizes = dict(src_page_size=6, dst_page_size=page_size)
    slots = torch.arange(12)
    convert(convert_impl, between, back, slots, slots, src_format=dst, dst_format=src, **sizes)
    assert torch.equal(back, plane)


@pytest.mark.parametrize(
    ("src", "dst", "lossless"),
    [
        ("bf16", "fp8_v41", False),
        ("fp8_v41", "bf16", True),  # 4 bits times a power of two
        ("fp4_v41", "bf16", True),  # 2 bits times 4
        ("fp4_v41", "fp8_v41", False),
        ("fp8_v4_planar", "fp8_v4_608", True),  # the scale in another type
        ("fp8_v32", "int8_v32", False),
        ("int8_v32", "fp32", True),
        ("fp8_index_planar", "int8_index", False),
        ("int8_index", "int8_index_h", True),
        ("fp32", "int4_index_h", False),
        ("fp32", "bf16", False),
        ("fp16", "fp32", True),
    ],
)
def test_numbers_are_stored_anew_in_another_codec(convert_impl, src: str, dst: str, lossless: bool) -> None:
    dim = FORMATS[src].dim or FORMATS[dst].dim or 20
    heads = 1 if FORMATS[src].packed or FORMATS[dst].packed else 2
    plane, scale = new_plane(src, 3, 4, heads, dim)
    rows, slots = torch.randn(7, heads, dim), torch.tensor([0, 3, 11, 5, 6, 8, 9])
    sparse_attn.store(rows, plane, slots, scale=scale, format=src, page_size=4)
    target, target_scale = new_plane(dst, 4, 3, heads, dim)
    options = dict(src_format=src, dst_format=dst, src_page_size=4, dst_page_size=3)
    convert(convert_impl, plane, target, slots, slots, src_scale=scale, dst_scale=target_scale, **options)
    read = sparse_attn.load(plane, slots, scale=scale, format=src, page_size=4)
    direct, direct_scale = new_plane(dst, 4, 3, heads, dim)
    sparse_attn.store(read, direct, slots, scale=direct_scale, format=dst, page_size=3)
    assert torch.equal(bits(target), bits(direct))
    assert scale is None or target_scale is None or torch.equal(target_scale, direct_scale)
    got = sparse_attn.load(target, slots, scale=target_scale, format=dst, page_size=3)
    assert torch.equal(got, read) == lossless


def test_scales_of_others_are_kept_between_orders(convert_impl) -> None:
    """Not as large as ours would be: the entry must not be quantised anew."""
    plane = shaped("fp8_v4", golden.plane(golden.PACKED["fp8_v4"], 3, 1, {0: 1}, 0), 1)
    plane[0, 0, 0, :448] = 0x38  # 1 in e4m3
    target, _ = new_plane("fp8_v4_planar", 3, 1)
    options = dict(src_format="fp8_v4", dst_format="fp8_v4_planar", dst_page_size=1)
    convert(convert_impl, plane, target, torch.tensor([0]), torch.tensor([1]), **options)
    assert torch.equal(target[1, :584], plane[0].flatten())


def test_nan_of_plain_rows_keeps_its_bits(convert_impl) -> None:
    plane = torch.full((2, 3, 2, 8), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    target = torch.zeros(2, 3, 2, 8, dtype=torch.bfloat16)
    convert(convert_impl, plane, target)
    assert torch.equal(bits(target), bits(plane))


def test_refusals() -> None:
    src, dst = new_plane("fp8_v41")[0], new_plane("fp8_v41_planar")[0]
    slots = torch.arange(3)
    options = dict(src_format="fp8_v41", dst_format="fp8_v41_planar", dst_page_size=3)
    for args, changes, sentence in (
        ((src, dst, slots), {}, "convert: dst_slots: expected slots of both planes or of neither, got slots of one"),
        ((src, dst[:3]), {}, "convert: dst: expected a plane of 12 entries or more, as src, got 9"),
        ((src, dst, slots, slots[:2]), {}, "convert: dst_slots: expected int64 [N] with N = 3, got int64 [2]"),
        ((src, dst, slots + 10, slots), {}, "convert: src_slots: expected less than pages * page_size = 12, got 12"),
        ((src, dst, slots, slots + 10), {}, "convert: dst_slots: expected less than pages * page_size = 12, got 12"),
        ((src, dst), dict(dst_page_size=0), "convert: dst_page_size: expected the entries of a page, as planar format"),
        (
            (src, src),
            dict(dst_format="fp4_v41"),
            "convert: dst: expected uint8 [pages, page_size, heads, row] with row",
        ),
        ((src, dst), dict(src_format="v41"), "convert: src_format: expected one of fp32, bf16,"),
        (
            (src, new_plane("fp8_index")[0]),
            dict(dst_format="fp8_index"),
            "convert: dst: expected rows of 128 elements for format 'fp8_index', got 512",
        ),
    ):
        refused(lambda a=args, c=changes: sparse_attn.convert(*a, **dict(options, **c)), sentence)


def test_debug_checks(debug_checks) -> None:
    src, dst = new_plane("bf16")[0], new_plane("fp32")[0]
    options = dict(src_format="bf16", dst_format="fp32")
    slots = torch.arange(3)
    sparse_attn.convert(src, dst, slots, slots, **options)
    refused(
        lambda: sparse_attn.convert(src, dst, slots, slots * 0, **options),
        "convert: dst_slots: expected no slot twice, got [0, 0, 0]",
    )
    refused(
        lambda: sparse_attn.convert(dst, dst, src_format="fp32", dst_format="fp32"),
        "convert: dst: expected memory that no other argument uses, got overlapping tensors; pass a tensor of its own",
    )
