"""A step of an engine: lengths and tables, as ``attend`` and ``select`` take them, once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Step:
    """``tokens`` query rows; those from ``cu_seqlens_q[-1]`` on are padding. The others are arguments of ``attend``."""

    tokens: int
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    max_seqlen_q: int
    max_seq_len: int
    ranges: dict[int, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> dict[str, Any]:
        """The arguments that are the same in every layer."""
        return dict(
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            page_table=self.page_table,
            max_seqlen_q=self.max_seqlen_q,
            max_seq_len=self.max_seq_len,
        )

    def last(self, window: int) -> Tensor:
        """Ranges of each row's last ``window`` tokens, itself included, int32 ``[T, 2]``."""
        if window not in self.ranges:
            rows = torch.arange(self.tokens, dtype=torch.int32, device=self.seq_lens.device)
            sequence = torch.searchsorted(self.cu_seqlens_q[1:], rows, right=True).clamp(max=len(self.seq_lens) - 1)
            end = self.seq_lens[sequence] - self.cu_seqlens_q[1:][sequence] + rows + 1
            self.ranges[window] = torch.stack([(end - window).clamp(min=0), end], -1).int()
        return self.ranges[window]
