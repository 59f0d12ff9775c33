"""The suite is tested itself on the native kernel: faults in a copy of its source, compiled, must be noticed.

Each fault is compiled for the portable instruction set, which shares its source with the others, and runs in a process
of its own, of `kernel_probes.py`: a fault may crash it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import cases
import compressions
import merges
import pytest
import test_attend
import test_attend_formats
import test_compressions
import test_cpu_native_select
import test_formats
import test_merge
import test_mutations
import test_same_bytes
import test_select
import test_select_formats
import test_select_merge
import test_store
import torch

from sparse_attn import registry
from sparse_attn.ops.attend import Attend

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = ("attend.cpp", "attend_portable.cpp", "select.cpp", "select_portable.cpp", "best.cpp", "store.cpp")
SOURCES += ("compress.cpp", "compress_portable.cpp", "entry.cpp", "entry_portable.cpp", "merge.cpp", "select_merge.cpp")
SOURCES += ("select_rows.cpp", "select_lists.cpp")
SOURCES += ("limits.cpp", "limits_portable.cpp", "parallel.cpp", "memory.cpp", "isa.cpp", "arguments.cpp")
ISAS = {"x86_64": ("Avx2", "Avx512", "Avx512Bf16", "AmxBf16"), "aarch64": ("NeonBf16", "Sve256Bf16")}
OTHER_ISAS = "".join(
    f"extern const Kernels k{isa}Kernels = {{}}; extern const SelectKernels k{isa}SelectKernels = {{}};"
    f"extern const CompressEntry k{isa}Compress = nullptr; extern const RowKernels k{isa}RowKernels = {{}};"
    f"extern const LimitKernels k{isa}LimitKernels = {{}};"
    for isa in ISAS.get(platform.machine(), ())
)
INCLUDED_BY = {"encode.h": ["entry_portable.cpp"], "compress_kernel.h": ["compress_portable.cpp"]}
INCLUDED_BY |= {"plane.h": ["arguments.cpp"], "../common/layout.h": ["arguments.cpp", "entry.cpp"]}
INCLUDED_BY |= {"entry_kernel.h": ["entry_portable.cpp"]}
INCLUDED_BY |= {"simd.h": ["attend_portable.cpp", "entry_portable.cpp"]}
INCLUDED_BY |= {"convert.h": ["attend_portable.cpp", "select_portable.cpp", "entry_portable.cpp"]}
SELECT_SOURCES = ["select.cpp", "select_portable.cpp", "select_rows.cpp", "select_lists.cpp"]
INCLUDED_BY |= dict.fromkeys(("select_schedule.h", "best.h"), SELECT_SOURCES)
INCLUDED_BY |= {"best_cut.h": ["select_portable.cpp"]}
SELECT_HEADERS = ("kernel", "keys", "lanes", "pooling", "products", "softmax", "tiles")
INCLUDED_BY |= dict.fromkeys((f"select_{name}.h" for name in SELECT_HEADERS), ["select_portable.cpp"])

# probe: what notices the fault
LINES, NAN, POOL, HOSTILE, LONG, SELECT = "lines", "nan", "pool", "hostile", "long", "select"
STORE, MERGE, SELECT_MERGE, COMPRESS = "store", "merge", "select_merge", "compress"
PACKED, PACKED_SELECT = "packed", "packed select"

# (fault, file, text, what stands there instead, probe)
FAULTS = [
    ("sink dropped", "partial.h", "p.sinks ? exp(p.sinks[head] - maximum) : 0", "0", LINES),
    ("sink in the lse", "partial.h", "maximum + log(sum)", "maximum + log(sum + exp(-maximum))", LINES),
    ("wrong scale", "attend_kernel.h", "p_.scale * 1.44269504088896341", "p_.scale", LINES),
    ("partial results merged crosswise", "partial.h", "f0 = exp2(m0 - m), f1 = exp2(m1 - m)",
     "f1 = exp2(m0 - m), f0 = exp2(m1 - m)", LINES),
    ("last partial result forgotten", "partial.h", "    merge_last();\n    finish(", "    finish(",
     LONG),
    ("running maximum not applied", "softmax.h", "const Floats alpha = exp2(before - maximum);",
     "const Floats alpha = broadcast(1.0f);", LONG),
    ("lanes see what the first of their group sees", "attend_kernel.h",
     "if (other.high > high) high = other.high;", "", LINES),
    ("row blocks of one group only", "attend.cpp", "by_group_ ? item / places : item % parts",
     "by_group_ ? 0 : item % parts", LINES),
    ("zero times NaN", "attend_kernel.h", "!tile.mixed() || unseen_are_finite(tile, rows)", "true", NAN),
    ("window one short", "schedule.h", "tokens - plane.window :", "tokens - plane.window + 1 :", LINES),
    ("visible = p // ratio", "schedule.h", "tokens / plane.ratio}", "(tokens - 1) / plane.ratio}", LINES),
    ("always causal", "schedule.h", "causal ? position + 1 : length", "position + 1", LINES),
    ("ranges ignored", "schedule.h", "if (plane.range) {", "if (false) {", LINES),
    ("counts ignored", "schedule.h", "if (plane.counts) {", "if (false) {", LINES),
    ("-1 read as row 0", "schedule.h", "index = indices[j * strides[2]];",
     "index = indices[j * strides[2]] < 0 ? 0 : indices[j * strides[2]];", HOSTILE),
    ("selection not causal", "schedule.h", "if (run.high > range.high) run.high = range.high;", "", LINES),
    ("lower bound ignored", "schedule.h", "if (run.low < range.low) run.low = range.low;",
     "if (run.low < 0) run.low = 0;", LINES),
    ("mixed tiles see everything", "tiles.h", "bool mixed() const { return seen != seen_by_all; }",
     "bool mixed() const { return false; }", LINES),
    ("key scale dropped", "tiles.h", "if (plane_->k_scale.dim > 0)", "if (false)", LINES),
    ("value scale dropped", "tiles.h", "if (plane_->v_scale.dim > 0)", "if (false)", LINES),
    ("page of the first sequence", "rows.h", "sequence * plane.page_table_stride", "0 * sequence", LINES),
    ("32-bit addresses", "tiles.h", "places[i].page * rows.page_stride",
     "static_cast<int32_t>(places[i].page * rows.page_stride)", POOL),
    ("first KV head for all", "tiles.h", "block_.kv_head * rows.head_stride", "0 * rows.head_stride", LINES),
    ("few lanes: first KV head for all", "attend_few.h", "v.data + block_->kv_head * v.head_stride",
     "v.data + 0 * v.head_stride", LINES),
    ("few lanes: runs do not end with their page", "attend_few.h", "if (many > run.high - entry)",
     "many = run.high - entry; if (false)", LINES),
    ("few lanes: running maximum not applied", "attend_few.h", "all_alpha = exp2(widen(before) - all_maximum);",
     "all_alpha = broadcast(1.0f);", LONG),
    ("first index head for all", "attend.cpp", "block->index_head = static_cast<int32_t>(group * p_.main.index_heads",
     "block->index_head = static_cast<int32_t>(0 * p_.main.index_heads", LINES),
    ("padding left as it was", "attend.cpp", "fill_empty(p, p.cu_seqlens_q[p.batch], p.tokens);", "", LINES),
    ("rows before the first token left", "attend.cpp", "fill_empty(p, begin, row);", "", HOSTILE),
    ("scale rounded to nearest", "encode.h", "half_to_float(scale) * largest < most) ++scale;",
     "false) ++scale;", STORE),
    ("power of two rounded down", "encode.h", "(amax >> 23) + larger", "(amax >> 23)", STORE),
    ("no least scale", "encode.h", "+ 127, broadcast_int(kLeast))", "+ 127, broadcast_int(0))", STORE),
    ("infinity has a scale", "encode.h", "amax < kInfinityBits;", "amax <= kInfinityBits;", STORE),
    ("product for quotient", "encode.h", "return x / by;", "return x * inverse;", STORE),
    ("halves rounded away from zero", "encode.h", "| sign) + 0x1.8p23f)",
     "| sign) * 1.0000001f + 0x1.8p23f)", STORE),
    ("ties away from zero", "encode.h", "(magnitude + (Floats)step)",
     "(magnitude * 1.0000001f + (Floats)step)", STORE),
    ("subnormals rounded as others", "encode.h", "broadcast_int(kLeastNormal << 23))", "Ints{})", STORE),
    ("no saturation", "encode.h", "magnitude = min(magnitude, broadcast(6));", ";", STORE),
    ("zero has no sign", "encode.h", "(sign >> 2",
     "((magnitude == 0 ? sign ^ sign : sign) >> 2", STORE),
    ("nibbles swapped", "simd.h", "x[2 * i] | x[2 * i + 1] << 4", "x[2 * i + 1] | x[2 * i] << 4", STORE),
    ("rows read without their scale", "entry_kernel.h", "groups ? scales.of(begin) : broadcast(1)",
     "broadcast(1)", STORE),
    ("rest of a row not read", "entry_kernel.h", "if (i == group) continue;", "continue;", STORE),
    ("NaN rounded", "simd.h", "(x == x ? rounded : quiet) >> 16", "rounded >> 16", STORE),
    ("rest of a row forgotten", "encode.h", "i == count ? largest :", "true ? largest :", STORE),
    ("whole vectors past a row", "encode.h", "bytes_of(kElement, rest)", "bytes_of(kElement, kWidth)",
     STORE),
    ("scale of the first group", "encode.h", "kGroup ? i / kGroup : 0", "0", STORE),
    ("padding left as it was in entries", "entry.cpp", "  clear_pad(plane, slot);\n", "", STORE),
    ("planar entries as interleaved", "../common/layout.h", "planar(format) ? width(section) : entry_stride",
     "entry_stride", STORE),
    ("-1 stored", "store.cpp", "  if (slot < 0) return;", "  if (slot < -1) return;", STORE),
    ("-1 read", "store.cpp", "  if (slot < 0) {", "  if (slot < -1) {", STORE),
    ("bf16 rounded down", "encode.h", "store_bf16(halves, x);",
     "store_bf16(halves, (Floats)((Ints)x & ~0xffff));", STORE),
    ("runs cross pages", "store.cpp", "i + dst.page_size - dst_offset", "end", STORE),
    ("runs over gaps", "store.cpp", "src.strides[1] == row", "true", STORE),
    ("skipped entries converted", "store.cpp", "if (from < 0 || to < 0) return;", "", STORE),
    ("scale types do not matter", "store.cpp", "a.scale == b.scale && ", "", STORE),
    ("sink applied twice", "merge.cpp", "sum += exp(p.sinks[h]", "sum += 2 * exp(p.sinks[h]", MERGE),
    ("sink in the lse of merge", "merge.cpp", "maximum + log(sum)",
     "maximum + log(sum + (p.sinks ? exp(p.sinks[h] - maximum) : 0))", MERGE),
    ("base 2 taken for e", "merge.cpp", "p.base_2 ? 0.69314718055994530942", "p.base_2 ? 1.0", MERGE),
    ("+inf is never empty", "merge.cpp", "p.inf_is_empty && ", "false && ", MERGE),
    ("+inf is always empty", "merge.cpp", "p.inf_is_empty && ", "", MERGE),
    ("what empty parts hold counts", "merge.cpp", "empty ? kEmpty :", "", MERGE),
    ("NaN below other maxima", "merge.cpp", "|| isnan(maximum)", "", MERGE),
    ("weights of the first head", "merge.cpp", "h * p.lse_strides[2]", "0", MERGE),
    ("offset of the first row", "select_merge.cpp", "t * p.offset_strides[1]", "0", SELECT_MERGE),
    ("negative local indices", "select_merge.cpp", "local < 0 ? NAN : ", "", SELECT_MERGE),
    ("-inf selected", "best_cut.h", "taken &= greater(load(scores), broadcast(best->threshold));",
     "taken &= ~greater(broadcast(best->threshold), load(scores)) & ((1u << kWidth) - 1);", SELECT_MERGE),
    ("runs forgotten", "select_merge.cpp", "whole = local / p.run;", "whole = local;", SELECT_MERGE),
    ("negative numbers last", "select_merge.cpp", "kSign = 0x80000000u", "kSign = 0", SELECT_MERGE),
    ("budgets ignored by merging", "select_merge.cpp", "p.row_k ?", "false ?", SELECT_MERGE),
    ("order of scores", "select_merge.cpp", "p.by_score ? 64 : 32", "p.by_score ? 32 : 64", SELECT_MERGE),
    ("places left as they were", "select_merge.cpp", "std::fill(indices + count, indices + p.k, -1);", "",
     SELECT_MERGE),
    ("ties to the highest", "best.h", "0xffffffffu - static_cast<uint32_t>(number))", "static_cast<uint32_t>(number))",
     SELECT),
    ("negative zero below zero", "best.h", "bits_of(score + 0.0f)", "bits_of(score)", SELECT),
    ("threshold taken again", "best.h", "score > best->threshold", "score >= best->threshold", SELECT),
    ("a buffer is cut too far", "best_cut.h", "last, UINT64_MAX", "last + 1, UINT64_MAX", SELECT),
    ("equal scores of lower numbers left out", "select_merge.cpp", "std::nextafter(best.threshold, -INFINITY)",
     "best.threshold", SELECT_MERGE),
    ("a negative scale comes out of a ReLU", "select_kernel.h", "if (!others) return;", "return;", SELECT),
    ("scales of heads dropped", "select_kernel.h", "converted[d] *= q_scales_[lane]", "converted[d] *= 1", SELECT),
    ("places left out between two threads", "select_schedule.h", "__ATOMIC_RELAXED);", "__ATOMIC_RELAXED) + kTile;",
     SELECT),
    ("no ReLU", "select_kernel.h", "max(Floats{}, x), sum", "x, sum", SELECT),
    ("rows of a block share a range", "select_kernel.h", "block_.row[r].places;", "block_.places;", SELECT),
    ("products are not rounded", "select_products.h", "store(to + j, round_to_bf16(load(to + j)));", ";", SELECT),
    ("tiles of the softmax forgotten", "select_softmax.h", "load(from.sum + lane) * exp2(m1 - m)", "Floats{}", SELECT),
    ("NaN in the softmax", "select_softmax.h", "e == e ? e : Floats{}", "e", SELECT),
    ("maximum of a tile taken for the row's", "select_softmax.h", "broadcast(1.0f) : exp2(m - row)",
     "broadcast(1.0f) : broadcast(1.0f)", SELECT),
    ("places that a row does not see are in its sum", "select_softmax.h", "sees(lane, n) ? counted : Floats{}",
     "counted", SELECT),
    ("what is kept of the first tile", "select_kernel.h", "kept + tile * kept_floats", "kept + 0 * kept_floats",
     SELECT),
    ("lanes of the first heads", "select_lanes.h", "segment.lane + r * segment.heads", "r * segment.heads", SELECT),
    ("first row's queries for all", "select_lanes.h", "segment.lane + r * segment.heads", "segment.lane", SELECT),
    ("last unit forgotten", "select_kernel.h", "units_[at].finish(spare);", "", SELECT),
    ("each entry once in a sum", "select_pooling.h", "static_cast<double>(high - low);", "1;", SELECT),
    ("mean of too many", "select_keys.h", "end < entries.high ? end : entries.high", "end", SELECT),
    ("index scale dropped", "select_keys.h", "if (scales_rows()) {", "if (false) {", SELECT),
    ("halves of a byte swapped", "simd.h", ">> 4 * (i % 2) & 15", ">> 4 * (1 - i % 2) & 15", PACKED),
    ("scale of the neighbouring group", "convert.h", "at_[i >> shift_]", "at_[i >> shift_ ^ 1]",
     PACKED),
    ("denormals of e4m3 are zero", "simd.h", "< broadcast_int(8) ? denormal", "< broadcast_int(8) ? Floats{}", PACKED),
    ("e8m0 of another bias", "simd.h", "(0x00400000) : x << 23", "(0x00400000) : (x + 1) << 23", PACKED),
    ("parts of a planar page in its first entry", "../common/layout.h",
     "planar(format) ? width(section) : entry_stride", "planar(format) ? 0 : entry_stride", PACKED),
    ("planar scales where the last entry ends", "plane.h", "rows.data = data + place.first;",
     "rows.data = data + place.first - (planar(format) && which == Part::kScales ? place.step : 0);", PACKED),
    ("rope elements before the others", "plane.h", "part(Part::kRope, ", "part(Part::kValues, ", PACKED),
    ("rope elements at the start of the row", "attend_kernel.h", "rope.dim, to + plane.k.dim", "rope.dim, to", PACKED),
    ("an index of every group takes the first's scale", "convert.h", "at_[i >> shift_]", "at_[0]",
     PACKED_SELECT),
    ("scale of a planar index row dropped", "select_keys.h", "if (scales_rows()) {", "if (false) {", PACKED_SELECT),
    ("budgets of rows ignored", "select_rows.cpp", "p.row_k ? std::min", "false ? std::min", SELECT),
    ("candidates of the first list", "select_rows.cpp", "(p.candidate_heads > 1 ? list : 0)", "0", SELECT),
    ("candidates listed twice", "select_rows.cpp", "blocks.erase(std::unique(", "if (false) blocks.erase(std::unique(",
     SELECT),
    ("tail not kept", "select_rows.cpp", "std::max(p.keep_last, tail)", "p.keep_last", SELECT),
    ("rows that fit are scored", "select_rows.cpp", "!scores_all(p) && others <= row.wanted", "false", SELECT),
    ("rope at the last token", "compress_kernel.h", "tokens.entry * p.rope_stride",
     "tokens.entry * p.rope_stride + p.stride - 1", COMPRESS),
    ("rope turned back", "compress_kernel.h", "even * angles[i] - odd", "even * angles[i] + odd", COMPRESS),
    ("latent is rotated", "compress_kernel.h", "turned = memory;", "turned = latent;", COMPRESS),
    ("eps dropped", "compress_kernel.h", "static_cast<float>(dim) + p.eps", "static_cast<float>(dim)",
     COMPRESS),
    ("weight of the norm dropped", "compress_kernel.h", "* factor * by", "* factor", COMPRESS),
    ("bias dropped", "compress_kernel.h", "gates[i] += load_at", "gates[i] += 0 * load_at", COMPRESS),
    ("bias of another token", "compress_kernel.h", "place % p.stride", "(place + 1) % p.stride", COMPRESS),
    ("channels swapped", "compress_kernel.h", "place / p.stride * p.plane.dim",
     "(p.span - 1 - place) / p.stride * p.plane.dim",
     COMPRESS),
    ("mean over the whole span", "compress_kernel.h", "broadcast(static_cast<float>(tokens))",
     "broadcast(static_cast<float>(32))", COMPRESS),
    ("pooled not rounded", "compress_kernel.h", "rounded<kType>(load(pooled", "(load(pooled",
     COMPRESS),
    ("weights of some tokens relative to their own gates", "compress_kernel.h", "(before - largest) *",
     "(before - before) *", COMPRESS),
    ("an entry late", "compress.cpp", "step.done = step.after / p.stride;", "step.done = (step.after - 1) / p.stride;",
     COMPRESS),
    ("tokens before 0 count", "compress.cpp", "(entry + 1) * p.stride - p.span, 0)",
     "(entry + 1) * p.stride - p.span, 1)", COMPRESS),
    ("state one row short", "compress.cpp", "q = std::max(step.before, step.after - p.kept)",
     "q = std::max(step.before, step.after - p.kept + 4)", COMPRESS),
    ("state of the first sequence", "compress.cpp", "slot_of(p.state, p.state_page_table, b, q)",
     "slot_of(p.state, p.state_page_table, 0, q)", COMPRESS),
    ("gates of the state dropped", "compress.cpp", "place.row + p.width * 4", "place.row", COMPRESS),
    ("latents of the first sequence", "compress.cpp", "(step.latent + entry - step.first)", "(entry - step.first)",
     COMPRESS),
    ("rows before the first token", "compress.cpp", "step.row = end - (step.after - step.before);",
     "step.row = p.cu_seqlens_q[b];", COMPRESS),
    ("padding of lists left as it was", "select_lists.cpp", "empty_lists(p, next, p.tokens);", "", SELECT),
]  # fmt: skip

compiler = shutil.which("c++") or shutil.which("g++")
pybind11 = importlib.util.find_spec("pybind11")
native = next((impl for impl in registry.implementations("attend") if impl.backend == "cpu_native"), None)
pytestmark = [
    pytest.mark.skipif(compiler is None or pybind11 is None, reason="a C++ compiler and pybind11 are needed"),
    pytest.mark.skipif(native is None or registry.availability(native) is not None, reason="cpu_native is not built"),
]


class Build:
    """Objects of the clean source, and modules with one fault linked from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        assert pybind11 is not None and pybind11.origin is not None
        includes = [sysconfig.get_paths()["include"], str(Path(pybind11.origin).parent / "include")]
        self.flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-ffp-contract=off"]
        self.flags += [f"-I{path}" for path in includes]
        (folder / "clean").mkdir()
        (folder / "others.cpp").write_text(
            "".join(
                f'#include "{CSRC}/cpu_native/{name}.h"\n' for name in ("select_schedule", "compress_entry", "limits")
            )
            + f"namespace sparse_attn {{{OTHER_ISAS}}}"
        )
        self.objects = {name: self.compile(CSRC / "cpu_native" / name, folder / "clean") for name in SOURCES}
        self.objects["module.cpp"] = self.compile(CSRC / "cpu_native" / "module.cpp", folder / "clean")
        self.objects["others.cpp"] = self.compile(folder / "others.cpp", folder / "clean")

    def compile(self, source: Path, to: Path) -> Path:
        target = to / f"{source.stem}.o"
        subprocess.run([str(compiler), *self.flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    def module(self, number: int, file: str, old: str, new: str) -> Path:
        folder = self.folder / str(number)
        shutil.copytree(CSRC, folder / "csrc")
        faulty = folder / "csrc" / "cpu_native" / file
        text = faulty.read_text()
        assert old in text, f"the fault's place in {file} is gone: move it along with the source"
        faulty.write_text(text.replace(old, new))
        changed = [file] if file.endswith(".cpp") else INCLUDED_BY.get(file, ["attend.cpp", "attend_portable.cpp"])
        objects = dict(self.objects)
        for name in changed:
            objects[name] = self.compile(folder / "csrc" / "cpu_native" / name, folder)
        target = folder / "_cpu_native.so"
        link = [str(compiler), "-shared", "-o", str(target), *map(str, objects.values()), "-ldl", "-lpthread"]
        subprocess.run(link, check=True)
        return target


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Build:
    return Build(tmp_path_factory.mktemp("faults"))


def probe_lines() -> None:
    def attend(a: Attend, out: torch.Tensor, lse: torch.Tensor) -> None:
        arguments = a._asdict() | {"backend": "cpu_native"}
        torch.ops.sparse_attn.attend.out(**arguments, out=out, lse=lse)

    assert not test_mutations.notices(attend)


def probe_hostile() -> None:
    test_attend.test_hostile_indices_are_masked(native, 1)
    test_attend.test_empty_rows(native)


def probe_long() -> None:
    for shape in ("long", "long selected", "gqa, long selected"):
        cases.assert_agrees(native, *cases.attend(**test_attend.options_of(shape, "float32", "fp32")))


def probe_store() -> None:
    store, load, convert = (
        next(impl for impl in registry.implementations(op) if impl.backend == "cpu_native")
        for op in ("store", "load", "convert")
    )
    for format in ("int8", "int4_index_h", "fp8_v4_planar", "fp8_v4_608", "fp4_v41", "fp4_index"):
        for rows in ("ties", "any bits", "all of bfloat16"):
            test_same_bytes.test_store(store, format, rows)
    for format in ("int8", "int4_index_h"):
        test_same_bytes.test_rows_that_fill_no_vectors(store, format)
    for format in ("fp32", "bf16", "int8"):
        test_same_bytes.test_load(load, format, torch.bfloat16)
    test_same_bytes.test_rows_that_fill_no_vectors_are_read(load, "int8")
    test_same_bytes.test_a_nan_stays_one(load)
    test_same_bytes.test_load(load, "fp8_v4_planar", torch.bfloat16)
    test_formats.test_load_reads_these_rows(load, "fp8_v4", 3)
    test_same_bytes.test_convert(convert, "fp8_v4")
    test_same_bytes.test_convert_copies_runs(convert, "int8")
    test_store.test_same_bytes_as_the_reference(store, "int8", "float32", 1.0)
    test_store.test_nothing_to_store(store)


def probe_merge() -> None:
    impl = next(impl for impl in registry.implementations("merge") if impl.backend == "cpu_native")
    for base, sinks in (("e", True), ("2", False)):
        test_merge.test_parts_make_one_softmax(impl, [0, 7, 7, 30], base, sinks, torch.float32)
    for mark in (-torch.inf, torch.inf):
        test_merge.test_empty_parts_and_rows(impl, mark)
    test_merge.test_a_fault_shows(impl)
    for options in ({}, {"inf_is_empty": True}):
        torch.manual_seed(0)
        test_merge.test_hostile_values(impl, options, torch.float32)


def probe_select_merge() -> None:
    impl = next(impl for impl in registry.implementations("select_merge") if impl.backend == "cpu_native")
    for call in merges.merges():
        test_select_merge.test_agrees_entry_by_entry(call, impl)
    for order in ("index", "score"):
        torch.manual_seed(0)
        test_select_merge.test_hostile_values(impl, order)
        test_select_merge.test_equal_scores_beyond_a_buffer(impl, order)


def probe_packed() -> None:
    import test_cpu_native  # needs a built module

    for format in ("fp8_v4", "fp8_v4_planar", "fp8_v41_planar", "fp4_v41", "int8_v32"):
        test_cpu_native.test_every_number_of_a_packed_row("portable", "float32", format)
    test_attend_formats.test_every_packed_format_is_read(native, "fp8_v4_planar")


def probe_packed_select() -> None:
    impl = next(impl for impl in registry.implementations("select") if impl.backend == "cpu_native")
    for format in ("fp8_index_planar", "int8_index", "fp4_index", "fp4_index_planar"):
        test_select_formats.test_equals_select_on_the_numbers(impl, format, "values")


def probe_select() -> None:
    impl = next(impl for impl in registry.implementations("select") if impl.backend == "cpu_native")
    test_select.test_equal_scores_go_to_the_lowest_index(impl, 512)
    test_select.test_negative_zero_is_zero(impl)
    test_select.test_a_row_that_fits_is_not_scored(impl)
    test_select.test_rows_without_tokens(impl)
    test_select.test_formats(impl, torch.float32, "int8")
    test_select.test_any_call(impl)
    probabilities = dict(k=9, score="softmax_sum", out_heads=2)
    lists = dict(k=5, score="dot", out_heads=2, candidates="", candidate_heads=2)
    test_select.check(impl, test_select.Batch(lists, 4, 2, True, [90], [2]))
    test_select.test_zeros_of_either_sign_are_equal(impl)
    for dtype in (torch.float32, torch.int8):
        test_cpu_native_select.test_heads_that_fill_vectors_and_scaled_keys(dtype, 50, "relu_sum", 3)
    test_select.test_a_nan_in_one_block_leaves_the_others(impl)
    twice = torch.tensor([[[1, 1]]], dtype=torch.int32)
    args, kwargs = test_select.simple(torch.arange(40.0), 9, candidates=twice)
    assert test_select.chosen(test_select.run(impl, args, kwargs)) == list(range(8, 16))
    test_select.check(impl, test_select.Batch(probabilities, 4, 2, True, [1200], [2], faulty=[(0, 3)]))


def probe_compress() -> None:
    impl = next(impl for impl in registry.implementations("compress") if impl.backend == "cpu_native")
    for line in compressions.lines():
        test_compressions.test_line(line, impl)
        test_compressions.test_any_cut_into_steps_gives_the_same_bits(line, 0, impl)
        test_compressions.test_preempted_and_forked(line, impl)
    test_compressions.test_rows_that_count_for_nothing(impl)
    test_compressions.test_eps(impl)


PROBES: dict[str, Callable[[], None]] = {
    LINES: probe_lines,
    NAN: lambda: test_attend.test_neighbours_of_one_tile_do_not_leak(native),
    POOL: lambda: test_attend.test_pages_at_the_end_of_a_large_strided_pool(native, "kv"),
    HOSTILE: probe_hostile,
    LONG: probe_long,
    STORE: probe_store,
    MERGE: probe_merge,
    SELECT_MERGE: probe_select_merge,
    SELECT: probe_select,
    COMPRESS: probe_compress,
    PACKED: probe_packed,
    PACKED_SELECT: probe_packed_select,
}


class Prober:
    """Tries modules in processes that load no other."""

    def __init__(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", SPARSE_ATTN_CPU_ISA="portable")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("kernel_probes.py")], env=environment, text=True, **pipes
        )

    def passes(self, module: Path, probes: list[str]) -> bool:
        """Whether every probe passes."""
        assert self.server.stdin is not None and self.server.stdout is not None
        print(module, *probes, file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline()) == 0


@pytest.fixture(scope="module")
def prober():
    prober = Prober()
    yield prober
    prober.server.communicate()


def test_the_kernel_itself_passes(build: Build, prober: Prober) -> None:
    assert prober.passes(build.module(0, "store.cpp", "namespace", "namespace"), list(PROBES))


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault[0] for fault in FAULTS])
def test_fault_is_noticed(build: Build, prober: Prober, number: int) -> None:
    _, file, old, new, probe = FAULTS[number]
    assert not prober.passes(build.module(number + 1, file, old, new), [probe])
