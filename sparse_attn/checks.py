"""One form for every refusal: what was called, which argument, what is expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import FORMATS, Format


class InvalidCall(ValueError):
    """A call that breaks the contract of its op. Nothing was computed or written."""


def refuse(op: str, name: str, expected: str, got: object, do: str = "") -> InvalidCall:
    """The exception for one broken rule, for the caller to raise."""
    advice = f"; {do}" if do else ""
    return InvalidCall(f"{op}: {name}: expected {expected}, got {got}{advice}")


def expect(ok: Any, op: str, name: str, expected: str, got: object, do: str = "") -> None:
    """Raise ``InvalidCall`` unless ``ok``."""
    if not ok:
        raise refuse(op, name, expected, got, do)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(t: Tensor) -> str:
    """Shape and dtype of a tensor, as messages print it."""
    return f"{dtype_name(t.dtype)} {[*t.shape]}"


def expect_tensor(
    op: str,
    name: str,
    t: Tensor,
    axes: str,
    shape: Sequence[Any],
    dtypes: Sequence[str],
    device: torch.device,
    contiguous: str = "row",
) -> None:
    """Check rank, sizes, dtype, device and strides of one tensor.

    ``axes`` names the axes for the message, ``shape`` holds a size for each of them or None for any. ``contiguous`` is
    ``"row"`` (elements of the last axis lie side by side), ``"all"`` or ``"any"``.
    """
    expected = f"{' or '.join(dtypes)} [{axes}]"
    expect(t.dim() == len(shape), op, name, expected, describe(t))
    for axis, size, actual in zip(axes.split(", "), shape, t.shape, strict=True):
        if size is not None:
            expect(actual == size, op, name, f"{expected} with {axis} = {size}", describe(t))
    do = "convert it" if not t.dtype.is_floating_point else ""
    expect(dtype_name(t.dtype) in dtypes, op, name, expected, describe(t), do)
    expect(t.device == device, op, name, f"a tensor on {device}, where q or rows are", t.device)
    if contiguous == "row":
        ok = t.shape[-1] <= 1 or t.stride(-1) == 1
        expect(ok, op, name, "last axis with stride 1", f"strides {t.stride()}", "call .contiguous()")
    elif contiguous == "all":
        expect(t.is_contiguous(), op, name, "a contiguous tensor", f"strides {t.stride()}", "call .contiguous()")


def expect_format(op: str, name: str, format: str, allowed: Sequence[str]) -> Format:
    """The format called ``format``, which must be one of ``allowed``."""
    expect(format in allowed, op, name, f"one of {', '.join(allowed)}", repr(format))
    return FORMATS[format]


def expect_plane(
    op: str,
    name: str,
    plane: Tensor,
    format: Format,
    shape: Sequence[Any],
    device: torch.device,
    scale: Tensor | None,
    scale_name: str,
) -> None:
    """Check a plane ``[pages, page_size, heads, row]`` and its scale plane ``[pages, page_size, heads]``."""
    if plane.dtype != getattr(torch, format.dtype):
        raise refuse(
            op,
            name,
            f"{format.dtype} elements for format {format.name!r}",
            describe(plane),
            "pass the plane's own format",
        )
    expect_tensor(op, name, plane, "pages, page_size, heads, row", shape, (format.dtype,), device)
    if format.scale_dtype is None:
        expect(scale is None, op, scale_name, f"None, as format {format.name!r} has no scales", "a tensor")
        return
    if scale is None:
        raise refuse(op, scale_name, f"a scale plane for format {format.name!r}", "None")
    axes = "pages, page_size, heads"
    expect_tensor(op, scale_name, scale, axes, plane.shape[:3], (format.scale_dtype,), device, "any")
