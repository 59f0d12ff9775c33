"""``attend`` of rows that an operator does not read where they lie: packed formats on A2 and A3, strided pools, and
pools past 2**31 elements.

What each query row attends is gathered into a workspace of bf16 rows, and the operator is called on that. Every query
row becomes a sequence of its own, of which only what counts is there. Query rows are taken so many at a time that the
workspace stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import sparse_flash, sparse_mla
from .memory import PLAIN, Plane
from .rows import pack, place, ranges, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

PAGE = 64
"""Entries of a page of the workspace."""
WORKSPACE = 1 << 28
"""Bytes of gathered rows in float32 at a time."""


def latent(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Selected rows of V3.2 and GLM-5, for ``SparseFlashAttention``."""
    assert a.indices is not None and a.kv is not None and a.page_table is not None
    if out.numel() == 0 or a.indices.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        return
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    low, high = ranges(a.kv_range, rows.tokens if a.causal else rows.length, rows)
    plane = Plane(a.kv, a.format, a.kv_scale, a.page_size)
    rope = None if a.kv_rope is None else Plane(a.kv_rope, PLAIN[a.kv_rope.dtype])
    pages = -(-a.indices.shape[2] // PAGE)
    width = pages * PAGE
    for part in parts(len(a.q), width * a.q.shape[2]):
        counts = None if a.index_counts is None else a.index_counts[part]
        entries, count = pack(a.indices[part], counts, high[part], width, low[part])
        keys = gathered([plane] if rope is None else [plane, rope], a.page_table, rows.sequence[part], entries[:, 0])
        nope, turned = keys.view(-1, PAGE, 1, keys.shape[-1]).split([sparse_flash.NOPE, sparse_flash.ROPE], -1)
        call = one_row_each(a, part, count[:, 0], width)._replace(
            kv=nope.contiguous(),
            kv_rope=turned.contiguous(),
            kv_scale=None,
            page_table=pages_of(len(entries), pages, pages, keys.device),
            format="bf16",
            kv_range=None,
            indices=every(len(entries), width, keys.device),
            index_counts=None,
            causal=True,
        )
        sparse_flash.sparse_flash_attention(call, out[part], None)


def windowed(run: Callable[..., None], a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """A window, alone or with a selection, for ``SparseFlashMla`` as ``run`` calls it.

    A sequence is cut to its last tokens: as many as the window, or as the selection may have entries. In its window
    plane a few pages repeat, as in a ring, so that the window's rows alone are gathered.
    """
    if out.numel() == 0 or len(a.seq_lens) == 0:
        out.zero_()
        return
    assert a.win is not None and a.win_page_table is not None
    rows = rows_of(len(a.q), a.cu_seqlens_q, a.seq_lens)
    window = Plane(a.win, a.win_format, None, a.win_page_size)
    width = 0 if a.indices is None else sparse_mla.width_of(a.indices)
    longest = max(a.ratio * width, a.window)
    columns = -(-longest // PAGE)
    ring = -(-a.window // PAGE)
    for part in parts(len(a.q), (ring * PAGE + width) * a.q.shape[2]):
        tokens, sequence = rows.tokens[part], rows.sequence[part]
        length = tokens.clamp(max=longest)
        slots = torch.arange(ring * PAGE, device=a.q.device)
        newest = (length - 1)[:, None]
        positions = newest - (newest - slots) % (ring * PAGE)  # the newest that a slot of the ring stands for
        seen = (positions >= 0) & (positions > newest - a.window)
        wanted = torch.where(seen, positions + (tokens - length)[:, None], -1)
        call = one_row_each(a, part, length, longest)._replace(
            win=gathered([window], a.win_page_table, sequence, wanted).view(-1, PAGE, 1, a.q.shape[2]),
            win_page_table=pages_of(len(tokens), columns, ring, a.q.device),
            win_format="bf16",
            win_page_size=0,
        )
        if a.indices is not None:
            assert a.kv is not None and a.page_table is not None
            counts = None if a.index_counts is None else a.index_counts[part]
            entries, count = pack(a.indices[part], counts, tokens // a.ratio, width)
            plane = Plane(a.kv, a.format, a.kv_scale, a.page_size)
            call = call._replace(
                kv=gathered([plane], a.page_table, sequence, entries[:, 0]).view(-1, PAGE, 1, a.q.shape[2]),
                kv_scale=None,
                page_table=pages_of(len(tokens), width // PAGE, width // PAGE, a.q.device),
                format="bf16",
                page_size=0,
                indices=every(len(tokens), width, a.q.device),
                index_counts=count,
            )
        run(call, out[part], None)


def parts(rows: int, elements: int) -> Iterator[slice]:
    """Query rows so many at a time that ``elements`` for each fit the workspace."""
    most = max(WORKSPACE // (4 * elements), 1)
    for first in range(0, rows, most):
        yield slice(first, min(first + most, rows))


def gathered(planes: list[Plane], table: Tensor, sequence: Tensor, entries: Tensor) -> Tensor:
    """bf16 rows ``[R, N, D]`` of the ``entries [R, N]`` of each row's sequence, zeros for negative ones. What has no
    page is NaN, so that it is seen in the result. Planes hold parts of one row."""
    wanted = entries >= 0
    first = planes[0]
    page, offset, lost = place(table, sequence[:, None], entries.long(), wanted, first.pages, first.page_size)
    head = torch.zeros((), dtype=torch.int64, device=entries.device)
    found = torch.cat([plane.rows(page, offset, head) for plane in planes], -1)
    found = torch.where(wanted[..., None], found, 0.0)
    return torch.where(lost[..., None], torch.nan, found).to(torch.bfloat16)


def one_row_each(a: Attend, part: slice, lengths: Tensor, longest: int) -> Attend:
    """A call in which each query row of ``part`` is a sequence of its own."""
    q = a.q[part]
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    lengths = lengths.to(torch.int32)
    return a._replace(q=q, cu_seqlens_q=starts, seq_lens=lengths, max_seqlen_q=1, max_seq_len=longest, plan=None)


def pages_of(rows: int, columns: int, pages: int, device: torch.device) -> Tensor:
    """Page table of a workspace of ``pages`` pages a row, which repeat over the ``columns``."""
    first = torch.arange(rows, device=device)[:, None] * pages
    return (first + torch.arange(columns, device=device) % pages).to(torch.int32)


def every(rows: int, width: int, device: torch.device) -> Tensor:
    """The indices of all entries of each row's workspace."""
    return torch.arange(width, dtype=torch.int32, device=device).expand(rows, 1, width)
