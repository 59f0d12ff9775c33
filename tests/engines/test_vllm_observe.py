"""Observe mode on vLLM itself: its outputs stay as they are, and what ``/metrics`` says is what the requests say.

`make test-engines` makes an environment with vLLM and runs this. Elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparse_attn.serving.exposition import Sample, parse

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: `make test-engines` makes an environment with it", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from vllm_offline import ENVIRONMENT, NEW_TOKENS, PROMPTS, SMALL, write_config  # noqa: E402

LAYERS = SMALL["num_hidden_layers"]
ROOT = Path(__file__).parents[2]
START_SECONDS = 300
MODERATE = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, head_dim=128, num_attention_heads=16)
"""Changes to the smallest model that give a step the work of a small model's."""


def offline(folder: Path, changes: dict[str, Any] | None = None, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("vllm_offline.py")), str(folder), json.dumps(changes or {})]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return offline(tmp_path_factory.mktemp("observed"))


def value(found: list[Sample], name: str, **labels: str) -> float:
    (number,) = [v for n, had, v in found if n == name and {k: had.get(k) for k in labels} == labels]
    return number


def pairs(found: list[Sample], kind: str) -> float:
    return sum(value(found, "sparse_attn_kv_pairs_total", kind=kind, phase=phase) for phase in ("prefill", "decode"))


def test_installing_it_changes_no_token(observed: dict[str, Any], tmp_path: Path) -> None:
    alone = offline(tmp_path, VLLM_PLUGINS="")
    assert "sparse_attn_kv_pairs_total" not in alone["metrics"]
    assert alone["cost"]["steps"] == 0
    assert observed["cost"]["steps"] == len(observed["steps"]) > 20
    assert observed["tokens"] == alone["tokens"]
    assert all(len(tokens) == NEW_TOKENS for tokens in observed["tokens"])


def test_every_step_is_counted(observed: dict[str, Any]) -> None:
    """Chunks, a cached prefix and preemption included: the count goes by what the scheduler said."""
    found = parse(observed["metrics"])
    total = 0
    for step in observed["steps"]:
        for request, before in [*step["new"], *step["cached"]]:
            after = before + step["scheduled"][request]
            total += sum(range(before + 1, after + 1))
    assert pairs(found, "dense") == pairs(found, "effective") == LAYERS * total


def test_it_takes_less_than_a_hundredth_of_a_step(tmp_path: Path) -> None:
    cost = offline(tmp_path, MODERATE)["cost"]
    share = cost["seconds"] / cost["steps"] / cost["step_seconds"]
    print(f"{1e6 * cost['seconds'] / cost['steps']:.0f} us of {1e3 * cost['step_seconds']:.2f} ms: {share:.2%}")
    assert share < 0.01


# --- The server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, shared = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("multiprocess")
    write_config(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | ENVIRONMENT | {"PROMETHEUS_MULTIPROC_DIR": str(shared)}
    environment["SPARSE_ATTN_RECORDS"] = str(folder / "records.jsonl")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "small", "--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "96"]
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


def complete(url: str, prompt: list[int]) -> dict[str, Any]:
    body = dict(model="small", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_the_servers_metrics_are_those_of_its_requests(server: str) -> None:
    prompts = PROMPTS[:6]  # none begins as another, so every token is computed
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    lengths = []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        # the last token that is sampled is not computed on
        lengths += range(1, len(prompt) + answer["usage"]["completion_tokens"])
    deadline = time.monotonic() + 20
    while True:
        with urllib.request.urlopen(f"{server}/metrics", timeout=20) as answer:
            found = parse(answer.read().decode())
        finished = sum(v for n, _, v in found if n == "sparse_attn_effective_kv_ratio_count")
        if finished == len(prompts) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert finished == len(prompts)
    assert pairs(found, "dense") == pairs(found, "effective") == LAYERS * sum(lengths)
    assert pairs(found, "scored") == 0
    tokens = sum(value(found, "sparse_attn_query_tokens_total", phase=p) for p in ("prefill", "decode"))
    assert tokens == len(lengths)
    read = value(found, "sparse_attn_kv_read_bytes_estimated_total", plane="main")
    row = 2 * 2 * SMALL["num_key_value_heads"] * SMALL["head_dim"]  # keys and values of two bytes
    assert read == row * LAYERS * sum(lengths)
    assert value(found, "sparse_attn_build_info", model_name="small", engine="0", plan="qwen3") == 1
    # vLLM's own metrics are still there, and agree
    assert value(found, "vllm:prompt_tokens_total") == sum(map(len, prompts))
    assert value(found, "vllm:generation_tokens_total") == len(prompts) * NEW_TOKENS
