"""`flash_mla` against a stand-in of FlashMLA: the contract of `attend` on every kind of row and device; and every rule
of the stand-in."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import calls
import cases
import flash_mla_standin as standin
import pytest
import torch
from flash_mla_standin import DECODE, PREFILL, SM90, SM100, ReadsElsewhere, Rule, RuleBroken, machine
from torch import Tensor

import sparse_attn
from sparse_attn import layout, library, reference, registry
from sparse_attn.backends.flash_mla import attend as host
from sparse_attn.backends.flash_mla import installed, selfcheck
from sparse_attn.backends.flash_mla.kernels import KERNELS, Kernel
from sparse_attn.ops.attend import Attend, facts
from sparse_attn.registry import OneOf

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
SHAPE: dict[str, Any] = dict(dtype="bfloat16", q_heads=64, kv_heads=1, v_dim=512, page_size=5, win_page_size=3)
V4: dict[str, Any] = dict(SHAPE, format="fp8_v4_planar", win_format="fp8_v4_planar", qk_dim=512)
BF16: dict[str, Any] = dict(SHAPE, format="bf16", win_format="bf16")
SHAPES: dict[str, dict[str, Any]] = {
    "v3.2": dict(SHAPE, format="fp8_v32", qk_dim=576, index_heads=1),
    "v3.2, sinks, 128 heads": dict(SHAPE, format="fp8_v32", qk_dim=576, index_heads=1, sinks=True, q_heads=128),
    "v3.2, every entry": dict(SHAPE, format="fp8_v32", qk_dim=576),
    "v4, ratio 4": dict(V4, planes="main+window", ratio=4, index_heads=1, sinks=True),
    "v4, ratio 2, every entry": dict(V4, planes="main+window", ratio=2, q_heads=128),
    "v4, window": dict(V4, planes="window", sinks=True),
    "v4, main": dict(V4, index_heads=1),
    "v4, not causal": dict(V4, planes="main+window", causal=False),
    "bf16, 576": dict(BF16, qk_dim=576, index_heads=1, sinks=True),
    "bf16, 512, every entry": dict(BF16, qk_dim=512, ratio=2, q_heads=128),
    "bf16, window": dict(BF16, qk_dim=512, planes="window"),
    "bf16, pages of 1": dict(BF16, qk_dim=576, index_heads=1, page_size=1),
}


def on_the_cpu(kernel: Kernel) -> registry.Impl:
    impl = kernel.impl()
    return replace(impl, limits={**impl.limits, "device": OneOf(("cpu",))})


@pytest.fixture(autouse=True, params=[SM90, SM100], ids=["sm_90", "sm_100"])
def device(request, monkeypatch):
    """A machine with FlashMLA, whose kernels are asked for what they know as on a device."""
    monkeypatch.setitem(sys.modules, "flash_mla", standin.as_module())
    monkeypatch.setattr(installed, "capability", lambda: machine.capability)
    monkeypatch.setattr(selfcheck, "DEVICE", "cpu")
    monkeypatch.setattr(machine, "capability", request.param)
    monkeypatch.setattr(machine, "calls", [])
    impls = (*map(on_the_cpu, KERNELS), *reference.IMPLS)
    library.forget()
    monkeypatch.setattr(registry, "_found", lambda: (impls, {}))
    yield request.param
    monkeypatch.undo()
    library.forget()


Call = tuple[tuple[Any, ...], dict[str, Any]]


def chosen(leading: tuple[Any, ...], kwargs: dict[str, Any]) -> registry.Impl:
    """The kernel of the backend that takes a call; V3.2 has none on sm_100."""
    call = facts(Attend(*leading, **kwargs))
    if machine.capability == SM100 and dict(call.facts)["format"] == "fp8_v32":
        with pytest.raises(sparse_attn.NoBackend, match="the device is sm_100, FlashMLA reads such rows on sm_90"):
            registry.choose(call, "flash_mla")
        pytest.skip("refused")
    return registry.choose(call, "flash_mla")


def call_of(shape: str, **options: Any) -> tuple[registry.Impl, tuple[Any, ...], dict[str, Any]]:
    leading, kwargs = cases.attend(**dict(SHAPES[shape], **options))
    return chosen(leading, kwargs), leading, kwargs


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(shape: str) -> None:
    impl, leading, kwargs = call_of(shape)
    cases.assert_agrees(impl, leading, kwargs)
    assert machine.calls, "FlashMLA was not called"


def lines() -> list[Any]:
    """Those of latent rows, with 64 heads. Two planes are taken of V4's packed rows alone."""
    found = []
    for line in calls.lines():
        two = "kv=" in line.arguments and "win=" in line.arguments
        if line.v_dim != 512 or "kv_rope" in line.arguments or (two and "latent" in line.arguments):
            continue
        for packed in (True,) if two else (False, True):
            for phase in line.phases:
                marks = [pytest.mark.slow] if phase == "prefill" else []
                name = f"{line.layer}-{phase}-{'packed' if packed else 'bf16'}"
                found.append(pytest.param(replace(line, q_heads=64), phase, packed, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("line", "phase", "packed"), lines())
def test_lines_of_the_page_of_calls(line: calls.Line, phase: str, packed: bool) -> None:
    """On planes whose unowned rows hold NaN, with hostile indices and tables."""
    batch = calls.Batch(line, phase, page=4)
    leading, kwargs = batch.arguments(torch.bfloat16)
    if packed:
        kwargs = in_packed_rows(kwargs, leading[0].shape[2])
    cases.assert_agrees(chosen(leading, kwargs), leading, kwargs)


def in_packed_rows(kwargs: dict[str, Any], dim: int) -> dict[str, Any]:
    """The planes of a call in the 8-bit format of their rows."""
    changed = dict(kwargs)
    format = "fp8_v32" if dim == 576 else "fp8_v4_planar"
    for plane, name, size in (("kv", "format", "page_size"), ("win", "win_format", "win_page_size")):
        if plane in kwargs and kwargs[plane].shape[3] == dim:
            pages, page_size = kwargs[plane].shape[:2]
            changed[plane] = torch.empty(layout.FORMATS[format].shape(pages, page_size, 1, dim), dtype=torch.uint8)
            slots = torch.arange(pages * page_size)
            rows = kwargs[plane].flatten(0, 1).float()
            sparse_attn.store(rows, changed[plane], slots, format=format, page_size=page_size, backend="reference")
            changed |= {name: format, size: page_size}
    return changed


# what is read


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_attended_changes_no_bit(shape: str) -> None:
    from test_attend import read_slots
    from test_attend_formats import entries, slot_bytes

    impl, leading, kwargs = call_of(shape)
    clean = cases.run(impl, leading, kwargs)
    changed = dict(kwargs)
    for plane, name in (("kv", "format"), ("win", "win_format")):
        if plane not in kwargs:
            continue
        pages, size = entries(kwargs, plane)
        shown = {"kv": torch.zeros(pages, size, 1, 1)} if plane == "kv" else {"win": torch.zeros(pages, size, 1, 1)}
        if not kwargs["causal"] and plane == "win":
            continue  # ranges of their own
        keep = read_slots(leading, dict(kwargs, **shown), plane).flatten()
        assert keep.any() and not keep.all()
        if kwargs[name] == "bf16":
            keep = keep.view(pages, size, 1, 1)
            changed[plane] = torch.where(keep, kwargs[plane], torch.tensor(math.nan).bfloat16())
            continue
        changed[plane] = torch.full_like(kwargs[plane], 0xFF)  # NaN in every type of number
        for slot in keep.nonzero().flatten().tolist():
            for page, index in slot_bytes(kwargs[name], slot, size):
                changed[plane][page][index] = kwargs[plane][page][index]
    q = leading[0].clone()
    q[int(leading[1][-1]) :] = math.nan  # padding rows
    cases.assert_same_bits(cases.run(impl, (q, *leading[1:]), changed), clean)
    assert all(x.isfinite().any() and not x.isnan().any() for x in clean)


SELECTED = [name for name, options in SHAPES.items() if options.get("index_heads")]


@pytest.mark.parametrize("shape", SELECTED)
def test_hostile_indices_are_masked(shape: str) -> None:
    impl, leading, kwargs = call_of(shape)
    clean = cases.run(impl, leading, kwargs)
    hostile = torch.tensor([-1, -7, INT_MIN, INT_MAX, 10**6, -2, 1 << 30], dtype=torch.int32)
    tokens, _, width = kwargs["indices"].shape
    indices = hostile[torch.arange(width + 7) % 7].repeat(tokens, 1, 1)
    for t in range(tokens):
        at = torch.randperm(width + 7)[:width].sort().values
        indices[t, 0, at] = kwargs["indices"][t, 0]
    for got, wanted in zip(cases.run(impl, leading, dict(kwargs, indices=indices)), clean, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=2**-7)  # sums of other groups of weights
    for counts, meaning in ((width, "all"), (0, "none"), (-5, "none"), (INT_MAX, "all"), (2, "some")):
        given = dict(kwargs, index_counts=torch.full((tokens, 1), counts, dtype=torch.int32))
        out, lse = cases.run(impl, leading, given)
        if meaning == "all":
            cases.assert_same_bits((out, lse), clean)
        elif meaning == "some":
            cases.assert_agrees(impl, leading, given)
        elif "window" not in SHAPES[shape].get("planes", ""):
            assert (out == 0).all() and (lse == -math.inf).all()
    strided = torch.stack([kwargs["indices"]] * 3, -1)[..., 1]
    cases.assert_same_bits(cases.run(impl, leading, dict(kwargs, indices=strided)), clean)


@pytest.mark.parametrize("shape", ["v3.2", "v4, ratio 4", "bf16, 576", "bf16, window", "v4, window"])
@pytest.mark.parametrize("page", [-1, 99, INT_MIN, INT_MAX, None], ids=lambda page: "next" if page is None else page)
def test_a_page_that_the_plane_lacks_is_not_read(shape: str, page: int | None) -> None:
    """The rows that would attend it are NaN, others whole."""
    impl, leading, kwargs = call_of(shape, lengths=(20, 9), rows=(2, 1), padding=1)
    clean = cases.run(impl, leading, kwargs)
    name = "win_page_table" if "win" in kwargs else "page_table"
    table = kwargs[name].clone()
    plane = kwargs["win" if "win" in kwargs else "kv"]
    table[1] = len(plane) if page is None else page
    if "indices" in kwargs:
        kwargs["indices"][:, 0, 0] = 1  # the row of the second sequence attends one of its entries
    clean = cases.run(impl, leading, kwargs)
    out, lse = cases.run(impl, leading, dict(kwargs, **{name: table}))
    assert out[2].isnan().all() and lse[2].isnan().all()
    rest = [0, 1, 3]
    cases.assert_same_bits((out[rest], lse[rest]), (clean[0][rest], clean[1][rest]))
    out, lse = cases.run(impl, leading, dict(kwargs, **{name: kwargs[name][:, :0]}))
    assert out[:3].isnan().all() and lse[:3].isnan().all() and (out[3] == 0).all() and (lse[3] == -math.inf).all()


def test_empty_rows_and_explicit_ranges() -> None:
    for shape in SHAPES:
        if machine.capability == SM100 and "v3.2" in shape:
            continue
        impl, leading, kwargs = call_of(shape, lengths=(2, 0, -3, 5), rows=(4, 2, 1, 2))
        out, lse = cases.run(impl, leading, kwargs)
        empty = [0, 1, 4, 5, 6, 9, 10]  # before the first token, length 0, negative length, padding
        assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all(), shape
        extremes = [(0, 5), (3, 3), (7, 2), (-4, 6), (19, 20), (INT_MIN, 1), (0, INT_MAX)]  # the last is padding
        ranges = torch.tensor(extremes, dtype=torch.int32)
        impl, leading, kwargs = call_of(shape, lengths=(20, 20), rows=(3, 3), padding=1, causal=True)
        kwargs |= dict(kv_range=ranges) if "kv" in kwargs and kwargs["ratio"] == 1 else {}
        kwargs |= dict(win_range=ranges) if "win" in kwargs else {}
        cases.assert_agrees(impl, leading, kwargs)


@pytest.mark.parametrize("shape", ["v3.2, every entry", "v4, window", "bf16, 512, every entry"])
def test_ranges_past_the_table_are_not_cut_short(shape: str) -> None:
    impl, leading, kwargs = call_of(shape, lengths=(20, 20), rows=(1, 1), padding=0)
    name, table = ("win_range", "win_page_table") if "win" in kwargs else ("kv_range", "page_table")
    paged = kwargs[table].shape[1] * (3 if "win" in kwargs else 5)
    ranges = torch.tensor([(0, paged), (0, paged + 1)], dtype=torch.int32)
    out, lse = cases.run(impl, leading, dict(kwargs, **{name: ranges}))
    assert not out[0].isnan().any() and out[1].isnan().all() and lse[1].isnan().all()


@pytest.mark.parametrize("shape", ["v3.2", "v4, window", "bf16, 576"])
def test_rows_that_were_not_written_are_zero(shape: str, monkeypatch) -> None:
    impl, leading, kwargs = call_of(shape)
    clean = cases.run(impl, leading, kwargs)
    name, _ = machine.calls[-1]
    found = getattr(standin, name)

    def unwritten(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out, *rest = found(*args, **kwargs)
        nothing = rest[-1] == math.inf
        return out.masked_fill((nothing.transpose(1, 2) if out.dim() == 4 else nothing)[..., None], math.nan), *rest

    monkeypatch.setattr(sys.modules["flash_mla"], name, unwritten)
    cases.assert_same_bits(cases.run(impl, leading, kwargs), clean)


def test_nothing_to_do() -> None:
    impl, leading, kwargs = call_of("bf16, 576", lengths=(4,), rows=(3,), padding=0)
    none = torch.empty(0, dtype=torch.int32)
    batchless = (leading[0], torch.zeros(1, dtype=torch.int32), none, *leading[3:])
    nothing = dict(kwargs, indices=torch.empty(3, 1, 0, dtype=torch.int32))
    for call in ((batchless, dict(kwargs, page_table=kwargs["page_table"][:0])), (leading, nothing)):
        out, lse = cases.run(impl, *call)
        assert (out == 0).all() and (lse == -math.inf).all()
    no_rows = (leading[0][:0], torch.zeros(2, dtype=torch.int32), *leading[2:])
    assert cases.run(impl, no_rows, dict(kwargs, indices=kwargs["indices"][:0]))[0].shape == (0, 64, 512)


@pytest.mark.parametrize("sink", [math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("shape", ["v3.2", "v4, ratio 4", "bf16, 576"])
def test_extreme_sinks(shape: str, sink: float) -> None:
    impl, leading, kwargs = call_of(shape, sinks=False)
    plain = cases.run(impl, leading, kwargs)
    out, lse = cases.run(impl, leading, dict(kwargs, sinks=torch.full((64,), sink)))
    assert torch.equal(lse, plain[1]), "the sink is not in the lse"
    assert torch.equal(out, torch.zeros_like(out) if sink > 0 else plain[0])
    cases.assert_agrees(impl, leading, dict(kwargs, sinks=torch.tensor([sink, 0.3, sink, -0.5]).repeat(16)))


@pytest.mark.parametrize("shape", ["v3.2", "v4, ratio 4", "bf16, 576"])
def test_scales(shape: str) -> None:
    """FlashMLA would take a negative one times the largest product as the largest score."""
    impl, leading, kwargs = call_of(shape)
    for scale in (-0.04, 1e-30, 3.0):
        cases.assert_agrees(impl, (*leading[:3], scale, *leading[4:]), kwargs)
    for scale in (0.0, 1e-40, 3e38):
        with pytest.raises(sparse_attn.InvalidCall, match=r"attend: scale: expected a magnitude from 2\*\*-126"):
            cases.run(impl, (*leading[:3], scale, *leading[4:]), kwargs)


def test_scales_of_another_writer() -> None:
    """V3.2 scales that are no powers of two: sm_90 reads them in bfloat16."""
    impl, leading, kwargs = call_of("v3.2", lengths=(300,), rows=(2,), selected=200)
    scales = kwargs["kv"][..., 512:528].contiguous().view(torch.float32)
    kwargs["kv"][..., 512:528] = (scales * (1 - torch.rand(scales.shape) / 2)).view(torch.uint8)
    cases.assert_agrees(impl, leading, kwargs)


# how it is called


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pool_is_a_view_and_pieces_join(shape: str, monkeypatch) -> None:
    impl, leading, kwargs = call_of(shape)
    whole = cases.run(impl, leading, kwargs)
    function, seen = machine.calls[-1]
    rows = [seen.kv] if function == PREFILL else [t for t in (seen.k_cache, seen.extra_k_cache) if t is not None]
    given = [kwargs[name] for name in ("win", "kv") if name in kwargs]
    assert [t.data_ptr() for t in rows] == [t.data_ptr() for t in given]
    before = len(machine.calls)
    monkeypatch.setattr(host, "PIECE_ROWS", 2)
    cases.assert_same_bits(cases.run(impl, leading, kwargs), whole)
    assert len(machine.calls) - before == 5
    monkeypatch.setattr(host, "PIECE_SLOTS", 1)
    cases.assert_same_bits(cases.run(impl, leading, kwargs), whole)
    assert len(machine.calls) - before == 14


@pytest.mark.parametrize("shape", ["v3.2", "v4, ratio 4", "bf16, 576"])
def test_nothing_waits_for_the_device(shape: str, monkeypatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.split(".")[0]
            assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique"), name
            return func(*args, **(kwargs or {}))

    def zeros(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out, lse = q.new_zeros(*q.shape[:-1], 512), torch.zeros(q.shape[:-1])
        return (out, lse.transpose(1, 2)) if q.dim() == 4 else (out, lse, lse)

    impl, leading, kwargs = call_of(shape)
    monkeypatch.setattr(sys.modules["flash_mla"], DECODE, zeros)
    monkeypatch.setattr(sys.modules["flash_mla"], PREFILL, zeros)
    a = Attend(*leading, **kwargs)
    with Waits():
        impl.run(a, torch.empty(9, 64, 512).bfloat16(), torch.empty(9, 64))
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            a.seq_lens[0].item()


def test_strided_queries_and_outputs() -> None:
    for shape in SHAPES:
        if machine.capability == SM100 and "v3.2" in shape:
            continue
        impl, leading, kwargs = call_of(shape)
        clean = cases.run(impl, leading, kwargs)
        q = leading[0]
        shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)  # not at 16 bytes
        wider = torch.cat([q, q[:, :8]], 1)[:, : q.shape[1]]
        for other in (wider, torch.cat([q, q], 2)[..., : q.shape[2]], shifted):
            cases.assert_same_bits(cases.run(impl, (other, *leading[1:]), kwargs), clean, shape)
        out = torch.zeros(*clean[0].shape[:2], 1024, dtype=q.dtype)[..., :512]
        lse = torch.zeros(len(q), 2 * q.shape[1])[:, ::2]
        impl.run(Attend(*leading, **kwargs), out, lse)
        cases.assert_same_bits((out, lse), clean, shape)
        impl.run(Attend(*leading, **kwargs), out.zero_(), None)
        assert torch.equal(out, clean[0])


def stretched(plane: Tensor, step: int) -> Tensor:
    """The same pages, ``step`` elements apart in a larger pool that is full of the largest byte."""
    pool = torch.full(((len(plane) - 1) * step + plane[0].numel(),), 0xFF, dtype=torch.uint8).to(plane.dtype)
    apart = pool.as_strided(plane.shape, (step, *plane.contiguous().stride()[1:]))
    return apart.copy_(plane)


@pytest.mark.parametrize(
    ("shape", "names", "steps"),
    [
        ("v3.2", ("kv",), (5 * 656, 5 * 656 + 16, 10 * 656)),
        ("v4, ratio 4", ("kv", "win"), (3456, 5 * 576 * 2)),
        ("bf16, 576", ("kv",), (5 * 576, 6 * 576, 13 * 576)),
        ("bf16, window", ("win",), (3 * 512, 4 * 512)),
        ("bf16, pages of 1", ("kv",), (576, 584, 2 * 576)),
    ],
)
def test_pages_apart(shape: str, names: tuple[str, ...], steps: tuple[int, ...]) -> None:
    impl, leading, kwargs = call_of(shape)
    clean = cases.run(impl, leading, kwargs)
    for step in steps:
        moved = {name: stretched(kwargs[name], step) for name in names}
        cases.assert_same_bits(cases.run(impl, leading, dict(kwargs, **moved)), clean, str(step))


def test_rows_apart() -> None:
    impl, leading, kwargs = call_of("bf16, 576")
    clean = cases.run(impl, leading, kwargs)
    beside = torch.cat([kwargs["kv"]] * 2, -1)[..., :576]
    assert not beside[0].is_contiguous()
    cases.assert_same_bits(cases.run(impl, leading, dict(kwargs, kv=beside)), clean)


def test_pages_past_4_gib() -> None:
    """Untouched pages cost nothing."""
    for shape in ("v3.2", "v4, main", "bf16, 576"):
        if machine.capability == SM100 and shape == "v3.2":
            continue
        impl, leading, kwargs = call_of(shape)
        small = kwargs["kv"]
        row = {"v3.2": 656, "v4, main": 576, "bf16, 576": 576}[shape]
        step = (5 << 30) // small.element_size() // len(small) // row * row
        pool = torch.empty(step * len(small), dtype=small.dtype)
        large = pool.as_strided(small.shape, (step, *small.stride()[1:]))
        large.copy_(small)
        assert kwargs["page_table"].max() >= len(small) - 2 and step * (len(small) - 2) > 1 << 31
        cases.assert_same_bits(
            cases.run(impl, leading, dict(kwargs, kv=large)), cases.run(impl, leading, kwargs), shape
        )


ALIGN = "align the pool and its pages"
PLANES_REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "v3.2, address": ("v3.2", lambda kv: shifted_by(kv, 8), f"an address at a multiple of 16 bytes.*{ALIGN}"),
    "v3.2, pages": ("v3.2", lambda kv: stretched(kv, 5 * 656 + 8), "pages 16 or a multiple of it apart"),
    "v4, pages": ("v4, main", lambda kv: stretched(kv, 3456 + 16), "pages 576 or a multiple of it apart"),
    "v4, address": ("v4, main", lambda kv: shifted_by(kv, 1), "an address at a multiple of 16 bytes"),
    "v4, large pages": ("v4, main", lambda kv: huge(kv, 576 << 22), r"up to 2\*\*31 - 1, got address"),
    "bf16, address": ("bf16, 576", lambda kv: shifted_by(kv, 1), f"rows at multiples of 16 bytes.*{ALIGN}"),
    "bf16, rows": ("bf16, 576", lambda kv: torch.cat([kv, kv[..., :4]], -1)[..., :576], "rows at multiples of 16"),
    "bf16, pages": ("bf16, 576", lambda kv: stretched(kv, 5 * 576 + 8), "pages a multiple of the step of rows apart"),
    "bf16, one row for all": ("bf16, 576", lambda kv: kv[:, :1].expand(kv.shape), "rows at multiples of 16 bytes"),
    "bf16, slots": ("bf16, 576", lambda kv: huge(kv, 576 << 27), r"at most 2\*\*31 - 1 slots"),
    "no page": ("bf16, 576", lambda kv: kv[:0], r"at least one page, got \[0, 5, 1, 576\]"),
}


def shifted_by(plane: Tensor, elements: int) -> Tensor:
    memory = torch.empty(plane.numel() + elements, dtype=plane.dtype)
    return memory[elements:].view(plane.shape).copy_(plane)


def huge(plane: Tensor, step: int) -> Tensor:
    """Pages so far apart that no memory holds them; none is read."""
    memory = torch.empty(0, dtype=plane.dtype, device="meta").new_empty(len(plane) * step)
    return memory.as_strided(plane.shape, (step, *plane.stride()[1:]))


@pytest.mark.parametrize("name", PLANES_REFUSED)
def test_planes_that_no_view_expresses_are_refused(name: str) -> None:
    shape, change, sentence = PLANES_REFUSED[name]
    impl, leading, kwargs = call_of(shape)
    a = Attend(*leading, **dict(kwargs, kv=change(kwargs["kv"])))
    with pytest.raises(sparse_attn.InvalidCall, match=f"attend: kv: expected {sentence}|attend: kv: .*{sentence}"):
        impl.run(a, torch.empty(9, 64, 512).bfloat16(), None)


def test_each_call_has_metadata_of_its_own() -> None:
    impl, leading, kwargs = call_of("v4, ratio 4")
    for _ in range(2):
        cases.run(impl, leading, kwargs)
    first, second = (seen.metadata for _, seen in machine.calls[-2:])
    assert first is not second and first.lengths == [None, None], "what depends on lengths would be stale"


# limits, availability, self checks


def test_what_is_outside_the_limits_is_refused() -> None:
    impls = {impl.variant: impl for impl in registry.implementations("attend") if impl.backend == "flash_mla"}
    outside = dict(dtype="float16", v_format="bf16", q_heads=16, kv_heads=2, rope_dim=64, v_dim=256, index_heads=64)
    outside |= dict(select_block=2, batch_invariant=True, planes="elsewhere", format="fp8_v4", win_format="fp8_v41")
    outside |= dict(qk_dim=320, kv_strides="rows", device="npu")
    for shape, variant in (("v3.2", "fp8_v32 rows"), ("v4, ratio 4", "fp8_v4_planar rows"), ("bf16, 576", "bf16 rows")):
        call = facts(Attend(*cases.attend(**SHAPES[shape])[0], **cases.attend(**SHAPES[shape])[1]))
        for name, limit in impls[variant].limits.items():
            value = outside[name]
            changed = call._replace(facts=tuple((n, value if n == name else v) for n, v in call.facts))
            changed = changed._replace(device=value) if name == "device" else changed
            wanted = f"runs on {limit}, the tensors" if name == "device" else f"{name} is {value}, supported: {limit}"
            assert impls[variant].refusals(changed)[0].startswith(wanted)


def test_it_stands_behind_the_kernels_of_this_package(monkeypatch) -> None:
    from sparse_attn.backends import cuda_triton, flash_mla

    [triton] = [impl for impl in cuda_triton.IMPLS if impl.op == "attend"]
    assert all(impl.priority < triton.priority for impl in flash_mla.IMPLS)


def refusal(kernel: int = 2) -> str | None:
    return KERNELS[kernel].available()


def test_why_it_cannot_run(monkeypatch) -> None:
    assert [refusal(k) for k in (1, 2)] == [None, None]
    monkeypatch.setattr(installed, "capability", lambda: (8, 0))
    assert refusal(1) == "the device is sm_80, FlashMLA reads such rows on sm_90 and sm_10x"
    monkeypatch.setattr(installed, "capability", lambda: None)
    assert refusal() == "torch finds no CUDA device"
    monkeypatch.setattr(installed, "capability", lambda: (10, 3))
    monkeypatch.setattr(sys.modules["flash_mla"], PREFILL, lambda q, kv, indices, sm_scale, d_v=512: None)
    assert refusal() is not None and "is of 2025, with an LSE of base 2 and no sinks" in str(refusal())
    monkeypatch.setattr(installed, "MODULE", "no_flash_mla_here")
    assert refusal() == "flash_mla is not installed; build FlashMLA for this torch and device"


Results = tuple[Tensor, ...]


def other_base(results: Results) -> Results:
    return (*results[:-1], results[-1] * standin.LOG2E)


def sink_in_the_lse(results: Results) -> Results:
    return (*results[:-1], torch.logaddexp(results[-1], torch.zeros(())))


def unwritten(results: Results) -> Results:
    """Rows that attend nothing keep what memory held."""
    nothing = results[-1] == math.inf
    return (results[0], *results[1:-1], results[-1].masked_fill(nothing, 7.0))


@pytest.mark.parametrize("fault", [other_base, sink_in_the_lse, unwritten])
@pytest.mark.parametrize("kernel", range(3))
def test_a_flash_mla_that_answers_otherwise_is_refused(monkeypatch, kernel: int, fault: Any) -> None:
    if kernel == 0 and machine.capability == SM100:
        pytest.skip("refused")
    assert refusal(kernel) is None
    name = KERNELS[kernel].function
    found = getattr(standin, name)

    def faulty(*args: Any, **kwargs: Any) -> Results:
        return fault(found(*args, **kwargs))

    faulty.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["flash_mla"], name, faulty)
    assert str(refusal(kernel)).startswith("its self check failed: ")


@pytest.mark.parametrize("name", ["attn_sink", "extra_k_cache", "indices"])
def test_a_flash_mla_that_ignores_an_argument_is_refused(monkeypatch, name: str) -> None:
    found = standin.flash_mla_with_kvcache

    def forgetful(*args: Any, **kwargs: Any) -> Results:
        if name == "indices":  # reads row 0 where a list says -1
            kwargs["indices"] = kwargs["indices"].clamp(min=0)
        else:
            kwargs |= {name: None} | ({"extra_indices_in_kvcache": None} if name == "extra_k_cache" else {})
        return found(*args, **kwargs)

    monkeypatch.setattr(sys.modules["flash_mla"], DECODE, forgetful)
    assert str(refusal(1)).startswith("its self check failed: out of known rows of fp8_v4_planar is off by ")


def test_scales_that_sm_100_rounds_are_found(monkeypatch) -> None:
    """FlashMLA pull request 184: why V3.2's 8-bit rows are not read there."""
    monkeypatch.setattr(machine, "capability", SM100)
    assert str(selfcheck.rows_of("fp8_v32", 576)(host.packed_rows)).startswith("its self check failed: out of known")
    monkeypatch.setattr(machine, "capability", SM90)
    assert selfcheck.rows_of("fp8_v32", 576)(host.packed_rows) is None


# the stand-in


def decoding(dim: int = 512, extra: bool = True) -> dict[str, Any]:
    """Two rows of 64 heads over two caches of 4 pages."""
    width, page, step = (584, 6, 3456 * 2) if dim == 512 else (656, 6, 6 * 656 * 2)
    pool = torch.zeros(4 * step, dtype=torch.uint8)
    cache = pool.as_strided((4, page, 1, width), (step, width, width, 1))
    a: dict[str, Any] = dict(q=torch.randn(2, 1, 64, dim).bfloat16(), k_cache=cache, block_table=None)
    a |= dict(cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=standin.FlashMLASchedMeta(), num_splits=None)
    a |= dict(softmax_scale=0.04, is_fp8_kvcache=True, attn_sink=torch.zeros(64))
    a["indices"] = torch.randint(-1, 24, (2, 1, 64), dtype=torch.int32)
    if dim == 512 and extra:
        a |= dict(extra_k_cache=cache.clone(), extra_indices_in_kvcache=a["indices"].flip(2))
        a["extra_k_cache"] = shifted_by(pool, 0).as_strided(cache.shape, cache.stride())
    return a


def prefilling() -> dict[str, Any]:
    a: dict[str, Any] = dict(q=torch.randn(2, 64, 576).bfloat16(), kv=torch.randn(24, 1, 576).bfloat16())
    a |= dict(indices=torch.randint(-9, 99, (2, 1, 128), dtype=torch.int32), sm_scale=0.04)
    return a | dict(attn_sink=torch.zeros(64), topk_length=torch.tensor([9, 128], dtype=torch.int32))


Change = Callable[[dict[str, Any]], dict[str, Any]]


def pages_shifted(a: dict[str, Any], by: int) -> Tensor:
    cache = a["k_cache"]
    pool = torch.zeros(5 * cache.stride(0), dtype=torch.uint8)
    return pool.as_strided(cache.shape, cache.stride(), by)


def sparse_pages(a: dict[str, Any], step: int) -> Tensor:
    cache = a["k_cache"]
    return torch.empty(5 * step, dtype=torch.uint8).as_strided(cache.shape, (step, *cache.stride()[1:]))


def used(a: dict[str, Any]) -> dict[str, Any]:
    metadata = standin.FlashMLASchedMeta()
    standin.flash_mla_with_kvcache(**dict(a, tile_scheduler_metadata=metadata))
    return dict(tile_scheduler_metadata=metadata)


LENGTHS = torch.ones(2, dtype=torch.int32)
WRONG: dict[tuple[str, str], Change] = {
    (DECODE, "metadata is its own object"): lambda a: dict(tile_scheduler_metadata=torch.zeros(3)),
    (DECODE, "no num_splits"): lambda a: dict(num_splits=torch.zeros(3)),
    (DECODE, "metadata of the same shapes"): lambda a: (
        used(a)
        | dict(q=a["q"][:1], indices=a["indices"][:1])
        | dict(extra_indices_in_kvcache=a["extra_indices_in_kvcache"][:1])
    ),
    (DECODE, "not causal"): lambda a: dict(causal=True),
    (DECODE, "rows of 8-bit floats are announced"): lambda a: dict(is_fp8_kvcache=False),
    (DECODE, "queries have four axes"): lambda a: dict(q=a["q"][:, 0]),
    (DECODE, "query type"): lambda a: dict(q=a["q"].half()),
    (DECODE, "row of 576 or 512"): lambda a: dict(q=a["q"][..., :448]),
    (DECODE, "512 values"): lambda a: dict(head_dim_v=448),
    (DECODE, "heads"): lambda a: dict(q=a["q"][:, :, :16], attn_sink=None),
    (DECODE, "cache of rows"): lambda a: dict(k_cache=a["k_cache"][..., :576]),
    (DECODE, "cache type"): lambda a: dict(k_cache=a["k_cache"].to(torch.int16)),
    (DECODE, "whole pages"): lambda a: dict(
        k_cache=torch.zeros(4, 6, 1, 592, dtype=torch.uint8)[..., :584]  # rows apart
    ),
    (DECODE, "lists"): lambda a: dict(indices=a["indices"].long()),
    (DECODE, "extra lists"): lambda a: dict(extra_indices_in_kvcache=a["indices"][:1]),
    (DECODE, "extra rows have lists"): lambda a: dict(extra_indices_in_kvcache=None),
    (DECODE, "width of lists"): lambda a: dict(indices=a["indices"][..., :60]),
    (DECODE, "width of extra lists"): lambda a: dict(extra_indices_in_kvcache=a["indices"][..., :1]),
    (DECODE, "sinks"): lambda a: dict(attn_sink=torch.zeros(64).double()),
    (DECODE, "lengths"): lambda a: dict(topk_length=LENGTHS.long()),
    (DECODE, "small strides"): lambda a: dict(k_cache=sparse_pages(a, 576 << 22)),
    (DECODE, "copies of queries"): lambda a: dict(q=shifted_by(a["q"], 1)),
    (DECODE, "no extra rows of V3.2"): lambda a: (
        decoding(576) | dict(extra_k_cache=decoding(576)["k_cache"], extra_indices_in_kvcache=a["indices"])
    ),
    (DECODE, "no lengths of V3.2"): lambda a: (
        decoding(576) | {k: None for k in a if "extra" in k} | dict(topk_length=LENGTHS)
    ),
    (DECODE, "loads of 16 bytes"): lambda a: dict(k_cache=pages_shifted(a, 8)),
    (DECODE, "address of rows"): lambda a: dict(k_cache=pages_shifted(a, 8)),
    (DECODE, "pages in rows"): lambda a: dict(k_cache=sparse_pages(a, 3456 + 16)),
    (DECODE, "steps of queries"): lambda a: dict(
        q=torch.zeros(2 * 40000).bfloat16().as_strided(a["q"].shape, (36864, 40000, 512, 1))
    ),
    (PREFILL, "queries have three axes"): lambda a: dict(q=a["q"][:, None]),
    (PREFILL, "query type"): lambda a: dict(q=a["q"].float()),
    (PREFILL, "row of 576 or 512"): lambda a: dict(q=a["q"][..., :320]),
    (PREFILL, "512 values"): lambda a: dict(d_v=576),
    (PREFILL, "heads"): lambda a: dict(q=a["q"][:, :8], attn_sink=None),
    (PREFILL, "rows"): lambda a: dict(kv=a["kv"][..., :512]),
    (PREFILL, "row type"): lambda a: dict(kv=a["kv"].float()),
    (PREFILL, "lists"): lambda a: dict(indices=a["indices"][:, 0]),
    (PREFILL, "width of lists"): lambda a: dict(indices=a["indices"][..., :72]),
    (PREFILL, "sinks"): lambda a: dict(attn_sink=torch.zeros(32)),
    (PREFILL, "lengths"): lambda a: dict(topk_length=LENGTHS[:1]),
    (PREFILL, "small strides"): lambda a: dict(
        indices=torch.empty(1 << 32, dtype=torch.int32).as_strided((2, 1, 128), ((1 << 31) + 64, 128, 1))
    ),
    (PREFILL, "copies"): lambda a: dict(kv=shifted_by(a["kv"], 1)),
}


@pytest.mark.parametrize("rule", standin.RULES, ids=lambda rule: f"{rule.function}-{rule.name}")
def test_every_rule_refuses_a_wrong_call(rule: Rule) -> None:
    if machine.capability not in rule.devices:
        pytest.skip("a rule of other devices")
    function = getattr(standin, rule.function)
    make = decoding if rule.function == DECODE else prefilling
    function(**make())
    right = make()
    with pytest.raises(RuleBroken, match=f"{rule.function}: {rule.name}: "):
        function(**dict(right, **WRONG[rule.function, rule.name](right)))


def test_what_a_device_would_read_elsewhere_is_seen() -> None:
    for index in (-2, 24, INT_MIN, INT_MAX):
        a = decoding()
        a["indices"][1, 0, 7] = index
        with pytest.raises(ReadsElsewhere, match="page "):
            standin.flash_mla_with_kvcache(**a)


def test_metadata_of_other_lengths_is_stale() -> None:
    a = decoding(extra=False)
    assert not standin.flash_mla_with_kvcache(**dict(a, topk_length=LENGTHS))[0].isnan().any()
    assert standin.flash_mla_with_kvcache(**dict(a, topk_length=2 * LENGTHS))[0].isnan().all()


def test_what_lies_past_a_length_leaks() -> None:
    a = prefilling()
    a["indices"][0, 0, :10] = torch.arange(10)
    a["indices"][0, 0, 10:] = -1
    a["kv"][9, 0, 570] = math.nan
    a["indices"][1] = 0
    out, _, lse = standin.flash_mla_sparse_fwd(**a)
    assert out[0].isnan().all() and not lse[0].isnan().any() and not out[1].isnan().any()


def test_what_negative_scales_do() -> None:
    a = prefilling()
    a["indices"][:, 0, 5] = 3
    assert standin.flash_mla_sparse_fwd(**dict(a, sm_scale=-0.04))[0].isnan().all()


def test_rows_that_attend_nothing() -> None:
    for a, function in ((decoding(), standin.flash_mla_with_kvcache), (prefilling(), standin.flash_mla_sparse_fwd)):
        for name in ("indices", "extra_indices_in_kvcache"):
            if name in a:
                a[name].fill_(-1)
        out, *_, lse = function(**a)
        assert (out == 0).all() and (lse == math.inf).all()
