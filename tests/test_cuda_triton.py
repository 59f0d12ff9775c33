"""What `cuda_triton` has of its own: schedules on any machine; under TRITON_INTERPRET=1 also its decoding of bytes and
what it does where it cannot refuse."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from compressions import Sequences, lines
from merges import Merge
from selections import Batch
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_attn
from sparse_attn import codecs, env, registry
from sparse_attn.backends.cuda_triton import schedule
from sparse_attn.backends.cuda_triton.device import INTERPRETED, Device
from sparse_attn.ops.attend import Attend

interpreted = pytest.mark.skipif(env.TRITON_INTERPRET.get() != "1", reason="needs TRITON_INTERPRET=1")


def test_tiles_hold_every_column() -> None:
    for dim in range(1, 641):
        shape = schedule.shape_of(dim, dim, None)
        assert dim <= shape.leads * shape.lead + shape.tail < 2 * max(dim, 16), dim
        assert max(shape.lead, shape.tail) <= 256
        for width in (shape.lead, shape.tail):
            assert width == 0 or (width >= 16 and width & (width - 1) == 0)


def test_tiles_of_released_models() -> None:
    assert schedule.shape_of(576, 512, None)[2:] == (256, 2, 64, 256, 2, 0)
    assert schedule.shape_of(512, 512, None)[2:] == (256, 2, 0, 256, 2, 0)
    assert schedule.shape_of(128, 128, 128)[2:] == (128, 1, 0, 128, 1, 0)
    assert schedule.shape_of(192, 128, 128)[2:] == (128, 1, 64, 128, 1, 0)
    assert schedule.shape_of(512, 16, None)[2:] == (256, 2, 0, 256, 1, 0)  # of the values only what is asked for


def test_lists_are_cut_only_while_processors_are_free() -> None:
    device = Device(90, 132)
    assert schedule.parts_of(device, 132, 32) == (1, 32)
    assert schedule.parts_of(device, 67, 32) == (1, 32)
    assert schedule.parts_of(device, 8, 32) == (16, 2)
    assert schedule.parts_of(device, 1, 2048) == (64, 32)
    assert schedule.parts_of(device, 1, 1) == (1, 1)
    for programs in (1, 3, 8, 50):
        for blocks in (1, 7, 33, 1000):
            parts, part_blocks = schedule.parts_of(device, programs, blocks)
            assert (parts - 1) * part_blocks < blocks <= parts * part_blocks  # no part is empty, none is missing


def test_wide_decoded_rows_are_decoded_for_32_heads_where_registers_allow() -> None:
    shape = schedule.shape_of(576, 512, None)
    for arch, planes, heads in ((90, 1, 32), (100, 1, 16), (90, 2, 16), (80, 1, 16), (120, 1, 16)):
        assert schedule.tile_of(Device(arch, 132), 128, shape, 2, "e4m3", planes).heads == heads
    assert schedule.tile_of(Device(90, 132), 128, shape, 2, "int8", 1).heads == 16
    assert schedule.tile_of(Device(90, 132), 8, shape, 2, "e4m3", 1).heads == 16
    assert schedule.tile_of(Device(90, 132), 64, schedule.shape_of(512, 512, None), 2, "e4m3", 1).heads == 16


def test_rows_are_taken_together_while_every_processor_has_work() -> None:
    device, shape = Device(90, 132), schedule.shape_of(128, 128, 128)
    assert schedule.tokens_of(device, 4, 8 * 4096, 4096, shape, 2) == 16
    assert schedule.tokens_of(device, 4, 8 * 4096, 4096, shape, 4) == 8
    assert schedule.tokens_of(device, 4, 8 * 40, 40, shape, 2) == 2
    assert schedule.tokens_of(device, 4, 8 * 4096, 1, shape, 2) == 1
    assert schedule.tokens_of(device, 3, 8 * 4096, 4096, shape, 2) == 16  # 48 of 64
    assert schedule.tokens_of(device, 64, 4096, 4096, shape, 2) == 1
    assert schedule.tokens_of(device, 1, 4096, 4096, schedule.shape_of(576, 512, None), 2) == 1


# under the interpreter


def impl_of(op: str) -> registry.Impl:
    return next(impl for impl in registry.implementations(op) if impl.backend == "cuda_triton")


@interpreted
@pytest.mark.parametrize(("type", "hardware_fp8"), [("e4m3", False), ("e4m3", True), ("e2m1", False), ("e8m0", False)])
def test_every_byte_is_decoded(type: str, hardware_fp8: bool) -> None:
    from triton_probe import decode_bytes

    stored = torch.arange(256, dtype=torch.uint8)
    expected = codecs.from_bytes(type, stored)
    if type == "e2m1":
        expected = expected.view(-1, 2)[:, 0]  # the low half of each byte
    got = decode_bytes(stored, type, hardware_fp8)
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(got.signbit()[expected == 0], expected.signbit()[expected == 0])


@interpreted
@pytest.mark.parametrize("fault", ["far", "negative", "short"])
def test_a_page_that_the_plane_lacks_makes_its_rows_nan(fault: str) -> None:
    """A device cannot refuse what it finds in a table. It reads nothing there, and only the rows concerned show it."""
    for index_heads in (0, 1):
        leading, kwargs = cases.attend(index_heads=index_heads, selected=24, v_format="fp32")
        clean = cases.run(impl_of("attend"), leading, kwargs)
        table = kwargs["page_table"].clone()
        table[3, 5] = {"far": 25, "negative": -1, "short": 0}[fault]
        kwargs["page_table"] = table[:, :5].contiguous() if fault == "short" else table
        out, lse = cases.run(impl_of("attend"), leading, kwargs)
        row = 6  # the last of sequence 3: entry 20, the only one in its page
        others = [t for t in range(len(out)) if t != row]
        assert out[row].isnan().all() and lse[row].isnan().all()
        cases.assert_same_bits((out[others], lse[others]), (clean[0][others], clean[1][others]))


@interpreted
def test_impossible_lengths_read_nothing_outside() -> None:
    leading, kwargs = cases.attend()
    for starts in ([0, 3, 2, 5, 7], [1, 3, 4, 5, 7], [0, 3, 4, 5, 99], [-4, -3, -2, -1, 0], [9, 9, 9, 9, 9]):
        broken = (leading[0], torch.tensor(starts, dtype=torch.int32), *leading[2:])
        out, _ = cases.run(impl_of("attend"), broken, kwargs)
        assert out.isfinite().all()


@interpreted
@pytest.mark.parametrize(
    "shape", [dict(planes="main+window", kv_heads=1, sinks=True), dict(index_heads=2, selected=160)]
)
def test_cut_lists_give_what_whole_ones_give(shape: dict, monkeypatch) -> None:
    from sparse_attn.backends.cuda_triton import attend as host

    leading, kwargs = cases.attend(**shape, lengths=(200, 0, 90), rows=(1, 1, 2), padding=1, window=150)
    whole = cases.run(impl_of("attend"), leading, dict(kwargs, batch_invariant=True))
    for parts, part_blocks in ((2, 3), (3, 2), (16, 1), (4, 0)):  # parts past the end, and all blocks in the last part
        monkeypatch.setattr(host, "parts_of", lambda *_, cut=(parts, part_blocks): cut)
        cut = cases.run(impl_of("attend"), leading, kwargs)
        for got, expected in zip(cut, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
        cases.assert_same_bits(cases.run(impl_of("attend"), leading, kwargs), cut)


@interpreted
@pytest.mark.parametrize(
    "shape",
    [
        dict(v_format="fp32"),
        dict(v_format="fp32", causal=False, ratio=2, sinks=True),
        dict(planes="window", kv_heads=1, window=3, sinks=True),
        dict(planes="main+window", kv_heads=1, ratio=3, q_heads=3, window=70),
    ],
    ids=lambda shape: ", ".join(shape),
)
def test_rows_taken_together_give_what_single_ones_give(shape: dict) -> None:
    """Also across the ends of sequences, and with NaN in the values of the last token, which others do not see."""
    options = dict(lengths=(90, 0, 21, 1), rows=(11, 1, 6, 1), padding=3)
    leading, kwargs = cases.attend(**(options | shape))
    for name in ("v", "win"):
        if kwargs.get(name) is not None and shape.get("causal", True):
            table = kwargs["page_table" if name == "v" else "win_page_table"]
            kwargs[name][int(table[0, 89 // 4]), 89 % 4, :, -1] = torch.nan
    alone = cases.run(impl_of("attend"), leading, dict(kwargs, batch_invariant=True))
    together = cases.run(impl_of("attend"), leading, kwargs)
    assert alone[0][11:].isfinite().all() and alone[0][:10].isfinite().all()
    for got, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6, equal_nan=True)


class Allocations(TorchDispatchMode):
    """Counts the numbers of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            "empty" in func.__name__ or "zeros" in func.__name__
        ) and result.numel():  # the interpreter makes empty ones
            self.sizes.append(result.numel())
        return result


@interpreted
def test_a_call_with_outputs_allocates_nothing_but_parts_of_cut_lists() -> None:
    """Outputs are the caller's; what is allocated in a capture, torch keeps in the graph's pool."""
    from sparse_attn.backends.cuda_triton import attend as host

    leading, kwargs = cases.attend(index_heads=1, selected=160, lengths=(200,), rows=(1,), padding=0)
    for cut in (False, True):
        a = Attend(*leading, **dict(kwargs, batch_invariant=not cut))
        out, lse = torch.empty(1, 4, 16), torch.empty(1, 4)
        with Allocations() as found:
            host.attend(a, out, lse)
        cells = 4 * schedule.parts_of(INTERPRETED, 2, 5)[0]
        assert found.sizes == ([cells * (2 + 16)] if cut else [])


@interpreted
def test_unaligned_packed_planes_are_refused() -> None:
    options = dict(format="fp8_v32", q_heads=2, kv_heads=1, qk_dim=576, v_dim=512, lengths=(9,), rows=(1,), padding=0)
    leading, kwargs = cases.attend(**options)
    pages, size, _, width = kwargs["kv"].shape
    pool = torch.zeros(kwargs["kv"].numel() + 1, dtype=torch.uint8)
    kwargs["kv"] = pool[1:].view(pages, size, 1, width)
    with pytest.raises(ValueError, match="attend: kv: expected entries at multiples of [24] bytes, where the device"):
        cases.run(impl_of("attend"), leading, kwargs)


@interpreted
def test_slots_past_the_plane_are_left_out_and_read_as_nan() -> None:
    plane, rows = torch.full((2, 3, 1, 16), 7.0), torch.randn(3, 1, 16)
    slots = torch.tensor([6, 4, 1 << 40])
    sparse_attn.store(rows, plane, slots, format="fp32", backend="cuda_triton")
    assert torch.equal(plane.flatten(0, 1)[4], rows[1]) and (plane == 7).sum() == 5 * 16
    read = sparse_attn.load(plane, torch.tensor([4, 6, -1]), format="fp32", backend="cuda_triton")
    assert torch.equal(read[0], rows[1]) and read[1].isnan().all() and (read[2] == 0).all()


@interpreted
def test_slots_past_a_plane_are_not_converted() -> None:
    for dst_format in ("fp32", "bf16"):  # moved, and stored anew
        src, dst = torch.randn(2, 3, 1, 16), torch.full((2, 4, 1, 16), 7.0).to(codecs.DTYPES[dst_format])
        options = dict(src_format="fp32", dst_format=dst_format, backend="cuda_triton")
        sparse_attn.convert(src, dst, torch.tensor([5, 6, 1, 2]), torch.tensor([7, 0, 8, -1]), **options)
        assert torch.equal(dst.flatten(0, 1)[7], src.flatten(0, 1)[5].to(dst.dtype)) and (dst == 7).sum() == 7 * 16


def compressed(change=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries 2 to 5 of one sequence in a plane of fp32, all of the plane, and their latents; the state has tokens 0 to
    8. With a ``change`` of the arguments."""
    s = Sequences(next(x for x in lines() if x.of == "DeepSeek V4, ratio 4"), [24], format="fp32", dim=24)
    impl = impl_of("compress")
    s.run(impl, [9], [9])
    s.plane.zero_()
    args, kwargs = s.step([24], [15])
    kwargs["entries"] = 4
    if change is not None:
        args = change(args, kwargs) or args
    latent = sparse_attn.compress(*args, **kwargs, backend=impl.backend)
    return s.entries()[0][2:], s.plane, latent


@interpreted
def test_what_compress_lacks_is_nan_or_left_out() -> None:
    clean, _, latents = compressed()
    assert clean.isfinite().all()

    def no_state(args, kwargs) -> None:
        table = kwargs["state_page_table"]
        kwargs["state_page_table"] = torch.where(torch.arange(table.shape[1]) == 1, -1, table)  # tokens 5 to 9

    got, _, _ = compressed(no_state)
    assert got[0].isnan().all() and got[1].isnan().all() and torch.equal(got[2:], clean[2:])

    def few_angles(args, kwargs) -> None:
        kwargs["cos_sin"] = kwargs["cos_sin"][:20]  # of entries up to 4, which begins at token 16

    got, _, kept = compressed(few_angles)
    assert torch.equal(got[:3], clean[:3]) and torch.equal(got[3, :, :-8], clean[3, :, :-8])
    assert got[3, :, -8:].isnan().all() and torch.equal(kept, latents)

    def few_latents(args, kwargs) -> None:
        kwargs["entries"] = 3

    got, _, kept = compressed(few_latents)
    assert torch.equal(got, clean) and torch.equal(kept, latents[:3])

    def no_page(args, kwargs):
        table = args[5].clone()
        table[0, 1] = 1 << 30  # of entries 3 to 5
        return *args[:5], table, *args[6:]

    got, plane, _ = compressed(no_page)
    assert torch.equal(got[0], clean[0]) and plane.count_nonzero() == clean[0].numel()


@interpreted
def test_impossible_lengths_compress_nothing_from_outside() -> None:
    for starts in ([1, 15], [0, 99], [-4, 15], [9, 9], [15, 0]):

        def change(args, kwargs, starts=starts):
            return *args[:2], torch.tensor(starts, dtype=torch.int32), *args[3:]

        _, plane, _ = compressed(change)
        assert not plane.isinf().any()


@interpreted
@pytest.mark.parametrize("dim", [1, 7, 33, 100])
def test_compress_takes_any_dimension(dim: int) -> None:
    for line in (x for x in lines() if x.of in ("DeepSeek V4, ratio 4", "Qwen4, index keys of pools of 16 tokens")):
        s = Sequences(line, [3 * line.stride + 1], format="fp32", dim=max(dim, 8 if "cos_sin" in line.arguments else 1))
        s.run(impl_of("compress"), s.lengths, s.lengths)
        for j, entry in enumerate(s.entries()[0]):
            assert s.close(entry, s.expected(0, j)[1])


def a_selection(**options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape = Batch(dict(k=9, out_heads=2, return_values=True) | options, 4, 2, True, [300, 0, 90], [2, 0, 3])
    return shape.arguments()


@interpreted
@pytest.mark.parametrize(
    "options", [{}, dict(order="score"), dict(keep_first=2, keep_last=3), dict(candidate_k=4)], ids=str
)
def test_cut_selections_are_those_of_whole_ones(options: dict, monkeypatch) -> None:
    """Lists that several programs share, and rows that are scored in several turns."""
    from sparse_attn.backends.cuda_triton import choose, select

    args, kwargs = a_selection(**options)
    whole = sparse_attn.select(*args, **kwargs, backend="cuda_triton")
    monkeypatch.setattr(choose, "MOST_PLACES", 128)
    monkeypatch.setattr(select, "MOST_SCORES", 3000)
    cut = sparse_attn.select(*args, **kwargs, backend="cuda_triton")
    assert all(x is y or torch.equal(x, y) for x, y in zip(whole, cut, strict=True))
    assert (whole.counts[:2] == 9).all()


@interpreted
@pytest.mark.parametrize("cut", [False, True])
def test_cut_merges_are_those_of_whole_ones(cut: bool, monkeypatch) -> None:
    from sparse_attn.backends.cuda_triton import choose, select_merge

    call = Merge(3, 150, width=200, whole=900, order="score")
    args, kwargs = call.arguments()
    if cut:
        monkeypatch.setattr(choose, "MOST_PLACES", 128)
        monkeypatch.setattr(select_merge, "MOST_SCORES", 2000)
    merged = sparse_attn.select_merge(*args, **kwargs, backend="cuda_triton")
    for got, expected in zip(merged, call.expected(), strict=False):
        assert torch.equal(got, expected)


@interpreted
@pytest.mark.parametrize(
    "options", [{}, dict(block=4, pool="max"), dict(block=4, pool="mean"), dict(score="max")], ids=str
)
@pytest.mark.parametrize("fault", ["far", "negative", "short"])
def test_an_entry_without_a_page_is_selected_and_seen(fault: str, options: dict) -> None:
    args, kwargs = a_selection(order="index", **options)
    table = args[5].clone()
    table[2, 22] = {"far": 1 << 20, "negative": -1, "short": 0}[fault]  # entries 88 and 89: what only the last rows see
    table = table[:, :22].contiguous() if fault == "short" else table
    clean = sparse_attn.select(*args, **kwargs, backend="cuda_triton")
    lengths = torch.tensor([80, 0, 90], dtype=torch.int32)
    selected = sparse_attn.select(*args[:3], lengths, args[4], table, *args[6:], **kwargs, backend="cuda_triton")
    lost = 22 if options.get("block") else 88
    for row in (3, 4):
        for head in range(2):
            values = dict(zip(selected.indices[row, head].tolist(), selected.values[row, head].tolist(), strict=True))
            assert values[lost] != values[lost]
    assert torch.equal(selected.indices[2], clean.indices[2]) and torch.equal(selected.values[2], clean.values[2])


@interpreted
def test_impossible_lengths_select_nothing_outside() -> None:
    args, kwargs = a_selection()
    for starts in ([0, 3, 2, 5], [1, 3, 4, 5], [0, 3, 4, 99], [-4, -3, -2, -1], [9, 9, 9, 9]):
        for lengths in ([300, 0, 90], [1 << 30, -5, 400]):
            broken = (torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
            selected = sparse_attn.select(*args[:2], *broken, *args[4:], **kwargs, backend="cuda_triton")
            assert (selected.counts <= 9).all() and (selected.indices < 400).all()
