"""Pages of a pool, counted, and the allocator of a single plane; ``manager`` has several. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ..layout import locate, pages_for, slot


class OutOfPages(RuntimeError):
    """The pool has too few free pages. Nothing was changed."""


class Pool:
    """Physical pages, numbered from 0, each with the number of its holders. The last to drop a page frees it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # the lowest page is handed out first
        self._holders = [0] * pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """How often the page is held; 0 if it is free."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Pages that nobody holds. Raises ``OutOfPages``, and takes none, if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(f"expected {count} free pages, got {len(self._free)} of {self.pages}")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Hold pages once less. Those that were taken last are handed out last."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


@dataclass
class _Sequence:
    entries: int = 0
    pages: list[int] = field(default_factory=list)


class PageAllocator:
    """Pages of one pool, handed to sequences and counted.

    A sequence is any hashable id. Its page table lists the physical page of each logical page. A page may stand in the
    tables of several sequences (``fork``); it returns to the pool when the last of them is freed. Only full pages are
    shared, so that no sequence writes into a page that another one reads.

    Args:
        pages: pages in the pool, numbered from 0.
        page_size: entries in a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"expected at least 1 page of at least 1 entry, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._pool = Pool(pages)
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    def add(self, sequence: Hashable) -> None:
        """Begin an empty sequence."""
        self._refuse_known(sequence)
        self._sequences[sequence] = _Sequence()

    def extend(self, sequence: Hashable, entries: int) -> list[int]:
        """Make room for ``entries`` more entries and return their slots, in order.

        Raises ``OutOfPages``, and changes nothing, if the pool is too small.
        """
        state = self._known(sequence)
        if entries < 0:
            raise ValueError(f"expected 0 or more entries for sequence {sequence!r}, got {entries}")
        end = state.entries + entries
        needed = pages_for(end, self.page_size) - len(state.pages)
        if needed > self.free_pages:
            raise OutOfPages(
                f"sequence {sequence!r} needs {needed} more pages of {self.page_size} entries, {self.free_pages} of "
                f"{self.pages} are free; free a sequence or make the pool larger"
            )
        state.pages += self._pool.take(needed)
        places = (locate(state.pages, entry, self.page_size) for entry in range(state.entries, end))
        slots = [slot(page, offset, self.page_size) for page, offset in places]
        state.entries = end
        return slots

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin ``child`` with the entries of ``parent``, whose pages both then share.

        The parent must end at a page boundary: its last page is full, so neither sequence writes into a shared page.
        """
        source = self._known(parent)
        self._refuse_known(child)
        if source.entries % self.page_size:
            raise ValueError(
                f"cannot fork sequence {parent!r}: expected full pages of {self.page_size} entries, "
                f"got {source.entries} entries; fork it at a page boundary"
            )
        self._pool.share(source.pages)
        self._sequences[child] = _Sequence(source.entries, list(source.pages))

    def free(self, sequence: Hashable) -> None:
        """End a sequence. Pages that no other sequence holds return to the pool."""
        state = self._known(sequence)
        del self._sequences[sequence]
        self._pool.drop(state.pages)

    def known(self, sequence: Hashable) -> bool:
        """Whether the sequence was begun and not freed."""
        return sequence in self._sequences

    def entries(self, sequence: Hashable) -> int:
        """Entries the sequence holds."""
        return self._known(sequence).entries

    def page_table(self, sequence: Hashable) -> list[int]:
        """Physical page of each logical page of the sequence."""
        return list(self._known(sequence).pages)

    def _known(self, sequence: Hashable) -> _Sequence:
        if not self.known(sequence):
            raise KeyError(f"no sequence {sequence!r}; add it first")
        return self._sequences[sequence]

    def _refuse_known(self, sequence: Hashable) -> None:
        if self.known(sequence):
            raise ValueError(f"sequence {sequence!r} exists already; free it first")
