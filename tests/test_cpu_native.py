"""What is native about `cpu_native`: every instruction set, its threads, and the kernels under sanitizers.

The tests of `attend` and `store` on every kernel run it too, on the instruction set that this machine is best at.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import test_same_bytes
import torch
from test_attend import SHAPES, options_of

import sparse_attn
from sparse_attn import layout, library, registry
from sparse_attn.codecs import to_bytes
from sparse_attn.planes import Plane

ROOT = Path(__file__).parent.parent
NATIVE = [impl for impl in registry.implementations() if impl.backend == "cpu_native"]
if not NATIVE or registry.availability(NATIVE[0]) is not None:
    pytest.skip("cpu_native is not built", allow_module_level=True)
IMPL = next(impl for impl in NATIVE if impl.op == "attend")

native = importlib.import_module("sparse_attn._cpu_native")
INSTRUCTION_SETS = list(native.instruction_sets())
FORMATS = [("float32", "fp32"), ("bfloat16", "bf16"), ("bfloat16", "int8"), ("float16", "fp16"), ("float32", "int8")]


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request, monkeypatch):
    """Each instruction set of this machine in turn."""
    monkeypatch.setenv("SPARSE_ATTN_CPU_ISA", request.param)
    library.forget()
    yield request.param
    monkeypatch.undo()
    library.forget()


@pytest.fixture
def threads():
    """A function that sets the number of threads, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# numbers


@pytest.mark.parametrize("isa", INSTRUCTION_SETS[:-1], indirect=True)  # the best one runs in test_attend
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_agrees(isa: str, shape: str, dtype: str, format: str) -> None:
    cases.assert_agrees(IMPL, *cases.attend(**options_of(shape, dtype, format)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("formats", [("int8", "bf16", "fp16"), ("bf16", "int8", "fp32"), ("fp16", "fp32", "bf16")])
def test_planes_of_different_formats(isa: str, dtype: str, formats: tuple[str, str, str]) -> None:
    keys, values, window = formats
    shared = dict(planes="main+window", dtype=dtype, format=keys, v_format=values, win_format=window, sinks=True)
    cases.assert_agrees(IMPL, *cases.attend(**shared, ratio=2, v_dim=13))
    cases.assert_agrees(IMPL, *cases.attend(**shared, qk_dim=27, rope_dim=9, v_dim=21, index_heads=2))


@pytest.mark.parametrize("dims", [(1, 1), (3, 2), (31, 30), (33, 32), (65, 63), (600, 513)])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_any_dimensions(isa: str, dims: tuple[int, int], dtype: str, format: str) -> None:
    qk_dim, v_dim = dims
    for q_heads in (1, 16):
        options = dict(q_heads=q_heads, qk_dim=qk_dim, v_dim=v_dim, dtype=dtype, format=format)
        cases.assert_agrees(IMPL, *cases.attend(**options, kv_heads=1, lengths=(40,), rows=(3,), padding=0))


@pytest.mark.parametrize("q_heads", [1, 4, 20, 64])
def test_parts_of_keys_that_lie_apart(isa: str, q_heads: int) -> None:
    """Products of bf16 with two parts of a key, which fill registers or do not, add up."""
    for qk_dim, rope_dim in ((96, 32), (80, 9)):
        options = dict(q_heads=q_heads, kv_heads=1, qk_dim=qk_dim, rope_dim=rope_dim, v_dim=33, lengths=(150, 9))
        options |= dict(dtype="bfloat16", format="bf16", v_format="bf16", rows=(2, 1))
        cases.assert_agrees(IMPL, *cases.attend(**options))
        cases.assert_agrees(IMPL, *cases.attend(**options, index_heads=1, selected=90))


@pytest.mark.parametrize("format", layout.names("kv", packed=True))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_packed_formats(isa: str, dtype: str, format: str) -> None:
    """Few and many heads, tiles of which rows see parts, lists, pages that end within a tile, either plane."""
    dim = layout.FORMATS[format].dim
    shared: dict[str, Any] = dict(dtype=dtype, format=format, win_format=format, kv_heads=1, qk_dim=dim, v_dim=512)
    shared |= dict(lengths=(70, 9))
    for q_heads, planes, rows in ((1, "main+window", (3, 1)), (17, "window", (4, 1)), (128, "main", (2, 0))):
        call = cases.attend(**shared, q_heads=q_heads, planes=planes, rows=rows, page_size=16, win_page_size=9)
        cases.assert_agrees(IMPL, *call)
    shared |= dict(v_dim=45, q_heads=9, planes="main+window", sinks=True, ratio=2)
    lists = dict(index_heads=1, selected=66, window=66)
    cases.assert_agrees(IMPL, *cases.attend(**shared, **lists, rows=(1, 2)))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS[:-1], indirect=True)  # the best one runs in test_same_bytes
@pytest.mark.parametrize("format", layout.FORMATS)
def test_same_rows_on_every_instruction_set(isa: str, format: str) -> None:
    store, load = (next(impl for impl in NATIVE if impl.op == op) for op in ("store", "load"))
    for rows in test_same_bytes.ROWS:
        test_same_bytes.test_store(store, format, rows)
    if not layout.FORMATS[format].packed:
        test_same_bytes.test_rows_that_fill_no_vectors(store, format)
        test_same_bytes.test_rows_that_fill_no_vectors_are_read(load, format)
    for dtype in (torch.float32, torch.bfloat16):
        test_same_bytes.test_load(load, format, dtype)
    test_same_bytes.test_a_nan_stays_one(load)


@pytest.mark.parametrize("format", ["fp8_v4", "fp8_v4_planar", "fp8_v41", "fp4_v41_planar"])
def test_pages_of_a_larger_pool(isa: str, format: str) -> None:
    """Pages of a packed plane may be views into other memory, at any distance."""
    f = layout.FORMATS[format]
    leading, kwargs = cases.attend(
        format=format, q_heads=2, kv_heads=1, qk_dim=512, v_dim=512, lengths=(40,), rows=(1,)
    )
    plane = kwargs["kv"]
    pool = torch.full((len(plane), 3, f.page_bytes(4) + 7), 0xFF, dtype=torch.uint8)
    pages = pool[:, 1, 5 : 5 + f.page_bytes(4)]
    view = pages if f.planar else pages.unflatten(1, (4, 1, -1))
    view.copy_(plane)
    assert view.stride(0) != plane.stride(0)
    cases.assert_same_bits(cases.run(IMPL, leading, dict(kwargs, kv=view)), cases.run(IMPL, leading, kwargs))


@pytest.mark.parametrize("format", layout.names("kv", packed=True))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_of_a_packed_row(isa: str, dtype: str, format: str) -> None:
    """One entry a row, and queries of zeros or of a single one: outputs are its values, the lse one of its elements."""
    f, g = layout.FORMATS[format], torch.Generator().manual_seed(0)
    codec, entries = f.codec, 64
    plane = Plane(torch.zeros(f.shape(16, 4, 1, f.dim), dtype=torch.uint8), format, page_size=4)
    at = plane.at(torch.arange(entries))
    values = torch.randint(256, (entries, f.codec.dim * f.bits // 8), generator=g).to(torch.uint8)
    groups = torch.arange(entries)[:, None] + 11 * torch.arange(codec.dim // codec.group)
    if codec.element == "e4m3":
        values[values & 127 == 127] = 0  # NaN
    scales = {
        "e8m0": (groups % 254 + 1).to(torch.uint8),
        "e4m3": (groups % 126 + 1).to(torch.uint8),
        "bf16": to_bytes("bf16", 2.0 ** (groups % 20 - 10) * torch.rand(groups.shape, generator=g)),
        "fp32": to_bytes("fp32", 2.0 ** (groups % 20 - 10) * (1 + (groups % 3) / 7)),
    }[codec.scale]
    if codec.scale == "e8m0":  # what float32 and bf16 hold as normal numbers
        large, small = ((s.repeat_interleave(codec.group, 1)) for s in (scales > 246, scales < 10))
        values[large] &= 0xBF
        values[small] |= 0x40
        values[values & 127 == 127] = 0x40
    rope = to_bytes("bf16", torch.randn(entries, codec.rope, generator=g)) if codec.rope else None
    plane.write(at, {"values": values, "scales": scales, "rope": rope})
    rows = plane.rows(at)[:, 0]
    assert rows.isfinite().all()

    q = torch.zeros(entries, 2, f.dim, dtype=cases.DTYPES[dtype])
    picked = torch.arange(entries) * (f.dim // entries) + 5
    q[torch.arange(entries), 1, picked] = 1.0
    starts, lens = torch.tensor([0, entries], dtype=torch.int32), torch.tensor([entries], dtype=torch.int32)
    options: dict[str, Any] = dict(
        kv=plane.data, format=format, page_size=4, page_table=torch.arange(16, dtype=torch.int32)[None]
    )
    options |= dict(indices=torch.arange(entries, dtype=torch.int32)[:, None, None], return_lse=True)
    out, lse = sparse_attn.attend(q, starts, lens, 1.0, 512, entries, entries, **options, backend="cpu_native")
    expected = rows.to(q.dtype)
    assert torch.equal(out[:, 0], expected[:, :512]) and (lse[:, 0] == 0).all()
    keys = expected.float() if isa.endswith("_bf16") else rows  # the others compute in float32
    wanted = keys[torch.arange(entries), picked]
    torch.testing.assert_close(lse[:, 1], wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_are_no_normal_numbers(isa: str, dtype: str) -> None:
    """A power of two moves the exponent of a number only as far as there are exponents."""
    shape = dict(format="fp8_v41", q_heads=1, kv_heads=1, qk_dim=512, v_dim=512, lengths=(1,), rows=(1,), padding=0)
    leading, kwargs = cases.attend(**shape, dtype=dtype)
    for code, scale in ((0x7E, 250), (0xFE, 246 + 1), (0x01, 3), (0x81, 8)):
        kwargs["kv"][..., :512], kwargs["kv"][..., 512:] = code, scale
        out, lse = cases.run(IMPL, (leading[0] * 0, *leading[1:]), kwargs)
        if scale > 200:  # infinity times a query of zero
            assert out.isnan().all() and lse.isnan().all()
        else:
            assert (out.abs() <= 2.0**-126).all() and (lse == 0).all()


@pytest.mark.parametrize("q_heads", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 127, 128])
@pytest.mark.parametrize(("dtype", "format"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_any_number_of_heads(isa: str, q_heads: int, dtype: str, format: str) -> None:
    options = dict(q_heads=q_heads, kv_heads=1, dtype=dtype, format=format, lengths=(70, 9), rows=(2, 1))
    cases.assert_agrees(IMPL, *cases.attend(**options))
    cases.assert_agrees(IMPL, *cases.attend(**options, index_heads=1, selected=40))


@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("dims", [(128, 128), (64, 160), (80, 33), (192, 96)])
def test_few_heads_with_lists(isa: str, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """Registers that are filled and those that are not; rows that lie evenly and rows of many pages."""
    sizes = dict(q_heads=heads[0], kv_heads=heads[1], qk_dim=dims[0], v_dim=dims[1], index_heads=heads[1])
    options = dict(sizes, dtype="bfloat16", format="bf16", v_format="bf16", lengths=(900, 41), rows=(1, 3))
    for page_size, select_block, selected in ((64, 64, 10), (16, 48, 17), (3, 1, 555)):
        lists = dict(page_size=page_size, select_block=select_block, selected=selected)
        cases.assert_agrees(IMPL, *cases.attend(**options, **lists))


@pytest.mark.parametrize("heads", [(4, 1), (8, 1)])
def test_few_heads_beside_infinity(isa: str, heads: tuple[int, int]) -> None:
    """An element of a value that is no number reaches the same element of outputs, and no other."""
    sizes = dict(q_heads=heads[0], kv_heads=heads[1], qk_dim=64, v_dim=168, index_heads=1, selected=300)
    leading, kwargs = cases.attend(
        **sizes, dtype="bfloat16", format="bf16", v_format="bf16", lengths=(700,), rows=(1,), padding=0
    )
    kwargs["indices"] = torch.arange(300, dtype=torch.int32).view(1, 1, 300) * 2
    clean = cases.run(IMPL, leading, kwargs)
    places = (
        (40, 0, torch.inf),
        (420, 31, -torch.inf),
        (300, 77, torch.inf),
        (598, 130, torch.nan),
        (2, 167, torch.inf),
    )
    for entry, element, number in places:
        page, offset = int(kwargs["page_table"][0, entry // 4]), entry % 4
        v = kwargs["v"].clone()
        v[page, offset, 0, element] = number
        out, lse = cases.run(IMPL, leading, dict(kwargs, v=v))
        others = torch.arange(168) != element
        cases.assert_same_bits((out[..., others], lse), (clean[0][..., others], clean[1]))
        assert not out[..., element].isfinite().any()
        assert out[..., element].isnan().all() == (number != number)


def test_scores_of_any_size(isa: str) -> None:
    """Far apart, all very negative, or all very large: the softmax neither overflows nor forgets a row."""
    leading, kwargs = cases.attend(lengths=(600,), rows=(2,), padding=0, kv_heads=1)
    for factor in (1e-30, 1.0, 30.0, 1e4):
        for sign in (1, -1):
            q = leading[0].abs() * factor * sign
            keys = kwargs["kv"].abs() * torch.rand(kwargs["kv"].shape[:2])[..., None, None]
            out, lse = cases.run(IMPL, (q, *leading[1:]), dict(kwargs, kv=keys, v=kwargs["kv"], v_format="fp32"))
            assert out.isfinite().all() and lse.isfinite().all()
            # with scores in the thousands, float32 products leave weights only three digits
            reference = sparse_attn.attend(
                q, *leading[1:], **dict(kwargs, kv=keys, v=kwargs["kv"], v_format="fp32"), backend="reference"
            )
            torch.testing.assert_close(lse, reference[1], atol=1e-5, rtol=2e-6)
            if factor <= 30:
                torch.testing.assert_close(out, reference[0], atol=2e-4, rtol=2e-4)


def test_bf16_denormals_count_as_zero(isa: str) -> None:
    """The documented limit of bf16 products: numbers below 2^-126 may be read as zero, and nothing worse."""
    leading, kwargs = cases.attend(dtype="bfloat16", format="bf16", v_format="bf16", lengths=(9,), rows=(1,), padding=0)
    tiny = torch.full_like(kwargs["v"], 1e-39)
    out, _ = cases.run(IMPL, leading, dict(kwargs, v=tiny))
    assert (out >= 0).all() and (out <= tiny.max()).all()


# the same bits


@pytest.mark.parametrize("shape", ["128 heads", "gqa 9 over 3", "gqa selected", "both planes", "window"])
@pytest.mark.parametrize(("dtype", "format"), [("float32", "fp32"), ("bfloat16", "int8")])
def test_bits_do_not_depend_on_threads(isa: str, threads, shape: str, dtype: str, format: str) -> None:
    """One row and many, short lists and lists of several chunks: cut by heads, by chunks, or not at all."""
    for rows in (1, 5):
        sizes = dict(qk_dim=128, v_dim=96, lengths=(1500,), rows=(rows,), selected=1300, window=700)
        call = cases.attend(**dict(options_of(shape, dtype, format), **sizes))  # enough work for threads
        results = []
        for count in (1, 2, 3, 5):
            threads(count)
            results.append(cases.run(IMPL, *call))
        for result in results[1:]:
            cases.assert_same_bits(result, results[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_where_rows_lie(isa: str, dtype: str) -> None:
    """The same rows in large pages, in small ones, and with those of another head between them."""
    format = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    sizes = dict(q_heads=4, kv_heads=1, qk_dim=64, v_dim=64, index_heads=1, selected=9, select_block=64, page_size=64)
    leading, kwargs = cases.attend(
        **sizes, dtype=dtype, format=format, v_format=format, lengths=(1000,), rows=(1,), padding=0
    )
    expected = cases.run(IMPL, leading, kwargs)
    small = dict(kwargs, page_size=4)
    for name in ("kv", "v"):
        rows = kwargs[name][kwargs["page_table"][0].long()].view(-1, 4, 1, 64)
        small[name] = torch.cat([rows.flip(0), torch.zeros_like(rows[:1])])
    pages = len(small["kv"]) - 1
    small["page_table"] = torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None]
    cases.assert_same_bits(cases.run(IMPL, leading, small), expected, "small pages")
    apart = dict(kwargs)
    for name in ("kv", "v"):
        apart[name] = torch.stack([kwargs[name], torch.zeros_like(kwargs[name])], dim=3)[..., 0, :]
    assert apart["kv"].stride(1) == 128
    cases.assert_same_bits(cases.run(IMPL, leading, apart), expected, "apart")


@pytest.mark.parametrize("heads", [(3, 1), (9, 3), (8, 1), (20, 1)])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_bits_do_not_depend_on_the_lanes_beside(isa: str, heads: tuple[int, int], dtype: str, format: str) -> None:
    """Rows are attended in blocks of as many lanes as there are; few and many lanes take different loops."""
    shared = dict(q_heads=heads[0], kv_heads=heads[1], qk_dim=37, v_dim=21, dtype=dtype, format=format, page_size=16)
    options = dict(shared, v_format=format, planes="main+window", win_format="bf16", window=100, ratio=2)
    leading, kwargs = cases.attend(**options, lengths=(701,), rows=(90,), padding=0)
    out, lse = cases.run(IMPL, leading, kwargs)
    start = 0
    for rows in (1, 2, 5, 40, 1, 41):
        part = (
            leading[0][start : start + rows],
            torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([701 - 90 + start + rows], dtype=torch.int32),
            *leading[3:5],
            rows,
            701,
        )
        alone = cases.run(IMPL, part, kwargs)
        cases.assert_same_bits(alone, (out[start : start + rows], lse[start : start + rows]), f"rows from {start}")
        start += rows
    assert start == 90


# store


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_every_rounding_of_store(format: str) -> None:
    """Every number of the format, every tie between two, and what is beside the ties."""
    dtype = getattr(torch, layout.FORMATS[format].dtype)
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    ties = (exact[1:].double() + exact[:-1].double()).div(2).float()
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    special = torch.tensor([torch.inf, -torch.inf, 65519.99, 65520.0, 3.3961775e38])
    rows = torch.cat([exact, ties, *beside, special])[:, None, None]
    plane = torch.zeros(1, len(rows), 1, 1, dtype=dtype)
    sparse_attn.store(rows, plane, torch.arange(len(rows)), format=format, backend="cpu_native")
    assert torch.equal(plane.flatten().view(torch.int16), rows.to(dtype).flatten().view(torch.int16))


def test_what_exceeds_the_caches_is_copied_as_it_is() -> None:
    """32 MB and more are written past the caches, in whole lines of memory alone."""
    slots, rows = torch.randperm(1 << 14), torch.randn(1 << 14, 1, 1024).bfloat16()
    plane = torch.zeros(1 << 8, 1 << 6, 1, 1024, dtype=torch.bfloat16)
    sparse_attn.store(rows, plane, slots, backend="cpu_native")
    assert torch.equal(plane.flatten(0, 1)[slots], rows)
    assert torch.equal(sparse_attn.load(plane, slots, dtype=torch.bfloat16, backend="cpu_native"), rows)
    moved = torch.zeros_like(plane)
    sparse_attn.convert(plane, moved, src_format="bf16", dst_format="bf16", backend="cpu_native")
    assert torch.equal(moved, plane)
    wide = sparse_attn.load(plane, slots, dtype=torch.float32, backend="cpu_native")
    assert torch.equal(wide, rows.float())
    odd = torch.zeros(1 << 12, 1 << 6, 1, 65, dtype=torch.bfloat16).normal_()
    every = torch.arange(1 << 18)
    assert torch.equal(sparse_attn.load(odd, every, dtype=torch.bfloat16, backend="cpu_native"), odd.flatten(0, 1))


def test_store_does_not_depend_on_threads(threads) -> None:
    rows, slots = torch.randn(3000, 3, 64), torch.randperm(3008)[:3000]
    planes = []
    for count in (1, 2, 3):
        threads(count)
        plane = torch.zeros(188, 16, 3, 64, dtype=torch.int8)
        scale = torch.zeros(188, 16, 3, dtype=torch.float16)
        sparse_attn.store(rows, plane, slots, scale=scale, format="int8", backend="cpu_native")
        planes.append((plane, scale))
    for plane, scale in planes[1:]:
        assert torch.equal(plane, planes[0][0]) and torch.equal(scale, planes[0][1])


# the module


def test_one_kernel_for_each_op() -> None:
    assert sorted(impl.op for impl in NATIVE) == sorted(op.name for op in library.defined())


def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(native, "instruction_sets", lambda: {"portable": 0})
    monkeypatch.setenv("SPARSE_ATTN_CPU_ISA", "avx512")
    library.forget()
    leading, kwargs = cases.attend()
    sentence = "cpu_native: SPARSE_ATTN_CPU_ISA is avx512, this machine runs portable"
    with pytest.raises(sparse_attn.NoBackend, match=sentence):
        cases.run(IMPL, leading, kwargs)
    monkeypatch.undo()
    library.forget()


THREADS = """
import os, re, torch
import sparse_attn, cases
torch.set_num_threads(2)
torch.randn(1 << 20).exp()  # torch starts its threads
before = len(os.listdir("/proc/self/task"))
impl = next(i for i in sparse_attn.registry.implementations("attend") if i.backend == "cpu_native")
for rows in (1, 40):
    cases.run(impl, *cases.attend(q_heads=128, kv_heads=1, lengths=(900,), rows=(rows,)))
from sparse_attn import _cpu_native
maps = open("/proc/self/maps").read()
print(before, len(os.listdir("/proc/self/task")), _cpu_native.thread_runtime())
print(*sorted({line.split()[-1] for line in maps.splitlines() if re.search("lib(g|i)?omp", line)}))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_work_runs_on_the_threads_of_torch() -> None:
    """One OpenMP runtime in the process, and no thread more than torch has by itself."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), *sys.path]), OMP_NUM_THREADS="2")
    result = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, env=environment
    )
    counts, runtimes = result.stdout.splitlines()
    before, after, runtime = counts.split(" ", 2)
    assert before == after
    if runtimes:  # torch is built with OpenMP
        assert [os.path.realpath(path) for path in runtimes.split()] == [os.path.realpath(runtime)]
    else:
        assert runtime == "std::thread"


FORKS = """
import os, signal, sys
sys.path.insert(0, "tests")
import torch
import cases, sparse_attn
torch.set_num_threads(2)
leading, kwargs = cases.attend(q_heads=64, qk_dim=64, v_dim=64, lengths=(2000,), rows=(8,))
def work():
    return torch.ops.sparse_attn.attend(*leading, **kwargs, backend="cpu_native")[0], torch.ones(1 << 20).exp()
expected = work()
child = os.fork()
if child == 0:
    signal.alarm(60)  # instead of waiting without end
    os._exit(0 if all(map(torch.equal, work(), expected)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert all(map(torch.equal, work(), expected))
"""


def test_a_forked_process_calls_with_several_threads() -> None:
    subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


# the kernels without Python


@pytest.fixture(scope="module")
def native_build() -> Path:
    """Where the kernels and their test program are built with sanitizers; kept between runs."""
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("cmake and a C++ compiler are needed")
    build = ROOT / "build" / "native"
    for command in (["-S", str(ROOT / "tests" / "native"), "-B", str(build)], ["--build", str(build), "-j", "2"]):
        result = subprocess.run([cmake, *command], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    return build


@pytest.mark.parametrize(
    ("program", "rounds"), [("test_kernels", "60"), ("test_compress", "200"), ("test_select", "40")]
)
def test_hostile_calls_under_sanitizers(native_build: Path, program: str, rounds: str) -> None:
    result = subprocess.run([native_build / program, rounds], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = [name for name in INSTRUCTION_SETS if name != "amx_bf16"]
    if "avx512_bf16" in expected:
        expected.append("amx_bf16")  # on a model of its instructions
    assert result.stdout == f"passed: {' '.join(expected)}\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
def test_the_model_of_amx(native_build: Path) -> None:
    result = subprocess.run([native_build / "test_amx"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "passed\n", result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="reads symbols with nm")
def test_no_code_of_an_instruction_set_is_shared(native_build: Path) -> None:
    """A linker keeps one copy of a function that several objects offer: with AVX-512, others would run that too."""
    objects = sorted(native_build.rglob("attend_*.o"))
    assert objects
    for file in objects:
        listing = subprocess.run(["nm", "-C", str(file)], capture_output=True, text=True, check=True).stdout
        offered = [
            line for line in listing.splitlines() if line[17:18] in ("W", "V", "u", "T") and "personality" not in line
        ]
        assert offered == [], f"{file.name} offers functions: {offered}"
