"""``load``: read rows of a paged plane back, as numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import layout, library
from ..checks import dtype_name, expect, expect_format, expect_plane, expect_scales, expect_tensor
from ..library import Output, Return
from ..planes import Plane
from ..registry import Call

ROW_DTYPES = (torch.float32, torch.bfloat16)

SCHEMA = (
    'Tensor plane, Tensor slots, *, Tensor? scale=None, str format="bf16", int page_size=0, '
    'ScalarType? dtype=None, str backend="auto"'
)


class Load(NamedTuple):
    """The arguments of one call, under the schema's names."""

    plane: Tensor
    slots: Tensor
    scale: Tensor | None = None
    format: str = "bf16"
    page_size: int = 0
    dtype: torch.dtype | None = None
    backend: str = "auto"

    @property
    def row_dtype(self) -> torch.dtype:
        return self.dtype or torch.float32

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the rows: slots, heads, elements."""
        plane = Plane(self.plane, self.format, self.scale, self.page_size)
        return self.slots.shape[0], plane.heads, plane.dim


def check(a: Load) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    format = expect_format("load", "format", a.format, tuple(layout.FORMATS))
    page_size, scale = ("page_size", a.page_size), ("scale", a.scale)
    expect_plane("load", "plane", a.plane, format, None, None, a.plane.device, page_size, scale)
    expect_tensor("load", "slots", a.slots, "T", (None,), ("int64",), a.plane.device, "all")
    expect(a.row_dtype in ROW_DTYPES, "load", "dtype", "float32 or bfloat16", dtype_name(a.row_dtype))


def check_values(a: Load) -> None:
    """Raise ``InvalidCall`` for a slot past the plane, or for scales that its format does not have."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    inside = bool((a.slots < plane.slots).all())
    expect(inside, "load", "slots", f"less than pages * page_size = {plane.slots}", f"{a.slots.tolist()}")
    expect_scales("load", "plane", plane, a.slots)


def facts(a: Load) -> Call:
    """What the choice of a kernel depends on."""
    _, heads, dim = a.shape
    return Call(
        "load",
        a.plane.device.type,
        (
            ("dtype", dtype_name(a.row_dtype)),
            ("format", a.format),
            ("kv_heads", heads),
            ("dim", dim),
            ("page_size", Plane(a.plane, a.format, a.scale, a.page_size).page_size),
        ),
    )


def outputs(a: Load) -> tuple[Output, ...]:
    """What the call returns."""
    return (Output(a.shape, a.row_dtype),)


library.define(
    library.Op("load", Load, SCHEMA, check, check_values, facts, returns=(Return("out", "T, H, D"),), outputs=outputs)
)


def load(
    plane: Tensor,
    slots: Tensor,
    *,
    scale: Tensor | None = None,
    format: str = "bf16",
    page_size: int = 0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Rows of ``plane`` as numbers: for tests and migration. ``attend`` reads every format by itself.

    An element is ``stored * scale``, one product in float32, then rounded to ``dtype``.

    Args (T slots, H heads, D elements a row; every tensor on one device):
        plane: ``[pages, page_size, H, D]`` in ``format``, or uint8 in the shape of a packed format, which has one head
            and its own D. Any strides but in the last axis.
        slots: int64 ``[T]``, ``page * page_size + offset`` of each row, in any order, twice if wanted. A negative slot
            gives a row of zeros.
        scale: float16 ``[pages, page_size, H]`` for formats with a scale plane.
        format: a name in ``sparse_attn.layout.FORMATS``.
        page_size: entries of a page of a planar plane. Else 0, or the plane's own as a check.
        dtype: float32 (None) or bfloat16.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``[T, H, D]`` in ``dtype``.

    Raises:
        InvalidCall: an argument breaks the contract, or a slot lies past the plane.
        NoBackend: no kernel can run the call.
    """
    return torch.ops.sparse_attn.load(
        plane, slots, scale=scale, format=format, page_size=page_size, dtype=dtype, backend=backend
    )
