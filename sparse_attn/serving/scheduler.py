"""What each step of an engine computes: who begins, who goes on, who gives up its pages. Imports no torch.

It reads no clock and runs no model: the engine, or a simulator, asks for a ``Plan``, does or imitates it, and tells the
tokens that came of it and the time it took. The same calls give the same decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import Any, Literal, NamedTuple

from .admission import LOOK, Admission, Decision, Load, Waiting
from .cost import Work
from .crossover import Switch
from .manager import CacheManager, Copy, Saved, Tables, Use
from .pages import OutOfPages
from .prefix import prefix_keys

Finish = Literal["stop", "length", "error"]
"""Why a request ended: a token to stop at, its longest output, or logits that are not finite."""

Reason = Literal["plan", "prompt", "request", "exact", "approximate"]
"""Why a part selects (``"plan"``) or is dense: of a prompt, of a request that asked for it, or by a ``Switch``."""

NOWHERE = Switch(0)


class Refused(RuntimeError):
    """A request that is not taken. ``reason`` is ``"infeasible"``, ``"queue"``, ``"overdue"`` or ``"closed"``."""

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(said)
        self.reason = reason


@dataclass(eq=False)
class Request:
    """A request, and how far it is.

    ``tokens``: the prompt, and what is generated after it, ``output`` tokens at most. ``dense``: it attends to
    everything; if not, what is generated attends to this ``share`` of what it sees, None: the engine's own.
    ``saved``: a cache to begin with, whose bytes the engine has; also of a preempted request. ``options``: for whoever
    samples.
    """

    name: Hashable
    tokens: list[int]
    output: int
    dense: bool = False
    stop: frozenset[int] = frozenset()
    arrived: float = 0.0
    saved: Saved | None = None
    options: Any = None
    share: Fraction | None = None
    prompt: int = field(init=False)
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in its pages."""
    preempted: bool = field(default=False, init=False)
    spread: float = field(default=0.0, init=False)
    """What its prompt adds to each of its steps, by ``Admission.spread``."""
    keys: tuple[bytes, ...] = field(default=(), init=False)
    """Of its prompt's blocks."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that are to be computed before the next one is known: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def most_tokens(self) -> int:
        return self.prompt + self.output


class Save(NamedTuple):
    """The bytes of these pages are to be saved for the request."""

    request: Request
    tables: Tables


class Restore(NamedTuple):
    """What was saved for the request is to be written into these pages."""

    request: Request
    tables: Tables


@dataclass(frozen=True)
class Part:
    """What a step computes of a request. ``slots``: where its tokens ``[before, after)`` are stored, by plane.

    Prompts are computed densely, and what is generated selects: a model that was not trained to select loses less so,
    and requests of both kinds find the same prefixes.
    """

    request: Request
    before: int
    after: int
    slots: Mapping[str, Sequence[int]]
    tables: Tables
    reason: Reason

    @property
    def dense(self) -> bool:
        return self.reason != "plan"

    @property
    def work(self) -> Work:
        return Work(self.before, self.after, self.dense, self.request.share)

    @property
    def samples(self) -> bool:
        """Whether the request's next token follows."""
        return self.after == len(self.request.tokens)


@dataclass(frozen=True)
class Plan:
    """A step. ``moves`` come first, in their order; then ``parts``, all at once. ``decisions`` on those that wait."""

    moves: tuple[Save | Restore | Copy, ...]
    parts: tuple[Part, ...]
    refused: tuple[tuple[Request, Decision], ...]
    decisions: tuple[Decision, ...]

    @property
    def works(self) -> list[Work]:
        return [part.work for part in self.parts]


@dataclass(frozen=True)
class Event:
    """A token of a request, or None if there is none; and why the request ended, if it did."""

    request: Request
    token: int | None
    finish: Finish | None


@dataclass(frozen=True)
class Steps:
    """``tokens`` that a step computes at most, ``running`` requests, and ``queued`` ones."""

    tokens: int = 256
    running: int = 256
    queued: int = 1024

    def __post_init__(self) -> None:
        if not (1 <= self.running <= self.tokens and self.queued >= 1):
            raise ValueError(
                "steps: expected at least 1 running request, as many tokens, and 1 queued request, got "
                f"{self.running}, {self.tokens} and {self.queued}"
            )


class Scheduler:
    """Continuous batching: at each step every running request decodes a token, and prompts come in chunks beside them.

    Args:
        manager: of pages. It has no rings, so that steps may be of any length.
        admission: which waiting requests may begin.
        steps: how large steps and queues may be.
        prefixes: whether caches of prompts are kept and found.
        salt: of prefix keys.
        switches: by share, up to which length requests that select are attended densely; without: nowhere.
    """

    def __init__(
        self,
        manager: CacheManager,
        admission: Admission,
        steps: Steps | None = None,
        *,
        prefixes: bool = True,
        salt: bytes = b"",
        switches: Mapping[Fraction | None, Switch] | None = None,
    ) -> None:
        self.manager, self.admission, self.steps = manager, admission, steps or Steps()
        self.prefixes, self._salt = prefixes, salt
        self.switches = switches or {}
        self.waiting: OrderedDict[Hashable, Request] = OrderedDict()
        self.running: dict[Hashable, Request] = {}  # the oldest first
        self.preemptions = 0

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises ``Refused`` at once if it can never run, or if the queue is full."""
        if request.name in self.waiting or request.name in self.running:
            raise ValueError(f"request {request.name!r} exists already; choose another name")
        if not request.tokens or request.output < 1:
            raise Refused("infeasible", f"expected a prompt and an output, got {request.prompt} and {request.output}")
        try:
            self.manager.check(request.most_tokens)
        except ValueError as error:
            raise Refused("infeasible", str(error)) from None
        if len(self.waiting) >= self.steps.queued:
            raise Refused("queue", f"expected at most {self.steps.queued} requests that wait; try again later")
        if self.prefixes and request.saved is None:
            request.keys = tuple(prefix_keys(request.tokens[:-1], self.manager.block, self._salt))
        request.arrived = now
        self.waiting[request.name] = request

    def cancel(self, name: Hashable) -> None:
        """Forget a request, if it is there, and free its pages."""
        self.waiting.pop(name, None)
        if self.running.pop(name, None):
            self.manager.free(name)

    # --- A step

    def plan(self, now: float) -> Plan:
        """Decide on a step. Without parts there is nothing to do."""
        moves: list[Save | Restore | Copy] = []
        refused, decisions = self._admit(now, moves)
        parts: list[Part] = []
        decoding = [self._next(request) for request in self.running.values() if request.remaining == 1]
        chunks: list[Work] = []
        room, whole = self.steps.tokens - len(decoding), True
        for request in list(self.running.values()):
            if request.name not in self.running:
                continue  # an older one took its pages
            tokens = 1
            if request.remaining > 1:
                tokens = self._chunk(request, (*decoding, *chunks), room, first=not chunks) if whole else 0
                if not tokens:
                    continue
            part = self._extend(request, tokens, moves)
            if part is None:
                continue
            parts.append(part)
            if request.remaining > 1:
                chunks.append(part.work)
                room, whole = room - tokens, tokens == request.remaining
        return Plan(tuple(moves), tuple(parts), tuple(refused), tuple(decisions))

    def advance(self, plan: Plan, sampled: Mapping[Hashable, int | None], seconds: float) -> list[Event]:
        """What came of a step: the token of each part that ``samples``, None where logits are not finite, and the
        seconds that it took, with which later predictions are corrected."""
        if plan.parts:
            self.admission.observe(plan.works, seconds)
        return [self._advance(part, sampled) for part in plan.parts if part.request.name in self.running]

    # --- Parts of a step

    def _admit(
        self, now: float, moves: list[Save | Restore | Copy]
    ) -> tuple[list[tuple[Request, Decision]], list[Decision]]:
        if not self.waiting:
            return [], []
        asked = list(islice(self.waiting.values(), LOOK))
        asked_of = {request.name: self._waiting(request, now) for request in asked}
        decisions = self.admission.admit(list(asked_of.values()), self.load)
        refused = []
        room = self._prompt_room
        for request, decision in zip(asked, decisions, strict=True):
            if decision.verdict == "refuse" and not request.preempted and not decision.admit:
                del self.waiting[request.name]
                refused.append((request, decision))
            elif decision.admit and room > 0:
                request.spread = request.spread or self.admission.spread(asked_of[request.name])
                # a prompt of which the step could compute nothing waits as well outside, where it may be refused
                begun = self._begin(request, moves)
                room = room - (request.remaining if request.remaining > 1 else 0) if begun else 0
        return refused, decisions

    def _waiting(self, request: Request, now: float) -> Waiting:
        return Waiting(
            request.name,
            request.prompt,
            request.output,
            self.manager.new_pages(len(request.tokens), request.keys),
            self.manager.pages_for(request.most_tokens),
            now - request.arrived,
            self._reason(request, request.prompt + 1) != "plan",
            self._prompt(request),
            request.share,
        )

    def _prompt(self, request: Request) -> Work | None:
        """What of its prompt is to be computed, but for cached prefixes."""
        before = request.saved.tokens if request.saved else request.computed
        return Work(before, request.prompt, dense=True) if before < request.prompt else None

    @property
    def load(self) -> Load:
        """What admission goes by: prompts that are computed in part count with all of their pages."""
        return Load(
            self.manager.pool.pages,
            self.manager.used_pages + self._promised,
            self.manager.kept["admit"],
            tuple(map(self._next, self.running.values())),
            sum(request.spread for request in self.running.values()),
        )

    @property
    def _promised(self) -> int:
        """Pages that prompts of running requests have yet to take."""
        return sum(
            self.manager.pages_for(len(request.tokens)) - self.manager.pages_for(request.computed)
            for request in self.running.values()
            if request.remaining > 1
        )

    @property
    def _prompt_room(self) -> int:
        """Tokens of prompts that the next step can take on, beside those of prompts that have begun."""
        decoding = [self._next(request) for request in self.running.values() if request.remaining == 1]
        begun = sum(request.remaining for request in self.running.values() if request.remaining > 1)
        tokens = self.steps.tokens - len(decoding)
        return self.admission.chunk(decoding, 0, tokens, tokens, dense=True) - begun if tokens > 0 else 0

    def _next(self, request: Request) -> Work:
        """Its next decode step."""
        tokens = max(len(request.tokens), request.computed + 1)
        return Work.decode(tokens, self._reason(request, tokens) != "plan", request.share)

    def _reason(self, request: Request, tokens: int) -> Reason:
        """Of its decode step that sees so many tokens."""
        return "request" if request.dense else self.switches.get(request.share, NOWHERE).reason(tokens) or "plan"

    def _begin(self, request: Request, moves: list[Save | Restore | Copy]) -> bool:
        """Begin a request, unless there are too many, or too few pages."""
        idle = not self.running
        use: Use = "emergency" if idle else "admit"
        pages = self.manager.new_pages(len(request.tokens), request.keys)
        if len(self.running) >= self.steps.running or pages + self._promised > self.manager.room(use):
            return False
        if request.saved is None:
            request.computed = self.manager.add(request.name, request.keys)
        else:
            tables = self.manager.resume(request.name, request.saved, use)
            request.computed = request.saved.tokens
            moves.append(Restore(request, tables))
            request.saved = None
        del self.waiting[request.name]
        self.running[request.name] = request
        return True

    def _chunk(self, request: Request, others: Sequence[Work], room: int, first: bool) -> int:
        """Tokens of a prompt's next chunk. The first prompt gets on at any rate, others if the step has time left."""
        if room < 1:
            return 0
        before = request.computed
        tokens = self.admission.chunk(others, before, request.remaining, room, dense=True)
        if first or self.admission.mode != "enforce":
            return tokens
        share = self.admission.compute((*others, Work(before, before + tokens, dense=True)))
        return tokens if share is None or share <= 1 else 0

    def _extend(self, request: Request, tokens: int, moves: list[Save | Restore | Copy]) -> Part | None:
        """Make room for a part of a request, if need be by preempting the youngest; None if that is the request."""
        while True:
            oldest = next(iter(self.running.values()))
            try:
                step = self.manager.extend(request.name, tokens, "emergency" if request is oldest else "grow")
            except OutOfPages:
                youngest = next(reversed(self.running.values()))
                self._preempt(youngest, moves)
                if youngest is request:
                    return None
                continue
            moves += step.copies
            before, after = request.computed, request.computed + tokens
            reason = "prompt" if before < request.prompt else self._reason(request, after)
            return Part(request, before, after, step.slots, self.manager.tables(request.name), reason)

    def _preempt(self, request: Request, moves: list[Save | Restore | Copy]) -> None:
        self.preemptions += 1
        request.saved, request.preempted = self.manager.preempt(request.name), True
        moves.append(Save(request, request.saved.tables))
        del self.running[request.name]
        self.waiting[request.name] = request
        self.waiting.move_to_end(request.name, last=False)

    def _advance(self, part: Part, sampled: Mapping[Hashable, int | None]) -> Event:
        request = part.request
        request.computed = part.after
        if not part.samples:
            return Event(request, None, None)
        token = sampled[request.name]
        if token is None:
            return Event(request, None, self._finish(request, "error"))
        if len(request.tokens) == request.prompt and request.keys:
            self.manager.keep(request.name, request.keys)
        request.tokens.append(token)
        if token in request.stop:
            return Event(request, token, self._finish(request, "stop"))
        if len(request.tokens) == request.most_tokens:
            return Event(request, token, self._finish(request, "length"))
        return Event(request, token, None)

    def _finish(self, request: Request, why: Finish) -> Finish:
        del self.running[request.name]
        self.manager.free(request.name)
        return why
