"""Compiles what `cuda_triton` launches for every architecture, without a device, and prints the table of
`docs/cuda.md`: `PYTHONPATH=. python tests/cuda_compile.py` (Triton, not its interpreter; some minutes).

A compiled kernel may still be a trap: Triton makes one of code that it finds impossible, without a word. So a kernel
counts as compiled only if its matrix products are there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cases
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from sparse_attn.backends.cuda_triton import attend as attend_host
from sparse_attn.backends.cuda_triton.device import Device
from sparse_attn.ops.attend import Attend

ARCHITECTURES = {80: "", 86: "", 89: "", 90: "a", 100: "a", 103: "a", 120: "a"}
"""And the suffix of each for what only it has."""

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes of shared memory that a program may use, of NVIDIA's table of compute capabilities."""

PROCESSORS = 132

_ONE_ROW: dict[str, Any] = dict(dtype="bfloat16", lengths=(2500,), rows=(1,), padding=0, page_size=64, win_page_size=64)
_V32 = dict(_ONE_ROW, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1, selected=2048)
_V4 = dict(_ONE_ROW, planes="main+window", kv_heads=1, qk_dim=512, v_dim=512, index_heads=1, selected=512, sinks=True)
_GQA = dict(_ONE_ROW, q_heads=32, kv_heads=8, qk_dim=128, v_dim=128)
ATTENDS: dict[str, dict[str, Any]] = {
    "V3.2, bf16, 128 heads": dict(_V32, q_heads=128, format="bf16"),
    "V3.2, bf16, 16 heads": dict(_V32, q_heads=16, format="bf16"),
    "V3.2, fp8_v32, 128 heads": dict(_V32, q_heads=128, format="fp8_v32"),
    "V3.2, int8_v32, 128 heads": dict(_V32, q_heads=128, format="int8_v32"),
    "V4, bf16, 64 heads": dict(_V4, q_heads=64, format="bf16", win_format="bf16"),
    "V4, fp8_v4_planar, 64 heads": dict(_V4, q_heads=64, format="fp8_v4_planar", win_format="fp8_v4_planar"),
    "V4.1, fp4_v41 + fp8_v41, 64 heads": dict(_V4, q_heads=64, format="fp4_v41", win_format="fp8_v41"),
    "GQA 32/8, bf16, dense": dict(_GQA, format="bf16", v_format="bf16"),
    "GQA 64/4, bf16, blocks of 128": dict(
        _GQA, q_heads=64, kv_heads=4, format="bf16", v_format="bf16", index_heads=4, selected=2048, select_block=128
    ),
    "GQA 32/8, int8": dict(_GQA, format="int8", v_format="int8", index_heads=8, selected=1024),
    "V3.2, fp32, 16 heads": dict(_V32, q_heads=16, dtype="float32", format="fp32"),
}


class Compiled(NamedTuple):
    case: str
    arch: int
    kernel: str
    tile: str
    registers: int
    spilled: int
    shared: int
    products: str

    @property
    def ok(self) -> bool:
        """Compiled to what it should be, within what the device has."""
        computes = self.products != "none" or "attend" not in self.kernel
        return computes and self.registers > 8 and self.spilled == 0 and self.shared <= SHARED[self.arch]


class NoDevice:
    """A driver for an architecture that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def kernels_of(arch: int, launch: Callable[[], None]) -> list[tuple[str, dict[str, Any], Any]]:
    """Name, options and code of every kernel that ``launch`` would start."""
    found: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.device_caches.clear()
        found.append((self.fn.__name__, options, run(self, *args, grid=grid, warmup=True, **options)))

    device_of = attend_host.device_of
    triton.runtime.driver.set_active(NoDevice(arch))
    JITFunction.run = compile_only
    attend_host.device_of = lambda _: Device(arch, PROCESSORS)
    try:
        launch()
    finally:
        JITFunction.run, attend_host.device_of = run, device_of
    return found


def assembled(arch: int, ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        target = f"-arch=sm_{arch}{ARCHITECTURES[arch]}"
        command = [get_ptxas(arch).path, "-v", target, str(file), "-o", str(file.with_suffix(".cubin"))]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers and spilled, text
    return int(registers[1]), int(spilled[1])


def attend(options: dict[str, Any]) -> Callable[[], None]:
    leading, kwargs = cases.attend(**options)
    a = Attend(*leading, **kwargs)
    out, lse = torch.empty(*a.q.shape[:2], a.v_dim, dtype=a.q.dtype), torch.empty(a.q.shape[:2])
    return lambda: attend_host.attend(a, out, lse)


def compiled(architectures: list[int], names: list[str]) -> Iterator[Compiled]:
    for name in names:
        launch = attend(ATTENDS[name])
        for arch in architectures:
            for kernel, options, code in kernels_of(arch, launch):
                ptx = code.asm["ptx"]
                tile = [options[n] for n in ("BLOCK_H", "BLOCK_N") if n in options]
                tile += [options["num_warps"], options.get("num_stages", "")]
                products = next((n for n in ("tcgen05", "wgmma", "mma.sync", "fma") if n in ptx), "none")
                sizes = assembled(arch, ptx)
                yield Compiled(name, arch, kernel, "x".join(map(str, tile)), *sizes, code.metadata.shared, products)


def row(c: Compiled) -> str:
    cells = (c.case, f"sm_{c.arch}{ARCHITECTURES[c.arch]}", c.tile, c.registers, c.spilled, c.shared, c.products)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("| call | device | heads x entries x warps x stages | registers | spilled bytes | shared bytes | products |")
    print("|---|---|---|---|---|---|---|")
    archs = [int(arg) for arg in sys.argv[1:] if arg.isdigit()] or list(ARCHITECTURES)
    chosen = [name for name in ATTENDS if any(arg in name for arg in sys.argv[1:] if not arg.isdigit())]
    for c in compiled(archs, chosen or list(ATTENDS)):
        if c.kernel == "attend_kernel":
            print(row(c), "" if c.ok else "  <- over budget", flush=True)
