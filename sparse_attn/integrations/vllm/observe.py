"""Observe mode for vLLM: pairs, ratio and FLOPs of each step on its ``/metrics``, by its own kernels and scheduler.

Installing the package is enough: vLLM loads ``register`` in each of its processes. In the process of the scheduler,
what a step computed is counted from the scheduler's output, after the step. No argument and no output of vLLM changes.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Hashable
from typing import Any

from ...serving.observer import Observer
from ...serving.stats import Span, StepStats
from ..observing import guarded, observer


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Calling it again does nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrapped = Scheduler.__init__
    if hasattr(wrapped, "observed"):
        return
    observe = guarded(attach)

    @functools.wraps(wrapped)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, *args, **kwargs)
        observe(self)

    init.observed = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init


def watch(scheduler: Any, export: bool = True) -> Observer:
    """An observer of the model that a scheduler serves."""
    config = scheduler.vllm_config
    model, speculative = config.model_config, config.speculative_config
    served = model.served_model_name
    return observer(
        model.hf_text_config.to_dict(),
        model_name=served[0] if isinstance(served, list) else served,
        engine=str(config.parallel_config.data_parallel_index),
        cache_dtype=config.cache_config.cache_dtype,
        drafts=speculative.num_speculative_tokens if speculative else 0,
        runs_dense=not _has_indexer(scheduler.kv_cache_config),
        export=export,
    )


def attach(scheduler: Any) -> None:
    """Observe the steps of a scheduler."""
    scheduler.sparse_attn_observer = watch(scheduler)
    count, clock = guarded(functools.partial(note, scheduler.sparse_attn_observer)), Clock()
    schedule, update = scheduler.schedule, scheduler.update_from_output

    @functools.wraps(schedule)
    def timed(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        clock.start(output)
        return output

    @functools.wraps(update)
    def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(scheduler_output, *args, **kwargs)
        count(scheduler_output, clock.stop(scheduler_output))
        return outputs

    scheduler.schedule, scheduler.update_from_output = timed, update_from_output


def observer_of(scheduler: Any) -> Observer | None:
    """The observer that is attached to a scheduler, if one is."""
    return getattr(scheduler, "sparse_attn_observer", None)


class Clock:
    """Seconds of a step: from when it was scheduled to its outputs, without the time of the step before it."""

    def __init__(self) -> None:
        self._begun: deque[tuple[Any, float]] = deque()
        self._end = 0.0

    def start(self, output: Any) -> None:
        self._begun.append((output, time.perf_counter()))

    def stop(self, output: Any) -> float | None:
        """None if the step was not seen to start."""
        while self._begun:
            started, at = self._begun.popleft()
            if started is output:
                begin, self._end = max(at, self._end), time.perf_counter()
                return self._end - begin
        return None


def note(found: Observer, output: Any, seconds: float | None = None) -> StepStats | None:
    """Count what a ``SchedulerOutput`` had the model compute, if anything, and the requests that have finished."""
    for request in output.finished_req_ids:
        if request in found:
            found.finish(request)
    return found.step(spans(output), seconds) if output.num_scheduled_tokens else None


def spans(output: Any) -> dict[Hashable, Span]:
    """For each request of a ``SchedulerOutput``, its tokens before and after the step."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    before = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {request: (before[request], before[request] + tokens) for request, tokens in scheduled.items()}


def _has_indexer(kv_cache: Any) -> bool:
    """Whether a layer caches index keys. Other platforms than vLLM's own may keep them elsewhere: taken for granted."""
    from vllm.platforms import current_platform

    names = (name for group in kv_cache.kv_cache_groups for name in group.layer_names)
    return current_platform.is_out_of_tree() or any("index" in name for name in names)
