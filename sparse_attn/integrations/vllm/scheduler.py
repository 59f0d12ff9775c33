"""vLLM's scheduler with the admission rule, for its own kernels as for this package's.

    --scheduler-cls sparse_attn.integrations.vllm.scheduler.SparseAttnScheduler
    --additional-config '{"sparse_attn": {"admission": {"mode": "enforce", "budget": 0.05, "profile": "profile.json"}}}'

The rule decides when vLLM is about to begin a waiting request. What it holds stays at the head of the queue.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from ...layout import pages_for
from ...serving.admission import Load, Waiting
from ...serving.cost import Work
from ..admitting import Gate, admission
from . import observe


class SparseAttnScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        observer = observe.observer_of(self) or observe.watch(self, export=False)
        config, self._dense = self.vllm_config, observer.runs_dense
        asked = (config.additional_config or {}).get("sparse_attn", {}).get("admission", {})
        device = f"{current_platform.get_device_name()}, {observer.model.name}, {config.cache_config.cache_dtype}"
        self.gate = Gate(admission(asked, observer.model, device), observer.exporter)
        self._clock = observe.Clock()
        self._most = self.max_num_scheduled_tokens
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            begins = request.status != RequestStatus.RUNNING and not request.num_computed_tokens
            if begins and not self.gate.admits(
                self._waiting(request, kwargs.get("num_new_computed_tokens", 0)), self._load()
            ):
                return None
            return allocate(request, num_new_tokens, *args, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate_slots

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.max_num_scheduled_tokens = self._budget()
        output = super().schedule(*args, **kwargs)
        self._clock.start(output)
        for request in output.finished_req_ids:
            self.gate.forget(request)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        seconds = self._clock.stop(scheduler_output)
        works = [Work(before, after, self._dense) for before, after in observe.spans(scheduler_output).values()]
        self.gate.observe(works, seconds or 0.0)
        return outputs

    def _pages(self, tokens: int) -> int:
        groups = self.kv_cache_config.kv_cache_groups
        return sum(pages_for(max(tokens, 0), group.kv_cache_spec.block_size) for group in groups)

    def _waiting(self, request: Any, cached: int) -> Waiting:
        output = max(min(request.max_tokens, self.max_model_len - request.num_prompt_tokens), 0)
        whole = self._pages(request.num_prompt_tokens + output)
        return Waiting(
            request.request_id,
            prompt=request.num_tokens,
            output=output,
            # at most the pool's, as vLLM has refused what is longer; windows keep less than is counted here
            pages=min(self._pages(request.num_tokens - cached), self._pool),
            most_pages=min(whole, self._pool),
            waited=time.time() - request.arrival_time,
            dense=self._dense,
        )

    @property
    def _pool(self) -> int:
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one stands for no block

    def _load(self) -> Load:
        used = self._pool - self.kv_cache_manager.block_pool.get_num_free_blocks()
        running = tuple(Work.decode(r.num_tokens + 1, self._dense) for r in self.running)
        return Load(self._pool, used, self.kv_cache_manager.watermark_blocks, running)

    def _budget(self) -> int:
        """Tokens of the next step: as many of a prompt's chunk as leave it within the rule's budget."""
        rule = self.gate.rule
        if rule.predictor is None or rule.mode != "enforce":
            return self._most
        decoding = [r for r in self.running if r.num_computed_tokens >= r.num_prompt_tokens]
        prompts = [r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens]
        if not prompts and self.waiting:
            prompts = [self.waiting.peek_request()]
        room = self._most - len(decoding)
        if not prompts or room < 1:
            return self._most
        before = prompts[0].num_computed_tokens
        works = [Work.decode(r.num_tokens + 1, self._dense) for r in decoding]
        return len(decoding) + rule.chunk(works, before, max(prompts[0].num_tokens - before, 1), room, self._dense)
