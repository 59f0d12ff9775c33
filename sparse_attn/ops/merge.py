"""``merge``: join attention over parts of the entries into attention over all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import library
from ..checks import dtype_name, expect, expect_one_of, expect_tensor
from ..library import Output, Return
from ..registry import Call

OUT_DTYPES = ("float32", "bfloat16", "float16")
BASES = ("e", "2")

SCHEMA = 'Tensor outs, Tensor lses, *, Tensor? sinks=None, str base="e", bool inf_is_empty=False, str backend="auto"'


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


def outputs(a: Merge) -> tuple[Output, ...]:
    """What the call returns."""
    shape = a.outs.shape[1:]
    return Output(shape, a.outs.dtype), Output(shape[:2], torch.float32)


library.define(
    library.Op(
        "merge",
        Merge,
        SCHEMA,
        check,
        check_values,
        facts,
        returns=(Return("out", "T, H, Dv"), Return("lse", "T, H")),
        outputs=outputs,
    )
)


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
