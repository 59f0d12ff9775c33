"""What measured scores say: the loss of each task at each share, and the smallest share within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import expm1, inf

from torch import Tensor

VOID = 0.8
"""A task with right and wrong answers counts if dense attention gives at least so many right ones."""
WINDOWS = 16
"""Parts of a text over which the error of a loss is taken."""


@dataclass(frozen=True)
class Loss:
    """Of a task at a share: by how much of itself the perplexity rose, or the share lost of the answers that dense
    attention gives. ``error``: the standard error of the paired difference; 0 for answers."""

    task: str
    ratio: float
    loss: float
    error: float
    void: bool


def perplexity_loss(task: str, ratio: float, dense: Tensor, sparse: Tensor) -> Loss:
    """From the nats ``[tokens]`` of the same tokens."""
    more = (sparse - dense).double()
    means = [float(part.mean()) for part in more.tensor_split(min(WINDOWS, len(more)))]
    mean = sum(means) / len(means)
    spread = sum((value - mean) ** 2 for value in means) / max(len(means) - 1, 1)
    return Loss(task, ratio, expm1(float(more.mean())), (spread / len(means)) ** 0.5, void=False)


def answers_loss(task: str, ratio: float, dense: Tensor, sparse: Tensor) -> Loss:
    """From right answers, 0 or 1 ``[questions]``."""
    right = float(dense.sum())
    lost = float((dense * (1 - sparse)).sum())
    return Loss(task, ratio, lost / right if right else inf, 0.0, void=right < VOID * len(dense))


def worst(losses: Iterable[Loss], ratio: float) -> Loss | None:
    """The loss that decides about a share: the greatest of tasks that are not void."""
    return max((x for x in losses if x.ratio == ratio and not x.void), key=lambda x: x.loss, default=None)


def recommended(losses: Sequence[Loss], budget: float) -> float | None:
    """The smallest share at which, and at every greater one, the worst task loses no more than ``budget``."""
    found = None
    for ratio in sorted({x.ratio for x in losses}, reverse=True):
        decides = worst(losses, ratio)
        if decides is None or decides.loss > budget:
            break
        found = ratio
    return found
