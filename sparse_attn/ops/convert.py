"""``convert``: move entries of a paged plane into another plane, of another format or order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import layout, library
from ..checks import expect, expect_format, expect_plane, expect_scales, expect_tensor
from ..planes import Plane
from ..registry import Call

SCHEMA = (
    "Tensor src, Tensor(a!) dst, Tensor? src_slots=None, Tensor? dst_slots=None, *, "
    'Tensor? src_scale=None, Tensor(b!)? dst_scale=None, str src_format="bf16", str dst_format="bf16", '
    'int src_page_size=0, int dst_page_size=0, str backend="auto"'
)


class Convert(NamedTuple):
    """The arguments of one call, under the schema's names."""

    src: Tensor
    dst: Tensor
    src_slots: Tensor | None = None
    dst_slots: Tensor | None = None
    src_scale: Tensor | None = None
    dst_scale: Tensor | None = None
    src_format: str = "bf16"
    dst_format: str = "bf16"
    src_page_size: int = 0
    dst_page_size: int = 0
    backend: str = "auto"

    @property
    def planes(self) -> tuple[Plane, Plane]:
        return (
            Plane(self.src, self.src_format, self.src_scale, self.src_page_size),
            Plane(self.dst, self.dst_format, self.dst_scale, self.dst_page_size),
        )


def check(a: Convert) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    device, formats = a.src.device, tuple(layout.FORMATS)
    src_format = expect_format("convert", "src_format", a.src_format, formats)
    dst_format = expect_format("convert", "dst_format", a.dst_format, formats)
    page_size, scale = ("src_page_size", a.src_page_size), ("src_scale", a.src_scale)
    expect_plane("convert", "src", a.src, src_format, None, None, device, page_size, scale)
    src = Plane(a.src, a.src_format, a.src_scale, a.src_page_size)
    page_size, scale = ("dst_page_size", a.dst_page_size), ("dst_scale", a.dst_scale)
    expect_plane("convert", "dst", a.dst, dst_format, src.heads, src.dim, device, page_size, scale)
    if a.src_slots is None or a.dst_slots is None:
        both = a.src_slots is None and a.dst_slots is None
        expect(both, "convert", "dst_slots", "slots of both planes or of neither", "slots of one")
        src, dst = a.planes
        expect(dst.slots >= src.slots, "convert", "dst", f"a plane of {src.slots} entries or more, as src", dst.slots)
        return
    expect_tensor("convert", "src_slots", a.src_slots, "N", (None,), ("int64",), device, "all")
    expect_tensor("convert", "dst_slots", a.dst_slots, "N", (a.src_slots.shape[0],), ("int64",), device, "all")


def check_values(a: Convert) -> None:
    """Raise ``InvalidCall`` for a slot past its plane, two entries that go to one slot, or scales that the source's
    format does not have."""
    src, dst = a.planes
    if a.src_slots is None or a.dst_slots is None:
        return
    for name, slots, plane in (("src_slots", a.src_slots, src), ("dst_slots", a.dst_slots, dst)):
        inside = bool((slots < plane.slots).all())
        expect(inside, "convert", name, f"less than pages * page_size = {plane.slots}", f"{slots.tolist()}")
    used = a.dst_slots[(a.src_slots >= 0) & (a.dst_slots >= 0)]
    expect(used.unique().numel() == used.numel(), "convert", "dst_slots", "no slot twice", f"{a.dst_slots.tolist()}")
    expect_scales("convert", "src", src, a.src_slots)


def facts(a: Convert) -> Call:
    """What the choice of a kernel depends on."""
    src, dst = a.planes
    return Call(
        "convert",
        a.src.device.type,
        (
            ("src_format", a.src_format),
            ("dst_format", a.dst_format),
            ("kv_heads", src.heads),
            ("dim", src.dim),
            ("src_page_size", src.page_size),
            ("dst_page_size", dst.page_size),
        ),
    )


library.define(library.Op("convert", Convert, SCHEMA, check, check_values, facts, writes=("dst", "dst_scale")))


def convert(
    src: Tensor,
    dst: Tensor,
    src_slots: Tensor | None = None,
    dst_slots: Tensor | None = None,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    src_format: str = "bf16",
    dst_format: str = "bf16",
    src_page_size: int = 0,
    dst_page_size: int = 0,
    backend: str = "auto",
) -> None:
    """Write entries of ``src`` into ``dst`` in place, in the format and order of ``dst``: for migration, not per step.

    Formats of one codec hold the same bytes in another order, and these are moved as they are. Between others each
    entry is read as ``load`` reads it in float32 and quantised as ``store`` quantises it. Page sizes may differ.

    Args (N entries; every tensor on one device):
        src, dst: planes of one number of heads and elements a row, as in ``store``, in memory of their own.
        src_slots, dst_slots: int64 ``[N]``, where each entry comes from and goes to; a negative one skips the entry.
            Whole pages are ``(pages[:, None] * page_size + torch.arange(page_size)).flatten()``. None: every entry, to
            the slot of the same number.
        src_scale, dst_scale: float16 ``[pages, page_size, H]`` for formats with a scale plane.
        src_format, dst_format: names in ``sparse_attn.layout.FORMATS``.
        src_page_size, dst_page_size: entries of a page of a planar plane. Else 0, or the plane's own as a check.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Raises:
        InvalidCall: an argument breaks the contract, or a slot lies past its plane.
        NoBackend: no kernel can run the call.
    """
    torch.ops.sparse_attn.convert(
        src,
        dst,
        src_slots,
        dst_slots,
        src_scale=src_scale,
        dst_scale=dst_scale,
        src_format=src_format,
        dst_format=dst_format,
        src_page_size=src_page_size,
        dst_page_size=dst_page_size,
        backend=backend,
    )
