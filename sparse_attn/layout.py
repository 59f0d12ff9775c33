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

    ``code`` is the number of the format in native kernels. ``dtype`` and ``scale_dtype`` are names of torch dtypes.
    A format with a ``scale_dtype`` keeps one scale per entry and head in a plane of its own, ``[pages, page_size,
    heads]``,
    beside the rows, so that rows stay aligned: ``value = stored * scale``.
    """

    name: str
    version: int
    code: int
    dtype: str
    bits: int
    scale_dtype: str | None = None
    scale_bits: int = 0
    use: str = "kv"

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one entry of one head with ``dim`` elements, its scale included."""
        return (dim * self.bits + self.scale_bits) // 8


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 1, 0, "float32", 32),
        Format("bf16", 1, 1, "bfloat16", 16),
        Format("fp16", 1, 2, "float16", 16),
        Format("int8", 1, 3, "int8", 8, "float16", 16),
        Format("int8_index_h", 1, 4, "int8", 8, "float16", 16, use="index"),
    )
}

PLAIN_FORMATS = tuple(f.name for f in FORMATS.values() if f.scale_dtype is None)
"""Formats whose rows are plain numbers."""


def names(use: str) -> tuple[str, ...]:
    """Names of the formats for one use: ``"kv"`` (read by ``attend``) or ``"index"`` (read by a selector)."""
    return tuple(f.name for f in FORMATS.values() if f.use == use)


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
