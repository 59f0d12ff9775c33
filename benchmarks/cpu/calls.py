"""What a call costs besides its work: the smallest decode step, through the operator and without the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparse_attn import resolve
from sparse_attn.ops.attend import Attend

from .timing import OURS, Case

REPEATS = 500
"""Calls that are timed together."""
RESOLVED = "resolved kernel"


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

    def routed() -> None:
        op(*leading, **named)

    def resolved() -> None:
        impl.run(arguments, out, None)

    return Case("attend B 1, 1 head, K 16", {OURS: _many(routed, out), RESOLVED: _many(resolved, out)})


def _many(call: Callable[[], None], out: torch.Tensor) -> Callable[[int], torch.Tensor]:
    def run(_: int) -> torch.Tensor:
        for _ in range(REPEATS):
            call()
        return out

    return run
