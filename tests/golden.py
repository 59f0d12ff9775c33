"""Rows and their bytes in every format, derived by hand from the layouts' published descriptions.

Nothing here uses the package: numbers are decoded from bits in Python, and the place of every part is written out. The
rows are such that their quantisation is exact, so that one expected byte follows from one description.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

Parts = dict[str, bytes]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    return -E2M1[code - 8] if code & 8 else E2M1[code]


def bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def rope(entry: int) -> tuple[list[float], bytes]:
    """64 numbers of bf16, given by their bits: every sign, large and subnormal ones."""
    bits = [(0x3F80 + 0x0101 * (7 * j + entry)) & 0xFFFF for j in range(64)]
    bits = [b if b & 0x7F80 != 0x7F80 else b & 0x80FF for b in bits]
    return [bf16(b) for b in bits], struct.pack("<64H", *bits)


def powers(groups: int, entry: int) -> list[int]:
    return [(3 * g + 5 * entry) % 9 - 4 for g in range(groups)]


def e4m3_row(dim: int, group: int, entry: int) -> tuple[list[float], bytes, list[int]]:
    """Every code but NaN, in groups whose largest is 240 to 448: the scale is the power of two that follows."""
    codes = [(37 * entry + 11 * j) % 256 for j in range(dim)]
    codes = [c if c & 0x7F != 0x7F else c - 1 for c in codes]
    exponents = powers(dim // group, entry)
    for g in range(dim // group):
        if g & 1:  # nothing above 240 but the one below
            codes[g * group : (g + 1) * group] = [
                c & 0xF7 if c & 0x7F > 0x77 else c for c in codes[g * group :][:group]
            ]
        codes[g * group + (5 * g + entry) % group] = (0x7E - (g + entry) % 8) | (g & 1) << 7
    row = [e4m3(c) * 2.0 ** exponents[j // group] for j, c in enumerate(codes)]
    return row, bytes(codes), exponents


def int_row(dim: int, group: int, entry: int, scales: list[float], largest: int) -> tuple[list[float], list[int]]:
    """Integers whose largest is ``largest``, times a scale."""
    stored = [(29 * entry + 13 * j) % (2 * largest + 1) - largest for j in range(dim)]
    for g in range(dim // group):
        stored[g * group + (3 * g + entry) % group] = largest if g & 1 else -largest
    return [q * scales[j // group] for j, q in enumerate(stored)], stored


def e2m1_row(dim: int, group: int, entry: int, scales: list[float]) -> tuple[list[float], bytes]:
    """Every code, both zeros included, in groups that hold a 6; the element of even index in the low half of a byte."""
    codes = [(7 * entry + 3 * j) % 16 for j in range(dim)]
    for g in range(dim // group):
        codes[g * group + (g + entry) % group] = 7 | (g & 1) << 3
    row = [e2m1(c) * scales[j // group] for j, c in enumerate(codes)]
    return row, bytes(codes[j] + 16 * codes[j + 1] for j in range(0, dim, 2))


def v32(entry: int) -> tuple[list[float], Parts]:
    row, values, exponents = e4m3_row(512, 128, entry)
    tail, last = rope(entry)
    return row + tail, dict(values=values, scales=struct.pack("<4f", *(2.0**k for k in exponents)), rope=last)


def int8_v32(entry: int) -> tuple[list[float], Parts]:
    scales = [1.5 * 2.0**k for k in powers(4, entry)]
    row, stored = int_row(512, 128, entry, scales, 127)
    tail, last = rope(entry)
    return row + tail, dict(values=struct.pack("<512b", *stored), rope=last, scales=struct.pack("<4f", *scales))


def v4(entry: int) -> tuple[list[float], Parts]:
    row, values, exponents = e4m3_row(448, 64, entry)
    tail, last = rope(entry)
    return row + tail, dict(values=values, rope=last, scales=bytes(127 + k for k in exponents))


def v4_bf16_scales(entry: int) -> tuple[list[float], Parts]:
    row, parts = v4(entry)
    # a power of two in bf16 is its exponent in the 8 bits below the sign
    return row, dict(parts, scales=struct.pack("<7H", *(b << 7 for b in parts["scales"])))


def v41(entry: int) -> tuple[list[float], Parts]:
    row, values, exponents = e4m3_row(512, 32, entry)
    return row, dict(values=values, scales=bytes(127 + k for k in exponents))


def fp4_v41(entry: int) -> tuple[list[float], Parts]:
    scales = [0x01, 0x08, 0x38, 0x7E, *((0x20 + 5 * g + entry) % 0x70 + 8 for g in range(4, 32))]
    row, values = e2m1_row(512, 16, entry, [e4m3(c) for c in scales])
    return row, dict(values=values, scales=bytes(scales))


def fp8_index(entry: int) -> tuple[list[float], Parts]:
    row, values, exponents = e4m3_row(128, 128, entry)
    return row, dict(values=values, scales=struct.pack("<f", 2.0 ** exponents[0]))


def int8_index(entry: int) -> tuple[list[float], Parts]:
    scale = 1.25 * 2.0 ** (entry - 3)
    row, stored = int_row(128, 128, entry, [scale], 127)
    return row, dict(values=struct.pack("<128b", *stored), scales=struct.pack("<e", scale))


def fp4_index(entry: int) -> tuple[list[float], Parts]:
    exponents = powers(4, entry)
    row, values = e2m1_row(128, 32, entry, [2.0**k for k in exponents])
    return row, dict(values=values, scales=bytes(127 + k for k in exponents))


Place = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Golden:
    """``entry(i)`` gives a row and its parts. ``place(p)`` gives the bytes of a page of ``p`` entries, and of each part
    where it starts in the page, how far apart two entries have it, and its size."""

    entry: Callable[[int], tuple[list[float], Parts]]
    place: Callable[[int], tuple[int, Place]]
    planar: bool = False

    def page(self, page_size: int, entries: dict[int, int], fill: int) -> bytes:
        """The bytes of a page that holds entries at these offsets, zeros in their padding, and ``fill`` elsewhere."""
        size, places = self.place(page_size)
        page = bytearray([fill] * size)
        for offset, entry in entries.items():
            parts = self.entry(entry)[1]
            for part, (start, stride, length) in places.items():
                content = parts.get(part, bytes(length))
                assert len(content) == length, part
                page[start + offset * stride : start + offset * stride + length] = content
        return bytes(page)


def up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


PACKED = {
    "fp8_v32": Golden(
        v32, lambda p: (656 * p, dict(values=(0, 656, 512), scales=(512, 656, 16), rope=(528, 656, 128)))
    ),
    "int8_v32": Golden(
        int8_v32, lambda p: (656 * p, dict(values=(0, 656, 512), rope=(512, 656, 128), scales=(640, 656, 16)))
    ),
    "fp8_v4": Golden(
        v4,
        lambda p: (
            584 * p,
            dict(values=(0, 584, 448), rope=(448, 584, 128), scales=(576, 584, 7), pad=(583, 584, 1)),
        ),
    ),
    "fp8_v4_planar": Golden(
        v4,
        lambda p: (
            up(584 * p, 576),
            dict(values=(0, 576, 448), rope=(448, 576, 128), scales=(576 * p, 8, 7), pad=(576 * p + 7, 8, 1)),
        ),
        planar=True,
    ),
    "fp8_v4_640": Golden(
        v4,
        lambda p: (
            640 * p,
            dict(rope=(0, 640, 128), values=(128, 640, 448), scales=(576, 640, 7), pad=(583, 640, 57)),
        ),
    ),
    "fp8_v4_608": Golden(
        v4_bf16_scales,
        lambda p: (
            608 * p,
            dict(rope=(0, 608, 128), values=(128, 608, 448), scales=(576, 608, 14), pad=(590, 608, 18)),
        ),
    ),
    "fp8_v41": Golden(v41, lambda p: (528 * p, dict(values=(0, 528, 512), scales=(512, 528, 16)))),
    "fp8_v41_planar": Golden(
        v41, lambda p: (up(528 * p, 512), dict(values=(0, 512, 512), scales=(512 * p, 16, 16))), planar=True
    ),
    "fp4_v41": Golden(fp4_v41, lambda p: (288 * p, dict(values=(0, 288, 256), scales=(256, 288, 32)))),
    "fp4_v41_planar": Golden(
        fp4_v41, lambda p: (up(288 * p, 256), dict(values=(0, 256, 256), scales=(256 * p, 32, 32))), planar=True
    ),
    "fp8_index": Golden(fp8_index, lambda p: (132 * p, dict(values=(0, 132, 128), scales=(128, 132, 4)))),
    "fp8_index_planar": Golden(
        fp8_index, lambda p: (132 * p, dict(values=(0, 128, 128), scales=(128 * p, 4, 4))), planar=True
    ),
    "int8_index": Golden(int8_index, lambda p: (130 * p, dict(values=(0, 130, 128), scales=(128, 130, 2)))),
    "int8_index_planar": Golden(
        int8_index, lambda p: (130 * p, dict(values=(0, 128, 128), scales=(128 * p, 2, 2))), planar=True
    ),
    "fp4_index": Golden(fp4_index, lambda p: (68 * p, dict(values=(0, 68, 64), scales=(64, 68, 4)))),
    "fp4_index_planar": Golden(
        fp4_index, lambda p: (68 * p, dict(values=(0, 64, 64), scales=(64 * p, 4, 4))), planar=True
    ),
}


def scale_plane(largest: int, heads: int, dim: int, entry: int) -> tuple[list[list[float]], list[bytes], bytes]:
    """Rows of each head, their stored bytes, and their float16 scales, of the formats with a scale plane."""
    scales = [(1 + (entry + h) % 4 / 4) * 2.0 ** (entry % 5 - 2 - h) for h in range(heads)]
    rows, stored = zip(*(int_row(dim, dim, entry + h, [s], largest) for h, s in enumerate(scales)), strict=True)
    if largest == 127:
        values = [struct.pack(f"<{dim}b", *row) for row in stored]
    else:  # two's complement in 4 bits, the element of even index in the low half
        values = [bytes((row[j] & 15) | (row[j + 1] & 15) << 4 for j in range(0, dim, 2)) for row in stored]
    return list(rows), values, struct.pack(f"<{heads}e", *scales)


def plane(golden: Golden, pages: int, page_size: int, at: dict[int, int], fill: int) -> bytes:
    """The bytes of a plane that holds entry ``at[slot]`` in each slot."""
    return b"".join(
        golden.page(page_size, {s % page_size: e for s, e in at.items() if s // page_size == page}, fill)
        for page in range(pages)
    )
