"""Copies of the reference, and of the files that it reads bytes with, that have one fault."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import sparse_attn

PACKAGE = Path(sparse_attn.__file__).parent
OPS = ("attend", "compress", "convert", "load", "merge", "select", "select_merge", "store")
MODULES = ("layout", "codecs", "planes", *(f"reference.{name}" for name in ("rows", *OPS)))
"""Each imports only those before it."""

SOURCES = {module: (PACKAGE / f"{module.replace('.', '/')}.py").read_text() for module in MODULES}
FILES = {module.rpartition(".")[2]: module for module in MODULES}


def mutant(file: str, old: str, new: str) -> types.SimpleNamespace:
    """The ops, and ``layout``, on a copy with ``new`` for ``old`` in one file: ``"layout"``, ``"rows"``, or an op's."""
    assert old in SOURCES[FILES[file]], "the fault's place is gone: move it along with the source"
    originals = {}
    try:
        for module in MODULES:
            name = f"sparse_attn.{module}"
            copy = types.ModuleType(name)
            copy.__package__, _, attribute = name.rpartition(".")
            parent = sys.modules[copy.__package__]
            originals[name] = sys.modules[name], parent, attribute, getattr(parent, attribute)
            sys.modules[name] = copy
            setattr(parent, attribute, copy)
            source = SOURCES[module].replace(old, new) if module == FILES[file] else SOURCES[module]
            exec(compile(source, name, "exec"), copy.__dict__)
        copies = {file: sys.modules[f"sparse_attn.{module}"] for file, module in FILES.items()}
        return types.SimpleNamespace(layout=copies["layout"], **{op: getattr(copies[op], op) for op in OPS})
    finally:
        for name, (original, parent, attribute, value) in originals.items():
            sys.modules[name] = original
            setattr(parent, attribute, value)


def each(**faults: list[tuple[str, str, str]]) -> Any:
    """A test for each (fault, text in the file, what stands there instead), by file."""
    found = [(file, *fault) for file, some in faults.items() for fault in some]
    ids = [f"{file}: {fault}" for file, fault, _, _ in found]
    return pytest.mark.parametrize(("file", "old", "new"), [(file, *texts) for file, _, *texts in found], ids=ids)
