"""Which waiting requests may begin: by memory, and by the predicted time of a step. Imports no torch.

``docs/serving.md`` has the rule as a table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from .cost import Parts, Predictor, Work

Mode = Literal["off", "observe", "enforce"]
"""``"off"`` admits what can ever fit. ``"observe"`` does too, and says what ``"enforce"`` would do."""

Verdict = Literal["admit", "hold", "refuse"]

REASONS = {
    "off": "the rule is off",
    "idle": "nothing runs",
    "none": "memory and compute are below their watermarks",
    "short": "memory is above its watermark, and the request is short",
    "memory": "memory is above its watermark",
    "compute": "compute is above its watermark",
    "memory and compute": "both are above their watermarks",
    "room": "the pool has too few free pages beside its reserve",
    "behind overdue": "an older request that is overdue goes first",
    "overdue": "it has waited too long",
    "infeasible": "it is longer than the pool",
}
"""What a reason says. They are few, so a metric may have them as a label."""

LATE_STEPS = 64
"""Steps over which the share of late ones is averaged."""

LOOK = 64
"""Requests of the queue that are looked at each time."""


@dataclass(frozen=True)
class Limits:
    """What admission keeps to.

    * ``budget``: seconds that a step may take.
    * ``memory``, ``compute``: watermarks, shares of the pool's pages and of the budget, counted with the request.
      Between the memory's and the pool's reserve only short requests get in; what is left of the budget above the
      compute's is for prefill chunks.
    * ``short``: tokens, prompt and output together, up to which a request is short.
    * ``hold``: seconds after which a waiting request is overdue. Then ``overdue`` tells: ``"first"``, none passes it
      any more, so it begins at the latest when all that run have finished; or ``"refuse"``, for clients who are gone.
    * ``late``: share of the steps that may take longer than the budget: prompts then come in whole. Where a percentile
      of the steps counts, half of what it leaves out is enough, as steps vary by themselves.
    """

    budget: float
    memory: float = 0.8
    compute: float = 0.8
    short: int = 512
    hold: float = 10.0
    late: float = 0.0
    overdue: Literal["first", "refuse"] = "first"

    def __post_init__(self) -> None:
        if not (self.budget > 0 and 0 < self.memory <= 1 and 0 < self.compute <= 1 and self.hold >= 0):
            raise ValueError(
                "limits: expected a budget above 0 s, watermarks above 0 and at most 1, hold of 0 s or more, got "
                f"{self.budget}, {self.memory} and {self.compute}, {self.hold}"
            )
        if self.overdue not in ("first", "refuse"):
            raise ValueError(f"overdue: expected first or refuse, got {self.overdue!r}")


@dataclass(frozen=True)
class Waiting:
    """A request that waits.

    ``prompt`` and ``output`` are tokens, the latter at most. ``pages``: it takes for its prompt, without those of a
    cached prefix. ``most_pages``: at its full length, alone. ``waited``: seconds. ``dense``: it attends to everything;
    if not, to this ``share`` of what it may select, None as the plan has it. ``chunk``: what of its prompt is to be
    computed; None: that has no price.
    """

    name: Hashable
    prompt: int
    output: int
    pages: int
    most_pages: int
    waited: float = 0.0
    dense: bool = False
    chunk: Work | None = None
    share: Fraction | None = None

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def work(self) -> Work:
        """Its first decode step."""
        return Work.decode(self.prompt + 1, self.dense, self.share)


@dataclass(frozen=True)
class Load:
    """What an engine has and runs: ``pages`` of the pool, those ``used`` by sequences and those ``reserved`` for their
    growth, and the next decode step of each running request; of one in prefill, its first. ``prompts``: seconds of a
    step that the prompts of such requests take, ``Admission.spread`` of each that runs."""

    pages: int
    used: int
    reserved: int
    running: tuple[Work, ...] = ()
    prompts: float = 0.0

    def with_request(self, request: Waiting) -> Load:
        return replace(self, used=self.used + request.pages, running=(*self.running, request.work))


@dataclass(frozen=True)
class Decision:
    """``admit``: what to do. ``verdict`` and ``reason``: of the rule, in mode ``"observe"`` too. ``memory`` and
    ``compute``: shares of the pool and of the step's budget with the request, the latter None without a profile."""

    request: Hashable
    admit: bool
    verdict: Verdict
    reason: str
    memory: float
    compute: float | None

    def __str__(self) -> str:
        compute = "unknown" if self.compute is None else f"{self.compute:.0%} of a step's budget"
        shares = f"with it memory is {self.memory:.0%} of the pool, compute {compute}"
        return f"request {self.request!r}: {self.verdict}: {REASONS[self.reason]}; {shares}"


class Admission:
    """The rule.

    Args:
        limits: what it keeps to.
        predictor: of step times. None: memory alone decides.
        device: fingerprint of this machine, model and formats, as the profile has it. If the profile is of another,
            memory alone decides, and ``alarm`` says so.
        mode: whether it is in force.
    """

    def __init__(self, limits: Limits, predictor: Predictor | None, device: str = "", mode: Mode = "enforce") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
        self.limits, self.mode, self.device = limits, mode, device
        self.alarm: str | None = None
        if predictor is None:
            self.alarm = "no profile of step times: admission goes by memory alone; calibrate"
        elif predictor.device != device:
            self.alarm = (
                f"profile: expected one of {device!r}, got one of {predictor.device!r}: admission goes by memory "
                "alone; calibrate here"
            )
        self.predictor = None if self.alarm else predictor
        self._late = 0.0  # moving share of the steps that took longer than the budget

    def admit(self, waiting: Sequence[Waiting], load: Load) -> list[Decision]:
        """Decide on the first ``LOOK`` requests, the oldest first, each with the load that those admitted before it
        bring."""
        found: list[Decision] = []
        overdue, running = False, self._parts(load.running) + Parts(0.0, load.prompts)
        for request in waiting[:LOOK]:
            with_it = running + self._parts([request.work]) + Parts(0.0, self.spread(request))
            decision = self._decide(request, load, overdue, self._share(with_it))
            found.append(decision)
            if decision.admit:
                load, running = load.with_request(request), with_it
            if decision.verdict == "hold" and request.waited > self.limits.hold:
                overdue = True
        return found

    def decide(self, request: Waiting, load: Load, behind_overdue: bool = False) -> Decision:
        """Decide on a request. ``behind_overdue``: an older request that is overdue was held."""
        parts = self._parts((*load.running, request.work)) + Parts(0.0, load.prompts + self.spread(request))
        return self._decide(request, load, behind_overdue, self._share(parts))

    def _decide(self, request: Waiting, load: Load, behind_overdue: bool, compute: float | None) -> Decision:
        memory = (load.used + request.pages) / load.pages
        verdict, reason = self._verdict(request, load, behind_overdue, memory, compute)
        admit = verdict == "admit" or (self.mode == "observe" and reason != "infeasible")
        return Decision(request.name, admit, verdict, reason, memory, compute)

    def _verdict(
        self, request: Waiting, load: Load, behind_overdue: bool, memory: float, compute: float | None
    ) -> tuple[Verdict, str]:
        limits = self.limits
        if request.most_pages > load.pages:
            return "refuse", "infeasible"
        if self.mode == "off":
            return "admit", "off"
        if not load.running and load.used + request.pages <= load.pages:
            return "admit", "idle"
        if request.waited > limits.hold and limits.overdue == "refuse":
            return "refuse", "overdue"
        if behind_overdue:
            return "hold", "behind overdue"
        if load.used + request.pages > load.pages - load.reserved:
            return "hold", "room"
        high = memory > limits.memory, compute is not None and compute > limits.compute
        if high == (False, False):
            return "admit", "none"
        if high == (True, False):
            return ("admit", "short") if request.tokens <= limits.short else ("hold", "memory")
        return "hold", "compute" if high == (False, True) else "memory and compute"

    def compute(self, works: Iterable[Work]) -> float | None:
        """Predicted time of a step over its budget. None without a profile of this device."""
        return self._share(self._parts(works))

    def spread(self, request: Waiting) -> float:
        """Uncorrected seconds that the request's prompt takes of each of its decode steps: while it runs, others like
        it begin, one for each that ends."""
        if self.predictor is None or request.chunk is None:
            return 0.0
        return self.predictor.parts([request.chunk]).variable / request.output

    def observe(self, works: Iterable[Work], seconds: float) -> None:
        """Take in the measured time of a step."""
        if self.predictor:
            self.predictor.observe(works, seconds)
        self._late += ((seconds > self.limits.budget) - self._late) / LATE_STEPS

    def _parts(self, works: Iterable[Work]) -> Parts:
        return self.predictor.parts(works) if self.predictor else Parts()

    def _share(self, parts: Parts) -> float | None:
        return self.predictor.corrected(parts) / self.limits.budget if self.predictor else None

    def chunk(self, running: Sequence[Work], before: int, remaining: int, most: int, dense: bool = False) -> int:
        """Tokens of a prompt's next chunk: as many of ``remaining`` as leave the step with ``running`` in its budget,
        at least 1, so that the prompt gets on, and at most ``most``. Only ``"enforce"`` keeps to the budget."""
        if min(remaining, most) < 1 or before < 0:
            raise ValueError(
                f"chunk: expected at least 1 token remaining and at most, got {remaining} and {most}, {before} before"
            )
        least, limit = 1, min(remaining, most)
        if self.predictor is None or self.mode != "enforce" or self._late < self.limits.late:
            return limit
        others = self.predictor.parts(running)
        while least < limit:
            middle = (least + limit + 1) // 2
            parts = others + self.predictor.parts([Work(before, before + middle, dense)])
            fits = self.predictor.corrected(parts) <= self.limits.budget
            least, limit = (middle, limit) if fits else (least, middle - 1)
        return least
