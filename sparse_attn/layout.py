"""The one description of the bytes: KV formats and slot arithmetic. Imports no torch.

A *plane* is a paged tensor ``[pages, page_size, heads, row]``. An *entry* is one row of it. Entry ``e`` of a sequence
lies in page ``page_table[e // page_size]`` at offset ``e % page_size``; its *slot* is ``page * page_size + offset``.
``csrc/common/layout.h`` mirrors this file for native kernels; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """How the elements of a row are stored.

    ``code`` is the number of the format in native kernels; None: no kernel reads the format yet, and every op refuses
    it. ``dtype`` and ``scale_dtype`` are names of torch dtypes. A format with a ``scale_dtype`` keeps one scale per
    entry and head in a plane of its own, ``[pages, page_size, heads]``, beside the rows, so that rows stay aligned:
    ``value = stored * scale``.

    A packed format has no ``scale_dtype`` but ``scale_bits``: its scales lie in the row, one for every ``group``
    elements (0: one for all). The last ``tail`` elements are bfloat16 and have no scale, and ``pad`` bytes follow. It
    is defined for rows of ``dim`` elements only (0: any).
    """

    name: str
    version: int
    code: int | None
    dtype: str
    bits: int
    scale_dtype: str | None = None
    scale_bits: int = 0
    use: str = "kv"
    dim: int = 0
    group: int = 0
    tail: int = 0
    pad: int = 0

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one entry of one head with ``dim`` elements, its scales included."""
        if self.dim not in (0, dim):
            raise ValueError(f"format {self.name!r}: expected rows of {self.dim} elements, got {dim}")
        scaled = dim - self.tail
        scales = scaled // self.group if self.group else 1
        return -(-(scaled * self.bits + scales * self.scale_bits + self.tail * 16) // 8) + self.pad


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 1, 0, "float32", 32),
        Format("bf16", 1, 1, "bfloat16", 16),
        Format("fp16", 1, 2, "float16", 16),
        Format("int8", 1, 3, "int8", 8, "float16", 16),
        Format("int8_index_h", 1, 4, "int8", 8, "float16", 16, use="index"),
        Format("int4_index_h", 1, None, "uint8", 4, "float16", 16, use="index"),
        Format("fp8_v32", 1, None, "uint8", 8, scale_bits=32, dim=576, group=128, tail=64),
        Format("fp8_v4", 1, None, "uint8", 8, scale_bits=8, dim=512, group=64, tail=64, pad=1),
        Format("fp8_v41", 1, None, "uint8", 8, scale_bits=8, dim=512, group=32),
        Format("fp4_v41", 1, None, "uint8", 4, scale_bits=8, dim=512, group=16),
        Format("fp8_index", 1, None, "uint8", 8, scale_bits=32, use="index", dim=128),
        Format("int8_index", 1, None, "uint8", 8, scale_bits=16, use="index", dim=128),
        Format("fp4_index", 1, None, "uint8", 4, scale_bits=8, use="index", dim=128, group=32),
    )
}

PLAIN_FORMATS = tuple(f.name for f in FORMATS.values() if f.scale_bits == 0)
"""Formats whose rows are plain numbers."""


def names(use: str) -> tuple[str, ...]:
    """Names of the formats that kernels read, for one use: ``"kv"`` (``attend``) or ``"index"`` (a selector)."""
    return tuple(f.name for f in FORMATS.values() if f.use == use and f.code is not None)


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
