"""Tasks run on a model of transformers, densely and with selections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..integrations.transformers import PagedCache, Selection, register, set_selection
from .tasks import Question, Task

CHUNK = 256
"""Tokens of a step of the prompt, and of what follows it, where each selects for itself."""


@dataclass(frozen=True)
class Measured:
    """Of a task: nats of each token scored, or of each question 1.0 if its answer is right."""

    task: Task
    ratio: float | None
    values: Tensor


def prepare(model: Any) -> None:
    """Let ``model`` attend through ``sparse_attn``."""
    register()
    model.eval()
    model.set_attn_implementation("sparse_attn")


def run(
    model: Any, task: Task, ratios: Sequence[float | None], format: str = "", index_format: str = ""
) -> Iterator[Measured]:
    """What the model scores in ``task`` for each of ``ratios``; None: dense. The prompt is read once, densely.

    Args:
        model: prepared by ``prepare``; a dense model, as ``PagedCache`` takes.
        format, index_format: of keys and values, and of the index that a selection scores; ``""``: as the model has
            them, and none.
    """
    longest = max(len(question.tokens) for question in task.questions)
    cache = PagedCache(model.config, len(task.prompt) + longest, format, index_format)
    set_selection(model, None)
    for _ in forward(model, cache, task.prompt, 0):
        pass
    for ratio in ratios:
        set_selection(model, None if ratio is None else Selection(ratio, least=0, queries=0))
        values = [score(model, cache, question, task.exact) for question in task.questions]
        yield Measured(task, ratio, torch.cat(values))
    set_selection(model, None)


def score(model: Any, cache: PagedCache, question: Question, exact: bool) -> Tensor:
    """What the question's answer scores. The cache is as before afterwards."""
    tokens = question.tokens
    logits = torch.cat([*forward(model, cache, tokens[:-1], question.answer)])
    cache.crop(1 - len(tokens))
    wanted = torch.tensor(tokens[-question.answer :], device=logits.device)
    if exact:
        return (logits.argmax(-1) == wanted).all()[None].float().cpu()
    return cross_entropy(logits.float(), wanted, reduction="none").cpu()


def forward(model: Any, cache: PagedCache, tokens: Sequence[int], scored: int) -> Iterable[Tensor]:
    """Read ``tokens``; yield logits ``[n, vocabulary]`` of the steps that hold some of the last ``scored``."""
    for start in range(0, len(tokens), CHUNK):
        part = torch.tensor([tokens[start : start + CHUNK]], device=model.device)
        keep = min(part.shape[1], max(start + part.shape[1] - (len(tokens) - scored), 0))
        with torch.inference_mode():
            out = model(part, cache=cache, use_cache=True, logits_to_keep=max(keep, 1))
        if keep:
            yield out.logits[0]
