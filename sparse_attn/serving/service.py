"""Requests, steps, pages and decisions of an engine as Prometheus metrics. Imports no torch."""

from __future__ import annotations

from typing import Any

from .admission import REASONS
from .scheduler import Event, Plan, Scheduler

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of times."""


class ServiceMetrics:
    """Watches an engine. ``registry``: of ``prometheus_client``."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, help: str, *labels: str) -> Any:
            return Gauge(f"sparse_attn_{name}", help, labels, registry=registry)

        self._requests = gauge("requests", "Requests that run, and that wait.", "state")
        self._pages = gauge("pages", "Pages of the pool: used by requests, kept for prefixes alone, free.", "state")
        self._shares = gauge(
            "admission_load_ratio",
            "What admission goes by: pages in use over those of the pool, and the predicted time of a step over its "
            "budget; the latter is missing without a profile of this device.",
            "resource",
        )
        self._watermarks = gauge("admission_watermark_ratio", "Shares above which requests are held.", "resource")
        self._correction = gauge("admission_correction_ratio", "Moving average of measured over predicted time.")
        self._alarm = gauge("admission_alarm", "1 if admission goes by memory alone: no profile of this device.")
        self._decisions = Counter(
            "sparse_attn_admission_decisions",
            "Decisions on waiting requests, one for each request and step, with the rule's reason.",
            ("verdict", "reason"),
            registry=registry,
        )
        self._refused = Counter(
            "sparse_attn_requests_refused", "Requests that were refused.", ("reason",), registry=registry
        )
        self._finished = Counter(
            "sparse_attn_requests_finished", "Requests that ended.", ("reason",), registry=registry
        )
        self._preemptions = Counter("sparse_attn_preemptions", "Requests that gave up their pages.", registry=registry)
        self._steps, self._first, self._gap = (
            Histogram(f"sparse_attn_{name}_seconds", help, buckets=SECONDS, registry=registry)
            for name, help in (
                ("step", "Time of a step."),
                ("time_to_first_token", "From a request's arrival to its first token."),
                ("token_gap", "Between tokens of a request."),
            )
        )
        self._last: dict[Any, float] = {}
        self._preempted = 0

    def step(self, plan: Plan, seconds: float, scheduler: Scheduler) -> None:
        """After each step."""
        if plan.parts:
            self._steps.observe(seconds)
        for decision in plan.decisions:
            assert decision.reason in REASONS
            self._decisions.labels(decision.verdict, decision.reason).inc()
        self._preemptions.inc(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions
        manager, admission = scheduler.manager, scheduler.admission
        for state, number in (("running", len(scheduler.running)), ("waiting", len(scheduler.waiting))):
            self._requests.labels(state).set(number)
        used, cached = manager.used_pages, manager.cached_pages
        for state, number in (("used", used), ("cached", cached), ("free", manager.pool.pages - used - cached)):
            self._pages.labels(state).set(number)
        load = scheduler.load
        self._shares.labels("memory").set(load.used / load.pages)
        compute = admission.compute(load.running)
        if compute is not None and admission.predictor:
            self._shares.labels("compute").set(compute)
            self._correction.set(admission.predictor.correction.factor)
        self._watermarks.labels("memory").set(admission.limits.memory)
        self._watermarks.labels("compute").set(admission.limits.compute)
        self._alarm.set(admission.alarm is not None)

    def event(self, event: Event, now: float) -> None:
        """A token, or the end of a request."""
        request = event.request
        if event.token is not None:
            if request.name in self._last:
                self._gap.observe(now - self._last[request.name])
            else:
                self._first.observe(now - request.arrived)
            self._last[request.name] = now
        if event.finish:
            self._finished.labels(event.finish).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def forget(self, name: Any) -> None:
        """A request ended, or its client is gone."""
        self._last.pop(name, None)
