"""Copies of modules without torch that have one fault."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def faulty(name: str, old: str, new: str) -> types.ModuleType:
    """``sparse_attn.serving.<name>`` with ``new`` for ``old``, which must stand there once."""
    original = importlib.import_module(f"sparse_attn.serving.{name}")
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(old) == 1, f"the fault's place stands {source.count(old)} times: move it along with the source"
    copy = types.ModuleType(original.__name__)
    copy.__package__ = original.__package__
    sys.modules[original.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), original.__file__, "exec"), copy.__dict__)
    finally:
        sys.modules[original.__name__] = original
    return copy
