"""Steps of a service as seen from outside: a stand-in with a clock of its own, and a small server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparse_attn.calibrate import main
from sparse_attn.models import PRESETS
from sparse_attn.serving import calibration, endpoint
from sparse_attn.serving.cost import StepCost
from sparse_attn.serving.endpoint import Endpoint, Stream, measure, steps, together
from sparse_attn.serving.stats import Counter, Stats

MODEL = PRESETS["deepseek-v3.2"]
TRUE = StepCost(step=4e-3, token=2e-4, scored=2e-9, attended=1e-8)


class Ideal:
    """A service whose steps take what ``TRUE`` says, and whose prompts take no time, one after the other."""

    def __init__(self) -> None:
        self.counter = Counter(MODEL)

    def together(self, length: int, number: int, tokens: int) -> list[Stream]:
        times: list[list[float]] = [[] for _ in range(number)]
        now = 0.0
        while any(len(t) < tokens for t in times):
            begun = min(number, 1 + max(len(t) for t in times))  # a stream begins in each step
            active = [i for i in range(begun) if len(times[i]) < tokens]
            spans = [(length + len(times[i]) - 1, length + len(times[i])) for i in active if times[i]]
            now += TRUE.step + TRUE.variable(self.counter(spans)) if spans else TRUE.step
            for i in active:
                times[i].append(now)
        return [Stream(length, tuple(t)) for t in times]


def test_coefficients_are_found_from_outside(tmp_path: Path) -> None:
    ideal, lines = Ideal(), []
    for length in (300, 1000, 3000, 9000, 20000):
        for number in (1, 2, 5, 11):
            for counts, seconds in steps(ideal.together(length, number, 60), partial(Stats, MODEL)):
                lines.append(json.dumps({"record": "step", "seconds": seconds, **counts.to_dict()}))
    assert len(lines) == 5 * 4 * 4
    (tmp_path / "steps").write_text("\n".join(lines))
    cost = calibration.fit(calibration.read(tmp_path / "steps")).cost
    for term in ("step", "token", "scored", "attended"):
        assert getattr(cost, term) == pytest.approx(getattr(TRUE, term), rel=0.02), term


def test_streams_that_never_run_together_give_nothing() -> None:
    apart = [Stream(10, (0.0, 1.0, 2.0)), Stream(10, (5.0, 6.0, 7.0))]
    assert steps(apart, partial(Stats, MODEL)) == []


class Handler(BaseHTTPRequestHandler):
    gauge = 'vllm:num_requests_running{engine="0"}'
    running, coalesced, seen = 0, False, []  # type: ignore[var-annotated]

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        metrics = f"{self.gauge} {self.running}\n"
        self._send(metrics if self.path == "/metrics" else json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if len(body["prompt"]) > 100:
            self.send_error(400, "too long")
            return
        tokens = body["max_tokens"]
        events = [{"choices": [{"text": "x"}]}] * (tokens // 2 if self.coalesced else tokens)
        events.append({"choices": [], "usage": {"completion_tokens": tokens}})
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small server sends all events at once."""
    monkeypatch.setattr(endpoint, "TOGETHER", 0.0)


def test_events_that_were_collected_on_the_way_are_refused(url: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ValueError, match="expected events sent one by one, as tokens are made, got .* of 50 together"):
        Endpoint(url, "other").stream([1, 2, 3], 50)
    file = tmp_path / "steps.jsonl"
    assert main([str(file), "--endpoint", url, "--model", "deepseek-v3.2", "--lengths", "5"]) == 2
    assert "one by one" in capsys.readouterr().err
    assert not file.exists()


def test_which_events_came_together() -> None:
    paced = [0.002 * number for number in range(40)]
    assert together(paced) == 0
    assert together([t if number % 20 else t - 0.00195 for number, t in enumerate(paced)]) == 0  # one of them
    assert together([0.008 * (number // 4) + 1e-5 * number for number in range(40)]) == 30


@pytest.mark.usefixtures("no_clock")
def test_what_is_asked_of_a_service(url: str) -> None:
    list(measure(Endpoint(url), MODEL, [5, 9], [1, 3], 12))
    assert sorted(len(body["prompt"]) for body in Handler.seen) == [5] * 4 + [9] * 4
    assert len({tuple(body["prompt"]) for body in Handler.seen}) == 8  # no prefix is found again
    for body in Handler.seen:
        assert (body["model"], body["max_tokens"], body["stream"]) == ("served", 12, True)
    assert len(Endpoint(url, "other").stream([1, 2, 3], 7).times) == 7


@pytest.mark.parametrize(
    ("change", "length", "said"),
    [
        (dict(running=2), 5, "expected an idle service, got 2 requests that run"),
        (dict(running=1, gauge='sparse_attn_requests{state="running"}'), 5, "got 1 requests that run"),
        (dict(coalesced=True), 5, "expected each token in an event, got 12 tokens in 6 events"),
        ({}, 200, "expected a completion of token numbers, got 400"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], length: int, said: str
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(Handler, name, value)
    with pytest.raises(ValueError, match=said):
        list(measure(Endpoint(url), MODEL, [length], [1], 12))


@pytest.mark.usefixtures("no_clock")
def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.jsonl"
    asked = [str(file), "--endpoint", url, "--lengths", "5,9", "--sequences", "1,2", "--tokens", "12"]
    assert main(asked) == 2
    assert "expected --model with it" in capsys.readouterr().err
    main([*asked, "--model", "deepseek-v3.2"])  # a service that takes no time has no coefficients
    assert len(file.read_text().splitlines()) == len(calibration.read(file)) > 4
    assert main([*asked, "--model", "deepseek-v3.2"]) == 2
    assert "File exists" in capsys.readouterr().err
