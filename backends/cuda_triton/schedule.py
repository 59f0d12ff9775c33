"""Launch parameters: tiles by device and shape, and into how many parts the entries of a row are cut."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .device import Device


class Shape(NamedTuple):
    """Columns of keys and values: one or two leading tiles of one width, and a tail (0: none). Widths are powers of
    two, of which ``dim`` and ``v_dim`` columns count."""

    dim: int
    v_dim: int
    lead: int
    leads: int
    tail: int
    v_lead: int
    v_leads: int
    v_tail: int


class Tile(NamedTuple):
    """Query heads and entries that a program takes at a time, and how it is compiled."""

    heads: int
    entries: int
    warps: int
    stages: int


SMALLEST = 16
"""The least extent of a matrix product."""

WIDEST = 256
"""The widest tile of columns."""


def power_of_two(n: int) -> int:
    """The least one that is ``n`` or more."""
    return 1 << (n - 1).bit_length()


@cache
def shape_of(dim: int, v_dim: int, apart: int | None) -> Shape:
    """Tiles of columns; ``apart`` is the row of the values where they have a plane of their own."""
    lead, leads, tail = _columns(dim)
    if apart is not None:
        return Shape(dim, v_dim, lead, leads, tail, *_columns(v_dim))
    v_leads = leads if v_dim > lead else 1
    return Shape(dim, v_dim, lead, leads, tail, lead, v_leads, tail if v_dim > leads * lead else 0)


def _columns(dim: int) -> tuple[int, int, int]:
    """(width of leading tiles, their number, width of the tail)"""
    lead = max(1 << (dim.bit_length() - 1), SMALLEST)
    rest = dim - lead
    tail = max(power_of_two(rest), SMALLEST) if rest > 0 else 0
    if tail >= lead:
        lead, tail = 2 * lead, 0
    return (lead, 1, tail) if lead <= WIDEST else (lead // 2, 2, tail)


def most_rows(device: Device, shape: Shape, compute_bytes: int) -> int:
    """Rows of the largest tile of query heads. For sm_100, Triton 3.7 makes a trap of 64 rows and 512 columns."""
    narrow = compute_bytes == 4 or (shape.leads == 2 and (device.small or device.arch >= 100))
    return 32 if narrow else 64


@cache
def tile_of(device: Device, heads: int, shape: Shape, compute_bytes: int, decoded: str, planes: int) -> Tile:
    """Tile for groups of ``heads`` query heads, whose products take numbers of ``compute_bytes``, on rows of one or two
    ``planes`` whose numbers are ``decoded`` from some type, or plain (""). Chosen so that nothing spills from registers
    (``docs/cuda.md``), not yet by speed."""
    most = most_rows(device, shape, compute_bytes)
    if shape.leads == 2 and (decoded or compute_bytes == 4):
        # Beside the decoder and its rows there is no room for more, but on sm_90 where the rope has a tile of its own.
        most = 32 if decoded == "e4m3" and planes == 1 and shape.tail > 0 and device.arch == 90 else 16
    block_h = min(max(power_of_two(heads), SMALLEST), most)
    if compute_bytes == 4:
        return Tile(block_h, 16 if shape.leads == 2 else 32, 4, 2)
    if shape.leads == 1:
        return Tile(block_h, 64, 8 if block_h == 64 else 4, 2)
    if decoded:
        entries = 32 if block_h == 32 or (planes == 2 and device.arch > 80) else 16
        return Tile(block_h, entries, 8, 1 if entries == 16 and device.arch >= 120 else 2)
    if block_h == SMALLEST:
        return Tile(block_h, 32, 4, 2)
    return Tile(block_h, 32 if planes == 1 or block_h < 64 else 16, 8, 1 if device.small else 2)


def tokens_of(device: Device, heads: int, rows: int, longest: int, shape: Shape, compute_bytes: int) -> int:
    """How many query rows, of ``heads`` heads each, a program takes where they attend much the same: as many as fill a
    tile, while the ``rows`` of all groups of heads keep every processor at work. ``longest`` bounds the rows of a
    sequence. Sums of wide values leave no room for it."""
    if shape.leads == 2:
        return 1
    most = min(most_rows(device, shape, compute_bytes) // heads, rows // device.processors, longest)
    return 1 << (max(most, 1).bit_length() - 1)


PARTS_MOST = 64
PART_BLOCKS_LEAST = 2
"""A part of one block would cost about as much to join as to compute."""


def parts_of(device: Device, programs: int, blocks: int) -> tuple[int, int]:
    """(parts, blocks of a part): as many parts as processors would stand idle without them."""
    wanted = min(device.processors // programs, blocks // PART_BLOCKS_LEAST, PARTS_MOST)
    if wanted <= 1:
        return 1, max(blocks, 1)
    part_blocks = -(-blocks // wanted)
    return -(-blocks // part_blocks), part_blocks


class ScoreTile(NamedTuple):
    """Query rows, heads and places of keys that a program of ``select`` takes at a time, and how it is compiled. Of the
    rows that have room it takes ``step``."""

    rows: int
    step: int
    heads: int
    places: int
    warps: int
    stages: int


@cache
def score_tile_of(heads: int, shape: Shape, compute_bytes: int, apart: bool, mean: bool, softmax: bool) -> ScoreTile:
    """Tile for segments of ``heads`` query heads. Rows are scored together, unless they lie ``apart``, while they and
    their heads are few. Where they lie apart too there is room for as many as fill a matrix product, so that sums over
    heads have the same form."""
    wide = shape.leads == 2 or compute_bytes > 2
    lanes = SMALLEST if wide else 32 if softmax else 64  # exponents of more spill for sm_100
    block_h = min(power_of_two(heads), lanes)
    least = max(SMALLEST // block_h, 1)
    rows = least if apart else min(lanes // block_h, 16)  # beside the marks of what more rows see there is no room
    full = mean and rows * block_h == 64  # products are added to others
    places = SMALLEST if compute_bytes == 8 or full else 32 if wide or mean else 64
    return ScoreTile(rows, 1 if apart else rows, block_h, places, 4, 2)
