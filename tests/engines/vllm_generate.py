"""Runs vLLM's engine in this process on a model's folder and prints what it generated, as JSON.

    python vllm_generate.py FOLDER [OPTIONS]

OPTIONS as JSON are arguments of ``LLM``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm_models import NEW_TOKENS, PROMPTS
from vllm_offline import ENVIRONMENT

SETTINGS = dict(
    dtype="float32",
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_model_len=256,
    max_num_batched_tokens=96,  # prompts are computed in chunks
    block_size=32,
    num_gpu_blocks_override=16,  # too few for all at once: some are preempted and computed again
)


def main() -> None:
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    most = preempted = 0
    schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        output = schedule(self, *args, **kwargs)
        most = max(most, len(self.running))
        return output

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    Scheduler.schedule, Scheduler._preempt_request = counted, noted  # type: ignore[method-assign]
    engine = LLM(sys.argv[1], **SETTINGS | json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    from prometheus_client import generate_latest

    print(
        json.dumps(
            {
                "tokens": [list(request.outputs[0].token_ids) for request in found],
                "cached_tokens": sum(request.num_cached_tokens or 0 for request in found),
                "preempted": preempted,
                "most_running": most,
                "metrics": generate_latest().decode(),
            }
        )
    )


if __name__ == "__main__":
    main()
