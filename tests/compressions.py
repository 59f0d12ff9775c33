"""What `docs/compressions.md` names: for each line a small random batch, and its entries, computed one by one.

Shares no code with the reference. The state holds NaN in every slot that no sequence owns, and tables page numbers far
out of range in every column that no step needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from calls import NOWHERE
from torch import Tensor

import sparse_attn
from sparse_attn import layout
from sparse_attn.registry import Impl

COMPRESSIONS = Path(__file__).parent.parent / "docs" / "compressions.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAGE, STATE_PAGE = 3, 5
REWIND = 3


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    of: str
    stride: int
    parts: int
    gated: bool
    arguments: str
    format: str

    def options(self) -> dict[str, Any]:
        names = re.findall(r"=([a-z]\w*)", self.arguments)
        return eval(f"dict({self.arguments})", {"__builtins__": {"dict": dict}}, {name: name for name in names})

    @property
    def span(self) -> int:
        return self.options().get("span", self.stride)


def lines() -> list[Line]:
    found = []
    for row in COMPRESSIONS.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in row.split("|")[1:-1]]
        if len(cells) == 6 and cells[1].isdigit():
            parts = {"D": 1, "2 D": 2}[cells[2]]
            found.append(Line(cells[0], int(cells[1]), parts, cells[3] == "yes", cells[4], cells[5]))
    return found


class Sequences:
    """Random sequences under one line, their planes, and the calls that bring them in step by step."""

    def __init__(self, line: Line, lengths: list[int], format: str = "", dim: int = 16) -> None:
        self.line, self.lengths = line, lengths
        self.format = layout.FORMATS[format or line.format]
        self.stride = line.stride if line.stride < 64 else 12  # bites in short sequences, and is no power of two
        self.span = line.span * self.stride // line.stride
        self.heads = 1 if self.format.packed or line.gated else 2
        self.dim = self.format.dim or dim
        self.width = line.parts * self.dim
        self.generator = torch.Generator().manual_seed(0)
        options = line.options()
        self.dtype = DTYPES[options.get("dtype", "fp32")]
        self.values = [self.random(n, self.heads, self.width).to(self.dtype) for n in lengths]
        self.gates = [self.random(n, self.heads, self.width) * 3 for n in lengths] if line.gated else None
        self.bias = self.random(self.stride, self.width) * 2 if "bias" in options else None
        self.norm = self.random(self.dim) if "norm" in options else None
        self.rope_stride = options.get("rope_stride", self.stride)
        angles = self.random(max(lengths, default=0) * max(self.rope_stride, 1) + 1, 4) * 3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1) if "cos_sin" in options else None
        self.eps = options.get("eps", 1e-6)
        self.table, self.plane, self.scale = self.new_plane()
        self.state_table, self.state = self.new_state()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def pages(self, counts: list[int]) -> tuple[Tensor, int]:
        """A table with pages in any order for so many pages of each sequence, and the pages of the pool."""
        total = sum(counts) + 2
        order = iter(torch.randperm(total, generator=self.generator).tolist())
        table = torch.full((len(counts), max(counts, default=0) + 1), NOWHERE, dtype=torch.int32)
        for b, count in enumerate(counts):
            table[b, :count] = torch.tensor([next(order) for _ in range(count)])
        return table, total

    def new_plane(self) -> tuple[Tensor, Tensor, Tensor | None]:
        table, total = self.pages([layout.pages_for(n // self.stride, PAGE) for n in self.lengths])
        shape = self.format.shape(total, PAGE, self.heads, self.dim)
        plane = torch.full(shape, 113, dtype=torch.uint8) if self.format.packed else torch.zeros(shape)
        scale = torch.zeros(total, PAGE, self.heads, dtype=torch.half) if self.format.scale_dtype else None
        return table, plane.to(getattr(torch, self.format.dtype)), scale

    def new_state(self) -> tuple[Tensor | None, Tensor | None]:
        """A state for each sequence that is a ring of as few pages as it needs."""
        if self.span == 1:
            return None, None
        ring = layout.pages_for(self.span - 1 + REWIND, STATE_PAGE)
        columns = layout.pages_for(max(self.lengths), STATE_PAGE)
        rings, total = self.pages([ring] * len(self.lengths))
        table = rings[:, torch.arange(columns) % ring].contiguous()
        return table, torch.full((total, STATE_PAGE, self.heads, self.width * (2 if self.line.gated else 1)), torch.nan)

    def step(self, ends: list[int], counts: list[int], values: list[Tensor] | None = None, padding: int = 0):
        """Arguments of the step that brings each sequence's next tokens in, up to its end."""
        values = self.values if values is None else values
        ranges = [slice(max(end - count, 0), max(end, 0)) for end, count in zip(ends, counts, strict=True)]

        def packed(parts: list[Tensor]) -> Tensor:
            fill = torch.full((padding, self.heads, self.width), torch.nan, dtype=parts[0].dtype)
            return torch.cat([*(part[r] for part, r in zip(parts, ranges, strict=True)), fill])

        starts = torch.tensor([0, *counts]).cumsum(0).int()
        args = (packed(values), packed(self.gates) if self.gates else None, starts)
        args += (torch.tensor(ends, dtype=torch.int32), self.plane, self.table, self.stride)
        args += (max(counts, default=0), max([0, *ends]))
        kwargs: dict[str, Any] = dict(span=self.span if self.span != self.stride else 0, format=self.format.name)
        kwargs |= dict(bias=self.bias, state=self.state, state_page_table=self.state_table, norm=self.norm)
        kwargs |= dict(max_rewind=REWIND if self.span > 1 else 0, eps=self.eps, cos_sin=self.cos_sin)
        kwargs |= dict(rope_stride=self.rope_stride, scale=self.scale, page_size=PAGE if self.format.planar else 0)
        kwargs |= dict(dtype={v: k for k, v in DTYPES.items()}[self.dtype])
        return args, kwargs

    def run(self, impl: Impl, ends: list[int], counts: list[int], **changes: Any) -> Tensor:
        args, kwargs = self.step(ends, counts, changes.pop("values", None), changes.pop("padding", 0))
        return sparse_attn.compress(*args, **(kwargs | changes), backend=impl.backend)

    def entries(self) -> list[Tensor]:
        """Every entry as stored, of each sequence: float32 ``[E, H, D]`` or bytes ``[E, n]``."""
        found = []
        for b, n in enumerate(self.lengths):
            slots = torch.arange(n // self.stride)
            slots = layout.slot(*layout.locate(self.table[b].long(), slots, PAGE), PAGE)
            kwargs = dict(scale=self.scale, format=self.format.name, page_size=PAGE)
            found.append(sparse_attn.load(self.plane, slots, **kwargs, backend="reference"))
        return found

    def expected(self, b: int, entry: int) -> tuple[Tensor, Tensor]:
        """Latent and entry, float64 ``[H, D]``, by loops over heads, tokens and pairs."""

        def rounded(x: Tensor) -> Tensor:
            return x.to(self.dtype).double()

        latent = torch.zeros(self.heads, self.dim, dtype=torch.float64)
        end = (entry + 1) * self.stride
        for h in range(self.heads):
            above = torch.zeros(self.dim, dtype=torch.float64)
            below = torch.zeros(self.dim, dtype=torch.float64)
            for p in range(max(end - self.span, 0), end):
                part = (p - (end - self.span)) // self.stride if self.line.parts > 1 else 0
                own = slice(part * self.dim, (part + 1) * self.dim)
                weight = torch.ones(self.dim, dtype=torch.float64)
                if self.gates:
                    logit = self.gates[b][p, h, own].double()
                    weight = (logit if self.bias is None else logit + self.bias[p % self.stride, own].double()).exp()
                above += weight * self.values[b][p, h, own].double()
                below += weight
            latent[h] = rounded(above / below)
        if self.norm is not None:
            size = (latent**2).sum(-1, keepdim=True) / self.dim + self.eps
            latent = rounded(latent / size.sqrt() * self.norm.double())
        if self.cos_sin is None:
            return latent, latent
        row = self.cos_sin[entry * self.rope_stride].double()
        turned, half = latent.clone(), len(row) // 2
        for i in range(half):
            at = self.dim - 2 * half + 2 * i
            z = torch.complex(latent[:, at], latent[:, at + 1]) * torch.complex(row[i], row[half + i])
            turned[:, at], turned[:, at + 1] = z.real, z.imag
        return latent, rounded(turned)

    def close(self, got: Tensor, expected: Tensor, atol: float = 2e-6, rtol: float = 2e-6) -> bool:
        """Whether a row is the expected one. In bf16 both are rounded: the same numbers, but where float32 falls on
        the other side of a middle."""
        got = got.double()
        if self.dtype == torch.float32:
            return torch.allclose(got, expected, atol=atol, rtol=rtol)
        return bool((got != expected).double().mean() <= 0.03) and torch.allclose(got, expected, atol=8e-3, rtol=1.6e-2)
