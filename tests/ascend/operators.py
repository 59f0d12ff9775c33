"""Registers the emulated operators for tensors on ``npu`` and on the CPU, under the names that engines ship."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import emulator
import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""How often each operator ran."""

_libraries: list[torch.library.Library] = []


def _host(value: Any) -> Any:
    """The same memory as the host sees it, strides included."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
    return value.as_strided((span,), (1,)).cpu().as_strided(value.shape, value.stride())


def kernel(name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
    """What runs behind the dispatcher: arguments by name, rules, result."""
    parameters = [(p.name, p.default_value) for p in schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((name for name, _ in parameters), args, strict=False)) | kwargs
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        named = {p: given.get(p, default) for p, default in parameters}
        hosted = {id(value): _host(value) for value in named.values()}  # a tensor that is given twice stays one
        a = SimpleNamespace(**{p: hosted[id(value)] for p, value in named.items()})
        calls[name] += 1
        emulator.obey(name, a)
        result = emulator.COMPUTE[name](a)
        return result.to(device) if isinstance(result, Tensor) else tuple(part.to(device) for part in result)

    return run


def install() -> None:
    """Once in a process."""
    for name, (namespace, schema) in emulator.SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        library.define(f"{name}{schema}")
        parsed = getattr(getattr(torch.ops, namespace), name).default._schema
        for key in ("PrivateUse1", "CPU"):
            library.impl(name, kernel(name, parsed), key)
