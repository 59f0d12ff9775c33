"""What a call costs besides its work: the smallest decode step, through the operator and without the router, beside
what PyTorch itself takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparse_attn import resolve
from sparse_attn.ops.attend import SCHEMA, Attend

from .timing import OURS, Case

REPEATS = 500
"""Calls that are timed together."""
RESOLVED = "resolved kernel"
EMPTY = "an op in Python that makes the outputs"
"""Of the same schema."""
_library = torch.library.Library("sparse_attn_bench", "DEF")
_library.define(f"empty({SCHEMA}) -> (Tensor out, Tensor lse)")
_library.impl("empty", lambda q, *_, **__: (q.new_empty(1, 1, 64), q.new_empty(0)), "CPU")


def make() -> Case:
    """B 1, 1 head of 64, 16 listed entries."""
    torch.manual_seed(0)
    plane = torch.randn(8, 16, 1, 64)
    leading = (
        torch.randn(1, 1, 64), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([128], dtype=torch.int32),
        0.125, 64, 1, 128,
    )  # fmt: skip
    named: dict[str, Any] = dict(
        kv=plane,
        v=plane,
        page_table=torch.arange(8, dtype=torch.int32)[None],
        indices=torch.arange(16, dtype=torch.int32)[None, None],
        format="fp32",
    )
    op, arguments = torch.ops.sparse_attn.attend.default, Attend(*leading, **named)
    impl = resolve("attend", *leading, **named)
    out = torch.empty(1, 1, 64)

    empty = torch.ops.sparse_attn_bench.empty.default

    def nothing() -> None:
        empty(*leading, **named)

    def routed() -> None:
        op(*leading, **named)

    def resolved() -> None:
        impl.run(arguments, out, None)

    functions = {OURS: routed, RESOLVED: resolved, EMPTY: nothing}
    return Case("attend B 1, 1 head, K 16", {name: _many(call, out) for name, call in functions.items()})


def _many(call: Callable[[], None], out: torch.Tensor) -> Callable[[int], torch.Tensor]:
    def run(_: int) -> torch.Tensor:
        for _ in range(REPEATS):
            call()
        return out

    return run
