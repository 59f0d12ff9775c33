"""`store` on every kernel: the same bytes as the reference, what is skipped, what is refused, and what a row loses."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, skip_unless, skip_where_values_stay_on_the_device

import sparse_attn
from sparse_attn import codecs, layout
from sparse_attn.ops.store import Store, facts

FORMATS = [name for name, f in layout.FORMATS.items() if not f.packed]  # test_formats.py has the packed ones
SCALED = [name for name in FORMATS if layout.FORMATS[name].scale_dtype]


def empty_plane(format: str, pages: int = 4, page: int = 3, heads: int = 2, dim: int = 20):
    f = layout.FORMATS[format]
    plane = torch.full(f.shape(pages, page, heads, dim), 7, dtype=getattr(torch, f.dtype))
    return plane, (torch.full((pages, page, heads), 7, dtype=torch.half) if format in SCALED else None)


def store(impl, rows, plane, slots, scale, format: str) -> None:
    skip_unless(impl, facts(Store(rows, plane, slots, scale, format)))
    sparse_attn.store(rows, plane, slots, scale=scale, format=format, backend=impl.backend)


def read(plane, scale, format: str) -> torch.Tensor:
    """Every entry as the reference reads it, ``[pages, page_size, heads, elements]``."""
    rows = sparse_attn.load(plane, torch.arange(12), scale=scale, format=format, backend="reference")
    return rows.unflatten(0, (4, 3))


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-9, 1e-4, 1.0, 300.0, 6e4])
def test_same_bytes_as_the_reference(store_impl, format: str, dtype: str, magnitude: float) -> None:
    rows = (torch.randn(9, 2, 20) * magnitude).to(DTYPES[dtype])
    rows[0] = 0
    slots = torch.tensor([3, -1, 0, 11, -7, 8, 1, 5, -(1 << 62)])
    plane, scale = empty_plane(format)
    expected, expected_scale = empty_plane(format)
    store(store_impl, rows, plane, slots, scale, format)
    sparse_attn.store(rows, expected, slots, scale=expected_scale, format=format, backend="reference")
    assert torch.equal(bytes_of(plane), bytes_of(expected))
    if scale is not None:
        assert torch.equal(bytes_of(scale), bytes_of(expected_scale))
    untouched = [s for s in range(12) if s not in slots.tolist()]
    assert (plane.flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize("format", SCALED)
def test_quantised_rows_are_within_half_a_step(store_impl, format: str) -> None:
    """The bound is the format's, not the kernel's: |x - stored * scale| <= scale / 2, and nothing is clipped."""
    rows = torch.randn(12, 2, 20) * torch.logspace(-4, 4, 12)[:, None, None]
    plane, scale = empty_plane(format)
    store(store_impl, rows, plane, torch.arange(12), scale, format)
    assert scale is not None
    step = scale.double()[..., None]
    numbers = read(plane, scale, format).double()
    assert ((numbers.flatten(0, 1) - rows.double()).abs() <= step.flatten(0, 1) * 0.5000001).all()
    normal = scale > 2.0**-14  # below, float16 itself is coarser
    largest = codecs.LARGEST[layout.FORMATS[format].codec.element]
    used = (numbers / step).abs().amax(-1)[normal]
    assert normal.sum() >= 12 and (used >= largest - 1).all(), "the scale is no larger than it must be"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("format", SCALED)
def test_what_the_scale_cannot_hold_shows(store_impl, bad: float, format: str) -> None:
    rows = torch.randn(2, 2, 20)
    rows[1, 0, 3] = bad
    plane, scale = empty_plane(format)
    store(store_impl, rows, plane, torch.tensor([0, 1]), scale, format)
    numbers = read(plane, scale, format)[0]
    assert not numbers[1, 0].isfinite().any(), "reading the row shows the fault"
    assert numbers[0].isfinite().all() and numbers[1, 1].isfinite().all(), "other rows and heads are whole"


def test_strided_planes(store_impl) -> None:
    pool = torch.zeros(4, 2, 3, 2, 32)  # pages hold two layers, and values beside keys
    plane = pool[:, 1, :, :, :20]
    rows = torch.randn(2, 2, 40)[..., ::2]
    assert not plane.is_contiguous()
    sparse_attn.store(rows.contiguous(), plane, torch.tensor([11, 4]), format="fp32", backend=store_impl.backend)
    assert torch.equal(pool[3, 1, 2, :, :20], rows[0]) and torch.equal(pool[1, 1, 1, :, :20], rows[1])
    assert pool.count_nonzero() == rows.count_nonzero()


@pytest.mark.parametrize("apart", ["a page", "an entry", "a head"])
def test_scales_in_the_page_of_their_rows(store_impl, apart: str) -> None:
    """One pool holds both: the rows of a page and then its scales, those of an entry, or those of a head."""
    pages, page, heads, dim = 3, 4, 2, 20
    before = {"a page": page, "an entry": 1, "a head": 1}[apart] * (1 if apart == "a head" else heads) * dim
    sizes = {"a page": page * heads, "an entry": heads, "a head": 1}[apart]
    lead = {"a page": (pages,), "an entry": (pages, page), "a head": (pages, page, heads)}[apart]
    pool = torch.full((*lead, before + 2 * sizes), 77, dtype=torch.int8)
    plane = pool[..., :before].unflatten(
        -1, {"a page": (page, heads, dim), "an entry": (heads, dim)}.get(apart, (dim,))
    )
    scale = pool.view(torch.half)[..., before // 2 :].unflatten(-1, {"a page": (page, heads)}.get(apart, (sizes,)))
    scale = scale[..., 0] if apart == "a head" else scale
    rows, slots = torch.randn(3, heads, dim), torch.tensor([0, 11, 6])
    alone, alone_scale = torch.full((pages, page, heads, dim), 77, dtype=torch.int8), scale.clone()
    sparse_attn.store(rows, alone, slots, scale=alone_scale, format="int8", backend=store_impl.backend)
    sparse_attn.store(rows, plane, slots, scale=scale, format="int8", backend=store_impl.backend)
    assert torch.equal(plane, alone) and torch.equal(bytes_of(scale), bytes_of(alone_scale))
    one_too_many = pool.view(torch.half).as_strided(scale.shape, scale.stride(), before // 2 - 1)
    with pytest.raises(sparse_attn.InvalidCall, match="store: plane: expected memory that no other argument uses"):
        sparse_attn.store(rows, plane, slots, scale=one_too_many, format="int8", backend=store_impl.backend)


def test_nothing_to_store(store_impl) -> None:
    plane, _ = empty_plane("fp32")
    before = plane.clone()
    none = torch.empty(0, dtype=torch.int64)
    sparse_attn.store(torch.empty(0, 2, 20), plane, none, format="fp32", backend=store_impl.backend)
    stepless = torch.empty(0, 2, 20).as_strided((0, 2, 20), (0, 0, 0))  # as an empty array of NumPy comes
    sparse_attn.store(stepless, plane, none, format="fp32", backend=store_impl.backend)
    sparse_attn.store(torch.randn(1, 2, 20), plane, torch.tensor([-1]), format="fp32", backend=store_impl.backend)
    assert torch.equal(plane, before)


def test_far_slots_of_a_large_pool(store_impl) -> None:
    pool = torch.empty((5 << 30) // 2, dtype=torch.bfloat16)
    plane = pool.as_strided((3, 4, 2, 8), (pool.numel() // 3, 16, 8, 1))
    rows = torch.randn(1, 2, 8).bfloat16()
    sparse_attn.store(rows, plane, torch.tensor([11]), backend=store_impl.backend)
    assert torch.equal(plane[2, 3], rows[0])


@pytest.mark.parametrize("slot", [12, 1 << 40])
def test_a_slot_past_the_plane_is_refused_and_writes_nothing(store_impl, slot: int) -> None:
    skip_where_values_stay_on_the_device(store_impl)
    plane, _ = empty_plane("fp32")
    before = plane.clone()
    with pytest.raises(
        sparse_attn.InvalidCall, match=r"store: slots: expected less than pages \* page_size = 12, got "
    ):
        sparse_attn.store(
            torch.randn(2, 2, 20), plane, torch.tensor([3, slot]), format="fp32", backend=store_impl.backend
        )
    assert torch.equal(plane, before)


def test_refusals() -> None:
    plane, scale = empty_plane("int8")
    rows, slots = torch.randn(2, 2, 20), torch.tensor([0, 1])
    for changes, sentence in (
        (dict(format="fp32"), "store: plane: expected float32 elements for format 'fp32', got int8"),
        (dict(scale=None), "store: scale: expected a scale plane for format 'int8', got None"),
        (dict(scale=scale.float()), r"store: scale: expected float16 \[pages, page_size, heads\], got float32"),
        (dict(slots=slots.int()), r"store: slots: expected int64 \[T\], got int32"),
        (dict(rows=rows[:1]), r"store: slots: expected int64 \[T\] with T = 1, got int64 \[2\]"),
        (dict(rows=rows[..., :8]), "store: plane: expected int8 .* with row = 8"),
    ):
        arguments = dict(dict(rows=rows, plane=plane, slots=slots, scale=scale, format="int8"), **changes)
        with pytest.raises(sparse_attn.InvalidCall, match=sentence):
            torch.ops.sparse_attn.store(**arguments)


def test_debug_checks_find_a_slot_written_twice(debug_checks) -> None:
    plane, _ = empty_plane("fp32")
    with pytest.raises(sparse_attn.InvalidCall, match="store: slots: expected no slot twice"):
        sparse_attn.store(torch.randn(2, 2, 20), plane, torch.tensor([3, 3]), format="fp32")


def test_the_reference_quantises_as_its_docstring_says() -> None:
    rows = torch.tensor([[1.0, -127.0, 63.5, 0.5], [0.0, 0.0, 0.0, 0.0], [2.0**-24, 0, 0, 0]])
    parts = codecs.encode(layout.FORMATS["int8"].codec, rows)
    stored, scale = parts["values"].view(torch.int8), parts["scales"].view(torch.half)[:, 0]
    assert stored[0].tolist() == [1, -127, 64, 0] and scale[0] == 1  # halves go to even
    assert stored[1].tolist() == [0] * 4 and scale[1] == 0
    assert scale[2] == 2.0**-24 and stored[2].tolist() == [1, 0, 0, 0]  # rounded up to the smallest float16


def test_overlapping_memory_is_refused(store_impl) -> None:
    plane = torch.arange(8.0).view(1, 8, 1, 1)
    before = plane.clone()
    with pytest.raises(sparse_attn.InvalidCall, match="store: plane: expected memory that no other argument uses"):
        sparse_attn.store(plane[0, :4], plane, torch.arange(1, 5), format="fp32", backend=store_impl.backend)
    twice = torch.zeros(1, 8, 1, 4).expand(1, 8, 2, 4)
    with pytest.raises(sparse_attn.InvalidCall, match="store: plane: expected elements that share no memory"):
        sparse_attn.store(torch.ones(1, 2, 4), twice, torch.tensor([0]), format="fp32", backend=store_impl.backend)
    assert torch.equal(plane, before) and (twice == 0).all()


@pytest.mark.parametrize("format", layout.FORMATS)
def test_no_rows(store_impl, format: str) -> None:
    """Nothing to write is no fault, whatever the format."""
    f = layout.FORMATS[format]
    plane = torch.full(f.shape(2, 3, 1, f.dim or 20), 7, dtype=getattr(torch, f.dtype))
    scale = torch.full((2, 3, 1), 7, dtype=torch.half) if f.scale_dtype else None
    args = torch.zeros(0, 1, f.dim or 20), plane, torch.zeros(0, dtype=torch.int64)
    skip_unless(store_impl, facts(Store(*args, scale, format, page_size=3)))
    sparse_attn.store(*args, scale=scale, format=format, page_size=3, backend=store_impl.backend)
    assert (plane == 7).all() and (scale is None or (scale == 7).all())
