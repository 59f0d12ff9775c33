"""Rows of sequences laid into shuffled paged planes, and one way to run ``attend`` on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn.registry import Impl

NO_PAGE = 2**31 - 1
"""In the columns of a page table that must never be read."""
SPARE_PAGES = 3


class Pages:
    """Pages for the entries ``[low, high)`` of each sequence, in random order in one pool.

    Some pages of the pool belong to nobody.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], page_size: int, seed: int = 0) -> None:
        self.spans, self.page_size = spans, page_size
        owned = [range(low // page_size, -(-high // page_size)) for low, high in spans]
        pool = torch.randperm(
            sum(map(len, owned)) + SPARE_PAGES, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self.count = len(pool)
        columns = max((pages.stop for pages in owned), default=0) + 1
        self.table = torch.full((len(spans), columns), NO_PAGE, dtype=torch.int32)
        for b, pages in enumerate(owned):
            for page in pages:
                self.table[b, page] = pool.pop()

    def lay(self, rows: Sequence[Tensor]) -> Tensor:
        """A plane ``[pages, page_size, ...]`` that holds ``rows[b] [n, ...]`` of sequence ``b``.

        Every other slot holds NaN (127 in planes of integers). The pages lie apart, as in a pool
        that several layers share.
        """
        filler = float("nan") if rows[0].is_floating_point() else 127
        pool = torch.full((self.count, 2, self.page_size, *rows[0].shape[1:]), filler, dtype=rows[0].dtype)
        plane = pool[:, 1]
        for b, (low, high) in enumerate(self.spans):
            entries = torch.arange(low, high)
            plane[self.table[b].long()[entries // self.page_size], entries % self.page_size] = rows[b]
        return plane


def attend(impl: Impl, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of one call on ``impl`` and its device, given back on the CPU."""
    limit = impl.limits.get("device")
    device = "cpu" if limit is None or limit.admits("cpu") else limit.values[0]

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    out, lse = sparse_attn.attend(
        *map(move, args),
        **{name: move(value) for name, value in kwargs.items()},
        return_lse=True,
        backend=impl.backend,
    )
    return out.cpu(), lse.cpu()
