"""``store``: write rows into a paged plane, in the plane's format."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import layout, library
from ..checks import dtype_name, expect, expect_format, expect_plane, expect_tensor
from ..planes import strides_of
from ..registry import Call

ROW_DTYPES = ("float32", "bfloat16", "float16")

SCHEMA = (
    "Tensor rows, Tensor(a!) plane, Tensor slots, *, Tensor(b!)? scale=None, "
    'str format="bf16", int page_size=0, str backend="auto"'
)


class Store(NamedTuple):
    """The arguments of one call, under the schema's names."""

    rows: Tensor
    plane: Tensor
    slots: Tensor
    scale: Tensor | None = None
    format: str = "bf16"
    page_size: int = 0
    backend: str = "auto"

    @property
    def paging(self) -> tuple[int, int, int]:
        """Pages, entries a page and heads of the plane."""
        return layout.FORMATS[self.format].paging(self.plane.shape, self.page_size)


def check(a: Store) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    expect_tensor("store", "rows", a.rows, "T, H, D", (None, None, None), ROW_DTYPES, a.rows.device)
    tokens, heads, dim = a.rows.shape
    format = expect_format("store", "format", a.format, tuple(layout.FORMATS))
    page_size, scale = ("page_size", a.page_size), ("scale", a.scale)
    expect_plane("store", "plane", a.plane, format, heads, dim, a.rows.device, page_size, scale)
    expect_tensor("store", "slots", a.slots, "T", (tokens,), ("int64",), a.rows.device, "all")


def check_values(a: Store) -> None:
    """Raise ``InvalidCall`` for a slot past the plane, or for two rows that go to one slot."""
    pages, page_size, _ = a.paging
    end = pages * page_size
    used = a.slots[a.slots >= 0]
    expect(bool((used < end).all()), "store", "slots", f"less than pages * page_size = {end}", f"{a.slots.tolist()}")
    expect(used.unique().numel() == used.numel(), "store", "slots", "no slot twice", f"{a.slots.tolist()}")


def facts(a: Store) -> Call:
    """What the choice of a kernel depends on."""
    _, heads, dim = a.rows.shape
    return Call(
        "store",
        a.rows.device.type,
        (
            ("dtype", dtype_name(a.rows.dtype)),
            ("format", a.format),
            ("kv_heads", heads),
            ("dim", dim),
            ("page_size", a.paging[1]),
            ("strides", strides_of(a.plane)),
        ),
    )


library.define(library.Op("store", Store, SCHEMA, check, check_values, facts, writes=("plane", "scale")))


def store(
    rows: Tensor,
    plane: Tensor,
    slots: Tensor,
    *,
    scale: Tensor | None = None,
    format: str = "bf16",
    page_size: int = 0,
    backend: str = "auto",
) -> None:
    """Write ``rows`` into ``plane`` in place, quantised as the plane's format says (``docs/formats.md``).

    Every row of every head is quantised by itself, to nearest, ties to even. A group with a non-finite element, or with
    more than its scale can express, gets a scale that is not finite, so that reading it shows the fault: rows of
    ``int8`` with a magnitude above 65504 * 127, and of ``int4_index_h`` with one above 65504 * 7, read back as NaN.

    Args (T rows, H heads; every tensor on one device):
        rows: float32, bfloat16 or float16 ``[T, H, D]``.
        plane: ``[pages, page_size, H, D]`` in ``format``, or uint8 in the shape of a packed format, which has one head
            and its own D. Any strides but in the last axis.
        slots: int64 ``[T]``, ``page * page_size + offset`` of each row; a negative slot skips its row. Two rows in one
            slot are the caller's error (``SPARSE_ATTN_CHECKS=debug`` finds it).
        scale: float16 ``[pages, page_size, H]`` for formats with a scale plane.
        format: a name in ``sparse_attn.layout.FORMATS``.
        page_size: entries of a page of a planar plane. Else 0, or the plane's own as a check.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Raises:
        InvalidCall: an argument breaks the contract, or a slot lies past the plane.
        NoBackend: no kernel can run the call.
    """
    torch.ops.sparse_attn.store(rows, plane, slots, scale=scale, format=format, page_size=page_size, backend=backend)
