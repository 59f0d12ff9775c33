"""Corrections to Triton's interpreter (checked with 3.7.1), for tests under ``TRITON_INTERPRET=1``; importing this
applies them.

The interpreter keeps bfloat16 as the integers of its bits and computes on those; its conversions to narrower floats
truncate. Here bfloat16 is computed in float32, and conversions round to nearest through torch. Also a driver that says
no device is there, as launches ask for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

FLOATS = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
}
EIGHT_BIT = (tl.float8e4nv,)
ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
_convert_float, _binary, _unary, _dot = (
    interpreter._convert_float,
    Builder.binary_op,
    Builder.unary_op,
    Builder.create_dot,
)
_cast = Builder.cast_impl


def as_torch(bits: np.ndarray, dtype: Any) -> torch.Tensor:
    raw = torch.from_numpy(np.frombuffer(np.ascontiguousarray(bits).tobytes(), np.uint8).copy())
    return raw.view(FLOATS[dtype]).reshape(bits.shape)


def as_numpy(numbers: torch.Tensor, kind: Any) -> np.ndarray:
    return numbers.contiguous().view(torch.uint8).numpy().view(kind).reshape(tuple(numbers.shape))


def convert_float(bits: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Rounds to nearest; conversions to 8 bits saturate, as the devices' do."""
    source, target = source.scalar, target.scalar
    if source not in FLOATS or target not in FLOATS or bits.size == 0:
        return _convert_float(bits, source, target, rounding)
    numbers = as_torch(bits, source).float()
    if target in EIGHT_BIT:
        largest = torch.finfo(FLOATS[target]).max
        numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-largest, largest))
    return as_numpy(numbers.to(FLOATS[target]), getattr(np, f"uint{target.primitive_bitwidth}"))


def is_bf16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def widened(handle: Any) -> Any:
    return Handle(as_torch(handle.data, tl.bfloat16).float().numpy(), tl.float32) if is_bf16(handle) else handle


def narrowed(handle: Any) -> Any:
    if handle.dtype.scalar != tl.float32:
        return handle
    numbers = torch.from_numpy(np.ascontiguousarray(handle.data, np.float32)).to(torch.bfloat16)
    return Handle(as_numpy(numbers, np.uint16), tl.bfloat16)


def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if (is_bf16(left) or is_bf16(right)) and op not in ON_BITS:
        return narrowed(_binary(self, widened(left), widened(right), op))
    return _binary(self, left, right, op)


def unary_op(self: Any, operand: Any, op: Any) -> Any:
    return narrowed(_unary(self, widened(operand), op)) if is_bf16(operand) else _unary(self, operand, op)


def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
    return _dot(self, widened(left), widened(right), *rest)


def cast_impl(self: Any, source: Any, target: Any) -> Any:
    from_, to = source.dtype.scalar, target.scalar
    if from_ == tl.bfloat16 and to not in (tl.bfloat16, tl.float32):
        return _cast(self, widened(source), target)
    if to == tl.bfloat16 and from_ not in FLOATS:
        return _cast(self, Handle(source.data.astype(np.float32), tl.float32), target)
    return _cast(self, source, target)


def device_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of a function. The interpreter takes the place of the language at every call, which costs more
    than all else; here only if it has not yet."""
    if any(tl.core.is_builtin(module.full) for module in self.fn.__globals__.values() if module in (tl, tl.core)):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


class NoDevice:
    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


interpreter._convert_float = convert_float
Builder.binary_op, Builder.unary_op, Builder.create_dot, Builder.cast_impl = binary_op, unary_op, create_dot, cast_impl
interpreter.InterpretedFunction.__call__ = device_call
triton.runtime.driver.set_active(NoDevice())
