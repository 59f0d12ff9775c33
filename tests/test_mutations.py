"""The suite is tested itself: each fault below is put into a copy of the source, and the calls of `docs/calls.md` must
notice."""

from __future__ import annotations

import sys
import types
from functools import cache
from pathlib import Path

import cases
import golden
import pytest
import torch
from calls import Batch, lines
from test_formats import AT, FILL, PAGES, SCALE_PLANE, bits, golden_rows, new_plane, shaped
from test_merge import parts_of, whole
from torch import Tensor

import sparse_attn
from sparse_attn import InvalidCall, layout, reference
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.store import Store

# (fault, text in reference.py, what stands there instead)
ATTEND_FAULTS = [
    ("sink dropped", "if a.sinks is not None:", "if False:"),
    (
        "sink in the lse",
        "lse[t, heads] = total.float()",
        "lse[t, heads] = torch.logaddexp(total, a.sinks[heads].double()).float() "
        "if a.sinks is not None else total.float()",
    ),
    ("sink scaled", "a.sinks[heads].double()", "a.scale * a.sinks[heads].double()"),
    ("scale derived from the row", "scores = a.scale *", "scores = a.q.shape[2] ** -0.5 * 1.01 *"),
    ("window one short", "position - a.window + 1 if", "position - a.window + 2 if"),
    ("window one long", "position - a.window + 1 if", "position - a.window if"),
    ("window without the token itself", "if a.window else 0, position + 1", "if a.window else 0, position"),
    ("visible = p // ratio", "low, high = 0, tokens // a.ratio", "low, high = 0, (tokens - 1) // a.ratio"),
    ("ratio ignored", "low, high = 0, tokens // a.ratio", "low, high = 0, len(a.page_table[b]) * a.kv.shape[1] // 2"),
    ("never causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if False else"),
    ("always causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if True else"),
    ("kv_range ignored", "if a.kv_range is not None:", "if False:"),
    ("win_range ignored", "if a.win_range is not None:", "if False:"),
    ("indices ignored", "if a.indices is None:\n        return", "if True:\n        return"),
    ("win_indices ignored", "if a.win_indices is None:", "if True:"),
    ("counts ignored", "if a.index_counts is not None:", "if False:"),
    ("-1 read as row 0", "chosen.long()[:, None]", "chosen.long().clamp(min=0)[:, None]"),
    (
        "selection not causal",
        "(entries >= max(low, 0)) & (entries < high)",
        "(entries >= max(low, 0)) & (entries < high + 1)",
    ),
    ("lower bound ignored", "(entries >= max(low, 0)) & (entries < high)", "(entries >= 0) & (entries < high)"),
    ("block numbers taken as entries", "chosen.long()[:, None] * a.select_block", "chosen.long()[:, None]"),
    ("first index head for all", "g * index_heads // groups", "0"),
    ("first KV head for all", "g * a.kv_heads // groups", "0"),
    (
        "rope dropped",
        "torch.cat([rows, a.kv_rope[:, :, kv_head][at].double()], dim=-1)",
        "torch.cat([rows, 0 * a.kv_rope[:, :, kv_head][at].double()], dim=-1)",
    ),
    ("keys as values", "values = rows[:, : a.v_dim] if a.v is None", "values = rows[:, : a.v_dim] if True"),
    ("key scale for values", "Plane(a.v, a.value_format, a.v_scale)", "Plane(a.v, a.value_format, a.kv_scale)"),
    ("page of another sequence", "where(a.page_table[b], entries, plane", "where(a.page_table[b - 1], entries, plane"),
    (
        "main plane through the window's pages",
        "where(a.win_page_table[b], entries",
        "where(a.win_page_table[b], entries + 1",
    ),
    ("positions from the first row on", "position = length - (end - t)", "position = t - start"),
    ("output left as it was", "out.zero_()", "pass"),
    ("lse left as it was", "lse.fill_(NEG_INF)", "pass"),
]

# (fault, file, text in it, what stands there instead)
FORMAT_FAULTS = [
    (
        "rope before scales, as on Ascend",
        "layout",
        "values=512, scales=16, rope=128",
        "values=512, rope=128, scales=16",
    ),
    (
        "scales before rope, as in FlashMLA",
        "layout",
        "values=512, rope=128, scales=16",
        "values=512, scales=16, rope=128",
    ),
    ("rope before values", "layout", "values=448, rope=128, scales=7, pad=1", "rope=128, values=448, scales=7, pad=1"),
    ("pad before scales", "layout", "_section(scales=7, pad=1)", "_section(pad=1, scales=7)"),
    ("pad of an entry forgotten", "layout", "scales=7, pad=57", "scales=7, pad=56"),
    ("padding of a page forgotten", "layout", "page_multiple=576", "page_multiple=1"),
    ("padding of another format", "layout", "page_multiple=512", "page_multiple=576"),
    ("padding rounded down", "layout", "-(-page_size * sum(", "(page_size * sum("),
    (
        "scales before values",
        "layout",
        "(_section(values=256), _section(scales=32))",
        "(_section(scales=32), _section(values=256))",
    ),
    ("groups of 64 for 32", "layout", 'Codec("e4m3", "e8m0", 32, 512)', 'Codec("e4m3", "e8m0", 64, 512)'),
    ("scales of another type", "layout", 'Codec("e2m1", "e4m3", 16, 512)', 'Codec("e2m1", "e8m0", 16, 512)'),
    ("rope quantised too", "layout", '"e8m0", 64, 448, rope=64', '"e8m0", 64, 512, rope=0'),
    (
        "halves of a byte swapped when written",
        "codecs",
        "codes[..., 0::2] | codes[..., 1::2] << 4",
        "codes[..., 1::2] | codes[..., 0::2] << 4",
    ),
    ("halves of a byte swapped when read", "codecs", "[stored & 15, stored >> 4]", "[stored >> 4, stored & 15]"),
    ("exponent rounded down", "codecs", " + (mantissa > largest_mantissa)", ""),
    (
        "exponent rounded up at powers of two",
        "codecs",
        "(mantissa > largest_mantissa)",
        "(mantissa >= largest_mantissa)",
    ),
    ("floor of amax forgotten", "codecs", "clamp(min=floor)", "clamp(min=1e-30)"),
    ("floor of the scale instead of amax", "codecs", "clamp(min=floor)", "clamp(min=floor * largest)"),
    ("least e4m3 scale forgotten", "codecs", ".clamp(2.0**-9, 448.0)", ".clamp(0.0, 448.0)"),
    ("sign of zero lost", "codecs", "numbers.signbit()", "(numbers < 0)"),
    ("e2m1 ties up", "codecs", "(magnitude > up_past)", "(magnitude >= up_past)"),
    ("e2m1 ties down", "codecs", "(magnitude >= up_from)", "(magnitude > up_from)"),
    (
        "halves away from zero",
        "codecs",
        "numbers = numbers.round()",
        "numbers = (numbers.abs() + 0.5).floor() * numbers.sign()",
    ),
    ("int4 without sign", "codecs", "((codes ^ 8) - 8)", "codes"),
    ("fp16 scale rounded to nearest", "codecs", "clips = ", "clips = torch.zeros_like(scale, dtype=torch.bool) & "),
    ("a fault clipped away", "codecs", "torch.where(amax.isfinite(), scale, torch.nan)", "scale.nan_to_num(1.0)"),
    (
        "multiplied by the reciprocal",
        "codecs",
        "groups / torch.where(usable, scale, 1.0)[",
        "groups * torch.where(usable, 1 / scale, 1.0)[",
    ),
    ("one scale for all groups", "codecs", "* scale[..., None]).flatten(-2)", "* scale[..., :1, None]).flatten(-2)"),
    (
        "offset and page swapped",
        "planes",
        "slots // self.page_size, slots % self.page_size",
        "slots % self.page_size, slots // self.page_size",
    ),
    (
        "32-bit slots",
        "planes",
        "return slots // self.page_size",
        "slots = slots.int()\n        return slots // self.page_size",
    ),
    ("sections one entry apart", "planes", "start += self.page_size * width", "start += (self.page_size - 1) * width"),
    ("sections all at the start", "planes", "start += self.page_size * width", "pass"),
    ("entries of a section too close", "planes", "offset[:, None] * width", "offset[:, None] * (width - 1)"),
    ("padding not zero", "planes", "self.data.new_zeros(entries, size)", "self.data.new_ones(entries, size)"),
    (
        "first head for all",
        "planes",
        "self.data[:, :, heads][page, offset]",
        "self.data[:, :, :1].expand_as(self.data)[page, offset]",
    ),
    (
        "scale of another entry",
        "planes",
        "self.scale[:, :, heads][page, offset]",
        "self.scale[:, :, heads][page, 0 * offset]",
    ),
    ("-1 writes the last row", "reference", "kept = a.slots >= 0", "kept = a.slots >= -1"),
    ("skipped rows keep what was there", "reference", "    out.zero_()\n    out[kept]", "    out[kept]"),
    ("always quantised anew", "reference", "if src.format.codec == dst.format.codec:", "if False:"),
    ("never quantised anew", "reference", "if src.format.codec == dst.format.codec:", "if True:"),
    ("skipped source entries are written", "reference", "(src_slots >= 0) & (dst_slots >= 0)", "dst_slots >= 0"),
    ("skipped target entries are written", "reference", "(src_slots >= 0) & (dst_slots >= 0)", "src_slots >= 0"),
    (
        "window read by the main plane's format",
        "reference",
        "Plane(a.win, a.win_format, None",
        "Plane(a.win, a.format, None",
    ),
    ("window read by the main plane's pages", "reference", "None, a.win_page_size)", "None, a.page_size)"),
]

MERGE_FAULTS = [
    ("base 2 taken as e", '(math.log(2) if a.base == "2" else 1.0)', "1.0"),
    ("base e taken as 2", '(math.log(2) if a.base == "2" else 1.0)', "math.log(2)"),
    ("lse in base 2", "lse.copy_(total)", 'lse.copy_(total / (math.log(2) if a.base == "2" else 1.0))'),
    (
        "sink in the lse",
        "lse.copy_(total)",
        "lse.copy_(total if a.sinks is None else torch.logaddexp(total, a.sinks.double()))",
    ),
    ("sink dropped", "total = torch.logaddexp(total, a.sinks.double())", "pass"),
    (
        "sink once for each part",
        "torch.logaddexp(total, a.sinks.double())",
        "torch.logaddexp(total, a.sinks.double() + math.log(len(lses)))",
    ),
    ("last part dropped", "for part in lses:", "for part in lses[:-1]:"),
    ("parts weighted alike", "torch.exp(part - total)", "(torch.ones_like(part) / len(lses))"),
    ("what empty parts hold leaks", "weighted.where((part != NEG_INF)[..., None], 0.0)", "weighted"),
    ("+inf is always empty", "if a.inf_is_empty:", "if True:"),
    ("+inf is never empty", "if a.inf_is_empty:", "if False:"),
    ("heads of another row", "a.outs, strict=True", "a.outs.flip(1), strict=True"),
]

FILES = ("layout", "codecs", "planes", "reference")  # each imports only those before it
SOURCES = {name: Path(reference.__file__).with_name(f"{name}.py").read_text() for name in FILES}


def mutant(old: str, new: str, file: str = "reference") -> types.ModuleType:
    """The reference on a copy of its files with one fault in one of them."""
    assert old in SOURCES[file], "the fault's place is gone: move it along with the source"
    names = {name: f"sparse_attn.{name}" for name in FILES}
    originals = {name: sys.modules[full] for name, full in names.items()}
    try:
        for name, full in names.items():
            module = sys.modules[full] = types.ModuleType(full)
            module.__package__ = "sparse_attn"
            setattr(sparse_attn, name, module)
            source = SOURCES[name].replace(old, new) if name == file else SOURCES[name]
            exec(compile(source, name, "exec"), module.__dict__)
        return sys.modules[names["reference"]]
    finally:
        for name, original in originals.items():
            sys.modules[names[name]] = original
            setattr(sparse_attn, name, original)


@cache
def batches() -> list[tuple[Batch, Tensor, Tensor]]:
    """Batches that together use every argument, small enough to run for each fault, with what they should give."""
    kept = []
    for line in lines():
        if line.q_heads > 16 and "64" in f"{line.q_heads}":
            line = type(line)(**dict(line.__dict__, q_heads=4))  # as many heads change nothing for the reference
        kept.append(Batch(line, "chunk" if "chunk" in line.phases else line.phases[0], page=4))
    return [(batch, *batch.expected()) for batch in kept]


def notices(attend) -> bool:
    for batch, out, lse in batches():
        leading, kwargs = batch.arguments()
        got, got_lse = torch.full(out.shape, 3.0), torch.full(lse.shape, 3.0)
        try:
            attend(Attend(*leading, **kwargs), got, got_lse)
        except (InvalidCall, IndexError):
            return True
        close = torch.allclose(got.double(), out, atol=1e-5, equal_nan=True)
        if not close or not torch.allclose(got_lse.double(), lse, atol=1e-5, equal_nan=True):
            return True
    return False


def test_the_reference_itself_passes() -> None:
    assert not notices(reference.attend)


@pytest.mark.parametrize(
    ("old", "new"), [fault[1:] for fault in ATTEND_FAULTS], ids=[fault[0] for fault in ATTEND_FAULTS]
)
def test_attend_fault_is_noticed(old: str, new: str) -> None:
    assert notices(mutant(old, new).attend)


def format_faults(r: types.ModuleType) -> bool:
    """Whether the reference ``r`` differs anywhere from the golden bytes and from what the formats promise."""
    try:
        return not (golden_bytes(r) and hard_rows(r) and scale_planes(r) and orders(r) and far_slots(r) and attends(r))
    except (InvalidCall, IndexError, KeyError, RuntimeError, ValueError):
        return True


def golden_bytes(r: types.ModuleType) -> bool:
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


def hard_rows(r: types.ModuleType) -> bool:
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


def scale_planes(r: types.ModuleType) -> bool:
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


def orders(r: types.ModuleType) -> bool:
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


def far_slots(r: types.ModuleType) -> bool:
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


def attends(r: types.ModuleType) -> bool:
    for a, out, lse in packed_calls():
        got, got_lse = torch.empty_like(out), torch.empty_like(lse)
        r.attend(a, got, got_lse)
        if not torch.equal(got, out) or not torch.equal(got_lse, lse):
            return False
    return True


def test_the_formats_themselves_pass() -> None:
    assert golden_bytes(reference) and hard_rows(reference) and scale_planes(reference)
    assert orders(reference) and far_slots(reference) and attends(reference)
    assert layout.FORMATS is reference.layout.FORMATS, "mutants leave nothing behind"


@pytest.mark.parametrize(
    ("file", "old", "new"), [fault[1:] for fault in FORMAT_FAULTS], ids=[fault[0] for fault in FORMAT_FAULTS]
)
def test_format_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert format_faults(mutant(old, new, file))


def merge_faults(r: types.ModuleType) -> bool:
    torch.manual_seed(0)
    scores, values = torch.randn(5, 3, 40) * 4, torch.randn(40, 8)
    sinks = torch.tensor([0.5, -2.0, 7.0])
    outs, lses = (x.float() for x in parts_of(scores, values, [7, 30]))
    outs[1, 2], lses[1, 2] = torch.nan, -torch.inf  # an empty part in row 2
    for mark in (-torch.inf, torch.inf):
        lses[1, 2] = mark
        for base, sink, scale in (("e", None, 1.0), ("2", sinks, 0.6931471805599453)):
            out, lse = torch.empty(5, 3, 8), torch.empty(5, 3)
            r.merge(Merge(outs, lses / scale, sink, base, mark > 0), out, lse)
            rows = [0, 1, 3, 4]
            expected, expected_lse = whole(scores[rows], values, sink)
            kept = torch.cat([scores[2:3, :, :7], scores[2:3, :, 30:]], -1), torch.cat([values[:7], values[30:]])
            for got, wanted in (
                (out[rows], expected),
                (lse[rows], expected_lse),
                *zip((out[2:3], lse[2:3]), whole(*kept, sink), strict=True),
            ):
                if not torch.allclose(got.double(), wanted, atol=1e-5, rtol=1e-5):
                    return True
    out, lse = torch.empty(5, 3, 8), torch.empty(5, 3)
    r.merge(Merge(outs, lses), out, lse)  # +inf that nobody said is empty
    return not bool(out[2].isnan().all())


def test_merge_itself_passes() -> None:
    assert not merge_faults(reference)


@pytest.mark.parametrize(
    ("old", "new"), [fault[1:] for fault in MERGE_FAULTS], ids=[fault[0] for fault in MERGE_FAULTS]
)
def test_merge_fault_is_noticed(old: str, new: str) -> None:
    assert merge_faults(mutant(old, new))
