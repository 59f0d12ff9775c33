"""Reads and writes entries of planes of any format and strides without a copy of the plane.

A plane's memory is seen as rows of as many bytes as all of its steps are multiples of: one row an entry where entries
lie side by side. So a device gathers whole rows from contiguous memory, whatever pool the plane is a view of: torch_npu
copies a plane whole where an operation wants it contiguous. Addresses are 64-bit, and no operation is given as many
elements as 32 bits count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS, Section

from . import codecs

MOST_ELEMENTS = (1 << 31) - 1
"""Of memory that one operation is given: some of an A3's multiplied addresses in 32 bits."""
PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The formats of rows of plain numbers."""
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Run:
    """``width`` bytes of every entry and head of ``data``. Steps are in bytes."""

    data: Tensor
    start: int
    page_step: int
    entry_step: int
    head_step: int
    width: int

    @property
    def span(self) -> int:
        """Elements from the plane's first to its last."""
        return sum((n - 1) * step for n, step in zip(self.data.shape, self.data.stride(), strict=True)) + 1

    @property
    def unit(self) -> int:
        """Bytes of a row of the memory."""
        span = self.span * self.data.element_size()
        return gcd(span, self.start, self.page_step, self.entry_step, self.head_step, self.width)

    @property
    def memory(self) -> Tensor:
        """All that lies between the plane's first byte and its last, as rows of ``unit`` bytes."""
        aligned = gcd(self.unit, self.data.storage_offset() * self.data.element_size())
        word = next(word for word in WORDS if aligned % word == 0)
        return self.data.as_strided((self.span,), (1,)).view(WORDS[word]).view(-1, self.unit // word)

    def rows(self, page: Tensor, offset: Tensor, head: Tensor) -> Tensor:
        """Rows of ``memory`` that hold the run, int64 ``[..., width / unit]``."""
        at = self.start + page * self.page_step + offset * self.entry_step + head * self.head_step
        within = torch.arange(self.width // self.unit, device=at.device)
        return (at // self.unit)[..., None] + within

    def read(self, page: Tensor, offset: Tensor, head: Tensor) -> Tensor:
        """The run at places that exist, as uint8 ``[..., width]``."""
        rows = self.rows(page, offset, head)
        wanted = rows.flatten()
        got: Tensor | None = None
        for first, memory in windows(self.memory):
            local = wanted - first
            part = memory.index_select(0, local.clamp(0, len(memory) - 1))
            got = part if got is None else torch.where((local >= 0)[:, None], part, got)
        assert got is not None
        return got.view(torch.uint8).view(*rows.shape[:-1], self.width)

    def write(self, page: Tensor, offset: Tensor, head: Tensor, values: Tensor, kept: Tensor) -> None:
        """Write ``values`` (uint8 ``[..., width]``) where ``kept`` (of their shape but for the last axis)."""
        rows = self.rows(page, offset, head)
        kept = kept[..., None].expand(rows.shape).flatten()
        places = rows.flatten()
        for first, memory in windows(self.memory):
            words = values.contiguous().view(memory.dtype).view(-1, memory.shape[1])
            local = places - first
            put(memory, local, words, kept & (local >= 0) & (local < len(memory)))


def windows(memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Parts of ``memory`` that one operation may be given, and the row that each begins with."""
    most = max(MOST_ELEMENTS // memory.shape[1], 1)
    for first in range(0, len(memory), most):
        yield first, memory[first : first + most]


def put(memory: Tensor, rows: Tensor, values: Tensor, kept: Tensor) -> None:
    """``memory[rows] = values`` where ``kept``, without waiting for the device to say where that is.

    A row that is not kept writes what the first kept one writes, to the same place; if there is none, the memory's
    first row writes itself.
    """
    places = torch.arange(len(kept), device=kept.device)
    first, some = torch.where(kept, places, len(kept) - 1).amin(), kept.any()
    spare = torch.where(some, values[first], memory[0])
    rows = torch.where(kept, rows, torch.where(some, rows[first], 0))
    memory.index_copy_(0, rows, torch.where(kept[:, None], values, spare))


class Plane:
    """A paged tensor, its format, and its scale plane if the format has one (see ``layout.Format``)."""

    def __init__(self, data: Tensor, format: str, scale: Tensor | None = None, page_size: int = 0) -> None:
        self.format = FORMATS[format]
        self.pages, self.page_size, self.heads = self.format.paging(data.shape, page_size)
        self.row_dim = self.format.row_dim(data.shape[-1])
        self.runs: list[tuple[Section, Run]] = []
        if not self.format.packed:
            for name, tensor in (("values", data), ("scales", scale)):
                if tensor is not None:
                    self.runs.append(self._plain(name, tensor if tensor is data else tensor.unsqueeze(-1)))
            return
        page_step, start = data.stride(0), 0
        for section, width in zip(self.format.sections, self.format.widths(), strict=True):
            step = width if self.format.planar else data.stride(1)
            self.runs.append((section, Run(data, start, page_step, step, 0, width)))
            start += width * self.page_size

    def _plain(self, name: str, data: Tensor) -> tuple[Section, Run]:
        size = data.element_size()
        steps = [step * size if n > 1 else 0 for n, step in zip(data.shape[:3], data.stride(), strict=False)]
        width = data.shape[3] * size
        return ((name, width),), Run(data, 0, steps[0], steps[1], steps[2], width)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Page and offset of each of ``slots`` (int64 ``[N]``), heads, and whether there is such a slot: ``[N, 1]``,
        ``[heads]``, ``[N, heads]``. A slot that is negative or past the plane is page 0, offset 0."""
        exists = (slots >= 0) & (slots < self.pages * self.page_size)
        slots = torch.where(exists, slots, 0)[:, None]
        heads = torch.arange(self.heads, device=slots.device)
        return slots // self.page_size, slots % self.page_size, heads, exists[:, None].expand(-1, self.heads)

    def read(self, page: Tensor, offset: Tensor, head: Tensor) -> dict[str, Tensor]:
        """The parts of entries, as uint8 ``[..., n]``; the places exist and broadcast against each other."""
        parts: dict[str, Tensor] = {}
        for section, run in self.runs:
            pieces = run.read(page, offset, head).split([size for _, size in section], -1)
            parts |= {name: piece for (name, _), piece in zip(section, pieces, strict=True)}
        return parts

    def rows(self, page: Tensor, offset: Tensor, head: Tensor) -> Tensor:
        """Entries as float32 ``[..., D]``; zeros of a plane without pages."""
        if not self.pages:
            places = torch.broadcast_shapes(page.shape, offset.shape, head.shape)
            return torch.zeros(*places, self.row_dim, device=page.device)
        return codecs.decode(self.format.codec, self.read(page, offset, head))

    def write(self, page: Tensor, offset: Tensor, head: Tensor, parts: dict[str, Tensor], kept: Tensor) -> None:
        """Write the parts of entries where ``kept``; padding becomes 0."""
        for section, run in self.runs:
            pieces = [
                parts[name].reshape(*kept.shape, size)
                if name != "pad"
                else parts["values"].new_zeros(*kept.shape, size)
                for name, size in section
            ]
            run.write(page, offset, head, torch.cat(pieces, -1), kept)
