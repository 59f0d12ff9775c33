"""Compiles what `cuda_triton` launches for every architecture, without a device, and writes the tables of
`docs/cuda.md`: `PYTHONPATH=. python tests/cuda_compile.py` (Triton, not its interpreter; some minutes). With words
and numbers, it prints figures of the calls and architectures that they name.

A compiled kernel may still be a trap: Triton makes one of code that it finds impossible, without a word. So a kernel
counts as compiled only if its matrix products are there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import cases
import compressions
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sparse_attn import layout
from sparse_attn.backends.cuda_triton import attend as attend_host
from sparse_attn.backends.cuda_triton import compress as compress_host
from sparse_attn.backends.cuda_triton import convert as convert_host
from sparse_attn.backends.cuda_triton import device, rows
from sparse_attn.backends.cuda_triton import merge as merge_host
from sparse_attn.backends.cuda_triton import select as select_host
from sparse_attn.backends.cuda_triton import select_merge as merge_selections_host
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.compress import Compress
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select import Select, outputs
from sparse_attn.ops.select_merge import SelectMerge
from sparse_attn.ops.select_merge import outputs as merged_outputs
from sparse_attn.ops.store import Store

PAGE = Path(__file__).parent.parent / "docs" / "cuda.md"

ARCHITECTURES = {80: "", 86: "", 89: "", 90: "a", 100: "a", 103: "a", 120: "a"}
"""And the suffix of each for what only it has."""

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes of shared memory that a program may use, of NVIDIA's table of compute capabilities."""

PRODUCTS = {"tcgen05": "UTCHMMA", "wgmma": "HGMMA", "mma.sync": "HMMA", "fma": "FFMA"}
"""Words for matrix products, and the instructions that they become."""

PROCESSORS = 132

MULTIPLY = ("attend_kernel", "score_kernel", "sum_kernel")
"""Kernels that multiply matrices."""

ATTENDS: dict[str, dict[str, Any]] = {
    "V3.2, bf16, 128 heads": dict(cases.V32, q_heads=128, format="bf16"),
    "V3.2, bf16, 16 heads": dict(cases.V32, q_heads=16, format="bf16"),
    "V3.2, fp8_v32, 128 heads": dict(cases.V32, q_heads=128, format="fp8_v32"),
    "V3.2, int8_v32, 128 heads": dict(cases.V32, q_heads=128, format="int8_v32"),
    "V4, bf16, 64 heads": dict(cases.V4, q_heads=64, format="bf16", win_format="bf16"),
    "V4, fp8_v4_planar, 64 heads": dict(cases.V4, q_heads=64, format="fp8_v4_planar", win_format="fp8_v4_planar"),
    "V4.1, fp4_v41 + fp8_v41, 64 heads": dict(cases.V4, q_heads=64, format="fp4_v41", win_format="fp8_v41"),
    "GQA 32/8, bf16, dense": dict(cases.GQA, format="bf16", v_format="bf16"),
    "GQA 64/4, bf16, blocks of 128": dict(
        cases.GQA,
        q_heads=64,
        kv_heads=4,
        format="bf16",
        v_format="bf16",
        index_heads=4,
        selected=2048,
        select_block=128,
    ),
    "GQA 32/8, int8": dict(cases.GQA, format="int8", v_format="int8", index_heads=8, selected=1024),
    "V3.2, fp32, 16 heads": dict(cases.V32, q_heads=16, dtype="float32", format="fp32"),
    "GQA 32/8, bf16, dense, 600 rows": dict(cases.GQA, format="bf16", v_format="bf16", lengths=(600,), rows=(600,)),
    "GQA 32/8, int8, dense, 600 rows": dict(cases.GQA, format="int8", v_format="int8", lengths=(600,), rows=(600,)),
}
STORED = ("bf16", "int4_index_h", "fp8_v32", "fp8_v4_planar", "fp4_v41")
COMPRESSED = (
    "DeepSeek V4, ratio 4",
    "DeepSeek V4, window",
    "Qwen4, index keys of pools of 16 tokens",
    "mean keys of a dense model, int8",
)
_INDEX: dict[str, Any] = dict(heads=64, format="fp8_index_planar", k=2048)
_V41_INDEX = dict(heads=32, format="fp4_index_planar", k=512, score_dtype="bf16")
INDEXERS: dict[str, dict[str, Any]] = {
    "V3.2, fp8_index_planar, 64 heads": _INDEX,
    "V4.1, fp4_index_planar, takes candidates, by score": dict(_V41_INDEX, candidates=2048, order="score"),
}
_HEADS: dict[str, Any] = dict(heads=32, key_heads=8, weighted=False)
SELECTORS: dict[str, dict[str, Any]] = {
    "V3.2, 4096 tokens": _INDEX,
    "V4.1, makes candidates": dict(_V41_INDEX, candidate_k=2048),
    "GQA 32/8, int8_index_h, probabilities, 512 rows": dict(
        _HEADS, format="int8_index_h", k=2048, score="softmax_sum", out_heads=8, rows=512
    ),
    "MiniMax-M3, blocks by best token, 512 rows": dict(
        heads=4, weighted=False, format="bf16", k=16, score="dot", out_heads=4, block=128, pool="max", rows=512
    ),
    "MoBA, blocks by mean key, 512 rows": dict(
        heads=8,
        key_heads=8,
        weighted=False,
        format="bf16",
        k=3,
        score="dot",
        out_heads=8,
        block=2048,
        pool="mean",
        rows=512,
    ),
    "HISA, blocks by mean key, 512 rows": dict(_INDEX, k=64, block=128, pool="mean", rows=512),
    "Quest, bounds, 32 heads": dict(_HEADS, format="bf16", k=64, score="dot", out_heads=32, ratio=16, bounds=True),
}
"""Of so few tokens that one program takes the best of them."""

SHOWN = {*ATTENDS, *(f"select, {name}" for name in INDEXERS)}
"""Calls whose matrix products the page shows for each architecture."""

MERGED = (2, 8)
"""Shards of 2048 selections each."""

CONVERTED = (("fp8_v4", "fp8_v4_planar"), ("fp8_v32", "int8_v32"), ("bf16", "int8_index_h"))


class Compiled(NamedTuple):
    case: str
    arch: int
    kernel: str
    tile: str
    registers: int
    spilled: int
    shared: int
    products: str

    wide_loads: int
    """Instructions that load 16 bytes."""

    @property
    def shown(self) -> bool:
        """Whether the page has a line for each architecture."""
        return self.kernel in ("attend_kernel", "score_kernel") and self.case in SHOWN

    @property
    def ok(self) -> bool:
        """Compiled to what it should be, within what the device has."""
        computes = self.products != "none" or self.kernel not in MULTIPLY
        return computes and self.registers > 8 and self.spilled == 0 and self.shared <= SHARED[self.arch]


class NoDevice:
    """A driver for an architecture that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def kernels_of(
    arch: int, launch: Callable[[], None], target: GPUTarget | None = None
) -> list[tuple[str, dict[str, Any], Any]]:
    """Name, options and code of every kernel that ``launch`` would start on ``arch``, compiled for ``target`` if it is
    another."""
    found: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.device_caches.clear()
        found.append((self.fn.__name__, options, run(self, *args, grid=grid, warmup=True, **options)))

    interpreted = device.INTERPRETED
    triton.runtime.driver.set_active(NoDevice(target or GPUTarget("cuda", arch, 32)))
    JITFunction.run = compile_only
    device.INTERPRETED = device.Device(arch, PROCESSORS)
    try:
        launch()
    finally:
        JITFunction.run, device.INTERPRETED = run, interpreted
    return found


@cache
def disassembled(cubin: bytes) -> tuple[int, int, str]:
    """Registers, spilled bytes, and the instructions. Without a store to it, the stack serves calls."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = partial(subprocess.run, capture_output=True, text=True, check=True)
        usage = run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name]).stdout
        sass = run([knobs.nvidia.nvdisasm.path, "-c", file.name]).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2]) if "STL" in sass else 0, sass


def attend(options: dict[str, Any]) -> Callable[[], None]:
    leading, kwargs = cases.attend(**options)
    a = Attend(*leading, **kwargs)
    out, lse = torch.empty(*a.q.shape[:2], a.v_dim, dtype=a.q.dtype), torch.empty(a.q.shape[:2])
    return lambda: attend_host.attend(a, out, lse)


def plane(format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    f = layout.FORMATS[format]
    heads = 1 if f.packed else 8
    data = torch.zeros(f.shape(4, 64, heads, f.dim or 128), dtype=getattr(torch, f.dtype))
    return data, torch.zeros(4, 64, heads, dtype=torch.half) if f.scale_dtype else None


def store(format: str) -> Callable[[], None]:
    data, scale = plane(format)
    f = layout.FORMATS[format]
    new = torch.zeros(64, 1 if f.packed else 8, f.dim or 128, dtype=torch.bfloat16)
    return lambda: rows.store(Store(new, data, torch.arange(64), scale, format, 64))


def load(format: str) -> Callable[[], None]:
    data, scale = plane(format)
    f = layout.FORMATS[format]
    out = torch.empty(64, 1 if f.packed else 8, f.dim or 128, dtype=torch.bfloat16)
    a = Load(data, torch.arange(64), scale=scale, format=format, page_size=64)
    return lambda: rows.load(a, out)


def convert(src_format: str, dst_format: str) -> Callable[[], None]:
    (src, src_scale), (dst, dst_scale) = plane(src_format), plane(dst_format)
    slots = torch.arange(64)
    a = Convert(src, dst, slots, slots, src_scale, dst_scale, src_format, dst_format, 64, 64)
    return lambda: convert_host.convert(a)


def compress(of: str) -> Callable[[], None]:
    line = next(line for line in compressions.lines() if line.of == of)
    s = compressions.Sequences(line, [40], dim=128)
    args, kwargs = s.step(s.lengths, s.lengths)
    a = Compress(*args, **kwargs, entries=20)
    latent = torch.empty(20, s.heads, s.dim, dtype=s.dtype)
    return lambda: compress_host.compress(a, latent)


def merge() -> Callable[[], None]:
    a = Merge(torch.zeros(4, 64, 16, 512, dtype=torch.bfloat16), torch.zeros(4, 64, 16), torch.zeros(16))
    return lambda: merge_host.merge(a, torch.empty(64, 16, 512, dtype=torch.bfloat16), torch.empty(64, 16))


def select(
    heads: int,
    format: str,
    k: int,
    key_heads: int = 1,
    weighted: bool = True,
    candidates: int = 0,
    rows: int = 1,
    length: int = 131072,
    **options: Any,
) -> Callable[[], None]:
    """A call of the last ``rows`` of ``length`` tokens."""
    f, page_size, dim = layout.FORMATS[format], 64, 128
    width = 2 * dim if options.get("bounds") else dim
    keys = torch.zeros(f.shape(2, page_size, key_heads, width), dtype=getattr(torch, f.dtype))
    if f.scale_dtype:
        options["key_scale"] = torch.zeros(2, page_size, key_heads, dtype=torch.half)
    if candidates:
        options["candidates"] = torch.zeros(rows, 1, candidates, dtype=torch.int32)
    starts, lengths = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    table = torch.zeros(1, length // page_size, dtype=torch.int32)
    q, weights = torch.zeros(rows, heads, dim).bfloat16(), torch.zeros(rows, heads).bfloat16()
    leading = (q, weights if weighted else None, starts, lengths, keys, table, k, 1.0, rows, length)
    a = Select(*leading, format=format, page_size=page_size, **options)
    return lambda: select_host.select(
        a, *(torch.empty(o.shape, dtype=o.dtype) if o.wanted else None for o in outputs(a))
    )


def select_merge(shards: int) -> Callable[[], None]:
    indices = torch.zeros(shards, 4, 1, 2048, dtype=torch.int32)
    a = SelectMerge(indices, torch.zeros(indices.shape), torch.zeros(shards, 4, dtype=torch.int32), 2048, order="score")
    given = [torch.empty(o.shape, dtype=o.dtype) for o in merged_outputs(a)]
    return lambda: merge_selections_host.select_merge(a, *given)


CALLS: dict[str, Callable[[], Callable[[], None]]] = {
    **{name: partial(attend, options) for name, options in ATTENDS.items()},
    **{f"store, {format}": partial(store, format) for format in STORED},
    **{f"load, {format}": partial(load, format) for format in STORED},
    **{f"convert, {src} to {dst}": partial(convert, src, dst) for src, dst in CONVERTED},
    **{f"compress, {of}": partial(compress, of) for of in COMPRESSED},
    "merge, 4 parts": merge,
    **{f"select, {name}": partial(select, **options) for name, options in INDEXERS.items()},
    **{f"select, {name}": partial(select, **options, length=4096) for name, options in SELECTORS.items()},
    **{f"select_merge, {shards} shards": partial(select_merge, shards) for shards in MERGED},
}


def tile_of(options: dict[str, Any]) -> str:
    """Query rows, heads of all of them, and entries that a program takes at a time, and how it is compiled."""
    if "HOW" in options:
        tile = [options["HOW"].rows * options["HOW"].block_h, options["HOW"].block_n]
    else:
        tile = [options[name] for name in ("BLOCK_H", "BLOCK_N") if name in options]
    return "x".join(map(str, (*tile, options["num_warps"], options.get("num_stages", ""))))


def compiled(architectures: list[int], names: list[str]) -> Iterator[Compiled]:
    for name in names:
        launch = CALLS[name]()
        for arch in architectures:
            for kernel, options, code in kernels_of(arch, launch):
                registers, spilled, sass = disassembled(code.asm["cubin"])
                yield Compiled(
                    case=name,
                    arch=arch,
                    kernel=kernel,
                    tile=tile_of(options),
                    registers=registers,
                    spilled=spilled,
                    shared=code.metadata.shared,
                    products=next((name for name, word in PRODUCTS.items() if word in sass), "none"),
                    wide_loads=len(re.findall(r"LDG(?:STS)?\.\S*128", sass)),
                )


def target(arch: int) -> str:
    return f"sm_{arch}{ARCHITECTURES[arch]}"


def tables(found: list[Compiled]) -> Iterator[tuple[str, list[str]]]:
    """Heads of the tables of the page, and their lines."""
    lines = []
    for c in found:
        if c.shown:
            cells = (c.case, target(c.arch), c.tile, c.registers, c.spilled, c.shared, c.products)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    yield (
        "| call | device | rows x entries x warps x stages | registers | spilled bytes | shared bytes | products |",
        lines,
    )
    others: dict[tuple[str, str], list[Compiled]] = {}
    for c in found:
        if not c.shown:
            others.setdefault((c.kernel, c.case), []).append(c)
    lines = []
    for (kernel, case), of in others.items():
        most = [max(getattr(c, name) for c in of) for name in ("registers", "spilled", "shared")]
        lines.append(f"| {' | '.join(map(str, (kernel, case, *most)))} |")
    yield "| kernel | call | registers | spilled bytes | shared bytes |", lines


def with_table(page: str, head: str, lines: list[str]) -> str:
    """The page with other lines in the table that begins so."""
    before, _, rest = page.partition(head)
    rule, _, rest = rest.lstrip("\n").partition("\n")
    while rest.startswith("|"):
        rest = rest.partition("\n")[2]
    return "\n".join([before + head, rule, *lines, rest])


if __name__ == "__main__":
    archs = [int(arg) for arg in sys.argv[1:] if arg.isdigit()] or list(ARCHITECTURES)
    chosen = [name for name in CALLS if any(arg in name for arg in sys.argv[1:] if not arg.isdigit())]
    found = []
    for c in compiled(archs, chosen or list(CALLS)):
        print(c, "" if c.ok else "  <- over budget", flush=True)
        found.append(c)
    if len(sys.argv) == 1:
        text = PAGE.read_text()
        for head, lines in tables(found):
            text = with_table(text, head, lines)
        PAGE.write_text(text)
