"""A decode loop for an engine of your own: continuous batching on paged planes, in buffers that never move.

Every step runs a fixed number of query rows for a fixed number of seats. Prompts enter in chunks beside the tokens that
others decode, so one kind of step does it all; rows and seats that are not in use are padding. ``step`` fills buffers
of its caller, at the same addresses every time, and reads nothing back, so a graph can hold it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.nn.functional import rms_norm

from sparse_attn.layout import pages_for
from sparse_attn.serving.pages import PageAllocator

VOCABULARY, WIDTH, LAYERS, Q_HEADS, KV_HEADS, DIM = 97, 32, 2, 4, 2, 8
PAGE, PAGES, SEATS, ROWS, LENGTH, BUDGET = 8, 40, 4, 16, 96, 24
ops = torch.ops.sparse_attn


class Model:
    """A small Llama-style model with random weights."""

    def __init__(self, device: str = "cpu") -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).mul(shape[-2] ** -0.5).to(device)

        generator = torch.Generator().manual_seed(0)
        self.embedding, self.head = weights(VOCABULARY, WIDTH) * 4, weights(WIDTH, VOCABULARY)
        self.qkv = weights(LAYERS, WIDTH, (Q_HEADS + 2 * KV_HEADS) * DIM)
        self.out = weights(LAYERS, Q_HEADS * DIM, WIDTH)
        self.up, self.down = weights(LAYERS, WIDTH, 2 * WIDTH), weights(LAYERS, 2 * WIDTH, WIDTH)

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values ``[T, heads, DIM]``, the first two rotated."""
        heads = (rms_norm(x, (WIDTH,)) @ self.qkv[layer]).view(len(x), -1, DIM)
        angles = positions[:, None, None] * 0.1 ** torch.arange(DIM // 2, device=x.device)
        a, b = heads.chunk(2, -1)
        rotated = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        q, k, _ = rotated.split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
        return q, k, heads[:, -KV_HEADS:]

    def finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention in a layer."""
        x = x + attended.flatten(1) @ self.out[layer]
        return x + (rms_norm(x, (WIDTH,)) @ self.up[layer]).relu() @ self.down[layer]


@dataclass
class Request:
    tokens: list[int]  # the prompt, then also what is generated
    end: int  # how many tokens it will have
    stored: int = 0
    slots: list[int] = field(default_factory=list)


class Engine:
    def __init__(self, model: Model) -> None:
        self.model, self.pages = model, PageAllocator(PAGES, PAGE)
        self.seats: list[Request | None] = [None] * SEATS
        with torch.device(model.head.device):
            self.planes = torch.zeros(LAYERS, 2, PAGES, PAGE, KV_HEADS, DIM)
            # inputs of a step
            self.tokens, self.positions, self.slots = torch.zeros(3, ROWS, dtype=torch.long)
            self.starts = torch.zeros(SEATS + 1, dtype=torch.int32)
            self.seq_lens = torch.zeros(SEATS, dtype=torch.int32)
            self.table = torch.zeros(SEATS, pages_for(LENGTH, PAGE), dtype=torch.int32)
            # what it fills
            self.indices = torch.zeros(ROWS, KV_HEADS, BUDGET, dtype=torch.int32)
            self.counts = torch.zeros(ROWS, KV_HEADS, dtype=torch.int32)
            self.attended = torch.zeros(ROWS, Q_HEADS, DIM)
            self.chosen = torch.zeros(SEATS, dtype=torch.long)

    def step(self) -> None:
        """The work of the device: the same kernels, shapes and addresses every time."""
        batch = dict(cu_seqlens_q=self.starts, seq_lens=self.seq_lens, page_table=self.table, scale=DIM**-0.5)
        batch |= dict(max_seqlen_q=ROWS, max_seq_len=LENGTH, format="fp32")
        rule = dict(k=BUDGET, keep_first=1, keep_last=4, score="softmax_sum", out_heads=KV_HEADS)
        lists = dict(indices=self.indices, index_counts=self.counts)
        x = self.model.embedding[self.tokens]
        for layer, (keys, values) in enumerate(self.planes):
            q, k, v = self.model.project(layer, x, self.positions)
            ops.store(k, keys, self.slots, format="fp32")
            ops.store(v, values, self.slots, format="fp32")
            ops.select.out(q, None, keys=keys, **rule, **batch, indices=self.indices, counts=self.counts)
            ops.attend.out(q, kv=keys, v=values, v_dim=DIM, **lists, **batch, out=self.attended)
            x = self.model.finish(layer, x, self.attended)
        last = x[(self.starts[1:] - 1).clamp(min=0)]  # of every seat
        self.chosen.copy_((rms_norm(last, (WIDTH,)) @ self.model.head).argmax(-1))

    def admit(self, waiting: deque[Request]) -> None:
        """Seat requests while there are seats, and pages for all that they may store."""
        for seat in range(SEATS):
            if waiting and self.seats[seat] is None and pages_for(waiting[0].end, PAGE) <= self.pages.free_pages:
                request = self.seats[seat] = waiting.popleft()
                self.pages.add(seat)
                request.slots = self.pages.extend(seat, request.end)
                pages = self.pages.page_table(seat)
                self.table[seat, : len(pages)] = torch.tensor(pages)

    def fill(self) -> None:
        """Set the inputs of a step."""
        rows: list[tuple[int, int, int]] = []
        lengths, ends = [], []
        for seat, request in enumerate(self.seats):
            if request is not None:
                later = sum(other is not None for other in self.seats[seat + 1 :])  # each gets at least one row
                first = request.stored
                request.stored = min(len(request.tokens), first + ROWS - len(rows) - later)
                rows += [(request.tokens[i], i, request.slots[i]) for i in range(first, request.stored)]
            lengths.append(request.stored if request else 0)
            ends.append(len(rows))
        rows += [(0, 0, -1)] * (ROWS - len(rows))  # padding is not stored
        for buffer, values in zip((self.tokens, self.positions, self.slots), zip(*rows, strict=True), strict=True):
            buffer.copy_(torch.tensor(values))
        self.starts[1:].copy_(torch.tensor(ends))
        self.seq_lens.copy_(torch.tensor(lengths))

    def run(self, requests: list[Request]) -> None:
        """Append to each request's tokens until it has all of them."""
        for r in requests:
            if not 0 < len(r.tokens) < r.end <= min(LENGTH, PAGES * PAGE):
                raise ValueError(f"run: expected a prompt and an end of at most {LENGTH} tokens, got {r}")
        waiting = deque(requests)
        while waiting or any(self.seats):
            self.admit(waiting)
            self.fill()
            self.step()
            for seat, (request, token) in enumerate(zip(self.seats, self.chosen.tolist(), strict=True)):
                if request is not None and request.stored == len(request.tokens):
                    request.tokens.append(token)
                    if len(request.tokens) == request.end:
                        self.pages.free(seat)
                        self.seats[seat] = None


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in (3, 40, 17, 60, 5, 29)]
    requests = [Request(prompt, len(prompt) + 12) for prompt in prompts]
    Engine(Model()).run(requests)
    for request in requests:
        print(*request.tokens[-12:])
