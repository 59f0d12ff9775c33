"""Observe mode for SGLang: pairs, ratio and FLOPs of each step on its ``/metrics`` (``--enable-metrics``).

Installing the package is enough: SGLang loads ``register`` in each process. What a batch computes is read from its
lengths, which its scheduler keeps on the host. Speculative decoding and pipeline parallelism are not observed.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from ...serving.observer import Observer
from ...serving.stats import Span
from ..observing import guarded, log, observer

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_observers: MutableMapping[Any, Observer | None] = WeakKeyDictionary()


def register() -> None:
    """Hook into the scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    count, finish = guarded(_count), guarded(_finish)

    def after_run_batch(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        count(scheduler, batch)

    def after_result(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        finish(scheduler, batch)

    # a hook that returns None leaves the result as it is
    HookRegistry.register(f"{SCHEDULER}.run_batch", after_run_batch, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.process_batch_result", after_result, HookType.AFTER)


def observer_of(scheduler: Any) -> Observer | None:
    """The observer of a scheduler, if it is observed."""
    if scheduler not in _observers:
        _observers[scheduler] = _made(scheduler)
    return _observers[scheduler]


def _made(scheduler: Any) -> Observer | None:
    """An observer of a scheduler, None where another rank's counts the same or its steps cannot be told."""
    from sglang.srt.runtime_context import get_parallel

    parallel, options = get_parallel(), scheduler.server_args
    if parallel.attn_tp_rank:
        return None
    if parallel.pp_size > 1 or not scheduler.spec_algorithm.is_none():
        log.warning("sparse_attn does not observe SGLang with speculative decoding or pipeline parallelism")
        return None
    return observer(
        scheduler.model_config.hf_text_config.to_dict(),
        model_name=options.served_model_name,
        engine=str(parallel.dp_rank or 0),
        cache_dtype=options.kv_cache_dtype,
    )


def _count(scheduler: Any, batch: Any) -> None:
    found, step = observer_of(scheduler), spans(batch)
    if found and step:
        found.step(step)


def _finish(scheduler: Any, batch: Any) -> None:
    found = observer_of(scheduler)
    if found is None:
        return
    for request in batch.reqs:
        if request.finished() and request.rid in found:
            found.finish(request.rid)


def spans(batch: Any) -> dict[Hashable, Span]:
    """For each request of a ``ScheduleBatch`` that runs, its tokens before and after."""
    requests = [request.rid for request in batch.reqs]
    if batch.forward_mode.is_decode():
        return {r: (after - 1, after) for r, after in zip(requests, batch.seq_lens_cpu.tolist(), strict=True)}
    if batch.forward_mode.is_extend():  # a mixed batch has decoding requests, too, each with one token
        lengths = zip(requests, batch.prefix_lens, batch.extend_lens, strict=True)
        return {r: (before, before + tokens) for r, before, tokens in lengths if tokens}
    return {}
