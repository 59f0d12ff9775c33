"""One form for every refusal: what was called, which argument, what is expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import FORMATS, Format
from .planes import Plane


class InvalidCall(ValueError):
    """A call that breaks the contract of its op.

    Nothing was computed or written, unless a value deep in the call is at fault, such as a page that the plane lacks:
    then tensors that the caller gave to fill hold anything.
    """


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
        ok = t.numel() == 0 or t.shape[-1] <= 1 or t.stride(-1) == 1
        expect(ok, op, name, "last axis with stride 1", f"strides {t.stride()}", "call .contiguous()")
    elif contiguous == "all":
        expect(t.is_contiguous(), op, name, "a contiguous tensor", f"strides {t.stride()}", "call .contiguous()")


def expect_one_of(op: str, name: str, value: str, allowed: Sequence[str]) -> None:
    """Check an option that is a word."""
    expect(value in allowed, op, name, f"one of {', '.join(allowed)}", repr(value))


def expect_format(op: str, name: str, format: str, allowed: Sequence[str]) -> Format:
    """The format called ``format``, which must be one of ``allowed``."""
    expect_one_of(op, name, format, allowed)
    return FORMATS[format]


def expect_plane(
    op: str,
    name: str,
    plane: Tensor,
    format: Format,
    heads: Any,
    dim: Any,
    device: torch.device,
    page_size: tuple[str, int],
    scale: tuple[str, Tensor | None],
) -> None:
    """Check a plane of ``format`` for rows of ``dim`` elements (None: any) and ``heads`` heads (None: any).

    ``page_size`` and ``scale`` are the names and values of the arguments that belong to the plane.
    """
    (size_name, size), (scale_name, scales) = page_size, scale
    if plane.dtype != getattr(torch, format.dtype):
        expected = f"{format.dtype} elements for format {format.name!r}"
        raise refuse(op, name, expected, describe(plane), "pass the plane's own format")
    axes = "pages, page_size, heads, row"
    shape: tuple[Any, ...] = (None, None, heads, None if dim is None else format.row(dim))
    if format.packed:
        expect(dim in (None, format.dim), op, name, f"rows of {format.dim} elements for format {format.name!r}", dim)
        expect(heads in (None, 1), op, name, f"1 head for format {format.name!r}", heads)
        shape = (None, None, 1, format.row(format.dim))
    elif dim is not None:
        expect(format.row_dim(format.row(dim)) == dim, op, name, f"rows of whole bytes in format {format.name!r}", dim)
    if format.planar:
        expected = f"the entries of a page, as planar format {format.name!r} does not show them"
        expect(size >= 1, op, size_name, expected, size)
        axes, shape = "pages, page_bytes", (None, format.page_bytes(size))
    expect_tensor(op, name, plane, axes, shape, (format.dtype,), device)
    if not format.planar:
        expected = "pages of at least 1 entry (axis 1 of the plane)"
        expect(plane.shape[1] >= 1, op, size_name, expected, describe(plane))
        expect(size in (0, plane.shape[1]), op, size_name, f"0 or the plane's {plane.shape[1]}", size)
    if format.scale_dtype is None:
        expect(scales is None, op, scale_name, f"None, as format {format.name!r} has no scale plane", "a tensor")
        return
    if scales is None:
        raise refuse(op, scale_name, f"a scale plane for format {format.name!r}", "None")
    axes = "pages, page_size, heads"
    expect_tensor(op, scale_name, scales, axes, plane.shape[:3], (format.scale_dtype,), device, "any")


def expect_scales(op: str, name: str, plane: Plane, slots: Tensor) -> None:
    """Check that the scales at ``slots`` (each below the plane's end; negative ones are skipped) are those of the
    plane's format, which are never negative: formats of one shape are told apart by nothing else."""
    if not plane.format.codec.scale:
        return
    used = slots[slots >= 0]
    wrong = used[(plane.scales(plane.at(used)) < 0).flatten(1).any(-1)]
    expected = f"no negative scale, as in every plane of format {plane.format.name!r}"
    expect(not len(wrong), op, name, expected, f"one in slot {wrong[:1].tolist()}", "pass the plane's own format")


def expect_distinct(op: str, name: str, written: Tensor) -> None:
    """Check that no two elements of a tensor to be written share memory."""
    alone = all(size <= 1 or stride != 0 for size, stride in zip(written.shape, written.stride(), strict=True))
    expect(alone, op, name, "elements that share no memory", f"strides {written.stride()}", "pass a tensor of its own")


def expect_apart(op: str, name: str, written: Tensor, others: Iterable[Tensor]) -> None:
    """Check that a tensor to be written shares no memory with ``others``."""
    storage = written.untyped_storage().data_ptr()
    for other in others:
        if other.untyped_storage().data_ptr() == storage and _meet(written, other):
            raise refuse(
                op, name, "memory that no other argument uses", "overlapping tensors", "pass a tensor of its own"
            )


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage may share a byte: their spans overlap, and modulo no step of an axis do the
    parts between two steps lie apart, as keys and scales of a page do in a pool of both."""
    if not (a.numel() and b.numel()):
        return False
    steps = [step * t.element_size() for t in (a, b) for step in t.stride()]
    return not any(step and _apart(a, b, step) for step in (1 << 62, *steps))


def _apart(a: Tensor, b: Tensor, step: int) -> bool:
    """Whether the bytes of two tensors lie apart modulo ``step``."""
    starts = [t.storage_offset() * t.element_size() for t in (a, b)]
    spans = [
        sum(
            (n - 1) * s * t.element_size()
            for n, s in zip(t.shape, t.stride(), strict=True)
            if s * t.element_size() % step
        )
        + t.element_size()
        for t in (a, b)
    ]
    distance = (starts[1] - starts[0]) % step
    return spans[0] <= distance and distance + spans[1] <= step


def expect_batch(op: str, q: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> int:
    """Check how query rows are packed; the number of sequences B."""
    ok = cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape[0] >= 1
    expect(ok, op, "cu_seqlens_q", "int32 [B + 1]", describe(cu_seqlens_q))
    batch = cu_seqlens_q.shape[0] - 1
    expect_tensor(op, "cu_seqlens_q", cu_seqlens_q, "B + 1", (batch + 1,), ("int32",), q.device, "all")
    expect_tensor(op, "seq_lens", seq_lens, "B", (batch,), ("int32",), q.device, "all")
    return batch


def expect_lengths(
    op: str, q: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, max_seqlen_q: int, max_seq_len: int
) -> None:
    """Check the values of lengths and their bounds. Reads them back to the host."""
    starts = cu_seqlens_q.tolist()
    parts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    ordered = starts[0] == 0 and min(parts, default=0) >= 0 and starts[-1] <= q.shape[0]
    expect(ordered, op, "cu_seqlens_q", f"0 = first <= ... <= last <= T = {q.shape[0]}", starts)
    longest = max(parts, default=0)
    expected = f"at least the longest query part, {longest}"
    expect(longest <= max_seqlen_q, op, "max_seqlen_q", expected, max_seqlen_q)
    tokens = max(seq_lens.tolist(), default=0)
    expect(tokens <= max_seq_len, op, "max_seq_len", f"at least the longest sequence, {tokens}", max_seq_len)


def expect_unique(op: str, name: str, indices: Tensor, counts: Tensor | None, why: str) -> None:
    """Check that no row of ``indices [T, H, K]`` lists a number twice. Reads them back to the host."""
    if indices.numel() == 0:
        return
    places = torch.arange(indices.shape[2], device=indices.device, dtype=torch.int32)
    used = indices >= 0
    if counts is not None:
        used &= places < counts.unsqueeze(-1)
    ordered = torch.where(used, indices, -1 - places).sort(dim=-1).values
    again = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if bool(again.any()):
        t, h = again.nonzero()[0].tolist()
        raise refuse(op, name, "no index twice in a row", f"a duplicate in row {t}, head {h}", why)
