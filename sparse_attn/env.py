"""Every environment variable of the package: name, values, default, meaning. Each is read once, at its first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, eq=False)  # its identity is its hash: one is looked up in every call
class Variable:
    """A variable. No ``values``: any."""

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str

    def get(self) -> str:
        return _read(self)


@cache
def _read(variable: Variable) -> str:
    value = os.environ.get(variable.name, variable.default)
    if variable.values and value not in variable.values:
        raise ValueError(
            f"{variable.name}: expected one of {', '.join(map(repr, variable.values))}, got {value!r}; correct it"
        )
    return value


def reset() -> None:
    """Forget what was read, so that the next use reads the environment again (tests)."""
    _read.cache_clear()


ALLOW_REFERENCE = Variable(
    "SPARSE_ATTN_ALLOW_REFERENCE",
    ("0", "1"),
    "0",
    "1 lets the slow reference stand in on an accelerator when no kernel fits; on CPU tensors it always may.",
)
CHECKS = Variable(
    "SPARSE_ATTN_CHECKS",
    ("shape", "debug"),
    "shape",
    "debug also checks the values of lengths, page tables and indices, which reads them back from the device.",
)
LOG = Variable(
    "SPARSE_ATTN_LOG",
    ("", "choice"),
    "",
    "choice prints, once for each kind of call, which kernel was chosen and why the others were not.",
)
CPU_ISA = Variable(
    "SPARSE_ATTN_CPU_ISA",
    ("auto", "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon_bf16", "sve256_bf16"),
    "auto",
    "instruction set of cpu_native, as it stands at the first call; one that the machine lacks is refused.",
)
RECORDS = Variable(
    "SPARSE_ATTN_RECORDS",
    (),
    "",
    "a file to which an engine that is observed appends a line of JSON for each step and each finished request.",
)
ADMISSION = Variable(
    "SPARSE_ATTN_ADMISSION",
    (),
    "",
    "in SGLang, the admission rule as JSON: mode, profile and limits (docs/engines.md).",
)
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET",
    ("", "0", "1"),
    "0",
    "Triton's own: 1 makes cuda_triton run on CPU tensors, by Triton's interpreter and slowly (tests).",
)

VARIABLES = (ALLOW_REFERENCE, CHECKS, LOG, CPU_ISA, RECORDS, ADMISSION, TRITON_INTERPRET)


def check() -> None:
    """Raise ``ValueError`` for a variable with a value that it cannot have, so that a misspelling is not ignored."""
    for variable in VARIABLES:
        variable.get()
