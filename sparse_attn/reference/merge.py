"""``merge``: attention over parts of the entries, weighted by what each part's softmax summed up to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..ops.merge import Merge

NEG_INF = float("-inf")


def merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    """``lse = ln sum_i exp(lse_i)``, ``out = sum_i exp(lse_i) out_i / (exp(sink) + sum_i exp(lse_i))``, in the order of
    the parts."""
    lses = a.lses.double() * (math.log(2) if a.base == "2" else 1.0)
    if a.inf_is_empty:
        lses = lses.where(lses != math.inf, NEG_INF)
    total = torch.full_like(lses[0], NEG_INF)
    for part in lses:
        total = torch.logaddexp(total, part)
    lse.copy_(total)
    if a.sinks is not None:
        total = torch.logaddexp(total, a.sinks.double())
    joined = torch.zeros_like(a.outs[0], dtype=torch.float64)
    for part, part_out in zip(lses, a.outs, strict=True):
        weighted = torch.exp(part - total)[..., None] * part_out.double()
        joined += weighted.where((part != NEG_INF)[..., None], 0.0)  # what an empty part holds counts for nothing
    out.copy_(joined)
