"""``merge``: join attention over parts of the entries into attention over all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import library
from ..checks import dtype_name, expect, expect_one_of, expect_tensor
from ..registry import Call

OUT_DTYPES = ("float32", "bfloat16", "float16")
BASES = ("e", "2")


class Merge(NamedTuple):
    """The arguments of one call, under the schema's names."""

    outs: Tensor
    lses: Tensor
    sinks: Tensor | None = None
    base: str = "e"
    inf_is_empty: bool = False
    backend: str = "auto"


def check(a: Merge) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    device = a.outs.device
    expect_tensor("merge", "outs", a.outs, "S, T, H, Dv", (None, None, None, None), OUT_DTYPES, device)
    parts, tokens, heads, _ = a.outs.shape
    expect(parts >= 1, "merge", "outs", "at least 1 part (axis 0)", parts)
    expect_tensor("merge", "lses", a.lses, "S, T, H", (parts, tokens, heads), ("float32",), device, "any")
    if a.sinks is not None:
        expect_tensor("merge", "sinks", a.sinks, "H", (heads,), ("float32",), device, "all")
    expect_one_of("merge", "base", a.base, BASES)


def check_values(a: Merge) -> None:
    """Raise ``InvalidCall`` for an ``lse`` of +inf that is not said to mean an empty part."""
    wrong = not a.inf_is_empty and bool((a.lses == math.inf).any())
    expect(not wrong, "merge", "lses", "less than +inf", "+inf", "pass inf_is_empty=True if it marks empty rows")


def facts(a: Merge) -> Call:
    """What the choice of a kernel depends on."""
    parts, _, heads, v_dim = a.outs.shape
    return Call(
        "merge",
        a.outs.device.type,
        (
            ("dtype", dtype_name(a.outs.dtype)),
            ("parts", parts),
            ("q_heads", heads),
            ("v_dim", v_dim),
            ("sinks", a.sinks is not None),
            ("base", a.base),
            ("inf_is_empty", a.inf_is_empty),
        ),
    )


_op = library.Op("merge", Merge, check, check_values, facts, host_bounds=slice(0, 0))


def _outputs(a: Merge) -> tuple[Tensor, Tensor]:
    shape = a.outs.shape[1:]
    return a.outs.new_empty(shape), a.outs.new_empty(shape[:2], dtype=torch.float32)


def _check_outputs(a: Merge, out: Tensor, lse: Tensor) -> None:
    shape, dtype = a.outs.shape[1:], (dtype_name(a.outs.dtype),)
    expect_tensor("merge", "out", out, "T, H, Dv", shape, dtype, a.outs.device, "all")
    expect_tensor("merge", "lse", lse, "T, H", shape[:2], ("float32",), a.outs.device, "all")


def _kernel(*args, **kwargs):  # type: ignore[no-untyped-def]
    impl = library.route(_op, args, kwargs)
    a = Merge(*args, **kwargs)
    out, lse = _outputs(a)
    impl.run(a, out, lse)
    return out, lse


def _fake(*args, **kwargs):  # type: ignore[no-untyped-def]
    a = Merge(*args, **kwargs)
    check(a)
    return _outputs(a)


def _kernel_out(*args, out, lse, **kwargs) -> None:  # type: ignore[no-untyped-def]
    impl = library.route(_op, args, kwargs)
    a = Merge(*args, **kwargs)
    _check_outputs(a, out, lse)
    impl.run(a, out, lse)


def _fake_out(*args, out, lse, **kwargs) -> None:  # type: ignore[no-untyped-def]
    a = Merge(*args, **kwargs)
    check(a)
    _check_outputs(a, out, lse)


_ARGUMENTS = (
    'Tensor outs, Tensor lses, *, Tensor? sinks=None, str base="e", bool inf_is_empty=False, str backend="auto"'
)
library.define(_op, f"merge({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _kernel, _fake)
library.define(_op, f"merge.out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()", _kernel_out, _fake_out)


def merge(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    base: str = "e",
    inf_is_empty: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Attention over all entries from attention over disjoint parts of them: shards, a prefix and the rest, splits.

    With ``lse_i`` the log-sum-exp of part ``i``: ``lse = ln sum_i exp(lse_i)`` and
    ``out = sum_i exp(lse_i) out_i / (exp(sink) + sum_i exp(lse_i))``, summed in the order of the parts, so that the
    same parts give the same bits.

    Args (S parts, T rows, H heads; every tensor on one device):
        outs: float32, bfloat16 or float16 ``[S, T, H, Dv]``, each part computed **without** sinks.
        lses: float32 ``[S, T, H]``, any strides. -inf: the part is empty in this row, and what ``outs`` holds there
            counts for nothing. NaN, or +inf unless ``inf_is_empty``, is a fault, and gives NaN.
        sinks: float32 ``[H]``, unscaled logits, in the denominator of ``out`` only.
        base: of the logarithm in ``lses``: ``"e"``, or ``"2"`` as FlashInfer returns.
        inf_is_empty: +inf also marks an empty part, as FlashMLA returns.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``out [T, H, Dv]`` in the dtype of ``outs`` and ``lse`` float32 ``[T, H]`` (natural logarithm, without the
        sink). A row that is empty in every part has ``out = 0`` and ``lse = -inf``.

    Raises:
        InvalidCall: an argument breaks the contract.
        NoBackend: no kernel can run the call.
    """
    return torch.ops.sparse_attn.merge(outs, lses, sinks=sinks, base=base, inf_is_empty=inf_is_empty, backend=backend)
