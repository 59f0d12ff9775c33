"""The order of the demo: prompt, continuations, held-out text, timing, comparison."""

from __future__ import annotations

import argparse
import platform
from fractions import Fraction
from time import perf_counter

import torch

from .. import doctor
from ..layout import pages_for
from . import model, paged_llama, text
from .measure import (
    Results,
    Say,
    compare,
    continue_text,
    peak_memory,
    prefill,
    ratios,
    read_tail,
    resident_bytes,
    time_attention,
)
from .selection import BlockSelector, Budget, Selector, TokenSelector

SHARES = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
SHORTEST_TIMED = 512  # entries


def run(options: argparse.Namespace, say: Say) -> Results:
    """Do everything that ``options`` ask for, but write nothing."""
    begin = perf_counter()
    if options.threads:
        torch.set_num_threads(options.threads)
    llama, tokenizer = model.load(say)
    config = llama.config
    if options.context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise model.CannotRun(f"the model reads at most {limit} tokens, --context is {options.context}")
    page_size = options.page_size
    length = (options.context - options.tail) // page_size * page_size  # full pages, which sequences can share
    content, source = text.read(options.text)
    tokens = text.tokenize(tokenizer, content, options.skip + length + options.tail + 1)[options.skip :]
    prompt, tail = tokens[:length], tokens[length:]

    pages = pages_for(length + options.tail, page_size)
    shape = (config.num_hidden_layers, pages, page_size, config.num_key_value_heads, config.head_dim)
    selector: Selector
    if options.select == "tokens":
        selector = TokenSelector(*shape)
    else:
        selector = BlockSelector(*shape, options.block, options.score)
    cache = paged_llama.PagedCache(config, pages, page_size, selector)
    paged_llama.register()
    llama.set_attn_implementation(paged_llama.ATTENTION)
    budgets = [Budget(keep) for keep in sorted({*SHARES, options.keep}, reverse=True)]

    cache.pages.add("prompt")
    start = perf_counter()
    after_prompt = prefill(llama, cache, "prompt", prompt, say)
    prefill_s = perf_counter() - start
    continuations = []
    for budget in (None, Budget(options.keep)):
        say(f"decoding {options.new} tokens, {_name(budget)}")
        continuations.append(continue_text(llama, cache, "prompt", after_prompt, options.new, budget))
    tails = []
    for budget in (None, *budgets):
        say(f"reading {options.tail} held-out tokens, {_name(budget)}")
        tails.append(read_tail(llama, cache, "prompt", tail, budget, keep_logits=budget is None))
    peak = peak_memory()

    dense, greedy = tails[0], continuations[0]
    contexts = [SHORTEST_TIMED * 2**i for i in range(8) if SHORTEST_TIMED * 2**i < length] + [length]
    scale = config.head_dim**-0.5
    timings = time_attention(cache, "prompt", greedy.queries, scale, contexts, budgets, options.repeats, say)
    agreement = compare(llama, "sdpa", prompt, tail, dense, greedy, say)
    kv_bytes, copy_bytes = resident_bytes(cache, length + options.tail)
    return Results(
        machine=doctor.cpu()["model"],
        threads=torch.get_num_threads(),
        versions=f"sparse_attn {doctor.package()['version']}, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}",
        backend=paged_llama.backend(cache, "prompt", greedy.queries[0]),
        text=f"{source}, from token {options.skip}",
        selection=selector.name,
        budget=Budget(options.keep),
        layers=config.num_hidden_layers,
        prompt=length,
        prefill_s=prefill_s,
        continuations=continuations,
        decoded=[tokenizer.decode(continuation.tokens) for continuation in continuations],
        tails=tails,
        ratios={tail.keep: ratios(cache, tail.tally) for tail in tails[1:] if tail.keep is not None},
        timings=timings,
        agreement=agreement,
        kv_bytes=kv_bytes,
        copy_bytes=copy_bytes,
        peak_bytes=peak,
        seconds=perf_counter() - begin,
    )


def _name(budget: Budget | None) -> str:
    return "dense" if budget is None else f"{budget.keep} of the pairs"
