"""The bundled engine: a scheduler's steps, run one after the other. Minimal on purpose: proof, calibration, small
deployments; large ones use an engine of their own with the rules of this package.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from .observer import Observer
from .scheduler import Event, Plan, Refused, Request, Scheduler

Listener = Callable[[Event | Refused], None]
"""Told of a request's tokens and of its end, by the thread that runs the steps; it must not block."""

IDLE = 0.01
"""Seconds until held requests are looked at again when nothing runs."""


class Runs(Protocol):
    """What runs a step: ``runner.Runner``, or a simulator."""

    def run(self, plan: Plan) -> Mapping[Hashable, int | None]:
        """Do the moves, compute the parts. Returns the next token of each part that samples, None where its logits are
        not finite."""

    def forget(self, name: Hashable) -> None:
        """A request ended."""


class Watcher(Protocol):
    """Told of what happens, for metrics."""

    def step(self, plan: Plan, seconds: float, scheduler: Scheduler) -> None: ...

    def event(self, event: Event, now: float) -> None: ...

    def refused(self, reason: str) -> None: ...

    def forget(self, name: Hashable) -> None: ...


class Engine:
    """Runs requests. ``step`` by hand, or ``start`` a thread that steps while there is work.

    Args:
        runner: computes.
        scheduler: decides.
        clock: seconds; the same for arrivals, waits and times of steps. A simulator gives its own.
        observer: counts pairs of every step.
        watcher: metrics.
    """

    def __init__(
        self,
        runner: Runs,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.runner, self.scheduler, self.clock = runner, scheduler, clock
        self.failed: BaseException | None = None
        self._observer, self._watcher = observer, watcher
        self._listeners: dict[Hashable, Listener] = {}
        self._lock = threading.RLock()  # of the scheduler; not held while a step runs; listeners may submit and cancel
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. Raises ``Refused`` if it can never run, the queue is full, or the engine is closed."""
        with self._work:
            try:
                if self._closed or self.failed:
                    raise Refused("closed", "expected a running engine, got one that ends; send it elsewhere")
                self.scheduler.submit(request, self.clock())
            except Refused as error:
                if self._watcher:
                    self._watcher.refused(error.reason)
                raise
            self._listeners[request.name] = listener
            self._work.notify()

    def cancel(self, name: Hashable) -> None:
        """Forget a request, whose client is gone. One that ended already is none."""
        with self._lock:
            if self._listeners.pop(name, None) is not None:
                self.scheduler.cancel(name)
                self._forget(name)

    def step(self) -> Plan:
        """Run one step. Without parts in its plan there was nothing to do."""
        with self._lock:
            plan = self.scheduler.plan(self.clock())
            for request, decision in plan.refused:
                self._tell(request.name, Refused("overdue", str(decision)), ends=True)
                if self._watcher:
                    self._watcher.refused("overdue")
        begin = self.clock()
        sampled = self.runner.run(plan)
        now = self.clock()
        with self._lock:
            if self._observer and plan.parts:
                works = {part.request.name: part.work for part in plan.parts}
                self._observer.works(works, Counter(part.reason for part in plan.parts), now - begin)
            for event in self.scheduler.advance(plan, sampled, now - begin):
                if self._watcher:
                    self._watcher.event(event, now)
                if event.token is not None or event.finish:
                    self._tell(event.request.name, event, ends=event.finish is not None)
            if self._watcher:
                self._watcher.step(plan, now - begin, self.scheduler)
        return plan

    @property
    def status(self) -> str:
        """``"ok"`` while requests are taken; ``"failed"`` or ``"closed"``."""
        return "failed" if self.failed else "closed" if self._closed else "ok"

    # --- In a thread

    def start(self) -> None:
        """Step in a thread of its own while there is work."""
        self._thread = threading.Thread(target=self._run, name="sparse_attn engine", daemon=True)
        self._thread.start()

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, wait up to ``grace`` seconds for those that there are, and end the thread."""
        with self._work:
            self._closed = True
            self._work.wait_for(lambda: not self._listeners or self.failed, timeout=grace)
            for name in list(self._listeners):
                self.scheduler.cancel(name)
                self._tell(name, Refused("closed", "the engine ended before the request did"), ends=True)
            self._work.notify_all()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or self.scheduler.waiting or self.scheduler.running)
                if self._closed and not self._listeners:
                    return
            try:
                plan = self.step()
            except BaseException as error:  # noqa: BLE001 - whatever it is, no request may wait for ever
                self._fail(error)
                return
            if not plan.parts:
                time.sleep(IDLE)  # all that wait are held, and nothing runs that could free pages

    def _fail(self, error: BaseException) -> None:
        with self._work:
            self.failed = error
            for name in list(self._listeners):
                self._tell(name, Refused("closed", f"the engine failed: {error}"), ends=True)
            self._work.notify_all()

    def _tell(self, name: Hashable, what: Event | Refused, ends: bool) -> None:
        listener = self._listeners.pop(name, None) if ends else self._listeners.get(name)
        if ends:
            self._forget(name)
            self._work.notify_all()
        if listener is not None:
            listener(what)

    def _forget(self, name: Hashable) -> None:
        self.runner.forget(name)
        if self._watcher:
            self._watcher.forget(name)
        if self._observer and name in self._observer:
            self._observer.finish(name)
