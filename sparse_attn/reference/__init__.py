"""The specification: every op in plain PyTorch, in float64 where it computes. A file for each op.

Written to be read. It runs anywhere, is slow, and is what every kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..registry import Impl
from .attend import attend
from .compress import compress
from .convert import convert
from .load import load
from .merge import merge
from .select import select
from .select_merge import select_merge
from .store import store

__all__ = ["IMPLS", "attend", "compress", "convert", "load", "merge", "select", "select_merge", "store"]

OUTPUTS = {"float32": (2e-6, 2e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}
"""Error of an output row, by its dtype."""

SCORES = dict.fromkeys(("float32", "bfloat16", "float16"), (2e-6, 2e-6))
"""Error of a score, by the dtype of the queries."""


def _impl(run: Callable[..., None], tolerance: Mapping[str, tuple[float, float]] | None = None) -> Impl:
    # priority below every kernel: registry.choose tries the reference last
    return Impl(run.__name__, "reference", limits={}, run=run, tolerance=tolerance or {}, priority=-1)


IMPLS = (
    _impl(attend, OUTPUTS),
    _impl(compress, OUTPUTS),
    _impl(convert),
    _impl(load),
    _impl(merge, OUTPUTS),
    _impl(select, SCORES),
    _impl(select_merge),
    _impl(store),
)
