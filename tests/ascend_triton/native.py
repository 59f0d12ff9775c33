"""Runs the linalg form of kernels on the CPU: MLIR's own passes to LLVM, clang to a shared object."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from lowering import CACHE, digest

LLVM = Path(os.environ.get("LLVM_BIN", "/usr/lib/llvm-19/bin"))
RUNTIME = Path(__file__).parent / "memref_copy.cpp"
PASSES = (
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--canonicalize",
    "--linalg-generalize-named-ops",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true allow-unknown-ops=true",
    "--canonicalize",
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-complex-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


def build(text: str) -> Any:
    """The kernel of a linalg module as a C function."""
    source = re.sub(r', mix_mode = "\w*"', "", text)
    source = re.sub(r"attributes \{SyncBlockLockArgIdx[^}]*\}", "attributes {llvm.emit_c_interface}", source)
    source = re.sub(r"\{tt\.tensor_kind = \d+ : i32(?:, [^}]*)?\}", "", source)
    # notes of dialects that MLIR does not know
    source = source.replace("{hivm.unlikely_condition}", "").replace("{ExtractedLoadOrStore}", "")
    source = re.sub(r"\n *annotation\.mark .*", "", source)
    library = CACHE / f"{digest(source, *PASSES, RUNTIME.read_text())}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        stem = library.with_suffix(f".{os.getpid()}")
        mlir, lowered, ir, made = (stem.with_suffix(stem.suffix + s) for s in (".mlir", ".llvm.mlir", ".ll", ".so"))
        mlir.write_text(source)
        _run(LLVM / "mlir-opt", mlir, *PASSES, "-o", lowered)
        _run(LLVM / "mlir-translate", lowered, "--mlir-to-llvmir", "-o", ir)
        flags = ("-O1", "-march=native", "-shared", "-fPIC", "-Wno-override-module")
        _run(LLVM / "clang", *flags, ir, RUNTIME, "-o", made, "-lm")
        made.rename(library)
        for path in (mlir, lowered, ir):
            path.unlink()
    name = re.search(r"func\.func @(\w+)\(%arg0", source)[1]
    return getattr(ctypes.CDLL(str(library)), f"_mlir_ciface_{name}")


def _run(*command: Any) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr[:2000]}")


class _Memory(ctypes.Structure):
    """MLIR's descriptor of a memory of one axis."""

    _fields_ = [
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    ]


def run(function: Any, programs: tuple[int, ...], arguments: tuple[Any, ...], kinds: list[str]) -> None:
    """One program after the other, the last first, as a device promises no order. ``kinds`` are Triton's names of the
    arguments' types."""
    grid = (*programs, 1, 1)[:3]
    memories: list[_Memory] = []

    def memory(t: torch.Tensor) -> Any:
        memories.append(_Memory(t.data_ptr(), t.data_ptr(), 0, t.numel(), 1))
        return ctypes.byref(memories[-1])

    lock, workspace = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2))
    passed = [memory(lock), memory(workspace)]
    for value, kind in zip(arguments, kinds, strict=True):
        passed.append(memory(value) if kind.startswith("*") else _SCALARS[kind](value))
    sizes = tuple(map(ctypes.c_int32, grid))
    for z in reversed(range(grid[2])):
        for y in reversed(range(grid[1])):
            for x in reversed(range(grid[0])):
                function(*passed, *sizes, *map(ctypes.c_int32, (x, y, z)))


_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}
