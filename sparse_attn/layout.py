"""The one description of the bytes: KV formats and slot arithmetic. Imports no torch.

A *plane* is a paged tensor of entries. Entry ``e`` of a sequence lies in page ``page_table[e // page_size]`` at offset
``e % page_size``; its *slot* is ``page * page_size + offset``. ``docs/formats.md`` gives every format byte by byte and
its origin. ``csrc/common/layout.h`` mirrors this file for native kernels; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e8m0": 8, "int8": 8, "e2m1": 4, "int4": 4}
"""Bits of each type of number. Two numbers of 4 bits share a byte, the one of even index in its low half."""

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""Names of the torch dtypes of planes of plain numbers. Other types live in planes of uint8."""


@dataclass(frozen=True)
class Codec:
    """What the numbers of a row become.

    The first ``dim`` elements (0: all of them, however many) are stored as ``element`` numbers. With a type of
    ``scale``, each ``group`` of them (0: all of the row) shares one: ``value = stored * scale``. The last ``rope``
    elements of the row are stored as bf16.
    """

    element: str
    scale: str = ""
    group: int = 0
    dim: int = 0
    rope: int = 0


Section = tuple[tuple[str, int], ...]
"""Parts in the order of their bytes: values, rope, scales or pad, each with its number of bytes an entry."""


@dataclass(frozen=True)
class Format:
    """A codec and where its parts lie. ``code`` is the number of the format in native kernels.

    Without ``sections`` the plane is ``[pages, page_size, heads, row]``, and the scales, if any, have a plane of their
    own, ``[pages, page_size, heads]``, so that rows stay aligned.

    With ``sections`` the format is *packed*: an entry has one head, and its scales among its bytes. A page holds, for
    each section in turn, the bytes of that section of its first entry, its second, and so on. One section is the
    *interleaved* order: the plane is uint8 ``[pages, page_size, 1, entry_bytes]``. Several are the *planar* order:
    uint8 ``[pages, page_bytes]``, a page padded to a multiple of ``page_multiple`` bytes.
    """

    name: str
    code: int
    codec: Codec
    sections: tuple[Section, ...] = ()
    page_multiple: int = 1
    use: str = "kv"
    version: int = 1

    @property
    def packed(self) -> bool:
        return bool(self.sections)

    @property
    def planar(self) -> bool:
        return len(self.sections) > 1

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of the plane."""
        return "uint8" if self.packed else TORCH_DTYPES.get(self.codec.element, "uint8")

    @property
    def scale_dtype(self) -> str | None:
        """Name of the torch dtype of the scale plane, None if there is none."""
        return TORCH_DTYPES[self.codec.scale] if self.codec.scale and not self.packed else None

    @property
    def bits(self) -> int:
        """Bits of a stored element."""
        return BITS[self.codec.element]

    @property
    def scale_bits(self) -> int:
        """Bits of the scale plane for one entry and head."""
        return BITS[self.codec.scale] if self.scale_dtype else 0

    @property
    def dim(self) -> int:
        """Elements of a row of a packed format; 0: any number."""
        return self.codec.dim + self.codec.rope

    def widths(self) -> tuple[int, ...]:
        """Bytes of an entry in each section."""
        return tuple(sum(size for _, size in section) for section in self.sections)

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one entry of one head with ``dim`` elements, its scales included."""
        if not self.packed:
            return -(-(dim * self.bits + self.scale_bits) // 8)
        if dim != self.dim:
            raise ValueError(f"format {self.name!r}: expected rows of {self.dim} elements, got {dim}")
        return sum(self.widths())

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of a packed format, its padding included."""
        return -(-page_size * sum(self.widths()) // self.page_multiple) * self.page_multiple

    def row(self, dim: int) -> int:
        """Length of the plane's last axis for rows of ``dim`` elements, unless planar."""
        return sum(self.widths()) if self.packed else dim // self._elements_an_item

    def row_dim(self, length: int) -> int:
        """Elements of a row in a plane whose last axis has ``length`` items."""
        return self.dim if self.packed else length * self._elements_an_item

    @property
    def _elements_an_item(self) -> int:
        return 2 if self.bits == 4 else 1

    def shape(self, pages: int, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Shape of a plane."""
        if self.planar:
            return pages, self.page_bytes(page_size)
        return pages, page_size, heads, self.row(dim)

    def paging(self, shape: Sequence[int], page_size: int) -> tuple[int, int, int]:
        """Pages, entries a page, and heads of a plane of this shape; ``page_size`` counts in the planar order only."""
        return (shape[0], page_size, 1) if self.planar else (shape[0], shape[1], shape[2])


def _section(**parts: int) -> Section:
    return tuple(parts.items())


_V32 = Codec("e4m3", "fp32", 128, 512, rope=64)
_INT8_V32 = Codec("int8", "fp32", 128, 512, rope=64)
_V4 = Codec("e4m3", "e8m0", 64, 448, rope=64)
_V4_BF16_SCALES = Codec("e4m3", "bf16", 64, 448, rope=64)
_V41 = Codec("e4m3", "e8m0", 32, 512)
_FP4_V41 = Codec("e2m1", "e4m3", 16, 512)
_FP8_INDEX = Codec("e4m3", "fp32", 128, 128)
_INT8_INDEX = Codec("int8", "fp16", 128, 128)
_FP4_INDEX = Codec("e2m1", "e8m0", 32, 128)

_FORMATS = (
    Format("fp32", 0, Codec("fp32")),
    Format("bf16", 1, Codec("bf16")),
    Format("fp16", 2, Codec("fp16")),
    Format("int8", 3, Codec("int8", "fp16")),
    Format("int8_index_h", 4, Codec("int8", "fp16"), use="index"),
    Format("int4_index_h", 5, Codec("int4", "fp16"), use="index"),
    Format("fp8_v32", 6, _V32, (_section(values=512, scales=16, rope=128),)),
    Format("int8_v32", 7, _INT8_V32, (_section(values=512, rope=128, scales=16),)),
    Format("fp8_v4", 8, _V4, (_section(values=448, rope=128, scales=7, pad=1),)),
    Format("fp8_v4_planar", 9, _V4, (_section(values=448, rope=128), _section(scales=7, pad=1)), page_multiple=576),
    Format("fp8_v4_640", 10, _V4, (_section(rope=128, values=448, scales=7, pad=57),)),
    Format("fp8_v4_608", 11, _V4_BF16_SCALES, (_section(rope=128, values=448, scales=14, pad=18),)),
    Format("fp8_v41", 12, _V41, (_section(values=512, scales=16),)),
    Format("fp8_v41_planar", 13, _V41, (_section(values=512), _section(scales=16)), page_multiple=512),
    Format("fp4_v41", 14, _FP4_V41, (_section(values=256, scales=32),)),
    Format("fp4_v41_planar", 15, _FP4_V41, (_section(values=256), _section(scales=32)), page_multiple=256),
    Format("fp8_index", 16, _FP8_INDEX, (_section(values=128, scales=4),), use="index"),
    Format("fp8_index_planar", 17, _FP8_INDEX, (_section(values=128), _section(scales=4)), use="index"),
    Format("int8_index", 18, _INT8_INDEX, (_section(values=128, scales=2),), use="index"),
    Format("int8_index_planar", 19, _INT8_INDEX, (_section(values=128), _section(scales=2)), use="index"),
    Format("fp4_index", 20, _FP4_INDEX, (_section(values=64, scales=4),), use="index"),
    Format("fp4_index_planar", 21, _FP4_INDEX, (_section(values=64), _section(scales=4)), use="index"),
)

FORMATS: dict[str, Format] = {f.name: f for f in _FORMATS}

PLAIN_FORMATS = tuple(f.name for f in _FORMATS if not f.codec.scale)
"""Formats whose rows are plain numbers."""


def names(use: str, packed: bool | None = None) -> tuple[str, ...]:
    """Names of the formats for one use: ``"kv"`` (read by ``attend``) or ``"index"`` (read by a selector). With
    ``packed``, only those that are, or are not."""
    return tuple(f.name for f in _FORMATS if f.use == use and packed in (None, f.packed))


def locate(page_table: Any, entries: Any, page_size: int) -> tuple[Any, Any]:
    """Physical page and offset of logical ``entries`` under one sequence's ``page_table`` (tensors or lists of
    integers)."""
    return page_table[entries // page_size], entries % page_size


def slot(page: Any, offset: Any, page_size: int) -> Any:
    """Physical position of an entry: what ``store`` takes. Use 64-bit integers: pools pass 2**31 elements."""
    return page * page_size + offset


def pages_for(entries: int, page_size: int) -> int:
    """Pages that hold ``entries`` entries."""
    return -(-entries // page_size)
