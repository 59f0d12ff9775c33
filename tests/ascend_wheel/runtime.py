"""Stands in for the libraries of CANN that torch_npu is linked with: every function returns 0. That is enough to
load it, and to ask it for schemas, shapes and kernels. Nothing runs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
OURS = r"\bU ((?:acl|rt[A-Z]|Msprof|Hccl)\w*)$"
TEXTS = {"aclrtGetSocName": "Ascend910B3", "aclGetRecentErrMsg": ""}
"""Functions that return a text."""


def missing() -> str:
    """Why torch_npu cannot be loaded; empty if it can."""
    return "" if find_spec("torch_npu") else "torch_npu is not installed in this environment"


def load(folder: Path) -> None:
    """Build the libraries in ``folder`` and load them, before torch_npu is imported."""
    spec = find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    linked = [str(path) for path in Path(spec.origin).parent.rglob("*.so")]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *linked], capture_output=True, text=True, check=True)
    names = sorted({*re.findall(OURS, symbols.stdout, re.MULTILINE), *TEXTS})
    source = folder / "runtime.c"
    source.write_text("\n".join(map(_function, names)))
    for name in LIBRARIES:
        library = folder / f"lib{name}.so"
        flags = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _function(name: str) -> str:
    if name in TEXTS:
        return f'const char* {name}(void) {{ return "{TEXTS[name]}"; }}'
    return f"long {name}(void) {{ return 0; }}"
