"""What limits a running service, by length of its requests and by phase, from its records. Imports no torch.

Counts of a request are exact. Its time is not measured apart from that of its neighbours: it is what the coefficients
of a step's time give for its counts, and its part of the steps that it was in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cost import TERMS, StepCost

SHORTEST = 1024
"""Tokens of the first bucket at most; each other ends at twice as many as the one before."""
COUNTS = ("sequences", "tokens", "attended_pairs")
LIMITS = {"step": "step", "token": "tokens", "scored": "selection", "attended": "attention"}
"""What takes the time of a term: launches and reading weights, other layers, the selector, attention."""


@dataclass(frozen=True)
class Bucket:
    """Requests of more than ``above`` and at most ``upto`` tokens, in one phase.

    ``tokens``: computed in it. ``seconds``: of all of them, by term; None if no coefficients are known.
    """

    above: int
    upto: int
    phase: str
    requests: int
    tokens: int
    effective_kv_ratio: float
    seconds: Mapping[str, float] | None

    @property
    def bottleneck(self) -> str:
        """What takes most of the time; ``"unknown"`` without coefficients."""
        if self.seconds is None:
            return "unknown"
        return LIMITS[max(TERMS, key=self.seconds.__getitem__)]


def read(path: str | Path) -> tuple[list[dict[str, Any]], float]:
    """Requests of a file of records, and how many sequences a step has, on average (0: there are no steps).

    Raises ValueError, naming the line.
    """
    requests, steps, sequences = [], 0, 0
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            phases = [found["prefill"], found["decode"]]
            for phase in phases:
                assert all(phase[name] >= 0 for name in COUNTS) and phase["pairs"].get("dense", 0) >= 0
            if found["record"] == "request":
                assert found["tokens"] > 0
                requests.append(found)
            else:
                steps, sequences = steps + 1, sequences + sum(phase["sequences"] for phase in phases)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{path}, line {number}: expected a record of a step or a request, with prefill and decode, got "
                f"{line.strip()[:200]}"
            ) from None
    if not requests:
        raise ValueError(f"{path}: expected records of requests that finished, got none")
    return requests, sequences / steps if steps else 0.0


def buckets(requests: Iterable[Mapping[str, Any]], cost: StepCost | None, together: float = 1.0) -> list[Bucket]:
    """By length and phase. ``cost``: coefficients of a step's time. ``together``: sequences of a step, on average."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for request in requests:
        upto = max(SHORTEST, 1 << (request["tokens"] - 1).bit_length())
        for phase in ("prefill", "decode"):
            if request[phase]["tokens"]:
                found.setdefault((upto, phase), []).append(request[phase])
    order = sorted(found, key=lambda key: (key[0], key[1] != "prefill"))
    return [_bucket(upto, phase, found[upto, phase], cost, together) for upto, phase in order]


def _bucket(upto: int, phase: str, counts: list[Mapping[str, Any]], cost: StepCost | None, together: float) -> Bucket:
    sequences, tokens, attended = (sum(each[name] for each in counts) for name in COUNTS)
    dense, scored = (sum(each["pairs"].get(kind, 0) for each in counts) for kind in ("dense", "scored"))
    seconds = None
    if cost and together:
        seconds = {
            "step": cost.step * sequences / together,
            "token": cost.token * tokens,
            "scored": cost.scored * scored,
            "attended": cost.attended * attended,
        }
    above = upto // 2 if upto > SHORTEST else 0
    return Bucket(above, upto, phase, len(counts), tokens, attended / dense if dense else 0.0, seconds)
