"""How many requests a step's budget holds, and which of them go together. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from .cost import Predictor, Work, path_of

STEADY = 0.2
"""Changes of the target up to this share of it are ignored."""


def batch_target(budget: float, predictor: Predictor, running: Sequence[Work]) -> int:
    """Requests like those that run, so many that a step of them takes ``budget`` seconds; at least 1.

    A request costs the mean of those that run: with no other cost than that of attended pairs, the target is
    ``budget / (mean length x mean effective ratio x pair cost)``, where the mean ratio is attended over dense pairs of
    the whole batch, and the pair cost is of all layers.
    """
    if not running or budget <= 0:
        raise ValueError(f"expected a budget above 0 s and requests that run, got {budget} s and {len(running)}")
    parts = predictor.parts(running)
    each = parts.variable / len(running)
    if not each:
        raise ValueError("cost of a step: expected a coefficient above 0 besides the step's own, got none: calibrate")
    return max(int((budget / predictor.correction.factor - parts.step) / each), 1)


class BatchLimit:
    """A batch target that stands still while the target is near it, for engines that take a number of requests."""

    def __init__(self, budget: float, predictor: Predictor) -> None:
        self.budget, self.predictor = budget, predictor
        self.value: int | None = None

    def update(self, running: Sequence[Work]) -> int:
        """The limit, with the requests that run now."""
        target = batch_target(self.budget, self.predictor, running)
        if self.value is None or abs(target - self.value) > STEADY * self.value:
            self.value = target
        return self.value


def groups(requests: Mapping[Hashable, Work], most: int, spread: float = 2.0) -> list[list[Hashable]]:
    """Requests that go into a kernel call together, shortest first: at most ``most``, of one path (a share, or dense)
    and of lengths whose longest is at most ``spread`` times the shortest.

    For kernels that pad a call to its longest sequence; one that does not pad needs no groups.
    """
    if most < 1 or spread < 1:
        raise ValueError(f"expected groups of at least 1 request and a spread of at least 1, got {most}, {spread}")
    found: list[list[Hashable]] = []
    for path in dict.fromkeys(map(path_of, requests.values())):
        names = sorted((n for n, work in requests.items() if path_of(work) == path), key=lambda n: requests[n].after)
        shortest = 0
        for name in names:
            length = requests[name].after
            if not shortest or length > spread * shortest or len(found[-1]) == most:
                found.append([])
                shortest = length
            found[-1].append(name)
    return found
