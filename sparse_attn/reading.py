"""What every call of an op does to all of its arguments: puts them into the op's tuple, makes a key of what kind of
call it is, and looks whether tensors to be written lie apart from the others.

Every call pays for this, so a native module does it where one was built; elsewhere Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor


class Reader(Protocol):
    """Reads the calls of one op."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...]) -> tuple[Any, Hashable]:
        """The argument tuple, and a key that differs where two calls differ in a shape, stride, dtype, device or
        option, also of the tensors ``given`` to fill. None: a value is of no known kind."""

    def apart(self, written: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        """Whether each tensor ``written`` is known to lie apart from all but one of ``arguments``, which is itself."""


@dataclass(frozen=True)
class PlainReader:
    """The reader in Python, to which no value is unknown."""

    op: str
    arguments: Callable[..., Any]
    """The class of the op's argument tuple."""
    start: int
    stop: int
    """The key leaves out the fields from ``start`` to ``stop``."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...]) -> tuple[Any, Hashable]:
        a = self.arguments(*args, **kwargs)
        return a, self.key(a, given)

    def key(self, a: Any, given: tuple[Any, ...]) -> Hashable:
        values = (*a[: self.start], *a[self.stop :], *given)
        return self.op, *[(v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v for v in values]

    def apart(self, written: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        return False


def reader(op: str, arguments: Callable[..., Any], start: int, stop: int) -> Reader:
    """The quickest reader of this installation."""
    try:
        native = import_module("sparse_attn._call")
    except ImportError:
        return PlainReader(op, arguments, start, stop)
    found: Reader = native.Reader(op, arguments, start, stop)
    return found
