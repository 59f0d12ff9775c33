"""vLLM's engine on this package's kernels: greedy tokens are those of transformers; and its scheduler with admission.

Prompts are computed in chunks, one is found in cached pages, and requests are preempted. `make test-engines`
makes an environment with vLLM and runs this. Elsewhere it is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparse_attn.serving.exposition import parse

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: `make test-engines` makes an environment with it", allow_module_level=True)

HERE = Path(__file__).parent
CUSTOM = dict(attention_config=dict(backend="CUSTOM"))
LATENT = dict(attention_config=dict(indexer_kv_dtype="bf16"))
PACKED = dict(dtype="bfloat16", kv_cache_dtype="fp8_ds_mla")
SCHEDULER = "sparse_attn.integrations.vllm.scheduler.SparseAttnScheduler"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", SPARSE_ATTN_LOG="choice")
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(model: str) -> tuple[Path, list[list[int]]]:
        path = tmp_path_factory.mktemp(model)
        done = run("vllm_models.py", str(path), model)
        assert done.returncode == 0, done.stderr[-4000:]
        return path, json.loads(done.stdout.splitlines()[-1])

    return folder


def generate(folder: Path, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    done = run("vllm_generate.py", str(folder), json.dumps(options))
    assert done.returncode == 0, done.stderr[-4000:]
    printed = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))  # workers talk after it
    return json.loads(printed), done.stdout + done.stderr


def value(metrics: str, name: str, **labels: str) -> float:
    found = [v for n, had, v in parse(metrics) if n == name and {k: had.get(k) for k in labels} == labels]
    return sum(found)


@pytest.mark.parametrize(
    ("model", "options", "path"),
    [
        ("qwen3", CUSTOM, "dense"),
        ("mistral", CUSTOM, "dense"),
        ("deepseek_v32", LATENT, "sparse"),
        ("glm_moe_dsa", LATENT, "sparse"),
    ],
)
def test_tokens_are_those_of_transformers(folders: Any, model: str, options: dict[str, Any], path: str) -> None:
    folder, expected = folders(model)
    found, said = generate(folder, options)
    assert found["tokens"] == expected
    assert "sparse_attn: attend runs on cpu_native" in said
    assert ("sparse_attn: select runs on cpu_native" in said) == (path == "sparse")
    metrics = found["metrics"]
    assert value(metrics, "sparse_attn_dispatch_total", path=path, reason="plan") > 0
    if model != "mistral":  # whose pages are free again once its window has moved on
        assert found["preempted"] > 0
        assert found["cached_tokens"] > 0


@pytest.mark.parametrize(("model", "options"), [("qwen3", CUSTOM), ("deepseek_v32", LATENT)])
def test_two_ranks_of_tensor_parallelism(folders: Any, model: str, options: dict[str, Any]) -> None:
    """Each of vLLM's workers attends with half of the heads; those that select find the same lists."""
    folder, expected = folders(model)
    found, said = generate(folder, options | dict(tensor_parallel_size=2, distributed_executor_backend="mp"))
    assert found["tokens"] == expected
    assert set(re.findall(r"\(Worker_TP(\d)", said)) == {"0", "1"}
    assert "sparse_attn: attend runs on cpu_native" in said


def test_packed_rows_and_index_keys_as_released(folders: Any) -> None:
    """Rows of 656 bytes and keys of 132: rounded, so that tokens of a random model soon differ."""
    folder, expected = folders("deepseek_v32_released")
    found, said = generate(folder, PACKED)
    assert "sparse_attn: attend runs on cpu_native" in said
    assert [len(tokens) for tokens in found["tokens"]] == [len(tokens) for tokens in expected]
    same = sum(a[0] == b[0] for a, b in zip(found["tokens"], expected, strict=True))
    assert same >= 3  # of 7, where 1 of 512 is chance


def test_a_cache_that_does_not_fit_the_model_is_refused_at_load(folders: Any) -> None:
    folder, _ = folders("deepseek_v32")
    done = run("vllm_generate.py", str(folder), json.dumps(PACKED))
    assert done.returncode
    assert "the main plane in fp8_v32: expected rows of 576 elements, got 96" in done.stderr


@pytest.mark.parametrize("mode", ["off", "observe", "enforce"])
def test_admission_with_vllms_own_kernels(folders: Any, tmp_path: Path, mode: str) -> None:
    folder, expected = folders("qwen3")
    profile = dict(step=1e-3, token=1e-5, scored=1e-9, attended=1e-7, device="cpu, qwen3, auto")
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    # a hundredth of what a step takes, so that no measured step makes room for a second request
    asked = dict(mode=mode, budget=1e-5, profile=str(tmp_path / "profile.json"))
    options = dict(scheduler_cls=SCHEDULER, additional_config=dict(sparse_attn=dict(admission=asked)))
    found, _ = generate(folder, options)
    assert found["tokens"] == expected
    held = value(found["metrics"], "sparse_attn_admission_verdicts_total", mode=mode, verdict="hold")
    assert (held > 0) == (mode != "off")
    assert (found["most_running"] == 1) == (mode == "enforce")
