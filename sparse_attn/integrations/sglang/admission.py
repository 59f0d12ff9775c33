"""The admission rule in SGLang: asked before its ``PrefillAdder`` takes a request into a batch.

    SPARSE_ATTN_ADMISSION='{"mode": "enforce", "budget": 0.05, "profile": "profile.json"}'

What the rule holds stays at the head of the queue. Ranks of tensor parallelism each decide for themselves, and must
decide alike: as the rule goes by time, it is refused there in mode ``enforce``.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ... import configs, env
from ...layout import pages_for
from ...serving.admission import Load, Waiting
from ...serving.cost import Work
from ..admitting import Gate, admission
from . import observe

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"

_gate: Gate | None = None
_since: dict[str, float] = {}
"""When a request was first asked about, by ``time.monotonic``."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{observe.SCHEDULER}.__init__", after_init, HookType.AFTER)
    HookRegistry.register(ADDER, around_add, HookType.AROUND)


def after_init(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The rule for a scheduler, of which a process has one."""
    global _gate
    from sglang.srt.runtime_context import get_parallel

    options, config = scheduler.server_args, scheduler.model_config.hf_text_config.to_dict()
    observer = observe.observer_of(scheduler)
    model = observer.model if observer else configs.plan(config)[0]
    rule = admission(
        json.loads(env.ADMISSION.get()), model, f"{options.device}, {model.name}, {options.kv_cache_dtype}"
    )
    if rule.mode == "enforce" and get_parallel().attn_tp_size > 1:
        raise ValueError("SPARSE_ATTN_ADMISSION: mode: expected off or observe with tensor parallelism, got enforce")
    _gate = Gate(rule, observer.exporter if observer else None)


def around_add(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """``add_one_req``, if the rule admits the request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if _gate is None or _gate.admits(_waiting(adder, req), _load(adder)):
        result = original(adder, req, *args, **kwargs)
        if req in adder.can_run_list and _gate is not None:
            _since.pop(req.rid, None)
            _gate.forget(req.rid)
        return result
    return AddReqResult.OTHER


def _tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _waiting(adder: Any, req: Any) -> Waiting:
    tokens, pool = _tokens(req), _pool(adder)
    left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    return Waiting(
        req.rid,
        prompt=tokens,
        output=left,
        # at most the pool's: SGLang has refused what is longer
        pages=min(pages_for(max(tokens - req.prefix_len, 0), adder.page_size), pool),
        most_pages=min(pages_for(tokens + left, adder.page_size), pool),
        waited=time.monotonic() - _since.setdefault(req.rid, time.monotonic()),
    )


def _pool(adder: Any) -> int:
    pages: int = adder.token_to_kv_pool_allocator.size // adder.page_size
    return pages


def _load(adder: Any) -> Load:
    free = adder.token_to_kv_pool_allocator.available_size() + adder.tree_cache.evictable_size()
    running = [*(adder.running_batch.reqs if adder.running_batch else ()), *adder.can_run_list]
    works = tuple(Work.decode(_tokens(r) + 1) for r in running)
    return Load(_pool(adder), max(_pool(adder) - free // adder.page_size, 0), 0, works)
