"""What the demo measures: loss on held-out text, continuations, time in attention, agreement, memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ..layout import pages_for
from .paged_llama import PagedCache, Tally, attend_layer, forward, reading_step
from .selection import Budget

PREFILL_CHUNK = 512
TAIL_CHUNK = 128
ABSOLUTE, RELATIVE = 1e-4, 1e-5
"""How far apart two float32 runs may be in a logit. At 8,192 tokens either is up to 9e-5 from the model in float64."""

Say = Callable[[str], None]


def prefill(model: Any, cache: PagedCache, sequence: str, tokens: Tensor, say: Say) -> Tensor:
    """Run a prompt densely. Returns the logits after its last token, ``[vocabulary]``."""
    logits = tokens.new_empty(0)
    for chunk in tokens.split(PREFILL_CHUNK):
        logits = forward(model, cache, sequence, chunk)[0][-1]
        say(f"prefill {cache.pages.entries(sequence)} of {len(tokens)} tokens")
    return logits


@dataclass
class Tail:
    """The held-out text under one budget (None: dense)."""

    keep: Fraction | None
    losses: Tensor
    """Nats of each token."""
    tally: Tally
    logits: Tensor | None = None

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())

    def change(self, dense: Tail) -> tuple[float, float]:
        """Relative change of perplexity to ``dense``, and its standard error over the tokens (paired)."""
        more = self.losses - dense.losses
        return float(more.mean().expm1()), float(more.std() / len(more) ** 0.5)


def read_tail(
    model: Any, cache: PagedCache, prompt: str, tokens: Tensor, budget: Budget | None, keep_logits: bool
) -> Tail:
    """Losses of ``tokens[1:]`` after ``prompt`` and the tokens before each: the first token is given, not predicted."""
    cache.pages.fork(prompt, "tail")
    tally, logits, losses = Tally(), [], []
    for chunk, targets in zip(tokens[:-1].split(TAIL_CHUNK), tokens[1:].split(TAIL_CHUNK), strict=True):
        part, step = forward(model, cache, "tail", chunk, budget, logits=len(chunk))
        tally += step.tally
        losses.append(cross_entropy(part, targets, reduction="none"))
        logits.append(part if keep_logits else part[:0])
    cache.pages.free("tail")
    keep = None if budget is None else budget.keep
    return Tail(keep, torch.cat(losses), tally, torch.cat(logits) if keep_logits else None)


@dataclass
class Continuation:
    """Greedy tokens after the prompt, under one budget (None: dense), decoded one at a time."""

    keep: Fraction | None
    tokens: list[int]
    logits: Tensor
    tallies: list[Tally]
    queries: list[Tensor]
    """The last token's queries of each layer."""

    def median_ms(self, part: str) -> float:
        """Milliseconds a token over all layers, for ``store``, ``select`` or ``attend``."""
        return 1e3 * median(getattr(tally, f"{part}_s") for tally in self.tallies)


def continue_text(
    model: Any, cache: PagedCache, prompt: str, after_prompt: Tensor, tokens: int, budget: Budget | None
) -> Continuation:
    """Decode ``tokens`` tokens greedily. ``after_prompt`` holds the logits that follow the prompt."""
    cache.pages.fork(prompt, "continuation")
    keep = None if budget is None else budget.keep
    result = Continuation(keep, [int(after_prompt.argmax())], torch.empty(0), [], [])
    rows = []
    for _ in range(tokens - 1):
        row, step = forward(model, cache, "continuation", torch.tensor(result.tokens[-1:]), budget)
        rows.append(row[-1])
        result.tokens.append(int(row[-1].argmax()))
        result.tallies.append(step.tally)
        result.queries = step.queries
    cache.pages.free("continuation")
    result.logits = torch.stack(rows)
    return result


@dataclass
class Agreement:
    """Dense attention through the op beside the attention of transformers, on the same tokens."""

    implementation: str
    largest_difference: float
    largest_logit: float
    compared: int
    """Tokens whose logits were compared."""
    same_logits: bool
    """Within the tolerance."""
    same_tokens: bool
    prefill_s: float

    @property
    def holds(self) -> bool:
        return self.same_tokens and self.same_logits


def compare(
    model: Any, implementation: str, prompt: Tensor, tail: Tensor, dense: Tail, greedy: Continuation, say: Say
) -> Agreement:
    """Run prompt, continuation and tail with an attention of transformers and its own cache."""
    from transformers import DynamicCache

    previous = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    cache = DynamicCache(config=model.config)

    def run(tokens: Tensor, rows: int) -> Tensor:
        with torch.inference_mode():
            # by place, as its name differs between versions
            result = model(tokens[None], None, None, cache, use_cache=True, logits_to_keep=rows)
        logits: Tensor = result.logits[0]
        return logits

    begin = perf_counter()
    row = torch.empty(0)
    for chunk in prompt.split(PREFILL_CHUNK):
        row = run(chunk, 1)[-1]
        say(f"the same with transformers: prefill {cache.get_seq_length()} of {len(prompt)} tokens")
    prefill_s = perf_counter() - begin
    tokens, rows = [int(row.argmax())], []
    for _ in greedy.tokens[1:]:
        rows.append(run(torch.tensor(tokens[-1:]), 1)[-1])
        tokens.append(int(rows[-1].argmax()))
    same = tokens == greedy.tokens
    pairs = list(zip(greedy.logits, rows, strict=True)) if same else []
    cache.crop(len(prompt) - cache.get_seq_length())  # negative: how many to drop
    assert dense.logits is not None
    for chunk, ours in zip(tail[:-1].split(TAIL_CHUNK), dense.logits.split(TAIL_CHUNK), strict=True):
        pairs.append((ours, run(chunk, len(chunk))))
    model.set_attn_implementation(previous)
    return Agreement(
        implementation,
        largest_difference=max(float((ours - theirs).abs().max()) for ours, theirs in pairs),
        largest_logit=max(float(theirs.abs().max()) for _, theirs in pairs),
        compared=len(tail) - 1 + (len(rows) if same else 0),
        same_logits=all(torch.allclose(ours, theirs, RELATIVE, ABSOLUTE) for ours, theirs in pairs),
        same_tokens=same,
        prefill_s=prefill_s,
    )


@dataclass
class Timing:
    """Milliseconds of one decode step's attention over all layers: a query token against ``context`` entries."""

    context: int
    sdpa: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    sparse: dict[Fraction, list[tuple[float, float]]] = field(default_factory=dict)
    """(select, attend) by share of the entries."""

    def sparse_ms(self, keep: Fraction) -> tuple[float, float]:
        """Medians of select and attend."""
        select, attend = zip(*self.sparse[keep], strict=True)
        return median(select), median(attend)


def time_attention(
    cache: PagedCache,
    sequence: str,
    queries: Sequence[Tensor],
    scale: float,
    contexts: Sequence[int],
    budgets: Sequence[Budget],
    repeats: int,
    say: Say,
) -> list[Timing]:
    """Time each variant on the cached keys and the model's own queries, in turns, so that all meet the same machine.

    PyTorch's ``scaled_dot_product_attention`` reads K and V copied out of the pages, in its quickest form for one query
    token: the query heads of a group as rows over their KV head. The copying is not counted.
    """
    pages = torch.tensor(cache.pages.page_table(sequence))
    keys, values = (
        [plane[pages].flatten(0, 1).transpose(0, 1).contiguous()[None] for plane in planes]
        for planes in (cache.keys, cache.values)
    )
    rows = [q.view(1, cache.kv_heads, -1, cache.dim) for q in queries]

    def sdpa(context: int) -> float:
        begin = perf_counter()
        for q, k, v in zip(rows, keys, values, strict=True):
            scaled_dot_product_attention(q, k[:, :, :context], v[:, :, :context], scale=scale)
        return 1e3 * (perf_counter() - begin)

    def paged(context: int, budget: Budget | None) -> tuple[float, float]:
        step = reading_step(cache, sequence, context, budget)
        for layer, q in enumerate(queries):
            attend_layer(step, layer, q, scale)
        return 1e3 * step.tally.select_s, 1e3 * step.tally.attend_s

    timings = [Timing(context, sparse={budget.keep: [] for budget in budgets}) for context in contexts]
    with torch.inference_mode():
        for turn in range(repeats + 1):  # the first is not counted
            say(f"timing attention, turn {turn} of {repeats}")
            for timing in timings:
                times = sdpa(timing.context), paged(timing.context, None)[1]
                selected = {budget.keep: paged(timing.context, budget) for budget in budgets}
                if turn:
                    timing.sdpa.append(times[0])
                    timing.dense.append(times[1])
                    for keep, pair in selected.items():
                        timing.sparse[keep].append(pair)
    return timings


@dataclass
class Ratios:
    """Three ratios to dense, kept apart."""

    resident: float
    """Bytes of K, V and the selector's copy, over bytes of K and V."""
    read: float
    """Bytes of the copy that were scored and of K and V that were attended, over the bytes of K and V of dense."""
    attended: float
    """Pairs attended over pairs of dense."""


def ratios(cache: PagedCache, tally: Tally) -> Ratios:
    """The ratios of a sparse run. Each query token counts as if it were decoded by itself."""
    copy = cache.selector.entry_bytes
    read = tally.scored_pairs * copy + tally.attended_pairs * cache.entry_bytes
    return Ratios(
        resident=(cache.entry_bytes + copy) / cache.entry_bytes,
        read=read / (tally.dense_pairs * cache.entry_bytes),
        attended=tally.attended_pairs / tally.dense_pairs,
    )


def resident_bytes(cache: PagedCache, entries: int) -> tuple[float, float]:
    """Bytes of K and V, and of the selector's copy, in the pages of ``entries`` entries."""
    paged = pages_for(entries, cache.pages.page_size) * cache.pages.page_size * cache.layers
    return paged * cache.entry_bytes, paged * cache.selector.entry_bytes


def peak_memory() -> int:
    """Largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass
class Results:
    """Everything that a run measured, for the two forms of its report. The first of several runs is the dense one."""

    machine: str
    threads: int
    versions: str
    backend: str
    text: str
    selection: str
    budget: Budget
    layers: int
    prompt: int
    prefill_s: float
    continuations: list[Continuation]
    decoded: list[str]
    tails: list[Tail]
    ratios: dict[Fraction, Ratios]
    timings: list[Timing]
    agreement: Agreement
    kv_bytes: float
    copy_bytes: float
    peak_bytes: int
    seconds: float
