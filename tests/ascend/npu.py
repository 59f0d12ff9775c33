"""Calls on ``npu`` tensors against the reference on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn import reference, registry
from sparse_attn.ops.attend import Attend, facts

TOLERANCE = 1e-2


def on_npu(value: Any) -> Any:
    """The tensor on the device, with the strides that it has."""
    if not isinstance(value, Tensor):
        return value
    span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
    return value.as_strided((span,), (1,)).to("npu").as_strided(value.shape, value.stride())


def attend(leading: tuple[Any, ...], kwargs: dict[str, Any], backend: str = "ascend_npu") -> Tensor:
    moved = {name: on_npu(value) for name, value in kwargs.items()}
    return sparse_attn.attend(*map(on_npu, leading), **moved, backend=backend).cpu()


def expected(leading: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    q = leading[0]
    out = torch.empty(*q.shape[:2], leading[4], dtype=torch.float64)
    reference.attend(Attend(q.double(), *leading[1:], **kwargs), out, None)
    return out


def assert_agrees(leading: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    out = attend(leading, kwargs)
    torch.testing.assert_close(out.double(), expected(leading, kwargs), atol=TOLERANCE, rtol=TOLERANCE)


def call_of(leading: tuple[Any, ...], kwargs: dict[str, Any]) -> registry.Call:
    """What the choice of a kernel depends on, with the tensors on the device."""
    return facts(Attend(*map(on_npu, leading), **{name: on_npu(value) for name, value in kwargs.items()}))


def refusal(leading: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no kernel of the backend takes a call; empty if one does."""
    try:
        registry.choose(call_of(leading, kwargs), "ascend_npu")
    except registry.NoBackend as error:
        return str(error)
    return ""
