"""Time of a step, from four coefficients and counts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import exp, log
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple

from ..models import Model, at_share, dense
from .stats import Counter, Counts, Span

TERMS = ("step", "token", "scored", "attended")
"""Coefficients of a step's time, in seconds: of itself, of a query token, of a pair scored and of a pair attended."""


@dataclass(frozen=True)
class StepCost:
    """``step + token x tokens + scored x scored pairs + attended x attended pairs``, in seconds.

    ``device`` names what it was measured on, model and formats included: a fingerprint, compared as a whole.
    """

    step: float = 0.0
    token: float = 0.0
    scored: float = 0.0
    attended: float = 0.0
    device: str = ""

    def __post_init__(self) -> None:
        for term in TERMS:
            if not 0 <= getattr(self, term) < float("inf"):
                raise ValueError(f"{term}: expected seconds, 0 or more, got {getattr(self, term)}")

    def variable(self, counts: Counts) -> float:
        """Seconds of what a step does, without the step itself."""
        scored = self.scored * counts.pairs.get("scored", 0)
        return self.token * counts.tokens + scored + self.attended * counts.attended_pairs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StepCost:
        """Raises ValueError for other keys."""
        names = {field.name for field in fields(cls)}
        if set(found) != names:
            raise ValueError(f"cost of a step: expected {', '.join(sorted(names))}, got {', '.join(sorted(found))}")
        return cls(**found)


KINDS = ("selecting", "dense", "chunk")
"""Sequences whose time is priced apart: those that decode by a selection, or densely, and chunks of prompts."""


@dataclass(frozen=True)
class Profile:
    """Coefficients of a device, by kind of sequence, where other kernels serve them: a chunk's pairs cost less where a
    key is read once for all of its tokens. None: priced as those that select, and a dense chunk as what decodes
    densely."""

    selecting: StepCost
    dense: StepCost | None = None
    chunk: StepCost | None = None

    def __post_init__(self) -> None:
        for kind in KINDS[1:]:
            other = getattr(self, kind)
            if other and other.device != self.device:
                raise ValueError(f"{kind}: expected one of {self.device!r}, got one of {other.device!r}")

    @property
    def device(self) -> str:
        return self.selecting.device

    def of(self, kind: str) -> StepCost:
        return getattr(self, kind) or self.selecting

    def save(self, path: str | PurePath) -> None:
        """As JSON: the coefficients of those that select, and under their names those of the other kinds."""
        others = {kind: getattr(self, kind) for kind in KINDS[1:]}
        found = self.selecting.to_dict() | {kind: cost.to_dict() for kind, cost in others.items() if cost}
        with open(path, "w") as file:
            json.dump(found, file)

    @classmethod
    def load(cls, path: str | PurePath) -> Profile:
        """What ``save`` wrote. Raises ValueError for anything else."""
        with open(path) as file:
            content = file.read()
        try:
            found = json.loads(content)
            others = {kind: StepCost.from_dict(found.pop(kind)) for kind in KINDS[1:] if kind in found}
            return cls(StepCost.from_dict(found), **others)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected a profile that calibrate --save wrote: {error}") from None


class Work(NamedTuple):
    """A sequence in a step: tokens before and after, whether its layers attend to everything, and if not, the share of
    what they may select, None for the plan's own."""

    before: int
    after: int
    dense: bool = False
    share: Fraction | None = None

    @classmethod
    def decode(cls, tokens: int, dense: bool = False, share: Fraction | None = None) -> Work:
        """A step of one token, the last of ``tokens``."""
        return cls(tokens - 1, tokens, dense, share)


DENSE: Final = "dense"
Path = Fraction | None | Literal["dense"]
"""How a sequence attends: by a share, as the plan has it (None), or to everything."""


def path_of(work: Work) -> Path:
    return DENSE if work.dense else work.share


def model_of(model: Model, path: Path) -> Model:
    """The plan of sequences that attend so."""
    if isinstance(path, Fraction):
        return at_share(model, path)
    return dense(model) if path == DENSE else model


@dataclass(frozen=True)
class Parts:
    """Uncorrected seconds of the step itself, and of what it does. Parts of sequences of one step add up: ``a + b``."""

    step: float = 0.0
    variable: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(max(self.step, other.step), self.variable + other.variable)

    @property
    def seconds(self) -> float:
        return self.step + self.variable


class Correction:
    """A moving average of measured over predicted time: how much slower the device is than when it was measured.

    Ratios are averaged by their logarithms, so that one long pause moves the average little. ``weight`` is of the
    newest.
    """

    def __init__(self, weight: float = 0.05) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight: expected more than 0, and at most 1, got {weight}")
        self.weight = weight
        self._log = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log)

    def observe(self, predicted: float, measured: float) -> None:
        """A step: predicted by the coefficients alone, and measured; both in seconds, above 0."""
        if predicted <= 0 or measured <= 0:
            raise ValueError(f"expected times above 0, got {predicted} s predicted and {measured} s measured")
        self._log += self.weight * (log(measured / predicted) - self._log)


class Predictor:
    """Predicts the time of steps in which some sequences select and others attend to everything.

    Args:
        model: the plan, or the name of a preset.
        profile: coefficients, by kind of sequence or of all alike.
        correction: takes in measured times.
    """

    def __init__(self, model: Model | str, profile: Profile | StepCost, correction: Correction | None = None) -> None:
        self._counters: dict[Path, Counter] = {None: Counter(model)}
        self.profile = profile if isinstance(profile, Profile) else Profile(profile)
        self.correction = correction or Correction()

    @property
    def device(self) -> str:
        return self.profile.device

    def counts(self, works: Iterable[Work]) -> Counts:
        """Counts of a step, each sequence in its own way."""
        spans: dict[Path, list[Span]] = {}
        for work in works:
            spans.setdefault(path_of(work), []).append((work.before, work.after))
        return sum((self._counter(path)(some) for path, some in spans.items()), Counts())

    def _counter(self, path: Path) -> Counter:
        if path not in self._counters:
            self._counters[path] = Counter(model_of(self._counters[None].model, path))
        return self._counters[path]

    def parts(self, works: Iterable[Work]) -> Parts:
        """Uncorrected time of a step; 0 of none."""
        kinds: dict[str, list[Work]] = {}
        for work in works:
            kinds.setdefault(self._kind(work), []).append(work)
        found = Parts()
        for kind, some in kinds.items():
            cost = self.profile.of(kind)
            found += Parts(cost.step, cost.variable(self.counts(some)))
        return found

    def _kind(self, work: Work) -> str:
        if work.after - work.before > 1 and self.profile.chunk:
            return "chunk"
        return "dense" if work.dense else "selecting"

    def seconds(self, works: Iterable[Work]) -> float:
        """Time of a step, corrected."""
        return self.corrected(self.parts(works))

    def corrected(self, parts: Parts) -> float:
        return self.correction.factor * parts.seconds

    def observe(self, works: Iterable[Work], measured: float) -> None:
        """Take in the measured time of a step."""
        self.correction.observe(self.parts(works).seconds, measured)
