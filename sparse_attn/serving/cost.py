"""Time of a step, from four coefficients and counts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import exp, log
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
        cost: coefficients.
        dense_cost: of sequences that attend to everything, if another kernel serves them; default: ``cost``.
        correction: takes in measured times.
        chunk_cost: of sequences that compute several tokens, whose pairs cost less where kernels read a key once for
            all of them; default: as those that decode.
    """

    def __init__(
        self,
        model: Model | str,
        cost: StepCost,
        dense_cost: StepCost | None = None,
        correction: Correction | None = None,
        chunk_cost: StepCost | None = None,
    ) -> None:
        self._counters: dict[Path, Counter] = {None: Counter(model)}
        self.costs = {False: cost, True: dense_cost or cost}
        self.chunk_costs = {False: chunk_cost, True: chunk_cost} if chunk_cost else self.costs
        self.correction = correction or Correction()
        for name, other in (("dense_cost", dense_cost), ("chunk_cost", chunk_cost)):
            if other and other.device != cost.device:
                raise ValueError(f"{name}: expected one of {cost.device!r}, got one of {other.device!r}")

    @property
    def device(self) -> str:
        return self.costs[False].device

    def counts(self, works: Iterable[Work]) -> dict[bool, Counts]:
        """Counts of a step, of sequences that select (False) and that attend to everything (True)."""
        spans: dict[Path, list[Span]] = {}
        for work in works:
            spans.setdefault(path_of(work), []).append((work.before, work.after))
        found = {False: Counts(), True: Counts()}
        for path, some in spans.items():
            found[path == DENSE] += self._counter(path)(some)
        return found

    def _counter(self, path: Path) -> Counter:
        if path not in self._counters:
            self._counters[path] = Counter(model_of(self._counters[None].model, path))
        return self._counters[path]

    def parts(self, works: Iterable[Work]) -> Parts:
        """Uncorrected time of a step; 0 of none."""
        found, works = Parts(), list(works)
        chunks = [work for work in works if work.after - work.before > 1]
        decoding = [work for work in works if work.after - work.before <= 1]
        for some, costs in ((decoding, self.costs), (chunks, self.chunk_costs)):
            for path, counts in self.counts(some).items():
                if counts.tokens:
                    found += Parts(costs[path].step, costs[path].variable(counts))
        return found

    def seconds(self, works: Iterable[Work]) -> float:
        """Time of a step, corrected."""
        return self.corrected(self.parts(works))

    def corrected(self, parts: Parts) -> float:
        return self.correction.factor * parts.seconds

    def observe(self, works: Iterable[Work], measured: float) -> None:
        """Take in the measured time of a step."""
        self.correction.observe(self.parts(works).seconds, measured)
