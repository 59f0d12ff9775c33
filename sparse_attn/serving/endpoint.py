"""Decode steps of a running service, timed from outside, for ``calibrate``. Imports no torch.

The service has an OpenAI-compatible endpoint that streams completions of token numbers, and ``/metrics``. Several
streams of one length decode together; a step is the time between two tokens of a stream while all of them run.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..models import Model
from . import exposition
from .diagnosis import RUNNING
from .stats import Span, Stats, StepStats

PARTS = 4
"""Steps that are taken of a load: means over parts of it, one after the other."""
SECONDS = 600
TOGETHER = 1e-4
"""Seconds; events that come closer were sent together, as no step is as short."""
VOCABULARY = 1000


@dataclass(frozen=True)
class Stream:
    """Tokens of a prompt, and when each token of its continuation came, in seconds."""

    prompt: int
    times: tuple[float, ...]


class Endpoint:
    """A service at a URL. ``model``: its name there; empty: the first that it lists."""

    def __init__(self, url: str, model: str = "") -> None:
        self.url = url.rstrip("/")
        self.model: str = model or self._ask("/v1/models")["data"][0]["id"]

    def _ask(self, path: str) -> Any:
        with urlopen(self.url + path, timeout=SECONDS) as answer:
            return json.loads(answer.read())

    def check_idle(self) -> None:
        """Raises ValueError if others' requests run, as far as ``/metrics`` says."""
        samples = exposition.read(f"{self.url}/metrics")
        own = ("sparse_attn_requests", "running")
        running = sum(s.value for s in samples if s.name in RUNNING or (s.name, s.labels.get("state")) == own)
        if running:
            raise ValueError(
                f"{self.url}: expected an idle service, got {running:g} requests that run; try again later"
            )

    def stream(self, prompt: Sequence[int], tokens: int) -> Stream:
        """Complete a prompt by so many tokens; it may end before.

        Raises:
            ValueError: the service refuses, or sends several tokens at once, so that steps cannot be told apart.
        """
        body = dict(model=self.model, prompt=list(prompt), max_tokens=tokens, temperature=0, stream=True)
        body |= dict(stream_options=dict(include_usage=True))
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        times, generated = [], None
        try:
            with urlopen(request, timeout=SECONDS) as answer:
                for line in answer:
                    now, data = time.perf_counter(), line.decode().removeprefix("data:").strip()
                    if not line.startswith(b"data:") or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("choices"):
                        times.append(now)
                    if event.get("usage"):
                        generated = event["usage"]["completion_tokens"]
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:200]
            raise ValueError(f"{self.url}: expected a completion of token numbers, got {error.code}: {said}") from error
        except HTTPException as error:
            raise ValueError(f"{self.url}: expected a stream of completions: {error}") from error
        if generated not in (None, len(times)) or len(times) < 2:
            sent = "an unknown number of" if generated is None else generated
            raise ValueError(f"{self.url}: expected each token in an event, got {sent} tokens in {len(times)} events")
        if late := together(times):
            raise ValueError(
                f"{self.url}: expected events sent one by one, as tokens are made, got {late} of {len(times)} together "
                "with the one before; leave the service a processor, and no proxy that collects events before it"
            )
        return Stream(len(prompt), tuple(times))


def together(times: Sequence[float]) -> int:
    """How many events came together with the one before; 0 if so few that means of steps are right."""
    found = sum(after - before < TOGETHER for before, after in pairwise(times))
    return found if found * 10 > len(times) else 0


def measure(
    endpoint: Endpoint, model: Model, lengths: Sequence[int], numbers: Sequence[int], tokens: int
) -> Iterator[dict[str, Any]]:
    """Steps as ``calibration.read`` takes them: of so many streams together, for each length of prompts.

    Prompts are random, so that no cached prefix serves them.
    """
    draw = random.Random(0)
    for length in lengths:
        for number in numbers:
            endpoint.check_idle()
            prompts = [[draw.randrange(1, VOCABULARY) for _ in range(length)] for _ in range(number)]
            with ThreadPoolExecutor(number) as pool:
                streams = list(pool.map(lambda prompt: endpoint.stream(prompt, tokens), prompts))
            for counts, seconds in steps(streams, lambda: Stats(model)):
                yield {"record": "step", "seconds": seconds, **counts.to_dict()}


def steps(streams: Sequence[Stream], stats: Callable[[], Stats]) -> list[tuple[StepStats, float]]:
    """Counts and mean time of steps in each of ``PARTS`` parts of the time in which all streams decode; none if it is
    too short."""
    start, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    clock = [t for t in streams[0].times if start <= t <= end]
    size = (len(clock) - 1) // PARTS
    found = []
    for part in range(PARTS if size > 0 else 0):
        first, last = clock[part * size], clock[(part + 1) * size]
        middle = (first + last) / 2
        lengths = [s.prompt + sum(t <= middle for t in s.times) for s in streams]
        batch: dict[Hashable, Span] = {number: (length - 1, length) for number, length in enumerate(lengths)}
        found.append((stats().step(batch), (last - first) / size))
    return found
