"""The specification: every op in plain PyTorch, in float64 where it computes. A file for each op.

Written to be read. It runs anywhere, is slow, and is what every kernel is tested against.
"""

from __future__ import annotations

from ..registry import Impl
from .attend import attend
from .select import select
from .select_merge import select_merge
from .store import quantise_int8, store

__all__ = ["IMPLS", "attend", "quantise_int8", "select", "select_merge", "store"]

SCORES = dict.fromkeys(("float32", "bfloat16", "float16"), (2e-6, 2e-6))
"""Error of a score, by the dtype of the queries."""

# priority below every kernel: registry.choose tries the reference last
IMPLS = (
    Impl(
        "attend",
        "reference",
        limits={},
        run=attend,
        tolerance={"float32": (2e-6, 2e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
        priority=-1,
    ),
    Impl("select", "reference", limits={}, run=select, tolerance=SCORES, priority=-1),
    Impl("select_merge", "reference", limits={}, run=select_merge, priority=-1),
    Impl("store", "reference", limits={}, run=store, priority=-1),
)
