"""What the machine can do at most, measured by loops of the native module that do nothing else."""

from __future__ import annotations

import mmap
import platform
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from sparse_attn import env

LIMITS = {
    "fp32": ("fp32 peak", "GFLOP/s"),
    "bf16": ("bf16 peak", "GFLOP/s"),
    "int8": ("int8 peak", "GOP/s"),
    "copy": ("copy bandwidth", "GB/s"),
    "blocks": ("16 KB block bandwidth", "GB/s"),
}
"""What each is called, and its unit, in thousands of millions a second. ``copy`` counts bytes read and written."""
MEMORY = 1 << 30
WARM_UP = 0.2
"""Seconds before a limit is taken: threads start, find their core, and its clock settles."""


def huge(size: int) -> mmap.mmap:
    """Memory in huge pages, where the system grants them."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pool(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor in huge pages. Numbers repeat those of a small tensor: times do not depend on them."""
    count = torch.Size(shape).numel()
    tensor = torch.frombuffer(huge(max(count * dtype.itemsize, 1)), dtype=dtype, count=count)
    some = torch.randn(min(count, 1 << 20)).to(dtype)
    for part in tensor.split(len(some)):
        part.copy_(some[: len(part)])
    return tensor.view(shape)


def measure(rounds: int = 5) -> dict[str, float]:
    """Every limit on torch's number of threads, in 1e9 operations or bytes a second. Absent: no such instruction."""
    native = import_module("sparse_attn._cpu_native")
    number = isa()
    memory = huge(MEMORY)
    memory.write(bytes(MEMORY))
    threads = torch.get_num_threads()
    found = {}
    for limit in LIMITS:
        rates: list[float] = []
        begin = time.perf_counter()
        while len(rates) < rounds:
            start = time.perf_counter()
            work = native.work_at_limit(limit, memory, threads, number)
            if start - begin > WARM_UP:
                rates.append(work / (time.perf_counter() - start) / 1e9)
        if max(rates) > 0:
            found[limit] = statistics.quantiles(rates, n=4)[2]  # the upper quartile: a neighbour only takes away
    return found


def isa() -> int:
    """The number of the instruction set that runs."""
    numbers: dict[str, int] = import_module("sparse_attn._cpu_native").instruction_sets()
    wanted = env.CPU_ISA.get()
    return list(numbers.values())[-1] if wanted == "auto" else numbers[wanted]


def mover(read: int, read_rows: list[Tensor], written: int, written_rows: list[Tensor]) -> Callable[[int], Tensor]:
    """What moves rows of so many bytes as a call does that computes nothing.

    Args:
        read: bytes of each row that is read.
        read_rows: for each variant of the call, which rows of a pool those are.
        written, written_rows: likewise.
    """
    native, number = import_module("sparse_attn._cpu_native"), isa()
    pools = [
        huge(size * (max(int(r.max()) for r in rows) + 1))
        for size, rows in ((read, read_rows), (written, written_rows))
    ]
    for memory in pools:
        memory.write(bytes(len(memory)))
    done = torch.empty(0)

    def move(i: int) -> Tensor:
        source, target = read_rows[i].numpy(), written_rows[i].numpy()
        native.move_rows(pools[0], source, read, pools[1], target, written, torch.get_num_threads(), number)
        return done

    return move


def described() -> dict[str, str]:
    """What a reader needs to know of where figures come from."""
    native = import_module("sparse_attn._cpu_native")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    wanted = env.CPU_ISA.get()
    return {
        "processor": ", ".join(sorted(names)) or platform.processor() or platform.machine(),
        "instruction set": list(native.instruction_sets())[-1] if wanted == "auto" else wanted,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
