"""The only user of ``torch.library``: defines an op from its card, with its fakes and its overload ``out``, and the
router that sends a call to a kernel.

The choice is made below the schema, so a direct caller of ``torch.ops.sparse_attn`` gets the same checks as a caller of
the public function, and a compiled or exported graph holds one op whatever kernel runs it. Checks, choice and outputs
depend on shapes, dtypes, devices and options only; they are remembered under those, so a repeated kind of call pays for
one dictionary look-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import env, reading, registry
from .checks import dtype_name, expect, expect_apart, expect_distinct, expect_tensor, refuse

_library = torch.library.Library("sparse_attn", "DEF")
_DEVICE_KEYS = ("CPU", "CUDA", "PrivateUse1")
_MEMO_ENTRIES = 4096
_TYPES: dict[str, tuple[str, Any]] = {
    "Tensor": ("a dense tensor", Tensor),
    "str": ("a word", str),
    "int": ("an integer", Integral),
    "SymInt": ("an integer", (Integral, torch.SymInt)),
    "float": ("a number", Real),
    "bool": ("True or False", bool),
    "ScalarType": ("a dtype", torch.dtype),
}
"""Of schemas, with a name for messages."""


class Arguments(Protocol):
    """The argument tuple of an op: a NamedTuple with the schema's names and defaults, a tensor first."""

    @property
    def backend(self) -> str: ...


@dataclass(frozen=True)
class Return:
    """A tensor that an op returns, or fills where the caller passes it to the overload ``out``."""

    name: str
    axes: str
    """Names of its axes, for messages."""
    when: str = ""
    """What asks for it; empty: it is always there."""


class Output(NamedTuple):
    """A tensor that a call returns. Where it is not wanted, kernels get None, and callers a tensor of shape ``[0]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = True


def _no_outputs(a: Any) -> tuple[Output, ...]:
    return ()


@dataclass(frozen=True)
class Op:
    """The card of one op: its argument tuple and the rules that every backend shares."""

    name: str
    arguments: type
    schema: str
    """The arguments in the language of PyTorch schemas."""
    check: Callable[[Any], None]
    """Raises ``InvalidCall`` from shapes, dtypes, devices and options alone; runs on fake tensors too."""
    check_values: Callable[[Any], None]
    """Raises ``InvalidCall`` from values; runs under ``SPARSE_ATTN_CHECKS=debug`` and may wait for the device."""
    facts: Callable[[Any], registry.Call]
    returns: tuple[Return, ...] = ()
    outputs: Callable[[Any], tuple[Output, ...]] = _no_outputs
    """One for each of ``returns``, on the device of the first argument; runs on fake tensors too."""
    writes: tuple[str, ...] = ()
    """Arguments that the op writes in place."""
    host_bounds: tuple[int, int] = (0, 0)
    """The range of positional arguments on which neither checks nor choice depend, as they change with every step."""

    @property
    def needed(self) -> list[str]:
        """Tensors that a call must bring: PyTorch passes None for any tensor."""
        return re.findall(r"Tensor(?:\(\w!\))? (\w+)", self.schema)

    @cached_property  # at the first call: importing the package loads no native module
    def reader(self) -> reading.Reader:
        return reading.reader(self.name, self.arguments, *self.host_bounds)


_OPS: list[Op] = []
Routed = tuple[registry.Impl, tuple[Output, ...]]
_memo: dict[Hashable, Routed] = {}


def forget() -> None:
    """Forget every remembered check and choice, and search backends again at the next call (tests)."""
    _memo.clear()
    registry.reset()


def route(op: Op, a: Any, key: Hashable, given: dict[str, Any] | None = None) -> Routed:
    """Check one call, and the tensors ``given`` to fill by name; the kernel that runs it, and what it returns."""
    if key is None:
        key = reading.PlainReader(op.name, op.arguments, *op.host_bounds).key(a, tuple((given or {}).values()))
    debug = env.CHECKS.get() == "debug"
    if debug:
        key = "debug", key  # which no caller looks up, so that values are checked in every call
    routed = _memo.get(key)
    if routed is None:
        env.check()
        outputs = _checked(op, a, given)
        for name, tensor in _written(op, a, given).items():
            if tensor is not None:
                expect_distinct(op.name, name, tensor)
        routed = registry.choose(op.facts(a), a.backend), outputs
        if len(_memo) >= _MEMO_ENTRIES:
            _memo.clear()
        _memo[key] = routed
    if debug:
        op.check_values(a)
    return routed


def _checked(op: Op, a: Any, given: dict[str, Any] | None) -> tuple[Output, ...]:
    """What a call returns, if it passes the checks, and the tensors given to fill as well."""
    for name in op.needed:
        expect(getattr(a, name) is not None, op.name, name, "a tensor", "None")
    op.check(a)
    outputs = op.outputs(a)
    if given is None:
        return outputs
    for r, (shape, dtype, wanted), tensor in zip(op.returns, outputs, given.values(), strict=True):
        got = "None" if tensor is None else "a tensor"
        expect(wanted == (tensor is not None), op.name, r.name, f"a tensor exactly when {r.when}", got)
        if tensor is not None:
            expect_tensor(op.name, r.name, tensor, r.axes, shape, (dtype_name(dtype),), a[0].device, "all")
    return outputs


def _check_types(op: Op, a: Any) -> None:
    """Refuse values of other types than the schema's, as PyTorch does for calls that pass through it."""
    for kind, optional, name in re.findall(r"(\w+)(?:\(\w!\))?(\??) (\w+)", op.schema):
        value, (expected, types) = getattr(a, name), _TYPES[kind]
        if value is None and (optional or kind == "Tensor"):
            continue  # needed tensors are looked for with the other checks
        expect(isinstance(value, types), op.name, name, expected, type(value).__name__)
        if kind == "Tensor":
            dense = value.layout == torch.strided and not value.is_nested
            expect(dense, op.name, name, expected, "a nested one" if value.is_nested else value.layout)


def _check_gradients(op: Op, a: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse tensors whose gradient PyTorch would follow: it would find none here, and of the tensors ``given`` to fill
    the one of what they held before."""
    for value in (*args, *kwargs.values(), *given.values()):  # fewer than all of the tuple
        if isinstance(value, Tensor) and value.requires_grad:
            name = next(name for name, argument in (a._asdict() | given).items() if argument is value)
            expected = "a tensor without requires_grad, as this op has no gradient"
            raise refuse(op.name, name, expected, "one with it", "detach it or use torch.no_grad()")


def _written(op: Op, a: Any, given: dict[str, Any] | None) -> dict[str, Tensor | None]:
    """The tensors that a call writes, by name."""
    return {name: getattr(a, name) for name in op.writes} | (given or {})


def _check_apart(op: Op, a: Any, written: dict[str, Tensor | None]) -> None:
    """Refuse to write memory that the call also reads. It depends on addresses, so it is not remembered."""
    named = a._asdict() | written
    if op.reader.apart(tuple(written.values()), tuple(named.values())):
        return
    for name, tensor in written.items():
        if tensor is not None:
            others = [other for n, other in named.items() if n != name and isinstance(other, Tensor)]
            expect_apart(op.name, name, tensor, others)


def _note_written(written: dict[str, Tensor | None]) -> None:
    """Tell autograd, so that a backward pass that saved one of them does not use what it holds now."""
    if not torch.is_inference_mode_enabled():
        tensors = [t for t in written.values() if t is not None and not t.is_inference()]
        torch.autograd.graph.increment_version(tensors)


def define(op: Op) -> None:
    """Register ``op`` and, if it returns tensors, its overload ``out``, which fills the caller's."""
    _OPS.append(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        a, key = op.reader.read(args, kwargs, ())
        impl, outputs = _memo.get(key) or route(op, a, key)
        if torch.is_grad_enabled():
            _check_gradients(op, a, args, kwargs, {})
        written = _written(op, a, None) if op.writes else {}
        if written:
            _check_apart(op, a, written)
        returned, filled = _empty(a, outputs)
        impl.run(a, *filled)
        if written:
            _note_written(written)
        return returned

    def fake(*args: Any, **kwargs: Any) -> Any:
        a = op.arguments(*args, **kwargs)
        if torch.is_grad_enabled():
            _check_gradients(op, a, args, kwargs, {})
        return _empty(a, _checked(op, a, None))[0]

    def kernel_out(*args: Any, **kwargs: Any) -> None:
        given = {r.name: kwargs.pop(r.name, None) for r in op.returns}
        a, key = op.reader.read(args, kwargs, tuple(given.values()))
        impl, _ = _memo.get(key) or route(op, a, key, given)
        if torch.is_grad_enabled():
            _check_gradients(op, a, args, kwargs, given)
        written = _written(op, a, given)
        _check_apart(op, a, written)
        impl.run(a, *given.values())
        _note_written(written)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        given = {r.name: kwargs.pop(r.name, None) for r in op.returns}
        a = op.arguments(*args, **kwargs)
        if torch.is_grad_enabled():
            _check_gradients(op, a, args, kwargs, given)
        _checked(op, a, given)

    names = [f"Tensor {r.name}" for r in op.returns]
    _register(op.name, op.schema, "Tensor" if len(names) == 1 else f"({', '.join(names)})", kernel, fake)
    if op.returns:
        filled = [
            f"Tensor({alias}!)? {r.name}=None" if r.when else f"Tensor({alias}!) {r.name}"
            for alias, r in zip("zyxw", op.returns, strict=False)  # apart from the letters of arguments
        ]
        _register(f"{op.name}.out", ", ".join([op.schema, *filled]), "()", kernel_out, fake_out)


def _empty(a: Any, outputs: tuple[Output, ...]) -> tuple[Any, list[Tensor | None]]:
    """New tensors, as the schema returns them, and those of them for a kernel to fill."""
    new, own, tensors, filled = a[0].new_empty, a[0].dtype, [], []
    for shape, dtype, wanted in outputs:  # sizes one by one, and no dtype, are what PyTorch parses quickest
        sizes = shape if wanted else (0,)
        tensor = new(*sizes) if dtype is own else new(*sizes, dtype=dtype)
        tensors.append(tensor)
        filled.append(tensor if wanted else None)
    return tensors[0] if len(tensors) == 1 else tuple(tensors) or None, filled


def _register(name: str, arguments: str, returns: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in _DEVICE_KEYS:
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"sparse_attn::{name}", fake, lib=_library)


def resolve(name: str, *args: Any, **kwargs: Any) -> registry.Impl:
    """The kernel that a call would run, checked and chosen once, for hot loops.

    Takes the op's name and the arguments of one call. ``impl.run(arguments, *outputs)`` then runs it without checks, on
    the op's argument tuple (``sparse_attn.ops.attend.Attend``): keep shapes, dtypes, strides and options as they were.
    """
    op = next((op for op in _OPS if op.name == name), None)
    if op is None:
        raise ValueError(f"resolve: name: expected one of {', '.join(op.name for op in _OPS)}, got {name!r}")
    a, key = op.reader.read(args, kwargs, ())
    _check_types(op, a)
    return route(op, a, key)[0]


def defined() -> tuple[Op, ...]:
    """Every op, in the order of definition."""
    return tuple(_OPS)
