"""Whether compaction would pay: a decode step over pages that lie in order, against the same over scattered pages.

`share`: logical neighbours that are physical neighbours. The pool is twice as large as the sequence, and much larger
than the caches of the processor. Calls take turns; medians of the quotient of neighbouring calls, with quartiles.
`copy`: time to copy what the step reads, in steps.
Run: python benchmarks/adjacency.py [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import quantiles
from time import perf_counter

import torch
from torch import Tensor

from sparse_attn import attend
from sparse_attn.serving.waste import adjacency

CONTEXT = 65_536
SHARES = (1.0, 0.5, 0.0)
PAGES = (16, 64, 256)


def table(pages: int, share: float) -> list[int]:
    """`pages` of a pool twice as large, about `share` of whose neighbours lie together."""
    run = round(1 / (1 - share)) if share < 1 else pages
    starts = torch.randperm(2 * pages // run)[: -(-pages // run)] * run
    return (starts[:, None] + torch.arange(run)).flatten()[:pages].tolist()


def calls(page_size: int) -> Iterator[tuple[str, Callable[[Tensor], object], float]]:
    """Of each kind of cache: its name, a decode step with a page table, and the bytes that it reads."""
    pages = CONTEXT // page_size
    lengths = dict(
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([CONTEXT], dtype=torch.int32),
        max_seqlen_q=1,
        max_seq_len=CONTEXT,
    )
    quarter = torch.rand(8, CONTEXT).topk(CONTEXT // 4).indices.sort(-1).values.int()[None]
    k, v = torch.randn(2, 2 * pages, page_size, 8, 128).bfloat16()
    q = torch.randn(1, 32, 128).bfloat16()
    for name, indices, entries in (("dense", None, CONTEXT), ("a quarter", quarter, CONTEXT // 4)):

        def gqa(page_table: Tensor, indices: Tensor | None = indices) -> object:
            return attend(q, scale=0.1, v_dim=128, kv=k, v=v, page_table=page_table, indices=indices, **lengths)

        yield f"GQA 32/8, bf16, {name}", gqa, entries * 8 * 128 * 2 * 2.0
    latent = torch.randn(2 * pages, page_size, 1, 576).bfloat16()
    query = torch.randn(1, 16, 576).bfloat16()
    chosen = torch.randperm(CONTEXT)[:2048].int()[None, None]

    def mla(page_table: Tensor) -> object:
        return attend(query, scale=0.1, v_dim=512, kv=latent, page_table=page_table, indices=chosen, **lengths)

    yield "V3.2, 16 heads, bf16, 2048 of 64K", mla, 2048 * 576 * 2.0


def seconds(function: Callable[[Tensor], object], argument: Tensor) -> float:
    start = perf_counter()
    function(argument)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print("| call | page | " + " | ".join(f"share {share:g}" for share in SHARES[1:]) + " | copy |")
    print("|---" * (2 + len(SHARES)) + "|")
    for page_size in PAGES:
        tables = [table(CONTEXT // page_size, share) for share in SHARES]
        for share, made in zip(SHARES, tables, strict=True):
            assert abs(adjacency([made]) - share) < 0.02
        given = [torch.tensor([made], dtype=torch.int32) for made in tables]
        for name, call, size in calls(page_size):
            times = [[seconds(call, made) for made in given] for _ in range(options.rounds + 1)][1:]
            cells = []
            for n in range(1, len(SHARES)):
                low, middle, high = quantiles([row[n] / row[0] for row in times], n=4)
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            source = torch.empty(int(size) // 2, dtype=torch.bfloat16)
            target = torch.zeros_like(source)
            copied = [seconds(target.copy_, source) for _ in range(3)]
            steps = min(copied) / quantiles([row[0] for row in times], n=4)[1]
            print(f"| {name} | {page_size} | {' | '.join(cells)} | {steps:.2f} |")


if __name__ == "__main__":
    main()
