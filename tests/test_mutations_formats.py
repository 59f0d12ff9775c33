"""The suite is tested itself: each fault below is put into a copy of the formats, or of what reads and writes them, and
golden bytes must notice."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import cases
import golden
import torch
from mutants import OPS, each, mutant
from test_formats import AT, FILL, PAGES, SCALE_PLANE, bits, golden_rows, new_plane, shaped
from torch import Tensor

from sparse_attn import InvalidCall, layout, reference
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.store import Store

# (fault, text in the file, what stands there instead)
LAYOUT_FAULTS = [
    ("rope before scales, as on Ascend", "values=512, scales=16, rope=128", "values=512, rope=128, scales=16"),
    ("scales before rope, as in FlashMLA", "values=512, rope=128, scales=16", "values=512, scales=16, rope=128"),
    ("rope before values", "values=448, rope=128, scales=7, pad=1", "rope=128, values=448, scales=7, pad=1"),
    ("pad before scales", "_section(scales=7, pad=1)", "_section(pad=1, scales=7)"),
    ("pad of an entry forgotten", "scales=7, pad=57", "scales=7, pad=56"),
    ("padding of a page forgotten", "page_multiple=576", "page_multiple=1"),
    ("padding of another format", "page_multiple=512", "page_multiple=576"),
    ("padding rounded down", "-(-page_size * sum(", "(page_size * sum("),
    (
        "scales before values",
        "(_section(values=256), _section(scales=32))",
        "(_section(scales=32), _section(values=256))",
    ),
    ("groups of 64 for 32", 'Codec("e4m3", "e8m0", 32, 512)', 'Codec("e4m3", "e8m0", 64, 512)'),
    ("scales of another type", 'Codec("e2m1", "e4m3", 16, 512)', 'Codec("e2m1", "e8m0", 16, 512)'),
    ("rope quantised too", '"e8m0", 64, 448, rope=64', '"e8m0", 64, 512, rope=0'),
]

CODECS_FAULTS = [
    (
        "halves of a byte swapped when written",
        "codes[..., 0::2] | codes[..., 1::2] << 4",
        "codes[..., 1::2] | codes[..., 0::2] << 4",
    ),
    ("halves of a byte swapped when read", "[stored & 15, stored >> 4]", "[stored >> 4, stored & 15]"),
    ("exponent rounded down", " + (mantissa > largest_mantissa)", ""),
    ("exponent rounded up at powers of two", "(mantissa > largest_mantissa)", "(mantissa >= largest_mantissa)"),
    ("floor of amax forgotten", "clamp(min=floor)", "clamp(min=1e-30)"),
    ("floor of the scale instead of amax", "clamp(min=floor)", "clamp(min=floor * largest)"),
    ("least e4m3 scale forgotten", ".clamp(2.0**-9, 448.0)", ".clamp(0.0, 448.0)"),
    ("sign of zero lost", "numbers.signbit()", "(numbers < 0)"),
    ("e2m1 ties up", "(magnitude > up_past)", "(magnitude >= up_past)"),
    ("e2m1 ties down", "(magnitude >= up_from)", "(magnitude > up_from)"),
    ("halves away from zero", "numbers = numbers.round()", "numbers = (numbers.abs() + 0.5).floor() * numbers.sign()"),
    ("int4 without sign", "((codes ^ 8) - 8)", "codes"),
    ("fp16 scale rounded to nearest", "clips = ", "clips = torch.zeros_like(scale, dtype=torch.bool) & "),
    ("a fault clipped away", "torch.where(amax.isfinite(), scale, torch.nan)", "scale.nan_to_num(1.0)"),
    (
        "multiplied by the reciprocal",
        "groups / torch.where(usable, scale, 1.0)[",
        "groups * torch.where(usable, 1 / scale, 1.0)[",
    ),
    ("one scale for all groups", "* scale[..., None]).flatten(-2)", "* scale[..., :1, None]).flatten(-2)"),
]

PLANES_FAULTS = [
    (
        "offset and page swapped",
        "slots // self.page_size, slots % self.page_size",
        "slots % self.page_size, slots // self.page_size",
    ),
    ("32-bit slots", "return slots // self.page_size", "slots = slots.int()\n        return slots // self.page_size"),
    ("sections one entry apart", "start += self.page_size * width", "start += (self.page_size - 1) * width"),
    ("sections all at the start", "start += self.page_size * width", "pass"),
    ("entries of a section too close", "offset[:, None] * width", "offset[:, None] * (width - 1)"),
    ("padding not zero", "self.data.new_zeros(entries, size)", "self.data.new_ones(entries, size)"),
    (
        "first head for all",
        "self.data[:, :, heads][page, offset]",
        "self.data[:, :, :1].expand_as(self.data)[page, offset]",
    ),
    ("scale of another entry", "self.scale[:, :, heads][page, offset]", "self.scale[:, :, heads][page, 0 * offset]"),
]

STORE_FAULTS = [
    ("-1 writes the last row", "kept = a.slots >= 0", "kept = a.slots >= -1"),
]

LOAD_FAULTS = [
    ("-1 reads the last row", "kept = a.slots >= 0", "kept = a.slots >= -1"),
    ("skipped rows keep what was there", "    out.zero_()\n    out[kept]", "    out[kept]"),
]

CONVERT_FAULTS = [
    ("always quantised anew", "if src.format.codec == dst.format.codec:", "if False:"),
    ("never quantised anew", "if src.format.codec == dst.format.codec:", "if True:"),
    ("skipped source entries are written", "(src_slots >= 0) & (dst_slots >= 0)", "dst_slots >= 0"),
    ("skipped target entries are written", "(src_slots >= 0) & (dst_slots >= 0)", "src_slots >= 0"),
]

ATTEND_FAULTS = [
    ("window read by the main plane's format", "Plane(a.win, a.win_format, None", "Plane(a.win, a.format, None"),
    ("window read by the main plane's pages", "None, a.win_page_size)", "None, a.page_size)"),
]


def format_faults(r: Any) -> bool:
    """Whether the reference ``r`` differs anywhere from the golden bytes and from what the formats promise."""
    try:
        return not (golden_bytes(r) and hard_rows(r) and scale_planes(r) and orders(r) and far_slots(r) and attends(r))
    except (InvalidCall, IndexError, KeyError, RuntimeError, ValueError):
        return True


def golden_bytes(r: Any) -> bool:
    page_size = 3
    for name, g in golden.PACKED.items():
        if r.layout.FORMATS[name].page_bytes(page_size) != g.place(page_size)[0]:
            return False
        expected = shaped(name, golden.plane(g, PAGES, page_size, AT, FILL), page_size)
        plane = torch.full_like(expected, FILL)
        slots = torch.tensor([*AT, -1])
        rows = golden_rows(name, [*AT.values(), 5])
        r.store(Store(rows, plane, slots, format=name, page_size=page_size))
        read = torch.full_like(rows, 7.0)
        r.load(Load(plane, slots, format=name, page_size=page_size), read)
        rows[-1] = 0
        if not torch.equal(plane, expected) or not torch.equal(bits(read), bits(rows)):
            return False
    return True


def hard_rows(r: Any) -> bool:
    """Halfway cases, the smallest and largest groups, and faults: bytes and numbers worked out by hand."""
    values = torch.tensor([0.5, -6.0, 1, 4, -0.0, 0.25, 0.26, 5, 0.75, 1.25, 1.75, 2.5, 3.5, -5, -0.2, 0.0])
    fp4 = torch.cat([values, values * 2**-12, torch.zeros(480)])[None, None]
    fp4[0, 0, 480:] = torch.inf
    plane = torch.zeros(1, 1, 1, 288, dtype=torch.uint8)
    r.store(Store(fp4, plane, torch.tensor([0]), format="fp4_v41"))
    row = plane.flatten().tolist()
    good = row[:8] == [0xF1, 0x62, 0x08, 0x61, 0x22, 0x44, 0xE6, 0x08]
    good &= row[256:259] == [0x38, 0x01, 0x01] and row[286:] == [0x7F, 0x7F]
    fp8 = torch.zeros(1, 1, 512)
    fp8[0, 0, 0], fp8[0, 0, 32], fp8[0, 0, 64], fp8[0, 0, 96] = 448, 448.5, 1e-6, torch.nan
    plane = torch.zeros(1, 1, 1, 528, dtype=torch.uint8)
    r.store(Store(fp8, plane, torch.tensor([0]), format="fp8_v41"))
    good &= plane.flatten()[512:517].tolist() == [127, 128, 105, 255, 105]  # 105: 2**-22 follows 1e-4 / 448
    ints = torch.zeros(1, 1, 128)  # halfway by division; times the reciprocal of the scale they are not
    ints[0, 0, :4] = torch.tensor([127.0, 15.5, 31.5, -2.5]) * 0.55078125
    plane = torch.zeros(1, 1, 1, 130, dtype=torch.uint8)
    r.store(Store(ints, plane, torch.tensor([0]), format="int8_index"))
    return good and plane.flatten()[:4].tolist() == [127, 16, 32, 256 - 2]


def scale_planes(r: Any) -> bool:
    for name in SCALE_PLANE:
        made = [golden.scale_plane(7 if name == "int4_index_h" else 127, 2, 20, entry) for entry in (4, 0, 6)]
        rows = torch.tensor([row for row, _, _ in made])
        plane, scale = new_plane(name)
        slots = torch.tensor([7, 0, 11])
        r.store(Store(rows, plane, slots, scale, name))
        read = torch.empty_like(rows)
        r.load(Load(plane, slots, scale, name), read)
        stored = bits(plane).view(12, -1)[slots].flatten().tolist()
        if not torch.equal(read, rows) or bytes(stored) != b"".join(v for _, values, _ in made for v in values):
            return False
        coarse, scale = torch.tensor([[[1.0] * 20, [1e-3] * 20]]), torch.zeros(4, 3, 2, dtype=torch.half)
        r.store(Store(coarse * 1.0003, new_plane(name)[0], torch.tensor([0]), scale, name))
        if not (
            scale[0, 0].double() * (7 if name == "int4_index_h" else 127) >= coarse[0, :, 0].double() * 1.0003
        ).all():
            return False
    return True


def orders(r: Any) -> bool:
    """Between orders of one codec bytes stay, scales of others included; between codecs numbers do."""
    for src, dst in (("fp8_v4", "fp8_v4_planar"), ("fp4_v41_planar", "fp4_v41"), ("fp8_v4_planar", "fp8_v4_608")):
        at, to = {0: 4, 5: 0, 2: 6}, {0: 7, 5: 0, 2: 3}
        plane = shaped(src, golden.plane(golden.PACKED[src], PAGES, 3, at, 0), 3)
        expected = shaped(dst, golden.plane(golden.PACKED[dst], PAGES, 3, {to[s]: e for s, e in at.items()}, FILL), 3)
        target = torch.full_like(expected, FILL)
        slots, targets = torch.tensor([*to, -1, 5]), torch.tensor([*to.values(), 1, -1])
        r.convert(Convert(plane, target, slots, targets, None, None, src, dst, 3, 3))
        if not torch.equal(target, expected):
            return False
    plane = shaped("fp8_v4", golden.plane(golden.PACKED["fp8_v4"], PAGES, 1, {0: 1}, 0), 1)
    plane[0, 0, 0, :448] = 0x38  # 1: another scale would do better
    target = torch.zeros(PAGES, 1152, dtype=torch.uint8)
    r.convert(Convert(plane, target, None, None, None, None, "fp8_v4", "fp8_v4_planar", 0, 1))
    return torch.equal(target[0, :584], plane[0].flatten())


def far_slots(r: Any) -> bool:
    """Almost 2**31 pages that begin one byte apart; only the last of them are touched."""
    pages = (1 << 31) - 21
    pool = torch.empty(pages + 63, dtype=torch.int8)
    plane = pool.as_strided((pages, 4, 1, 16), (1, 16, 16, 1))
    pool[-127:] = torch.arange(127)
    scale = torch.ones(1, 1, 1, dtype=torch.half).expand(pages, 4, 1)
    read = torch.empty(1, 1, 16)
    r.load(Load(plane, torch.tensor([4 * pages - 3]), scale, "int8"), read)
    return read.flatten().tolist() == list(range(127 - 48, 127 - 32))


@cache
def packed_calls() -> list[tuple[Attend, Tensor, Tensor]]:
    """Calls on packed and quantised planes, and what they give on the numbers in them."""
    from test_attend_formats import SHAPES, plain

    made = []
    for shape in ("v4.1, ratio 2", "v4.1, ratio 1, planar", "v3.2", "gqa in int8"):
        options = dict(lengths=(9, 6), rows=(1, 1), padding=0, page_size=3, win_page_size=4)
        leading, kwargs = cases.attend(**dict(SHAPES[shape], **options))
        out, lse = torch.ops.sparse_attn.attend(*leading, **plain(kwargs), backend="reference")
        made.append((Attend(*leading, **kwargs), out, lse))
    return made


def attends(r: Any) -> bool:
    for a, out, lse in packed_calls():
        got, got_lse = torch.empty_like(out), torch.empty_like(lse)
        r.attend(a, got, got_lse)
        if not torch.equal(got, out) or not torch.equal(got_lse, lse):
            return False
    return True


def test_the_formats_themselves_pass() -> None:
    original = SimpleNamespace(layout=layout, **{op: getattr(reference, op) for op in OPS})
    assert golden_bytes(original) and hard_rows(original) and scale_planes(original)
    assert orders(original) and far_slots(original) and attends(original)


@each(
    layout=LAYOUT_FAULTS,
    codecs=CODECS_FAULTS,
    planes=PLANES_FAULTS,
    store=STORE_FAULTS,
    load=LOAD_FAULTS,
    convert=CONVERT_FAULTS,
    attend=ATTEND_FAULTS,
)
def test_format_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert format_faults(mutant(file, old, new))
