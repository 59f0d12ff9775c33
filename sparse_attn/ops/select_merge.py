"""``select_merge``: the selections of context-parallel shards joined into one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import library
from ..checks import expect, expect_one_of, expect_tensor
from ..library import Output, Return
from ..registry import Call
from .select import ORDERS, Selected

SCHEMA = (
    "Tensor shard_indices, Tensor shard_values, Tensor shard_offsets, int k, *, int run=1, int stride=1, "
    'Tensor? row_k=None, str order="any", str backend="auto"'
)


class SelectMerge(NamedTuple):
    """The arguments of one call, under the schema's names."""

    shard_indices: Tensor
    shard_values: Tensor
    shard_offsets: Tensor
    k: int
    run: int = 1
    stride: int = 1
    row_k: Tensor | None = None
    order: str = "any"
    backend: str = "auto"


def check(a: SelectMerge) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    op, device, axes = "select_merge", a.shard_indices.device, "S, T, H, K"
    expect_tensor(op, "shard_indices", a.shard_indices, axes, (None,) * 4, ("int32",), device, "any")
    shape = a.shard_indices.shape
    expect_tensor(op, "shard_values", a.shard_values, axes, shape, ("float32",), device, "any")
    expect_tensor(op, "shard_offsets", a.shard_offsets, "S, T", shape[:2], ("int32",), device, "any")
    expect(a.k >= 0, op, "k", "at least 0", a.k)
    expect(a.run >= 1, op, "run", "at least 1", a.run)
    expect(a.run <= a.stride < 1 << 31, op, "stride", f"the run of {a.run} to 2**31 - 1", a.stride)
    if a.row_k is not None:
        expect_tensor(op, "row_k", a.row_k, "T", (shape[1],), ("int32",), device, "all")
    expect_one_of(op, "order", a.order, ORDERS)


def check_values(a: SelectMerge) -> None:
    """Raise ``InvalidCall`` for a global number that int32 does not hold."""
    local = a.shard_indices.long()
    numbers = a.shard_offsets.long()[:, :, None, None] + local // a.run * a.stride + local % a.run
    numbers = numbers[(local >= 0) & (a.shard_values > float("-inf"))]
    wrong = numbers[(numbers < 0) | (numbers >= 1 << 31)]
    expect(not len(wrong), "select_merge", "shard_offsets", "global numbers from 0 to 2**31 - 1", wrong[:1].tolist())


def facts(a: SelectMerge) -> Call:
    """What the choice of a kernel depends on."""
    shards, _, lists, width = a.shard_indices.shape
    return Call(
        "select_merge",
        a.shard_indices.device.type,
        (
            ("shards", shards),
            ("out_heads", lists),
            ("width", width),
            ("k", a.k),
            ("row_k", a.row_k is not None),
            ("order", a.order),
        ),
    )


def outputs(a: SelectMerge) -> tuple[Output, ...]:
    """What the call returns."""
    lists = a.shard_indices.shape[1:3]
    return Output((*lists, a.k), torch.int32), Output(lists, torch.int32), Output((*lists, a.k), torch.float32)


library.define(
    library.Op(
        "select_merge",
        SelectMerge,
        SCHEMA,
        check,
        check_values,
        facts,
        returns=(Return("indices", "T, H, k"), Return("counts", "T, H"), Return("values", "T, H, k")),
        outputs=outputs,
    )
)


def select_merge(
    shard_indices: Tensor,
    shard_values: Tensor,
    shard_offsets: Tensor,
    k: int,
    *,
    run: int = 1,
    stride: int = 1,
    row_k: Tensor | None = None,
    order: str = "any",
    backend: str = "auto",
) -> Selected:
    """One selection from those of the shards of a sequence, as if one ``select`` had scored all of it.

    Each shard selects with the same ``k`` among the entries that it holds, with ``return_values=True``. Local entry
    ``i`` of shard ``s`` has the global number ``shard_offsets[s, t] + i // run * stride + i % run``:

    * contiguous shards: the shard's first entry as offset, and the defaults;
    * entries dealt to S shards in runs of ``n``: offset ``s * n``, ``run=n``, ``stride=S * n``;
    * a shard of several chunks: one selection for each chunk (``kv_range``), each counted as a shard.

    The largest values win, of equal ones the lowest global number. An index below 0 and a value that is NaN or -inf are
    no selection. What a shard always keeps has value +inf, and stays. Global numbers outside of int32 are the caller's
    error (``SPARSE_ATTN_CHECKS=debug`` finds it).

    Args (S shards, T query rows, H lists; every tensor on one device):
        shard_indices: int32 ``[S, T, H, K]``, any strides: ``indices`` of each shard.
        shard_values: float32 ``[S, T, H, K]``, any strides: ``values`` of each shard.
        shard_offsets: int32 ``[S, T]``, any strides (``expand`` one that all rows share).
        k: places in a list.
        run, stride: how entries are dealt, see above.
        row_k: int32 ``[T]``, budget of each row, as the shards had it; None or more than ``k``: ``k``.
        order: of a list: ``index`` (ascending), ``score`` (descending, then by index), or ``any`` of a kernel's own.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``Selected`` with ``indices`` int32 ``[T, H, k]`` (global numbers, then -1), ``counts`` int32 ``[T, H]`` and
        ``values`` float32 ``[T, H, k]``, so that selections can be merged again.

    Raises:
        InvalidCall: an argument breaks the contract.
        NoBackend: no kernel can run the call; every reason is in the message.
    """
    return Selected(
        *torch.ops.sparse_attn.select_merge(
            shard_indices,
            shard_values,
            shard_offsets,
            k,
            run=run,
            stride=stride,
            row_k=row_k,
            order=order,
            backend=backend,
        )
    )
