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

from .cost import TERMS, Profile

SHORTEST = 1024
"""Tokens of the first bucket at most; each other ends at twice as many as the one before."""
COUNTS, WORK = ("sequences", "tokens", "attended_pairs"), ("sequences", "tokens", "scored", "attended")
"""Numbers that a phase of a record has, and those that it has of each kind of sequence, if it tells them apart."""
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
            numbers = [phase[name] for phase in phases for name in COUNTS]
            numbers += [phase["pairs"].get("dense", 0) for phase in phases]
            numbers += [work[name] for work in found.get("works", {}).values() for name in WORK]
            if min(numbers) < 0 or (found["record"] == "request" and found["tokens"] < 1):
                raise ValueError
            if found["record"] == "request":
                requests.append(found)
            else:
                steps, sequences = steps + 1, sequences + sum(phase["sequences"] for phase in phases)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{path}, line {number}: expected a record of a step or a request, with prefill and decode, got "
                f"{line.strip()[:200]}"
            ) from None
    if not requests:
        raise ValueError(f"{path}: expected records of requests that finished, got none")
    return requests, sequences / steps if steps else 0.0


def buckets(requests: Iterable[Mapping[str, Any]], profile: Profile | None, together: float = 1.0) -> list[Bucket]:
    """By length and phase. ``profile``: coefficients of steps. ``together``: sequences of a step, on average."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for request in requests:
        upto = max(SHORTEST, 1 << (request["tokens"] - 1).bit_length())
        for phase in ("prefill", "decode"):
            if request[phase]["tokens"]:
                found.setdefault((upto, phase), []).append(request)
    order = sorted(found, key=lambda key: (key[0], key[1] != "prefill"))
    return [_bucket(upto, phase, found[upto, phase], profile, together) for upto, phase in order]


def _bucket(
    upto: int, phase: str, requests: list[Mapping[str, Any]], profile: Profile | None, together: float
) -> Bucket:
    counts = [request[phase] for request in requests]
    tokens, attended = (sum(each[name] for each in counts) for name in ("tokens", "attended_pairs"))
    dense = sum(each["pairs"].get("dense", 0) for each in counts)
    seconds = None
    if profile and together:
        seconds = dict.fromkeys(TERMS, 0.0)
        for request in requests:
            for kind, work in _works(request, phase).items():
                cost = profile.of(kind)
                seconds["step"] += cost.step * work["sequences"] / together
                for term, number in (("token", "tokens"), ("scored", "scored"), ("attended", "attended")):
                    seconds[term] += getattr(cost, term) * work[number]
    above = upto // 2 if upto > SHORTEST else 0
    return Bucket(above, upto, phase, len(counts), tokens, attended / dense if dense else 0.0, seconds)


def _works(request: Mapping[str, Any], phase: str) -> Mapping[str, Mapping[str, int]]:
    """What a phase of a request computed, by kind; of an engine that tells no kinds, all of its plan's."""
    kinds = ("chunk",) if phase == "prefill" else ("selecting", "dense")
    if "works" in request:
        return {kind: request["works"][kind] for kind in kinds if kind in request["works"]}
    counts = request[phase]
    work = {"sequences": counts["sequences"], "tokens": counts["tokens"], "attended": counts["attended_pairs"]}
    return {kinds[0]: work | {"scored": counts["pairs"].get("scored", 0)}}
