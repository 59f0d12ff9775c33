"""The suite is tested itself on the native kernel: faults in a copy of its source, compiled, must be noticed.

Each fault is compiled for the portable instruction set, which shares its source with the others, and runs in a process
of its own: a fault may crash it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # the module under test takes the place of the built one, before anything asks for that
    loader = importlib.machinery.ExtensionFileLoader("sparse_attn._cpu_native", sys.argv[1])
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules[loader.name])

import cases
import pytest
import test_attend
import test_mutations
import test_store
import torch

from sparse_attn import registry
from sparse_attn.ops.attend import Attend

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = ("attend.cpp", "attend_portable.cpp", "store.cpp", "parallel.cpp", "memory.cpp", "isa.cpp", "arguments.cpp")
OTHER_ISAS = "".join(f"extern const Kernels k{isa}Kernels = {{}};" for isa in ("Avx2", "Avx512", "Avx512Bf16"))

# probe: what notices the fault
LINES, NAN, POOL, HOSTILE, LONG, STORE = "lines", "nan", "pool", "hostile", "long", "store"

# (fault, file, text, what stands there instead, probe)
FAULTS = [
    ("sink dropped", "attend_kernel.h", "p.sinks ? exp(p.sinks[head] - maximum) : 0", "0", LINES),
    ("sink in the lse", "attend_kernel.h", "maximum + log(sum)", "maximum + log(sum + exp(-maximum))", LINES),
    ("wrong scale", "attend_kernel.h", "p_.scale * 1.44269504088896341", "p_.scale", LINES),
    ("partial results merged crosswise", "attend_kernel.h", "f0 = exp2(m0 - m), f1 = exp2(m1 - m)",
     "f1 = exp2(m0 - m), f0 = exp2(m1 - m)", LINES),
    ("last partial result forgotten", "attend_kernel.h", "if (chunks > 1) merge_into(shape_, total, part);", "",
     LONG),
    ("running maximum not applied", "softmax.h", "const Floats alpha = exp2(before - maximum);",
     "const Floats alpha = broadcast(1.0f);", LONG),
    ("zero times NaN", "attend_kernel.h", "!tile.mixed() || unseen_are_finite(tile, rows)", "true", NAN),
    ("window one short", "schedule.h", "tokens - plane.window :", "tokens - plane.window + 1 :", LINES),
    ("visible = p // ratio", "schedule.h", "tokens / plane.ratio}", "(tokens - 1) / plane.ratio}", LINES),
    ("always causal", "schedule.h", "causal ? position + 1 : length", "position + 1", LINES),
    ("ranges ignored", "schedule.h", "if (plane.range) {", "if (false) {", LINES),
    ("counts ignored", "schedule.h", "if (plane.counts) {", "if (false) {", LINES),
    ("-1 read as row 0", "tiles.h", "index = indices[j * strides[2]];",
     "index = indices[j * strides[2]] < 0 ? 0 : indices[j * strides[2]];", HOSTILE),
    ("selection not causal", "tiles.h", "if (high > range.high) high = range.high;", "", LINES),
    ("lower bound ignored", "tiles.h", "if (low < range.low) low = range.low;", "if (low < 0) low = 0;", LINES),
    ("mixed tiles see everything", "tiles.h", "bool mixed() const { return seen != seen_by_all; }",
     "bool mixed() const { return false; }", LINES),
    ("key scale dropped", "tiles.h", "if (plane_->k_scale.dim > 0)", "if (false)", LINES),
    ("value scale dropped", "tiles.h", "if (plane_->v_scale.dim > 0)", "if (false)", LINES),
    ("page of the first sequence", "tiles.h", "sequence * plane.page_table_stride", "0 * sequence", LINES),
    ("32-bit addresses", "tiles.h", "places[i].page * rows.page_stride",
     "static_cast<int32_t>(places[i].page * rows.page_stride)", POOL),
    ("first KV head for all", "tiles.h", "block_.kv_head * rows.head_stride", "0 * rows.head_stride", LINES),
    ("first index head for all", "attend.cpp", "block->index_head = static_cast<int32_t>(group * p_.main.index_heads",
     "block->index_head = static_cast<int32_t>(0 * p_.main.index_heads", LINES),
    ("padding left as it was", "attend.cpp", "fill_empty(p, p.cu_seqlens_q[p.batch], p.tokens);", "", LINES),
    ("rows before the first token left", "attend.cpp", "fill_empty(p, begin, row);", "", HOSTILE),
    ("scale rounded to nearest", "store.cpp", "half_to_float(scale) * 127 < amax) ++scale;", "false) ++scale;", STORE),
    ("-1 stored", "store.cpp", "if (slot < 0) return;", "if (slot < -1) return;", STORE),
    ("halves rounded up", "store.cpp", "(row[i] / divisor + kShift) - kShift",
     "__builtin_floorf(row[i] / divisor + 0.5f)", STORE),
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
            f'#include "{CSRC}/cpu_native/schedule.h"\nnamespace sparse_attn {{{OTHER_ISAS}}}'
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
        changed = [file] if file.endswith(".cpp") else ["attend.cpp", "attend_portable.cpp"]
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
    for shape in ("long", "long selected"):
        cases.assert_agrees(native, *cases.attend(**test_attend.SHAPES[shape]))


def probe_store() -> None:
    rows = torch.tensor([[[127.0, 0.5, 1.5, -2.5] * 5] * 2])
    stored = [test_store.empty_plane("int8") for _ in range(2)]
    for (plane, scale), backend in zip(stored, ("cpu_native", "reference"), strict=True):
        torch.ops.sparse_attn.store(rows, plane, torch.tensor([4]), scale=scale, format="int8", backend=backend)
    assert torch.equal(stored[0][0], stored[1][0])
    impl = next(impl for impl in registry.implementations("store") if impl.backend == "cpu_native")
    test_store.test_same_bytes_as_the_reference(impl, "int8", "float32", 1.0)
    test_store.test_nothing_to_store(impl)


PROBES: dict[str, Callable[[], None]] = {
    LINES: probe_lines,
    NAN: lambda: test_attend.test_neighbours_of_one_tile_do_not_leak(native),
    POOL: lambda: test_attend.test_pages_at_the_end_of_a_large_strided_pool(native, "kv"),
    HOSTILE: probe_hostile,
    LONG: probe_long,
    STORE: probe_store,
}


def passes(path: Path, probes: list[str]) -> bool:
    """Whether every probe passes with the module at ``path``, tried in a process that loads no other."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", SPARSE_ATTN_CPU_ISA="portable")
    command = [sys.executable, __file__, str(path), *probes]
    return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == 0


def test_the_kernel_itself_passes(build: Build) -> None:
    assert passes(build.module(0, "store.cpp", "namespace", "namespace"), list(PROBES))


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault[0] for fault in FAULTS])
def test_fault_is_noticed(build: Build, number: int) -> None:
    _, file, old, new, probe = FAULTS[number]
    assert not passes(build.module(number + 1, file, old, new), [probe])


if __name__ == "__main__":
    for name in sys.argv[2:]:
        PROBES[name]()
