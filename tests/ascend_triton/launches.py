"""Calls of the ops at the sizes of models, and the kernels that they launch: what is planned for every chip, and
counted in `docs/ascend-triton.md`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import launching
import torch
from lowering import Chip, Specialised

import sparse_attn

CALLS: dict[str, Callable[[], Any]] = {}
"""By a name that says what is launched."""


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        CALLS[name] = run
        return run

    return add


@call("merge, 4 parts, 64 heads of 512")
def merge() -> Any:
    outs, lses = torch.zeros(4, 2, 64, 512), torch.zeros(4, 2, 64)
    return sparse_attn.merge(outs, lses, sinks=torch.zeros(64), backend="ascend_triton")


def kernels(name: str, chip: Chip) -> list[Specialised]:
    """The kernels that a call launches on a chip. None runs."""
    with launching.recorded(chip) as launched:
        CALLS[name]()
    return launched
