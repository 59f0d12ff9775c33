"""The admission rule of an engine, from what its operator asks for. Imports no torch and no engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any

from ..models import Model
from ..serving.admission import Admission, Decision, Limits, Load, Waiting
from ..serving.cost import Predictor, Profile, Work
from ..serving.metrics import Exporter
from .observing import log

LIMITS = tuple(field.name for field in fields(Limits) if field.name != "overdue")
"""An engine's queue cannot refuse what it has taken, so who waits too long goes first."""


def admission(asked: Mapping[str, Any], model: Model, device: str) -> Admission:
    """The rule.

    Args:
        asked: ``mode``, by default ``"observe"``; ``profile``, a file that ``calibrate --save`` wrote; and the fields
            of ``Limits``, of which a profile needs ``budget``.
        device: fingerprint of machine, model and formats.

    Raises:
        ValueError: a key, a value or the profile is wrong.
    """
    known = ("mode", "profile", *LIMITS)
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise ValueError(f"admission: expected keys among {', '.join(known)}, got {', '.join(unknown)}")
    if "profile" in asked and "budget" not in asked:
        raise ValueError("admission: expected budget, seconds that a step may take, with profile, got none")
    limits = Limits(**{"budget": float("inf")} | {name: asked[name] for name in LIMITS if name in asked})
    predictor = None
    if "profile" in asked:
        predictor = Predictor(model, Profile.load(asked["profile"]))
    rule = Admission(limits, predictor, device, asked.get("mode", "observe"))
    log.info("sparse_attn admits in mode %s on %r", rule.mode, device)
    if rule.alarm and rule.mode != "off":
        log.warning("sparse_attn: %s", rule.alarm)
    return rule


class Gate:
    """Decides on the requests of an engine one at a time, corrects the rule's predictions, and exports decisions.

    A request counts once for each change of what the rule says of it.
    """

    def __init__(self, rule: Admission, exporter: Exporter | None) -> None:
        self.rule, self.exporter = rule, exporter
        self._said: dict[Hashable, tuple[str, str]] = {}

    def admits(self, request: Waiting, load: Load) -> bool:
        """Whether a request may begin, or go on after it was preempted."""
        decision = self.rule.decide(request, load)
        self._note(decision)
        return decision.admit

    def _note(self, decision: Decision) -> None:
        said = decision.verdict, decision.reason
        if self.exporter and self._said.get(decision.request) != said:
            self.exporter.decision(decision, self.rule.mode)
        self._said[decision.request] = said

    def observe(self, works: list[Work], seconds: float) -> None:
        """Take in the measured time of a step."""
        if works and seconds > 0:
            self.rule.observe(works, seconds)

    def forget(self, request: Hashable) -> None:
        """A request has ended."""
        self._said.pop(request, None)
