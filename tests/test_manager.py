"""The cache manager against a memory that holds bytes: sharing, copies, prefixes, preemption, reserve, waste."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
from faults import faulty
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from sparse_attn.serving import manager as module
from sparse_attn.serving.manager import CacheManager, PagedPlane, Saved, Step
from sparse_attn.serving.pages import OutOfPages
from sparse_attn.serving.prefix import prefix_keys
from sparse_attn.serving.waste import Waste, adjacency, largest_free_run, measure, pinned_pages, steps_won

MAIN, COARSE = PagedPlane("main", 4, ratio=2), PagedPlane("coarse", 1, ratio=8)
WINDOW, STATE = PagedPlane("window", 2, ring=6), PagedPlane("state", 3, state=4)
EVERY = (MAIN, COARSE, WINDOW, STATE)
PAGES = 40
KEPT = {"admit": 8, "grow": 2, "emergency": 0}
MOST = 6  # tokens of a step: what the ring holds


@dataclass
class Memory:
    """What an engine keeps in the planes: it copies pages, and writes what the manager says, no more."""

    manager: CacheManager
    rows: dict[tuple[str, int], object] = field(default_factory=dict)

    def page(self, plane: str, page: int) -> list[object]:
        size = next(p.page_size for p in self.manager.planes if p.name == plane)
        return [self.rows.get((plane, page * size + offset)) for offset in range(size)]

    def put(self, plane: str, page: int, rows: list[object]) -> None:
        self.rows.update({(plane, page * len(rows) + offset): row for offset, row in enumerate(rows)})

    def write(self, step: Step, tokens: list[int], before: int) -> None:
        for copy in step.copies:
            self.put(copy.plane, copy.target, self.page(copy.plane, copy.source))
        for plane in self.manager.planes:
            entries = list(plane.written(before, len(tokens)))
            assert len(entries) == len(step.slots[plane.name])
            for n, (entry, slot) in enumerate(zip(entries, step.slots[plane.name], strict=True)):
                if plane.state:
                    row: object = (entry, tuple(tokens))
                elif plane.ring:
                    row = tuple(tokens[: before + n + 1])
                else:
                    row = tuple(tokens[: (entry + 1) * plane.ratio])
                self.rows[plane.name, slot] = row

    def read(self, sequence: Hashable, plane: PagedPlane) -> list[object]:
        table = self.manager.tables(sequence)[plane.name]
        entries = plane.entries(self.manager.tokens(sequence))
        return [row for page in table for row in self.page(plane.name, page)][:entries]


def expected(plane: PagedPlane, tokens: list[int]) -> list[object]:
    """What a sequence that was computed alone from its first token holds."""
    count = len(tokens)
    if plane.state:
        return [(entry, tuple(tokens)) for entry in range(plane.state if tokens else 0)]
    if plane.ring:
        newest = {token % plane.ring: tuple(tokens[: token + 1]) for token in range(count)}
        return [newest[entry] for entry in sorted(newest)]
    return [tuple(tokens[: end * plane.ratio]) for end in range(1, count // plane.ratio + 1)]


class ManagerAgainstMemory(RuleBasedStateMachine):
    """Each row is a function of the tokens before it, so a sequence reads what it would have computed alone."""

    sequences = Bundle("sequences")
    saved = Bundle("saved")
    planes: tuple[PagedPlane, ...] = EVERY
    module: Any = module

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.module.CacheManager(self.planes, PAGES, reserve=0.2, emergency=0.05)
        self.memory = Memory(self.manager)
        self.tokens: dict[int, list[int]] = {}
        self.kept: list[list[int]] = [[]]
        self.names = 0

    def _name(self) -> int:
        self.names += 1
        return self.names

    def _pages(self) -> object:
        pool = self.manager.pool
        tables = {name: self.manager.tables(name) for name in self.tokens}
        return tables, pool.free_pages, self.manager.cached_pages

    @rule(
        target=sequences,
        which=st.integers(0, 99),
        blocks=st.integers(0, 3),
        new=st.lists(st.integers(0, 1), max_size=3),
    )
    def add(self, which: int, blocks: int, new: list[int]) -> int:
        known = self.kept[which % len(self.kept)]
        prompt = known[: len(known) - blocks * self.manager.block] + new
        name = self._name()
        hit = self.manager.add(name, prefix_keys(prompt, self.manager.block))
        assert hit % self.manager.block == 0 and hit <= len(prompt)
        self.tokens[name] = prompt[:hit]
        return name

    @rule(name=sequences, new=st.lists(st.integers(0, 1), min_size=1, max_size=MOST), use=st.sampled_from([*KEPT]))
    def extend(self, name: int, new: list[int], use: str) -> None:
        tokens = self.tokens[name] + new
        before, used = self._pages(), self.manager.used_pages
        try:
            step = self.manager.extend(name, len(new), use)
        except OutOfPages:
            assert self._pages() == before
            return
        assert used == self.manager.used_pages or self.manager.used_pages <= PAGES - KEPT[use]
        self.memory.write(step, tokens, len(self.tokens[name]))
        self.tokens[name] = tokens

    @rule(name=sequences)
    def to_a_block_and_keep(self, name: int) -> None:
        block = self.manager.block
        while not self.tokens[name] or len(self.tokens[name]) % block:
            length = len(self.tokens[name])
            self.extend(name, [0] * min(block - length % block, MOST), "grow")
            if len(self.tokens[name]) == length:
                return
        self.manager.keep(name, prefix_keys(self.tokens[name], block))
        self.kept.append(list(self.tokens[name]))

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        name = self._name()
        free = self.manager.pool.free_pages
        self.manager.fork(parent, name)
        assert self.manager.pool.free_pages == free
        self.tokens[name] = list(self.tokens[parent])
        return name

    @rule(name=consumes(sequences))
    def free(self, name: int) -> None:
        self.manager.free(name)
        del self.tokens[name]

    @rule(target=saved, name=consumes(sequences))
    def preempt(self, name: int) -> tuple[Saved, dict[str, list[list[object]]], list[int]]:
        found = self.manager.preempt(name)
        rows = {plane: [self.memory.page(plane, page) for page in table] for plane, table in found.tables.items()}
        return found, rows, self.tokens.pop(name)

    @rule(target=sequences, what=consumes(saved))
    def resume(self, what: tuple[Saved, dict[str, list[list[object]]], list[int]]) -> int:
        found, rows, tokens = what
        name, before = self._name(), self._pages()
        try:
            tables = self.manager.resume(name, found)
        except OutOfPages:
            assert self._pages() == before
            self.manager.add(name)
            self.tokens[name] = []
            return name
        for plane, table in tables.items():
            for page, page_rows in zip(table, rows[plane], strict=True):
                self.memory.put(plane, page, page_rows)
        self.tokens[name] = tokens
        return name

    @rule()
    def evict(self) -> None:
        self.manager.evict()

    @invariant()
    def every_sequence_reads_what_it_would_have_computed_alone(self) -> None:
        for name, tokens in self.tokens.items():
            assert self.manager.tokens(name) == len(tokens)
            for plane in self.manager.planes:
                assert self.memory.read(name, plane) == expected(plane, tokens)
                assert len(self.manager.tables(name)[plane.name]) == plane.pages(len(tokens))

    @invariant()
    def no_page_is_lost_or_owned_twice(self) -> None:
        manager, pool = self.manager, self.manager.pool
        held = [p for name in self.tokens for table in manager.tables(name).values() for p in table]
        cached = [p for prefix in manager._cached.values() for p in prefix.pages]
        counts = [held.count(p) + cached.count(p) for p in range(pool.pages)]
        assert counts == [pool.holders(p) for p in range(pool.pages)]
        assert manager.used_pages == len(set(held))
        assert pool.free_pages == counts.count(0) == pool.pages - len({*held, *cached})
        assert manager.cached_pages == len(set(cached) - set(held))
        owner: dict[int, tuple[str, int]] = {}  # no page serves two planes, or two places of one
        for name in self.tokens:
            for plane, table in manager.tables(name).items():
                for place, page in enumerate(table):
                    assert owner.setdefault(page, (plane, place)) == (plane, place)


class GrowingPlanesAlone(ManagerAgainstMemory):
    planes = (MAIN, COARSE)


for machine in (ManagerAgainstMemory, GrowingPlanesAlone):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestManagerAgainstMemory = ManagerAgainstMemory.TestCase
TestGrowingPlanesAlone = GrowingPlanesAlone.TestCase


# (fault, text in the file, what stands there instead)
FAULTS = [
    ("a shared page is written", "for plane, place in self._shared(held, after):", "for plane, place in ():"),
    ("the copy is not told", "copies.append(Copy(plane, table[place], target))", "pass"),
    (
        "copied from itself",
        "copies.append(Copy(plane, table[place], target))",
        "copies.append(Copy(plane, target, target))",
    ),
    ("a prefix is not held", "self.pool.share(self._cached[own].pages)\n        first", "first"),
    ("a prefix of another length", "first = len(keys) if self._exact else 1", "first = 1"),
    ("prefixes hold pages for ever", "self.pool.drop(self._cached.pop(key).pages)", "self._cached.pop(key)"),
    ("keys outlive their prefix", "if found[0] != key}", "}"),
    ("pages used are forgotten", "self._users[page] = self._users.get(page, 0) + 1", "self._users[page] = 1"),
    ("the pool is not told", "        self.pool.drop(pages)\n", ""),
    (
        "the reserve is not kept",
        "self.pool.pages - self.used_pages - self.kept[use]",
        "self.pool.pages - self.used_pages",
    ),
    ("a ring reads on", "token % self.ring for", "token % (self.ring + 1) for"),
    (
        "the entry that is not complete",
        "before // self.ratio, after // self.ratio)",
        "-(-before // self.ratio), after // self.ratio)",
    ),
]


@pytest.mark.parametrize(("old", "new"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_the_machine_notices(old: str, new: str) -> None:
    broken = faulty("manager", old, new)
    planes = tuple(broken.PagedPlane(p.name, p.page_size, p.ratio, p.ring, p.state) for p in EVERY)
    namespace = {"module": broken, "planes": planes}
    machine = type("Broken", (ManagerAgainstMemory,), namespace)
    chosen = settings(
        max_examples=1000,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(Exception):  # noqa: B017 - whatever breaks first
        run_state_machine_as_test(machine, settings=chosen)


def filled(manager: CacheManager, sequence: str, tokens: int, keys: list[bytes] | None = None) -> int:
    hit = manager.add(sequence, keys or [])
    for start in range(hit, tokens, MOST):
        manager.extend(sequence, min(tokens - start, MOST))
    return hit


def test_a_fork_at_any_length_copies_what_it_writes_and_no_more() -> None:
    manager = CacheManager(EVERY, 40)
    filled(manager, "parent", 11)
    manager.fork("parent", "child")
    before = manager.tables("parent")
    step = manager.extend("child", 1)
    now = manager.tables("child")
    # entry 5 of main lies in its second page; token 11 in the last page of the ring; the state is written whole
    places = {"main": (1,), "window": (2,), "state": (0, 1)}
    wanted = {(plane, before[plane][at], now[plane][at]) for plane, ats in places.items() for at in ats}
    assert {(c.plane, c.source, c.target) for c in step.copies} == wanted
    assert manager.tables("parent") == before
    assert not manager.extend("parent", 1).copies, "the pages are its own again"


def test_a_prefix_is_found_with_its_ring_and_state_at_the_length_that_was_kept() -> None:
    prompt = list(range(20))
    manager = CacheManager(EVERY, 60)
    filled(manager, "a", 16)
    manager.keep("a", prefix_keys(prompt[:16], 8))
    assert filled(manager, "b", 20, prefix_keys(prompt, 8)) == 16
    assert filled(manager, "c", 12, prefix_keys(prompt[:12], 8)) == 0, "ring and state are of 16 tokens"
    growing = CacheManager((MAIN, COARSE), 60)
    filled(growing, "a", 16)
    growing.keep("a", prefix_keys(prompt[:16], 8))
    assert filled(growing, "c", 12, prefix_keys(prompt[:12], 8)) == 8
    assert filled(growing, "f", 20, prefix_keys(prompt, 8)) == 16
    growing.keep("f", prefix_keys(prompt, 8))  # of its first 16 tokens; it has 20
    assert growing.new_pages(20, prefix_keys(prompt, 8)) == growing.pages_for(20) - growing.pages_for(16)
    for name in "acf":
        growing.free(name)
    assert growing.new_pages(20, prefix_keys(prompt, 8)) == growing.pages_for(20), "nobody uses the cached pages"
    other = [*prompt[:3], 99, *prompt[4:]]
    assert filled(growing, "d", 20, prefix_keys(other, 8)) == 0
    assert filled(growing, "e", 20, prefix_keys(prompt, 8, b"another model")) == 0


def test_prefixes_are_evicted_when_pages_are_needed_the_oldest_first() -> None:
    manager = CacheManager((MAIN,), 10, reserve=0, emergency=0)
    keys = {name: prefix_keys([n] * 8, 8) for n, name in enumerate("abc")}
    for name in "abc":
        filled(manager, name, 8)
        manager.keep(name, keys[name])
        manager.free(name)
    assert (manager.used_pages, manager.cached_pages, manager.room()) == (0, 3, 10)
    assert filled(manager, "a again", 8, keys["a"]) == 8  # is now the most recent
    manager.free("a again")
    filled(manager, "long", 64)
    assert manager.cached_pages == 2
    assert [manager.add(f"{name} again", keys[name]) for name in "abc"] == [8, 0, 8]
    with pytest.raises(OutOfPages, match="got 0 of 10"):
        manager.extend("long", 2)
    manager.free("a again")
    manager.extend("long", 2)
    assert [manager.evict(), manager.evict()] == [True, False]


def test_the_reserve_is_for_growing_and_the_emergency_pages_for_the_oldest() -> None:
    manager = CacheManager((PagedPlane("main", 1),), 100, reserve=0.15, emergency=0.02)
    for name in "ab":
        manager.add(name)
    manager.extend("a", 85, "admit")
    with pytest.raises(OutOfPages, match="'b': expected 1 pages to admit, got 0 of 100, as 15 are kept"):
        manager.extend("b", 1, "admit")
    manager.extend("b", 13, "grow")
    with pytest.raises(OutOfPages, match="to grow"):
        manager.extend("b", 1)
    manager.extend("a", 2, "emergency")
    with pytest.raises(OutOfPages, match="to emergency, got 0"):
        manager.extend("a", 1, "emergency")
    saved = manager.preempt("b")
    with pytest.raises(OutOfPages, match="expected 13 pages to admit, got 0"):
        manager.resume("b", saved)
    manager.free("a")
    assert len(manager.resume("b", saved)["main"]) == 13


def test_waste_is_told_apart() -> None:
    planes = (PagedPlane("main", 4, entry_bytes=10), PagedPlane("index", 4, entry_bytes=3))
    manager = CacheManager(planes, 16, reserve=0, emergency=0)
    filled(manager, "a", 6)
    manager.fork("a", "b")
    assert measure(manager) == Waste(tail=2 * 10 + 2 * 3, padding=2 * (40 - 12), pinned=0), "shared pages count once"
    assert measure(manager, page_bytes=50) == Waste(26, 2 * 10 + 2 * 38, 0)
    assert measure(manager, chunk=16).pinned == 12 * 40
    with pytest.raises(ValueError, match="at least 40 bytes"):
        measure(manager, page_bytes=39)


def test_pages_in_a_row() -> None:
    assert adjacency([[3, 4, 5], [9, 8], [1]]) == 2 / 3
    assert adjacency([[1], []]) is None
    assert steps_won([[3, 4, 5], [9, 8]], 30, slower=0.2, copy=0.5) == pytest.approx(30 * 0.2 / 3 - 0.5)
    assert steps_won([[1], []], 30, slower=0.2, copy=0.5) == 0
    assert steps_won([[3, 4, 5]], 1000, slower=0.2, copy=0.5) == -0.5  # in order already: copying only costs
    assert largest_free_run([7, 1, 2, 9, 8]) == 3 and largest_free_run([]) == 0
    assert pinned_pages([0, 1, 2, 4], 6, 2) == 2 and pinned_pages([4], 5, 2) == 0
    # a long free run says nothing of how near the pages of a request lie
    assert largest_free_run(range(50, 100)) == 50 and adjacency([range(48, 0, -2)]) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected one of ratio, ring and state, got several"):
        PagedPlane("window", 4, ratio=4, ring=8)
    with pytest.raises(ValueError, match="page size and a ratio of at least 1"):
        PagedPlane("main", 0)
    with pytest.raises(ValueError, match="a name of its own"):
        CacheManager((MAIN, MAIN), 4)
    with pytest.raises(ValueError, match="emergency <= reserve < 1"):
        CacheManager((MAIN,), 4, reserve=0.1, emergency=0.2)
    with pytest.raises(ValueError, match="block: expected at least 1"):
        prefix_keys([1], 0)
    manager = CacheManager(EVERY, 20)
    manager.check(40)
    with pytest.raises(ValueError, match=r"pool's 20 pages, got 23 \(main 9, coarse 9, window 3, state 2\)"):
        manager.check(72)
    filled(manager, "a", 9)
    with pytest.raises(ValueError, match="a step of 1 to 6 tokens, got 7"):
        manager.extend("a", 7)
    with pytest.raises(ValueError, match="a step of 1 to 6 tokens, got 0"):
        manager.extend("a", 0)
    with pytest.raises(ValueError, match="blocks of 8 tokens, full ones, got 1 for 9 tokens"):
        manager.keep("a", [b"key"])
    for call in (lambda: manager.add("a"), lambda: manager.fork("a", "a"), lambda: manager.resume("a", Saved(0, {}))):
        with pytest.raises(ValueError, match="exists already"):
            call()
    for name in ("free", "preempt", "tables", "tokens"):
        with pytest.raises(KeyError, match="no sequence 'b'"):
            getattr(manager, name)("b")
