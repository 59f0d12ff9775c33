"""Cases of `merge` and `select_merge`: results of shards of a long context, with the same in eager torch as a peer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_attn import resolve
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select_merge import SelectMerge

from .timing import OURS, Case

VARIANTS = 4


def make_merge(parts: int, dtype: torch.dtype) -> Case:
    """A decode step of 16 sequences, 64 heads of 512."""
    torch.manual_seed(0)
    calls = [Merge(torch.randn(parts, 16, 64, 512).to(dtype), torch.randn(parts, 16, 64)) for _ in range(VARIANTS)]
    impl = resolve("merge", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        out, lse = torch.empty(16, 64, 512, dtype=dtype), torch.empty(16, 64)
        impl.run(calls[i], out, lse)
        return out

    def peer(i: int) -> Tensor:
        outs, lses = calls[i][:2]
        lses.logsumexp(0)
        return (lses.softmax(0)[..., None] * outs).sum(0).to(dtype)

    elements = calls[0].outs.numel()
    moved = (elements + elements // parts) * dtype.itemsize
    return case(f"merge {parts} parts, {str(dtype).removeprefix('torch.')}", run, peer, moved)


def make_select_merge(shards: int) -> Case:
    """16 rows, 2048 of each shard, 2048 of all."""
    torch.manual_seed(0)
    shape = (shards, 16, 1, 2048)
    offsets = (torch.arange(shards) * 8192).int()[:, None].expand(-1, 16)
    calls = [
        SelectMerge(torch.rand(*shape[:3], 8192).argsort(-1)[..., :2048].int(), torch.randn(shape), offsets, 2048)
        for _ in range(VARIANTS)
    ]
    impl = resolve("select_merge", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        lists = 16, 1, 2048
        indices, values = torch.empty(lists, dtype=torch.int32), torch.empty(lists)
        impl.run(calls[i], indices, torch.empty(lists[:2], dtype=torch.int32), values)
        return indices

    def peer(i: int) -> Tensor:
        indices, values, starts = calls[i][:3]
        numbers, scores = ((x.permute(1, 2, 0, 3).flatten(2)) for x in (indices + starts[..., None, None], values))
        places = scores.topk(2048, dim=-1, sorted=False).indices
        scores.gather(-1, places)
        return numbers.gather(-1, places).sort(-1).values

    return case(f"select_merge {shards} x 2048", run, peer, 8 * calls[0].shard_indices.numel() + 8 * 16 * 2048)


def case(name: str, run: Callable[[int], Tensor], peer: Callable[[int], Tensor], moved: int) -> Case:
    def check() -> None:
        """Raise if the peer joins to something else."""
        torch.testing.assert_close(peer(0), run(0), atol=2e-2, rtol=2e-2)

    return Case(name, {OURS: run, "torch": peer}, VARIANTS, bytes=float(moved), limit="copy", check=check)
