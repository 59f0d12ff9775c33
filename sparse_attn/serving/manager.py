"""The cache manager: pages of several planes of each sequence, over one pool. Imports no torch.

It moves no bytes. It says into which slots a step writes, and which pages must be copied before; ``docs/serving.md``
has the rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Literal

from ..layout import locate, pages_for, slot
from .pages import OutOfPages, Pool

Use = Literal["admit", "grow", "emergency"]
"""What pages are taken for. ``"admit"`` leaves the reserve, ``"grow"`` the emergency pages, ``"emergency"`` nothing."""

Tables = dict[str, list[int]]
"""Physical page of each logical page, by plane."""


@dataclass(frozen=True)
class PagedPlane:
    """A plane of a sequence: it grows by an entry each ``ratio`` tokens, or is a ring, or a state.

    ``page_size`` is the entries of a page. Token ``t`` writes entry ``t % ring`` of a ring. A step writes every entry
    of a state. ``entry_bytes`` is of all layers; only ``waste`` needs it.
    """

    name: str
    page_size: int
    ratio: int = 1
    ring: int = 0
    state: int = 0
    entry_bytes: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.ratio < 1 or min(self.ring, self.state, self.entry_bytes) < 0:
            raise ValueError(f"plane {self.name}: expected a page size and a ratio of at least 1, no sizes below 0")
        if (self.ring > 0) + (self.state > 0) + (self.ratio > 1) > 1:
            raise ValueError(f"plane {self.name}: expected one of ratio, ring and state, got several")

    @property
    def grows(self) -> bool:
        return not self.ring and not self.state

    def entries(self, tokens: int) -> int:
        """Entries that a sequence of so many tokens holds."""
        if self.state:
            return self.state if tokens else 0
        return min(tokens, self.ring) if self.ring else tokens // self.ratio

    def pages(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens holds."""
        return pages_for(self.entries(tokens), self.page_size)

    def written(self, before: int, after: int) -> Iterable[int]:
        """Entries that a step writes, in the order of its tokens."""
        if self.state:
            return range(self.state)
        if self.ring:
            return (token % self.ring for token in range(before, after))
        return range(before // self.ratio, after // self.ratio)


@dataclass(frozen=True)
class Copy:
    """A page that must be copied, all of its entries in all layers of the plane."""

    plane: str
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """Where a step of a sequence writes. Make ``copies`` first, in their order, before any sequence of the step writes
    and before pages are freed. ``slots``: of the entries that the step writes, by plane."""

    slots: dict[str, list[int]]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Saved:
    """A preempted sequence. The bytes of ``tables`` are the caller's to save before another sequence takes the pages,
    and to write back into those that ``resume`` returns, page by page."""

    tokens: int
    tables: Tables


@dataclass
class _Held:
    """Tokens and pages, of a sequence or of a cached prefix."""

    tokens: int
    tables: Tables

    @property
    def pages(self) -> list[int]:
        return [page for table in self.tables.values() for page in table]

    def copy(self, tokens: int, planes: Iterable[PagedPlane]) -> _Held:
        return _Held(tokens, {p.name: self.tables[p.name][: p.pages(tokens)] for p in planes})


class CacheManager:
    """Pages of sequences and of cached prefixes.

    A page may be held by several of them. It is never written while shared: ``extend`` gives the sequence that writes a
    page of its own, and says what to copy. Pages of cached prefixes alone count as free: they are evicted when needed,
    the least recently used first.

    Args:
        planes: of a sequence.
        pages: of the pool.
        reserve: share of the pool that admission leaves to sequences that grow.
        emergency: share of the pool, within the reserve, for the request that must get on when all others stand: the
            oldest. As long as it can, something finishes.
    """

    def __init__(
        self, planes: Sequence[PagedPlane], pages: int, *, reserve: float = 0.15, emergency: float = 0.02
    ) -> None:
        names = [plane.name for plane in planes]
        if not planes or len(set(names)) < len(names):
            raise ValueError(f"planes: expected at least one, each with a name of its own, got {names}")
        if pages < 1 or not 0 <= emergency <= reserve < 1:
            raise ValueError(
                f"expected at least 1 page and 0 <= emergency <= reserve < 1, got {pages} pages, emergency "
                f"{emergency}, reserve {reserve}"
            )
        self.planes = tuple(planes)
        self.pool = Pool(pages)
        self.kept: dict[Use, int] = {"admit": ceil(reserve * pages), "grow": ceil(emergency * pages), "emergency": 0}
        self.block = lcm(*(plane.page_size * plane.ratio for plane in planes if plane.grows))
        self._exact = any(not plane.grows for plane in planes)  # a ring or a state is of one length alone
        self._sequences: dict[Hashable, _Held] = {}
        self._users: dict[int, int] = {}  # of each page, how often sequences hold it
        self._prefixes: dict[bytes, tuple[bytes, int]] = {}  # a key's cached prefix, by its own key, and its tokens
        self._cached: OrderedDict[bytes, _Held] = OrderedDict()

    # --- What there is

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        return tuple(self._sequences)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return len(self._users)

    @property
    def cached_pages(self) -> int:
        """Pages that cached prefixes hold, and no sequence."""
        return self.pool.pages - self.pool.free_pages - self.used_pages

    def room(self, use: Use = "admit") -> int:
        """Pages that may be taken for this use."""
        return max(self.pool.pages - self.used_pages - self.kept[use], 0)

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence of so many tokens that shares none."""
        return sum(plane.pages(tokens) for plane in self.planes)

    def new_pages(self, tokens: int, keys: Sequence[bytes] = ()) -> int:
        """Pages by which a sequence of so many tokens would add to those in use, if it began with the longest cached
        prefix among ``keys``: without those that other sequences hold already."""
        known = self._longest(keys)
        if known is None:
            return self.pages_for(tokens)
        own, found = self._prefixes[known]
        tables = self._cached[own].copy(found, self.planes).tables
        shared = [page for plane in self.planes if plane.grows for page in tables[plane.name]]
        return self.pages_for(tokens) - sum(page in self._users for page in shared)

    def tokens(self, sequence: Hashable) -> int:
        return self._known(sequence).tokens

    def tables(self, sequence: Hashable) -> Tables:
        """The page tables of a sequence."""
        return {name: list(table) for name, table in self._known(sequence).tables.items()}

    def check(self, tokens: int) -> None:
        """Refuse a request that is longer than the whole pool: it would wait for ever. Raises ValueError."""
        if self.pages_for(tokens) > self.pool.pages:
            parts = ", ".join(f"{plane.name} {plane.pages(tokens)}" for plane in self.planes)
            raise ValueError(
                f"request of {tokens} tokens: expected at most the pool's {self.pool.pages} pages, got "
                f"{self.pages_for(tokens)} ({parts}); shorten the request or make the pool larger"
            )

    # --- Sequences

    def add(self, sequence: Hashable, keys: Sequence[bytes] = ()) -> int:
        """Begin a sequence with the longest cached prefix among ``keys`` (of ``prefix_keys``), and return its tokens.

        Leave at least one token of the prompt out of ``keys``: a step needs one to compute.
        """
        self._refuse_known(sequence)
        known = self._longest(keys)
        held = _Held(0, {plane.name: [] for plane in self.planes})
        if known is not None:
            own, tokens = self._prefixes[known]
            self._cached.move_to_end(own)
            held = self._cached[own].copy(tokens, self.planes)
        self._begin(sequence, held)
        return held.tokens

    def extend(self, sequence: Hashable, tokens: int, use: Use = "grow") -> Step:
        """Make room for ``tokens`` more tokens.

        Raises ``OutOfPages``, and changes nothing, if the pages that this use may take are too few.
        """
        held = self._known(sequence)
        before, after = held.tokens, held.tokens + tokens
        rings = [plane.ring for plane in self.planes if plane.ring]
        if not 1 <= tokens <= min(rings, default=tokens):
            raise ValueError(
                f"sequence {sequence!r}: expected a step of 1 to {min(rings, default='any')} tokens, got {tokens}; a "
                "ring must hold every token that a step writes"
            )
        grown = {p.name: p.pages(after) - len(held.tables[p.name]) for p in self.planes}
        new = sum(grown.values())
        # a page shared with cached prefixes alone need not be copied once they are evicted
        self._check_room(new + len(self._shared(held, after, self._users)), use, sequence)
        while self.pool.free_pages < new + len(self._shared(held, after)):
            self.evict()
        copies = []
        for plane, place in self._shared(held, after):
            table = held.tables[plane]
            (target,) = self._take(1)
            copies.append(Copy(plane, table[place], target))
            self._drop([table[place]])
            table[place] = target
        for name, count in grown.items():
            held.tables[name] += self._take(count)
        held.tokens = after
        slots = {p.name: self._slots(p, held.tables[p.name], p.written(before, after)) for p in self.planes}
        return Step(slots, tuple(copies))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin ``child`` with the tokens of ``parent``, at any length. All pages are shared until one is written."""
        held = self._known(parent)
        self._refuse_known(child)
        self._begin(child, held.copy(held.tokens, self.planes))

    def free(self, sequence: Hashable) -> None:
        """End a sequence. Pages that nothing else holds return to the pool."""
        held = self._known(sequence)
        del self._sequences[sequence]
        self._drop(held.pages)

    def preempt(self, sequence: Hashable) -> Saved:
        """End a sequence, for now. To compute it again instead of saving it, ``free`` it."""
        held = self._known(sequence)
        self.free(sequence)
        return Saved(held.tokens, held.tables)

    def resume(self, sequence: Hashable, saved: Saved, use: Use = "admit") -> Tables:
        """Begin a preempted sequence again, in pages of its own.

        Raises ``OutOfPages``, and changes nothing, if the pages that this use may take are too few.
        """
        self._refuse_known(sequence)
        count = sum(map(len, saved.tables.values()))
        self._check_room(count, use, sequence)
        while self.pool.free_pages < count:
            self.evict()
        tables = {name: self._take(len(table)) for name, table in saved.tables.items()}
        self._sequences[sequence] = _Held(saved.tokens, tables)
        return self.tables(sequence)

    # --- Cached prefixes

    def keep(self, sequence: Hashable, keys: Sequence[bytes]) -> None:
        """Cache what the sequence holds of its first blocks: ``keys`` are of those.

        Where planes grow and no more, every shorter prefix is found as well. With a ring or a state, which are of one
        length, ``keys`` must be of all of its tokens, and only this length is found: end the prefill chunk there first.
        """
        held = self._known(sequence)
        tokens = len(keys) * self.block
        if not keys or tokens > held.tokens or (self._exact and tokens != held.tokens):
            raise ValueError(
                f"sequence {sequence!r}: expected keys of {'all' if self._exact else 'some'} of its blocks of "
                f"{self.block} tokens, full ones, got {len(keys)} for {held.tokens} tokens"
            )
        own = keys[-1]
        if own in self._cached:
            self._cached.move_to_end(own)
            return
        self._cached[own] = held.copy(tokens, self.planes)
        self.pool.share(self._cached[own].pages)
        first = len(keys) if self._exact else 1
        self._prefixes.update({keys[n - 1]: (own, n * self.block) for n in range(first, len(keys) + 1)})

    def evict(self) -> bool:
        """Forget the least recently used prefix that frees a page; if none does, the least recently used. False if
        there is none."""
        if not self._cached:
            return False
        frees = (key for key, held in self._cached.items() if any(self.pool.holders(page) == 1 for page in held.pages))
        key = next(frees, next(iter(self._cached)))
        self.pool.drop(self._cached.pop(key).pages)
        self._prefixes = {known: found for known, found in self._prefixes.items() if found[0] != key}
        return True

    # --- Pages

    def _check_room(self, count: int, use: Use, sequence: Hashable) -> None:
        if count > self.room(use):
            raise OutOfPages(
                f"sequence {sequence!r}: expected {count} pages to {use}, got {self.room(use)} of {self.pool.pages}, "
                f"as {self.kept[use]} are kept; free or preempt a sequence, or make the pool larger"
            )

    def _shared(self, held: _Held, after: int, users: dict[int, int] | None = None) -> list[tuple[str, int]]:
        """Plane and number of the logical pages that a step to ``after`` tokens writes, and that are not the sequence's
        alone: with ``users``, that other sequences hold."""
        found = []
        for plane in self.planes:
            table = held.tables[plane.name]
            places = dict.fromkeys(entry // plane.page_size for entry in plane.written(held.tokens, after))
            for place in places:
                if place < len(table):
                    page = table[place]
                    if (self.pool.holders(page) if users is None else users[page]) > 1:
                        found.append((plane.name, place))
        return found

    def _slots(self, plane: PagedPlane, table: list[int], entries: Iterable[int]) -> list[int]:
        places = (locate(table, entry, plane.page_size) for entry in entries)
        return [slot(page, offset, plane.page_size) for page, offset in places]

    def _take(self, count: int) -> list[int]:
        pages = self.pool.take(count)
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def _begin(self, sequence: Hashable, held: _Held) -> None:
        """Begin a sequence with pages that others hold."""
        self.pool.share(held.pages)
        for page in held.pages:
            self._users[page] = self._users.get(page, 0) + 1
        self._sequences[sequence] = held

    def _drop(self, pages: list[int]) -> None:
        """Take pages away from a sequence."""
        self.pool.drop(pages)
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]

    def _longest(self, keys: Sequence[bytes]) -> bytes | None:
        """The last of ``keys`` under which a prefix is cached."""
        return next((key for key in reversed(keys) if key in self._prefixes), None)

    def _known(self, sequence: Hashable) -> _Held:
        if sequence not in self._sequences:
            raise KeyError(f"no sequence {sequence!r}; add it first")
        return self._sequences[sequence]

    def _refuse_known(self, sequence: Hashable) -> None:
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence!r} exists already; free it first")
