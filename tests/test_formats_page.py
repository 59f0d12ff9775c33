"""The tables of `docs/formats.md` are those of `sparse_attn.layout`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse_attn.layout import BITS, FORMATS, Format

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"


def table(head: str, rows: list[tuple[object, ...]]) -> str:
    columns = head.split(", ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def shape(f: Format) -> str:
    if f.planar:
        multiple = f", page_bytes a multiple of {f.page_multiple}" if f.page_multiple > 1 else ""
        return f"`uint8 [pages, page_bytes]`{multiple}"
    if f.packed:
        return f"`uint8 [pages, page_size, 1, {f.entry_bytes(f.dim)}]`"
    row = "D/2" if f.bits == 4 else "D"
    scales = f", scales `{f.scale_dtype} [pages, page_size, heads]`" if f.scale_dtype else ""
    return f"`{f.dtype} [pages, page_size, heads, {row}]`{scales}"


def entry(f: Format) -> str:
    """Bytes of an entry, of a head where there are several."""
    if f.packed:
        return str(f.entry_bytes(f.dim))
    row = {4: "D/2", 8: "D", 16: "2 D", 32: "4 D"}[f.bits]
    return f"{row} + {f.scale_bits // 8}" if f.scale_bits else row


def sizes() -> str:
    rows = [
        (f"`{f.name}`", f.code, f.use, f.dim or "any", entry(f), f.page_bytes(64) if f.packed else "", shape(f))
        for f in FORMATS.values()
    ]
    return table("format, code, use, elements, bytes an entry, bytes a page of 64, plane", rows)


def numbers(f: Format, part: str, size: int) -> str:
    type = {"values": f.codec.element, "scales": f.codec.scale, "rope": "bf16"}.get(part)
    return f"{size * 8 // BITS[type]} {type}" if type else ""


def offsets(f: Format) -> str:
    """Where each part of entry e lies in a page of p entries."""
    rows, start = [], 0
    for section, width in zip(f.sections, f.widths(), strict=True):
        within = 0
        for part, size in section:
            first = f"{start} p + " if start else ""
            at = f"{first}{width} e + {within}".removesuffix(" + 0")
            rows.append((part, numbers(f, part, size), size, at))
            within += size
        start += width
    return table("part, numbers, bytes, from byte", rows)


def section_of(name: str) -> str:
    return re.split(r"\n#+ ", PAGE.read_text().partition(f"\n### `{name}`\n")[2])[0]


def test_the_size_table_is_current() -> None:
    assert sizes() in PAGE.read_text(), f"put this table into docs/formats.md:\n{sizes()}"


@pytest.mark.parametrize("f", [f for f in FORMATS.values() if f.packed], ids=lambda f: f.name)
def test_every_packed_format_has_its_offsets_and_its_origin(f: Format) -> None:
    text = section_of(f.name)
    assert offsets(f) in text, f"put this into its section of docs/formats.md:\n{offsets(f)}"
    assert "Origin: " in text


def test_the_page_names_no_other_format() -> None:
    named = set(re.findall(r"\n### `(\w+)`", PAGE.read_text()))
    assert named == {f.name for f in FORMATS.values() if f.packed}
