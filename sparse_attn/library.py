"""The only user of ``torch.library``: defines an op, its fake, and the router that sends a call to a kernel.

The choice is made below the schema, so a direct caller of ``torch.ops.sparse_attn`` gets the same checks as a caller of
the public function, and a compiled or exported graph holds one op whatever kernel runs it. Checks and choice depend on
shapes, dtypes, devices and options only; both are remembered under those, so a repeated kind of call pays for one
dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import env, registry

_library = torch.library.Library("sparse_attn", "DEF")
_DEVICE_KEYS = ("CPU", "CUDA", "PrivateUse1")
_MEMO_ENTRIES = 4096


class Arguments(Protocol):
    """The argument tuple of an op: a NamedTuple with the schema's names and defaults."""

    @property
    def backend(self) -> str: ...


@dataclass(frozen=True)
class Op:
    """One op: its argument tuple and the rules that every backend shares."""

    name: str
    arguments: type
    check: Callable[[Any], None]
    """Raises ``InvalidCall`` from shapes, dtypes, devices and options alone; runs on fake tensors too."""
    check_values: Callable[[Any], None]
    """Raises ``InvalidCall`` from values; runs under ``SPARSE_ATTN_CHECKS=debug`` and may wait for the device."""
    facts: Callable[[Any], registry.Call]
    host_bounds: slice
    """Positional arguments on which neither checks nor choice depend, as they change with every step."""


_OPS: list[Op] = []
_memo: dict[Any, registry.Impl] = {}


def forget() -> None:
    """Forget every remembered check and choice, and search backends again at the next call (tests)."""
    _memo.clear()
    registry.reset()


def route(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> registry.Impl:
    """Check one call and choose its kernel."""
    # one flat loop: this line is most of what a routed call costs over a bare one
    key = (op.name, *kwargs) + tuple(
        [
            (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v
            for v in (*args[: op.host_bounds.start], *args[op.host_bounds.stop :], *kwargs.values())
        ]
    )
    impl = _memo.get(key)
    if impl is None:
        call = op.arguments(*args, **kwargs)
        op.check(call)
        impl = registry.choose(op.facts(call), call.backend)
        if len(_memo) >= _MEMO_ENTRIES:
            _memo.clear()
        _memo[key] = impl
    if env.CHECKS.get() == "debug":
        op.check_values(op.arguments(*args, **kwargs))
    return impl


def define(op: Op, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register one overload of ``op``. ``kernel`` and ``fake`` take the schema's arguments."""
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]  # with the overload, which define() does not return
    for key in _DEVICE_KEYS:
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"sparse_attn::{name}", fake, lib=_library)
    if op not in _OPS:
        _OPS.append(op)


def resolve(name: str, *args: Any, **kwargs: Any) -> registry.Impl:
    """The kernel that a call would run, checked and chosen once, for hot loops.

    Takes the op's name and the arguments of one call. ``impl.run(arguments, *outputs)`` then runs it without checks, on
    the op's argument tuple (``sparse_attn.ops.attend.Attend``): keep shapes, dtypes, strides and options as they were.
    """
    op = next((op for op in _OPS if op.name == name), None)
    if op is None:
        raise ValueError(f"resolve: name: expected one of {', '.join(op.name for op in _OPS)}, got {name!r}")
    return route(op, args, kwargs)


def defined() -> tuple[Op, ...]:
    """Every op, in the order of definition."""
    return tuple(_OPS)
