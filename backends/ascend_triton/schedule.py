"""Launch parameters: tiles by shape, and into how many parts what a row attends is cut."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .soc import Soc


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

    @property
    def row(self) -> int:
        """Columns of the tiles of keys."""
        return self.leads * self.lead + self.tail

    @property
    def v_row(self) -> int:
        return self.v_leads * self.v_lead + self.v_tail


SMALLEST, WIDEST = 16, 256
"""The least and the widest tile of columns. Results of 512 in float32 and what is added to them fill a buffer."""


@cache
def shape_of(dim: int, v_dim: int, apart: bool) -> Shape:
    """Tiles of columns. Values have rows of their own (``apart``) or are the first columns of the keys."""
    lead, leads, tail = _columns(dim)
    if apart:
        return Shape(dim, v_dim, lead, leads, tail, *_columns(v_dim))
    v_leads = leads if v_dim > lead else 1
    return Shape(dim, v_dim, lead, leads, tail, lead, v_leads, tail if v_dim > leads * lead else 0)


def _columns(dim: int) -> tuple[int, int, int]:
    """(width of leading tiles, their number, width of the tail)"""
    lead = max(1 << (dim.bit_length() - 1), SMALLEST)
    rest = dim - lead
    tail = max(1 << (rest - 1).bit_length(), SMALLEST) if rest > 0 else 0
    if tail >= lead:
        lead, tail = 2 * lead, 0
    return (lead, 1, tail) if lead <= WIDEST else (lead // 2, 2, tail)


def chunk_of(stored: int, shape: Shape) -> int:
    """Columns that the gather takes at a time: if it can be, so that none crosses the end of the stored ones."""
    most = stored & -stored
    return shape.lead if most < SMALLEST else min(most, shape.lead)


ENTRIES = 64
"""Of the largest tile."""


def heads_of(soc: Soc, size: int, shape: Shape) -> int:
    """Query heads of a task, of ``size`` that share what they attend: as many as fit, for each task fetches its rows
    anew."""
    most = 64 if soc.both_vector_units or shape.leads == 1 else 32
    return min(max(1 << (size - 1).bit_length(), SMALLEST), most)


PARTS_MOST = 32
PART_TILES_LEAST = 4
"""A part of less would cost about as much to join as to compute."""


def parts_of(cores: int, tasks: int, tiles: int) -> tuple[int, int]:
    """(parts, tiles of a part): as many parts as cores would stand idle without them."""
    wanted = min(cores // tasks, tiles // PART_TILES_LEAST, PARTS_MOST)
    if wanted <= 1:
        return 1, max(tiles, 1)
    part_tiles = -(-tiles // wanted)
    return -(-tiles // part_tiles), part_tiles
