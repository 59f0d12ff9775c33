"""What the serving suite measures with: the model, its documents, requests that arrive, and steps that are timed."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from serving_arms import DOCUMENT, OUTPUT, PAGE, PROMPT, Arrival, Record, Served

from sparse_attn.demo import model, text
from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.cost import Work
from sparse_attn.serving.engine import Engine
from sparse_attn.serving.manager import CacheManager, Saved
from sparse_attn.serving.memory import PLANE
from sparse_attn.serving.runner import Runner
from sparse_attn.serving.scheduler import Plan, Request, Scheduler, Steps

DOCUMENTS = 4
ALL = Steps(tokens=1024, running=1024, queued=100_000)
"""No bound that would show."""


class Bench:
    """The model and what is prepared once."""

    def __init__(self, pages: int, threads: int, say: Callable[[str], None], document: int = DOCUMENT) -> None:
        torch.set_num_threads(threads)
        llama, tokenizer = model.load(say)
        self.runner = Runner(llama.to(torch.bfloat16), pages, PAGE)
        self.document = document
        content, self.source = text.read(None)
        self.tokens: list[int] = text.tokenize(tokenizer, content, (DOCUMENTS + 1) * document).tolist()
        self.saved = []
        for number in range(DOCUMENTS):
            begin = time.perf_counter()
            self.saved.append(self._read(self.tokens[number * document :][:document]))
            say(f"document {number + 1} of {DOCUMENTS}: {document} tokens, {time.perf_counter() - begin:.1f} s")

    def scheduler(
        self, admission: Admission | None = None, steps: Steps = ALL, reserve: float = 0.15, pages: int = 0
    ) -> Scheduler:
        """A new one, over the first ``pages`` of the pool (0: all of them)."""
        manager = CacheManager([self.runner.memory.plane], pages or len(self.runner.memory.bytes), reserve=reserve)
        rule = admission or Admission(Limits(1.0, memory=1.0), None, mode="off")
        return Scheduler(manager, rule, steps, prefixes=False)

    def _read(self, tokens: list[int]) -> torch.Tensor:
        """The bytes of a document's pages."""
        scheduler = self.scheduler(steps=Steps(512, 512))
        request = Request("document", tokens, 2)
        scheduler.submit(request, 0.0)
        while len(request.tokens) == request.prompt:
            plan = scheduler.plan(0.0)
            scheduler.advance(plan, self.runner.run(plan), 0.0)
        return self.runner.memory.save(scheduler.manager.tables("document"))

    def request(self, name: object, kind: str, draw: random.Random) -> Request:
        """A long request begins with a document's pages, in a copy of its own; a short one is dense."""
        at = draw.randrange(len(self.tokens) - PROMPT[kind])
        prompt = self.tokens[at : at + PROMPT[kind]]
        if kind == "short":
            return Request(name, prompt, OUTPUT, dense=True)
        number = draw.randrange(DOCUMENTS)
        document = self.tokens[number * self.document :][: self.document]
        return self.continued(name, number, len(document), prompt, OUTPUT)

    def continued(
        self, name: object, number: int, tokens: int, prompt: Sequence[int], output: int, dense: bool = False
    ) -> Request:
        """A request that begins with the first ``tokens`` tokens of a document."""
        pages = -(-tokens // PAGE)
        saved = Saved(tokens, {PLANE: list(range(pages))})
        self.runner.give(name, self.saved[number][:pages])
        begin = number * self.document
        return Request(name, [*self.tokens[begin : begin + tokens], *prompt], output, dense, saved=saved)

    # --- Steps

    def timed(self, works: Sequence[Work], repeats: int = 5) -> float:
        """Seconds of a step of these sequences: the median. The first is not counted."""
        found = []
        for turn in range(repeats + 1):
            scheduler = self.scheduler()
            for number, work in enumerate(works):
                tokens = work.after - work.before
                prompt = self.tokens[:tokens]
                if work.before:
                    request = self.continued(number, number % DOCUMENTS, work.before, prompt, 2, work.dense)
                    request.prompt -= tokens == 1  # a token that was generated
                else:
                    request = Request(number, list(prompt), 2, work.dense)
                scheduler.submit(request, 0.0)
            plan = scheduler.plan(0.0)
            self.runner.run(Plan(plan.moves, (), (), ()))
            begin = time.perf_counter()
            self.runner.run(Plan((), plan.parts, (), ()))
            if turn:
                found.append(time.perf_counter() - begin)
        return median(found)


def serve(bench: Bench, scheduler: Scheduler, arrivals: Sequence[Arrival], seconds: float, seed: int) -> Served:
    """Offer requests when they are due, whatever becomes of those before, for so many seconds."""
    draw, records = random.Random(seed), []
    begin = time.perf_counter()
    engine = Engine(bench.runner, scheduler, clock=lambda: time.perf_counter() - begin)

    def offer(number: int, due: float, kind: str) -> None:
        record = Record(due, kind=kind)
        records.append(record)
        engine.submit(bench.request(number, kind, draw), record.listener(engine.clock))

    coming = iter(enumerate(arrivals))
    following = next(coming, None)
    while (now := engine.clock()) < seconds:
        while following and following[1][0] <= now:
            offer(following[0], *following[1])
            following = next(coming, None)
        if not engine.step().parts:
            time.sleep(0.001)
    for name in (*scheduler.waiting, *scheduler.running):
        engine.cancel(name)
    return Served(records, scheduler.preemptions, seconds)


def solo(bench: Bench, kind: str, times: int = 2) -> tuple[float, float]:
    """Seconds to the first token, and between tokens, of a request alone: medians. The first time is not counted."""
    firsts, gaps = [], []
    for seed in range(times + 1):
        record = serve(bench, bench.scheduler(), [(0.0, kind)], 2.0, seed).records[0]
        if len(record.times) < 3:
            sys.exit(f"{kind} alone: expected tokens for 2 s, got {len(record.times)}: the machine is too busy")
        firsts.append(record.first)
        gaps.append(median(b - a for a, b in zip(record.times, record.times[1:], strict=False)))
    return median(firsts[1:]), median(gaps[1:])


def saturated_rate(bench: Bench, longs: float, steps: Steps, most: int = 48) -> float:
    """Requests a second of an engine that never waits for one, when memory alone bounds it.

    It is filled with requests of the mix, ``most`` if the pool holds them; then their decode steps are timed, and the
    whole output counts at that pace.
    """
    engine = Engine(bench.runner, bench.scheduler(Admission(Limits(1.0, memory=1.0), None), steps), time.perf_counter)
    scheduler, draw = engine.scheduler, random.Random(0)
    for n in range(most):
        kind = "long" if int((n + 1) * longs) > int(n * longs) else "short"
        engine.submit(bench.request(n, kind, draw), lambda what: None)
    begin, times = time.perf_counter(), []
    while len(times) < 5:
        before = time.perf_counter()
        plan = engine.step()
        if all(work.after - work.before == 1 for work in plan.works):
            times.append(time.perf_counter() - before)
    seconds = time.perf_counter() - begin - sum(times) + OUTPUT * median(times)
    served = len(scheduler.running)
    for name in (*scheduler.waiting, *scheduler.running):
        engine.cancel(name)
    return served / seconds
