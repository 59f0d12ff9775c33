"""Which kernel runs a call, and every reason why another does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from . import env


class NoBackend(RuntimeError):
    """No kernel can run a call. The message gives each backend's reasons."""


class Call(NamedTuple):
    """What a choice depends on. ``facts`` are (name, value) pairs in the order of the op's card."""

    op: str
    device: str
    facts: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class OneOf:
    """The fact is one of a few values."""

    values: tuple[Any, ...]

    def admits(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}" if len(self.values) > 1 else str(self.values[0])


@dataclass(frozen=True)
class Between:
    """The fact is a multiple of ``step`` from ``low`` to ``high``, both included."""

    low: int
    high: int
    step: int = 1

    def admits(self, value: Any) -> bool:
        return self.low <= value <= self.high and value % self.step == 0

    def __str__(self) -> str:
        return f"{self.low} to {self.high}" + (f" in steps of {self.step}" if self.step > 1 else "")


Limit = OneOf | Between


def _always() -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Impl:
    """One kernel behind one op.

    ``limits`` maps fact names to what the kernel can do; a fact without a limit is unlimited. ``tolerance`` maps dtype
    names to (absolute, relative) error against the float64 reference. ``available`` says why this machine cannot run
    the kernel (None if it can); it is asked once. ``run`` takes the op's argument tuple and then the output tensors,
    which it fills. ``variant`` tells the kernels of one op and backend apart, in words. ``plan``, which a kernel of
    ``attend`` may have, takes the tuple and an int32 tensor, and writes what depends on lengths and shapes alone.
    """

    op: str
    backend: str
    limits: Mapping[str, Limit]
    run: Callable[..., None]
    tolerance: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    priority: int = 0
    available: Callable[[], str | None] = _always
    variant: str = ""
    plan: Callable[..., None] | None = None

    @property
    def label(self) -> str:
        """Backend and variant."""
        return f"{self.backend} {self.variant}".rstrip()

    def refusals(self, call: Call) -> list[str]:
        """Every reason why this kernel does not run ``call``; empty if it does."""
        device = self.limits.get("device")
        if device is not None and not device.admits(call.device):
            return [f"runs on {device}, the tensors are on {call.device}"]
        outside = [
            f"{name} is {value}, supported: {limit}"
            for name, value in call.facts
            if (limit := self.limits.get(name)) is not None and not limit.admits(value)
        ]
        if outside:
            return outside  # a kernel that is not wanted is not probed: that may run it
        missing = availability(self)
        return [missing] if missing else []


@cache
def availability(impl: Impl) -> str | None:
    """Why this machine cannot run ``impl``, or None."""
    try:
        return impl.available()
    except Exception as error:  # a broken driver or library is a reason, not a crash of the caller
        return f"probing it failed: {type(error).__name__}: {error}"


@cache
def _found() -> tuple[tuple[Impl, ...], dict[str, str]]:
    from . import backends, reference

    impls, broken = backends.discover()
    return (*impls, *reference.IMPLS), broken


def implementations(op: str | None = None) -> tuple[Impl, ...]:
    """Every kernel found, best first, of one op or of all. The reference is the last."""
    return tuple(impl for impl in _found()[0] if op is None or impl.op == op)


def broken_backends() -> dict[str, str]:
    """Backends that could not be imported, and why."""
    return dict(_found()[1])


def choose(call: Call, backend: str = "auto") -> Impl:
    """The kernel that runs ``call``: the best that fits, or the named backend's or none.

    Raises ``NoBackend`` with every reason. The reference stands in under ``"auto"`` on CPU tensors, or anywhere if
    ``SPARSE_ATTN_ALLOW_REFERENCE=1``, and says so once for each kind of call.
    """
    reasons: list[str] = []
    for impl in implementations(call.op):
        if backend not in ("auto", impl.backend):
            continue
        refusals = impl.refusals(call)
        if backend == "auto" and impl.backend == "reference" and not refusals and not _reference_may_stand_in(call):
            refusals = ["slow; set SPARSE_ATTN_ALLOW_REFERENCE=1 to let it stand in on this device"]
        if not refusals:
            _say(call, impl, backend, reasons)
            return impl
        reasons.append(f"  {impl.label}: {'; '.join(refusals)}")
    reasons += [f"  {name}: {why}" for name, why in broken_backends().items() if backend in ("auto", name)]
    if not reasons:
        known = sorted({impl.backend for impl in implementations()} | set(broken_backends()))
        reasons.append(f"  no backend is called {backend!r} for this op; known: {', '.join(known)}")
    facts = ", ".join(f"{name}={value}" for name, value in call.facts)
    raise NoBackend(
        "\n".join(
            [
                f"no backend can run this call (op={call.op}, device={call.device}, backend={backend}, {facts})",
                *reasons,
                "run `python -m sparse_attn doctor` to see what this machine has",
            ]
        )
    )


def _reference_may_stand_in(call: Call) -> bool:
    return call.device == "cpu" or env.ALLOW_REFERENCE.get() == "1"


def _say(call: Call, impl: Impl, backend: str, reasons: list[str]) -> None:
    if env.LOG.get() == "choice":
        print(f"sparse_attn: {call.op} runs on {impl.backend}", *reasons, sep="\n", file=sys.stderr)
    elif impl.backend == "reference" and backend == "auto":
        _say_reference_stands_in(call.op, "\n".join(reasons))


@cache
def _say_reference_stands_in(op: str, reasons: str) -> None:
    print(
        f"sparse_attn: no kernel fits this call of {op}; the slow reference stands in",
        reasons,
        sep="\n",
        file=sys.stderr,
    )


def reset() -> None:
    """Search backends and read the environment again at the next call (tests)."""
    _found.cache_clear()
    availability.cache_clear()
    _say_reference_stands_in.cache_clear()
    env.reset()
