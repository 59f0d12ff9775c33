"""A tiny model with random weights, and what must hold of an engine whatever happened to it."""

from __future__ import annotations

from fractions import Fraction

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.crossover import Switch
from sparse_attn.serving.engine import Engine
from sparse_attn.serving.manager import CacheManager
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.runner import Runner
from sparse_attn.serving.scheduler import Request, Scheduler, Steps

VOCABULARY, PAGE = 97, 16


def tiny_config(**more: object) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "initializer_range": 0.5,  # so that attention and the best token are clear
            "eos_token_id": None,
            **more,
        }
    )


def tiny_model(**more: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**more)).eval()


def engine(
    pages: int = 64,
    admission: Admission | None = None,
    steps: Steps | None = None,
    prefixes: bool = True,
    reserve: float = 0.15,
    watcher: object = None,
    observer: Observer | None = None,
    switches: dict[Fraction | None, Switch] | None = None,
    **runner: object,
) -> Engine:
    """An engine whose memory is exact, so that its tokens are those of the model."""
    made = Runner(tiny_model(), pages, PAGE, **{"format": "fp32", "index_format": "fp32", **runner})
    manager = CacheManager([made.memory.plane], pages, reserve=reserve)
    rule = admission or Admission(Limits(1.0, memory=1.0), None)
    chosen = Scheduler(manager, rule, steps or Steps(64, 16), prefixes=prefixes, switches=switches)
    return Engine(made, chosen, observer=observer, watcher=watcher)


class Heard(list):
    """A listener: what it was told."""

    def __call__(self, what: object) -> None:
        self.append(what)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self]

    @property
    def ended(self) -> bool:
        return bool(self) and getattr(self[-1], "finish", "refused") is not None


def prompt(seed: int, tokens: int) -> list[int]:
    return torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def submit(it: Engine, name: object, tokens: list[int], output: int = 8, **more: object) -> Heard:
    heard = Heard()
    it.submit(Request(name, list(tokens), output, **more), heard)
    return heard


def finish(it: Engine, most: int = 2000) -> None:
    for _ in range(most):
        invariants(it)
        if not it.step().parts and not it.scheduler.waiting:
            invariants(it)
            return
    raise AssertionError("requests do not end")


def invariants(it: Engine) -> None:
    """Every page is free, in a cached prefix, or in the table of a request that runs; and counted as often as it is."""
    manager, scheduler = it.scheduler.manager, it.scheduler
    pool = manager.pool
    assert set(manager.sequences) == set(scheduler.running)
    held = [page for name in manager.sequences for table in manager.tables(name).values() for page in table]
    cached = [page for prefix in manager._cached.values() for page in prefix.pages]
    counts = [held.count(page) + cached.count(page) for page in range(pool.pages)]
    assert counts == [pool.holders(page) for page in range(pool.pages)]
    assert manager.used_pages == len(set(held))
    assert not set(scheduler.running) & set(scheduler.waiting)
    for request in scheduler.running.values():
        assert manager.tokens(request.name) == request.computed


def nothing_leaked(it: Engine) -> None:
    """No request is left, and all pages can be taken again."""
    manager = it.scheduler.manager
    invariants(it)
    assert not it.scheduler.running and not it.scheduler.waiting and not it._listeners
    assert not it.runner._saved
    while manager.evict():
        pass
    assert manager.pool.free_pages == manager.pool.pages and not manager.used_pages
