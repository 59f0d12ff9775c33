"""A known answer, asked of FlashMLA once before it is used: what it reads and returns changed before without a version.

Rows see indices in a wild order, a page out of order, and NaN in everything that they must not read; heads differ in
sinks and in what they score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

DEVICE = "cuda"
PAGE, PAGES, LENGTH, HEADS = 64, 3, 100, 64
TABLE = (2, 0)
CHOSEN = (-1, 17, 3, 1 << 30, LENGTH - 1, 70, -7, 5)
"""The rows stand at the last two positions, so that only the second sees the newest token."""
OUTLIER = 5
"""The entry that odd heads attend."""
WINDOW = 2
SCALES = {"fp8_v32": (1.0, 2.0, 0.5, 1.5), "fp8_v4_planar": (1.0, 2.0, 0.5, 4.0, 1.0, 2.0, 8.0), "bf16": (1.0,)}
"""Of the groups of a row. Those of fp8_v32 are no powers of two, which is their right."""
CLOSE = 0.07
"""Half a bf16 step of the largest value."""


def rows_of(format: str, dim: int) -> Callable[[Callable[..., None]], str | None]:
    """The check of a kernel on rows of ``dim`` numbers in ``format``."""

    def check(run: Callable[..., None]) -> str | None:
        numbers, plane = _plane(format, dim)
        arguments, attended = _call(format, dim, plane)
        out = torch.full((3, HEADS, 512), 3.0, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.full((3, HEADS), 3.0, device=DEVICE)
        run(arguments, out, lse)
        want, want_lse = _expected(arguments, numbers, attended)
        for name, got, wanted in (("out", out, want), ("lse", lse, want_lse)):
            if not torch.allclose(got.double().cpu(), wanted, atol=CLOSE, rtol=0):
                error = (got.double().cpu() - wanted).abs().max()
                return f"its self check failed: {name} of known rows of {format} is off by {error:g}"
        return None

    return check


def _plane(format: str, dim: int) -> tuple[Tensor, Tensor]:
    """The numbers of each entry, float64 ``[LENGTH, dim]``, and a plane that holds them."""
    f = FORMATS[format]
    scales = torch.tensor(SCALES[format])
    values = (torch.arange(LENGTH) % 13).float()[:, None].expand(LENGTH, dim).clone()
    values[:, dim - 64 :] = 0
    values[OUTLIER, dim - 64] = 8
    stored = f.codec.dim or dim
    numbers = values.clone()
    numbers[:, :stored] *= scales.repeat_interleave(stored // len(scales))
    plane = torch.full(f.shape(PAGES, PAGE, 1, dim), 0xFF, dtype=torch.uint8)
    if not f.packed:
        plane = plane.to(torch.bfloat16).fill_(math.nan)
        for e in range(LENGTH):
            plane[TABLE[e // PAGE], e % PAGE, 0] = numbers[e].bfloat16()
        return numbers.double(), plane
    parts = {
        "values": values[:, :stored].to(torch.float8_e4m3fn).view(torch.uint8),
        "rope": values[:, stored:].bfloat16().view(torch.uint8),
        "scales": (scales.view(torch.uint8) if f.codec.scale == "fp32" else (scales.log2() + 127).to(torch.uint8)),
        "pad": torch.zeros(1, dtype=torch.uint8),
    }
    for e in range(LENGTH):
        page, start = plane[TABLE[e // PAGE]].flatten(), 0
        for section, width in zip(f.sections, f.widths(), strict=True):
            row = torch.cat([parts[name][e] if parts[name].dim() > 1 else parts[name] for name, _ in section])
            page[start + e % PAGE * width :][:width] = row
            start += PAGE * width
    return numbers.double(), plane


def _call(format: str, dim: int, plane: Tensor) -> tuple[Any, list[list[int]]]:
    """Two query rows and a padded one, as the op's own tuple has them, and the entries that each attends."""
    q = torch.zeros(3, HEADS, dim, dtype=torch.bfloat16)
    q[:, 1::2, dim - 64] = 1
    q[2] = math.nan
    sinks = torch.zeros(HEADS)
    sinks[HEADS // 2 :], sinks[-1] = -math.inf, math.inf
    table = torch.tensor([TABLE], dtype=torch.int32)
    given: dict[str, Any] = dict.fromkeys(("kv_range", "index_counts", "win", "win_range", "win_indices"))
    given |= dict(q=q, cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32), scale=1.0, causal=True, sinks=sinks)
    given |= dict(seq_lens=torch.tensor([LENGTH], dtype=torch.int32), max_seq_len=LENGTH, kv=plane, format=format)
    given |= dict(page_size=PAGE, page_table=table, ratio=1, main_paging=(PAGES, PAGE, 1))
    given |= dict(indices=torch.tensor(CHOSEN, dtype=torch.int32).expand(3, 1, len(CHOSEN)))
    attended = [[e for e in CHOSEN if 0 <= e < end] for end in (LENGTH - 1, LENGTH)]
    if format == "fp8_v4_planar":  # the kernel that reads a second plane
        given |= dict(win=plane, win_format=format, win_page_size=PAGE, win_page_table=table, window=WINDOW)
        given |= dict(window_paging=given["main_paging"])
        attended = [[*row, *range(LENGTH - 1 + t - WINDOW, LENGTH - 1 + t)] for t, row in enumerate(attended)]
    device = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in given.items()}
    return SimpleNamespace(**device), attended


def _expected(a: Any, numbers: Tensor, attended: list[list[int]]) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(3, HEADS, 512).double(), torch.full((3, HEADS), -math.inf).double()
    for t, entries in enumerate(attended):
        rows = numbers[entries]
        scores = a.q[t].double().cpu() @ rows.T
        lse[t] = scores.logsumexp(-1)
        total = torch.logaddexp(lse[t], a.sinks.double().cpu())
        out[t] = torch.exp(scores - total[:, None]) @ rows[:, :512]
    return out, lse
