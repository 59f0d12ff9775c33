"""What references share: which rows of a call count, where an entry lies, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from .. import layout
from ..checks import expect, refuse
from ..planes import Plane


class Batch(Protocol):
    """The arguments of any op with packed rows."""

    @property
    def cu_seqlens_q(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class Queries(Batch, Protocol):
    """The arguments of any op with packed query rows."""

    @property
    def q(self) -> Tensor: ...


def sequences(op: str, a: Batch, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, its first row, the row after its last, its length) of every sequence in ``rows`` rows."""
    starts, lengths = a.cu_seqlens_q.tolist(), a.seq_lens.tolist()
    expect(starts[0] == 0, op, "cu_seqlens_q", "a first value of 0", starts[0])
    expect(starts[-1] <= rows, op, "cu_seqlens_q", f"a last value of at most T = {rows}", starts[-1])
    for b, length in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        expect(start <= end, op, "cu_seqlens_q", "ascending values", starts)
        expect(end - start <= a.max_seqlen_q, op, "max_seqlen_q", f"at least {end - start}", a.max_seqlen_q)
        expect(length <= a.max_seq_len, op, "max_seq_len", f"at least {length}", a.max_seq_len)
        yield b, start, end, length


def query_rows(op: str, a: Queries) -> Iterator[tuple[int, int, int]]:
    """(row, sequence, token position) of every row that is not padding."""
    for b, start, end, length in sequences(op, a, a.q.shape[0]):
        for t in range(start, end):
            position = length - (end - t)
            if position >= 0:
                yield t, b, position


def where(op: str, table: Tensor, entries: Tensor, plane: Plane, name: str, b: int) -> tuple[Tensor, Tensor]:
    """Page and offset of entries of sequence ``b``, refused where the table has no page for them."""
    if len(entries) == 0:
        return entries, entries
    pages, page_size = plane.pages, plane.page_size
    last = int(entries.max())
    if last >= len(table) * page_size:
        expected = f"a page for entry {last} of sequence {b}"
        raise refuse(op, name, expected, f"{len(table)} pages of {page_size} entries")
    page, offset = layout.locate(table.long(), entries, page_size)
    valid = (page >= 0) & (page < pages)
    if not bool(valid.all()):
        raise refuse(op, name, f"pages from 0 to {pages - 1} in sequence {b}", int(page[~valid][0]))
    return page, offset


def read(plane: Plane, at: tuple[Tensor, Tensor], head: int) -> Tensor:
    """Rows of one head as float64."""
    return plane.rows(at, slice(head, head + 1))[:, 0].double()


def inside(op: str, name: str, slots: Tensor, plane: Plane) -> None:
    """Refuse slots past the plane."""
    last = int(slots.max()) if len(slots) else -1
    expect(last < plane.slots, op, name, f"less than pages * page_size = {plane.slots}", last)
