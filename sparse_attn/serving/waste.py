"""Memory that a pool holds and no entry uses, kind by kind, and how pages lie. Imports no torch.

``docs/serving.md`` says what each number means, and what it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .manager import CacheManager


@dataclass(frozen=True)
class Waste:
    """Bytes of pages that sequences hold: ``tail``, where no entry is yet, and ``padding``, where a page of the plane
    is smaller than a page of the pool. ``pinned``: bytes of free pages that cannot be unmapped, as their chunk of
    memory has another page in use. Cached prefixes are no waste."""

    tail: int
    padding: int
    pinned: int


def measure(manager: CacheManager, page_bytes: int = 0, chunk: int = 1) -> Waste:
    """The waste of a pool whose pages have ``page_bytes`` (default: of the largest plane), mapped ``chunk`` pages at
    once."""
    largest = max(plane.page_size * plane.entry_bytes for plane in manager.planes)
    page_bytes = page_bytes or largest
    if page_bytes < largest or chunk < 1:
        raise ValueError(
            f"expected pages of at least {largest} bytes, chunks of 1 page or more, got {page_bytes}, {chunk}"
        )
    tables = [(manager.tokens(sequence), manager.tables(sequence)) for sequence in manager.sequences]
    tail = padding = 0
    for plane in manager.planes:
        filled: dict[int, int] = {}  # a shared page counts once: all of its holders have the same entries in it
        for tokens, held in tables:
            entries = plane.entries(tokens)
            for place, page in enumerate(held[plane.name]):
                filled[page] = min(entries - place * plane.page_size, plane.page_size)
        tail += plane.entry_bytes * sum(plane.page_size - entries for entries in filled.values())
        padding += len(filled) * (page_bytes - plane.page_size * plane.entry_bytes)
    free = [page for page in range(manager.pool.pages) if not manager.pool.holders(page)]
    return Waste(tail, padding, page_bytes * pinned_pages(free, manager.pool.pages, chunk))


def pinned_pages(free: Iterable[int], pages: int, chunk: int) -> int:
    """Free pages in chunks of ``chunk`` pages that are not free as a whole."""
    counts: dict[int, int] = {}
    for page in free:
        counts[page // chunk] = counts.get(page // chunk, 0) + 1
    return sum(count for number, count in counts.items() if count < min(chunk, pages - number * chunk))


def adjacency(tables: Iterable[Sequence[int]]) -> float | None:
    """Of the steps from a logical page of a table to the next, the share that also leads to the next physical page.
    None if there is no such step."""
    steps = [after - before for table in tables for before, after in pairwise(table)]
    return steps.count(1) / len(steps) if steps else None


def steps_won(tables: Sequence[Sequence[int]], steps: int, slower: float, copy: float) -> float:
    """Decode steps that it would win to lay the pages of these tables in order; compaction pays where it is above 0.

    Args:
        tables: of the sequences of a step.
        steps: that they still have to go.
        slower: share by which a step without any adjacent pages is slower than one whose pages are in order.
        copy: time to copy what such a step reads, in steps.

    Both shares are to be measured on the device: ``docs/serving.md`` has those of a CPU.
    """
    found = adjacency(tables)
    return 0.0 if found is None else steps * slower * (1 - found) - copy


def largest_free_run(free: Iterable[int]) -> int:
    """The most free pages in a row."""
    most = run = 0
    last = None
    for page in sorted(free):
        run = run + 1 if last is not None and page == last + 1 else 1
        most, last = max(most, run), page
    return most
