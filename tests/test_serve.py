"""The endpoint over real connections, on a tiny model: answers, refusals, clients that go or read slowly, metrics."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from test_engine import alone
from tiny_engine import VOCABULARY, engine, nothing_leaked, prompt, tiny_model

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
prometheus_client = pytest.importorskip("prometheus_client")

from sparse_attn import serve  # noqa: E402
from sparse_attn.serving.engine import Engine  # noqa: E402
from sparse_attn.serving.http import Endpoint, Served  # noqa: E402
from sparse_attn.serving.scheduler import Steps  # noqa: E402
from sparse_attn.serving.service import ServiceMetrics  # noqa: E402

ROOT = Path(__file__).parents[1]
SERVED = Served(
    "tiny",
    encode=lambda text: [ord(c) % VOCABULARY for c in text],
    chat=lambda messages: [ord(c) % VOCABULARY for m in messages for c in m["content"]],
    decoder=lambda: lambda token: f"<{token}>",
    longest=2048,
    vocabulary=VOCABULARY,
    stop=frozenset(),
    shares=(Fraction(1, 4), Fraction(1, 3)),
)


class Client:
    def __init__(self, port: int, it: Engine | None = None) -> None:
        self.port, self.engine = port, it

    def open(self, body: Any = None, path: str = "/v1/completions") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def ask(self, body: Any = None, path: str = "/v1/completions") -> tuple[int, Any]:
        response = self.open(body, path)
        content = response.read().decode()
        return response.status, json.loads(content) if content.startswith("{") else content

    def until(self, holds: Any, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it does not come to that"
            time.sleep(0.01)


@contextmanager
def server(**options: Any) -> Iterator[Client]:
    registry = prometheus_client.CollectorRegistry()
    it = engine(watcher=ServiceMetrics(registry), **options)
    app = Endpoint(it, SERVED, registry).app()
    listening = socket.create_server(("127.0.0.1", 0))
    it.start()
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    client = Client(listening.getsockname()[1], it)
    client.until(lambda: running.started)
    try:
        yield client
    finally:
        running.should_exit = True
        thread.join(10)
        it.close()
        nothing_leaked(it)


def text(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def parts(content: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers() -> None:
    with server() as client:
        asked = prompt(1, 30)
        wanted = text(alone(asked, 8))
        status, whole = client.ask({"prompt": asked, "max_tokens": 8, "share": 1, "model": "tiny"})
        assert (status, whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (200, wanted, "length")
        assert whole["usage"] == {"prompt_tokens": 30, "completion_tokens": 8, "total_tokens": 38}
        body = {"prompt": asked, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
        status, content = client.ask(body)
        found = parts(content)
        assert "".join(part["choices"][0]["text"] for part in found[:-1]) == wanted
        assert found[-1]["usage"]["completion_tokens"] == 8 and not found[-1]["choices"]
        messages = [{"role": "user", "content": "why?"}]
        status, chat = client.ask({"messages": messages, "max_tokens": 4}, "/v1/chat/completions")
        assert chat["choices"][0]["message"] == {"role": "assistant", "content": text(alone(SERVED.encode("why?"), 4))}
        body = {"messages": messages, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        found = parts(client.ask(body, "/v1/chat/completions")[1])
        assert len({(part["id"], part["created"]) for part in found}) == 1 and found[0]["id"].startswith("chatcmpl-")
        deltas = [part["choices"][0]["delta"] for part in found[:-1]]
        assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
        assert "".join(delta["content"] for delta in deltas) == chat["choices"][0]["message"]["content"]
        assert client.ask(path="/v1/models")[1]["data"][0]["id"] == "tiny"
        assert client.ask(path="/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "body: expected an object with prompt"),
        ({"prompt": []}, "prompt: expected a text, or a list of tokens"),
        ({"prompt": [VOCABULARY]}, "prompt: expected tokens of 0 to 96"),
        ({"prompt": "a", "max_tokens": "8"}, "max_tokens: expected int, got '8'"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: expected int, got True"),
        (
            {"prompt": "a", "max_tokens": 3000},
            "expected 1 to 2047, as the model has 2048 with the prompt's 1, got",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: expected 1 to 2047"),
        ({"prompt": "a", "max_completion_tokens": 0, "max_tokens": 1}, "max_tokens: expected 1 to 2047"),
        ({"prompt": ""}, "prompt: expected 1 to 2047 tokens, got 0"),
        ({"prompt": [1] * 3000}, "prompt: expected 1 to 2047 tokens, got 3000"),
        ({"prompt": "\ud800"}, "prompt: expected Unicode text"),
        ({"prompt": "a", "n": 2}, "n: expected 1, as others are not supported, got 2"),
        ({"prompt": "a", "logprobs": 0}, "logprobs: expected False, as others are not supported, got 0"),
        (
            {"prompt": "a", "dense": True},
            "field: expected one of prompt, max_completion_tokens, max_tokens, model, seed, share",
        ),
        ({"prompt": "a", "\ud800": 1}, r"got '\ud800'"),
        ({"prompt": "a", "seed": 2**64}, "seed: expected an integer of 64 bits"),
        ({"prompt": "a", "seed": -(2**63) - 1}, "seed: expected an integer of 64 bits"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: expected 0 to 2, got nan"),
        ({"prompt": "a", "share": 0.3}, "share: expected one of 1/4, 1/3, 1, got 0.3"),
        ({"prompt": "a", "share": "1/8"}, "share: expected one of 1/4, 1/3, 1, got '1/8'"),
        ({"prompt": "a", "share": float("nan")}, "share: expected one of 1/4, 1/3, 1, got nan"),
        ({"prompt": "a", "share": True}, "share: expected"),
        ({"prompt": "a", "share": [1]}, "share: expected"),
        ({"prompt": "a", "top_p": 0}, "top_p: expected above 0 and at most 1, got 0"),
        ({"prompt": "a", "model": "other"}, "model: expected 'tiny', got 'other'"),
        ({"prompt": [1] * 1500, "max_tokens": 1}, "expected at most the pool's 64 pages, got 94"),
    ],
)
def test_wrong_requests_are_told_so(tiny_server: Client, body: Any, said: str) -> None:
    status, found = tiny_server.ask(body)
    assert status == 400 and said in found["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    ["why?", None, [], [1], [{"content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
     [{"role": "user", "content": None}], [{"role": "user", "content": "\ud800"}]],
)  # fmt: skip
def test_wrong_messages_are_told_so(tiny_server: Client, messages: Any) -> None:
    status, found = tiny_server.ask({"messages": messages}, "/v1/chat/completions")
    assert status == 400 and found["error"]["message"].startswith(("messages: expected objects", "prompt: expected 1"))


def test_a_body_that_is_nested_without_end_is_refused(tiny_server: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny_server.port, timeout=30)
    connection.request("POST", "/v1/completions", "[" * 100_000)
    assert connection.getresponse().status == 400


@pytest.mark.parametrize(
    "more",
    [
        dict.fromkeys(("stream_options", "stop", "tools", "temperature", "top_p", "seed", "logprobs", "max_tokens")),
        {"logprobs": False, "presence_penalty": 0.0, "n": 1},
        {"seed": 2**64 - 1, "temperature": 1e-300},
        {"seed": -(2**63), "temperature": 2, "top_p": 1e-300},
    ],
)
def test_what_changes_nothing_is_taken(tiny_server: Client, more: dict[str, Any]) -> None:
    asked = prompt(1, 30)
    body = {"prompt": asked, "stream": True, "max_completion_tokens": 4, **more}
    status, content = tiny_server.ask(body)
    assert status == 200
    assert "".join(part["choices"][0]["text"] for part in parts(content)) == text(alone(asked, 4))


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[Client]:
    with server() as client:
        yield client


@pytest.mark.parametrize(
    ("asked", "dense", "share"),
    [
        (None, False, None),
        (0.25, False, None),
        ("1/4", False, None),
        (1 / 3, False, Fraction(1, 3)),
        ("1/3", False, Fraction(1, 3)),
        (1, True, Fraction(1)),
        (1.0, True, Fraction(1)),
        ("1", True, Fraction(1)),
    ],
)
def test_a_request_names_its_share(asked: Any, dense: bool, share: Fraction | None) -> None:
    seen = []
    with server() as client:
        submit = client.engine.scheduler.submit
        client.engine.scheduler.submit = lambda request, now: (seen.append(request), submit(request, now))
        assert client.ask({"prompt": prompt(1, 30), "max_tokens": 2, "share": asked})[0] == 200
        assert client.ask(path="/v1/models")[1]["data"][0]["shares"] == ["1/4", "1/3", "1"]
    assert (seen[0].dense, seen[0].share) == (dense, share)


def test_back_pressure() -> None:
    with server(steps=Steps(16, 1, queued=2)) as client:
        streams = [client.open({"prompt": prompt(0, 20), "max_tokens": 800, "stream": True})]
        bodies = [{"prompt": prompt(n, 20), "max_tokens": 800, "stream": True} for n in (1, 2)]
        for body in bodies:
            threading.Thread(target=lambda body=body: client.open(body).read(), daemon=True).start()
        client.until(lambda: len(client.engine.scheduler.waiting) == 2)
        response = client.open({"prompt": "a"})
        assert response.status == 429 and response.headers["Retry-After"] == "1"
        assert "expected at most 2 requests that wait" in json.loads(response.read())["error"]["message"]
        client.until(lambda: 'sparse_attn_requests{state="waiting"} 2.0' in client.ask(path="/metrics")[1])
        assert 'sparse_attn_requests_refused_total{reason="queue"} 1.0' in client.ask(path="/metrics")[1]
        client.engine.close()
        assert b"the engine ended before the request did" in streams[0].read()
        status, found = client.ask({"prompt": "a"})
        assert (status, found["error"]["type"]) == (503, "overloaded_error")
        assert client.ask(path="/health") == (503, {"status": "closed"})


def test_a_client_that_goes_ends_its_request() -> None:
    with server() as client:
        scheduler = client.engine.scheduler
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", client.port)
            body = {"prompt": prompt(0, 30), "max_tokens": 900, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body))
            client.until(lambda: scheduler.running)
            connection.sock.close()
            client.until(lambda: not scheduler.running)
            assert client.ask({"prompt": "a", "max_tokens": 1})[0] == 200


def test_a_slow_reader_holds_up_nobody() -> None:
    with server() as client:
        slow = client.open({"prompt": prompt(0, 30), "max_tokens": 900, "stream": True, "share": 1})
        for n in range(3):
            assert client.ask({"prompt": prompt(n, 5), "max_tokens": 3})[0] == 200
        client.until(lambda: not client.engine.scheduler.running)  # its pages are free before it has read
        found = parts(slow.read().decode())
        assert "".join(part["choices"][0]["text"] for part in found) == text(alone(prompt(0, 30), 900))


def test_logits_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as client:
        monkeypatch.setattr(client.engine.runner, "run", lambda plan: {part.request.name: None for part in plan.parts})
        status, found = client.ask({"prompt": "a", "max_tokens": 3})
        assert status == 500 and found["error"]["message"] == "expected finite logits, got others"


def test_metrics_say_what_admission_goes_by() -> None:
    with server() as client:
        client.ask({"prompt": prompt(0, 40), "max_tokens": 5})
        client.until(lambda: 'sparse_attn_pages{state="used"} 0.0' in client.ask(path="/metrics")[1])
        found = client.ask(path="/metrics")[1]
        for line in (
            'sparse_attn_requests_finished_total{reason="length"} 1.0',
            'sparse_attn_admission_decisions_total{reason="idle",verdict="admit"} 1.0',
            'sparse_attn_admission_watermark_ratio{resource="memory"} 1.0',
            "sparse_attn_admission_alarm 1.0",
            'sparse_attn_pages{state="cached"} 2.0',
            "sparse_attn_time_to_first_token_seconds_count 1.0",
            "sparse_attn_token_gap_seconds_count 4.0",
            "sparse_attn_preemptions_total 0.0",
        ):
            assert line in found.splitlines()


# --- A process


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tiny"
    tiny_model().save_pretrained(folder)
    words = {f"w{n}": n for n in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return folder


@contextmanager
def process(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    command = [sys.executable, "-m", "sparse_attn", "serve", "--model", str(folder), "--port", str(port)]
    small = ["--pages", "64", "--page-size", "16", "--dtype", "float32", "--threads", "1", "--grace", "1"]
    running = subprocess.Popen(
        [*command, *small], cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    client = Client(port)

    def answers() -> bool:
        assert running.poll() is None
        try:
            return client.ask(path="/health")[0] == 200
        except OSError:
            return False

    try:
        client.until(answers, 120)
        yield running, client
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
def test_killed_and_started_again_it_answers_the_same(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"prompt": "w1 w2 w3", "max_tokens": 6, "share": 1}
    with process(checkpoint, port) as (running, client):
        before = client.ask(body)
        assert before[0] == 200 and before[1]["choices"][0]["text"].count("w") == 6
        assert "sparse_attn_kv_pairs_total" in client.ask(path="/metrics")[1]
        stream = client.open({**body, "max_tokens": 900, "stream": True})
        running.send_signal(signal.SIGKILL)
        running.wait()
        with pytest.raises((OSError, http.client.HTTPException)):
            while stream.readline():
                pass
            raise http.client.HTTPException("it ended without [DONE]")
    with process(checkpoint, port) as (running, client):
        assert client.ask(body)[1]["choices"] == before[1]["choices"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) in (0, -signal.SIGTERM)


# --- Its command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hold", "5"], "--hold: acts with --mode enforce alone, got --mode observe; choose it, or leave --hold out"),
        (["--hold", "5", "--mode", "off"], "--hold: acts with --mode enforce alone, got --mode off"),
        (["--share", "1/0"], "expected a share such as 1/4 or 0.25, got '1/0'"),
        (["--share", "1/4,1"], "expected different shares between 0 and 1 such as 1/2,1/4, got '1/4,1'"),
        (["--share", "1/4,0.25"], "expected different shares between 0 and 1"),
        (["--port", "99999"], "--port: expected 0 to 65535, got 99999"),
        (["--threads", "0"], "--threads: expected 1 or more, got 0"),
        (["--page-size", "0"], "--page-size: expected 1 or more, got 0"),
        (["--grace", "-1"], "--grace: expected 0 or more, got -1"),
    ],
)
def test_what_would_not_act_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(arguments)
    assert said in capsys.readouterr().err


def test_a_folder_that_is_none_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model", str(tmp_path / "none")]) == 2
    assert "--model: expected a folder with a checkpoint of transformers, got" in capsys.readouterr().err


def test_what_it_is_started_with() -> None:
    assert serve.parse([]).hold == serve.HOLD and serve.parse([]).share == [Fraction(1, 4)]
    assert serve.parse(["--mode", "enforce", "--hold", "5"]).hold == 5
    assert serve.parse(["--share", "1/8,1/4"]).share == [Fraction(1, 8), Fraction(1, 4)]
