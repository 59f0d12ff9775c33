"""Runs vLLM's engine in this process on a small random model and prints what it did, as JSON.

    python vllm_offline.py FOLDER [CONFIG]

The folder receives the model's configuration, CONFIG as JSON over the smallest one. Weights are random but the same in
each run, and so is the batch of each step, as there is one process. With ``VLLM_PLUGINS`` empty nothing observes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SMALL = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
)
ENVIRONMENT = dict(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)
PROMPTS = [[3 + (7 * i + j) % 500 for j in range(length)] for i, length in enumerate((5, 90, 33, 64, 200, 1))]
PROMPTS.append(PROMPTS[4][:160] + [9, 8, 7])  # begins as another: its cached pages are not computed again
NEW_TOKENS = 24


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL | changes))


def plain(output: Any) -> dict[str, Any]:
    """What a ``SchedulerOutput`` says of lengths."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [[request.req_id, request.num_computed_tokens] for request in output.scheduled_new_reqs],
        "cached": [list(pair) for pair in zip(cached.req_ids, cached.num_computed_tokens, strict=True)],
        "scheduled": output.num_scheduled_tokens,
        "finished": sorted(output.finished_req_ids),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    write_config(folder, **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))

    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from sparse_attn.integrations.vllm import observe as hook

    steps: list[dict[str, Any]] = []
    cost = dict(steps=0, seconds=0.0)
    note, update = hook.note, Scheduler.update_from_output

    def recorded(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(plain(scheduler_output))
        return update(self, scheduler_output, *args, **kwargs)

    def timed(*args: Any) -> None:
        start = time.thread_time()
        note(*args)
        cost["seconds"] += time.thread_time() - start
        cost["steps"] += 1

    hook.note, Scheduler.update_from_output = timed, recorded  # type: ignore[method-assign]
    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=96,
        block_size=32,
        num_gpu_blocks_override=16,  # too few for all at once: some are preempted and computed again
        seed=1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    from prometheus_client import generate_latest

    print(
        json.dumps(
            {
                "tokens": [list(request.outputs[0].token_ids) for request in found],
                "steps": steps,
                "cost": cost | {"step_seconds": seconds / max(len(steps), 1)},
                "metrics": generate_latest().decode(),
            }
        )
    )


if __name__ == "__main__":
    main()
