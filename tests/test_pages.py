"""The page allocator against a model: page tables, sharing, freeing, refusal."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sparse_attn.layout import pages_for
from sparse_attn.serving.pages import OutOfPages, PageAllocator

PAGES, PAGE_SIZE = 12, 4


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model writes a unique value into each slot it was given; every sequence must read back its own values."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES, PAGE_SIZE)
        self.memory: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.names = 0
        self.values = 0

    def _name(self) -> int:
        self.names += 1
        return self.names

    @rule(target=sequences)
    def add(self) -> int:
        name = self._name()
        self.allocator.add(name)
        self.written[name] = []
        return name

    @rule(name=sequences, entries=st.integers(0, 3 * PAGE_SIZE))
    def extend(self, name: int, entries: int) -> None:
        held = len(self.written[name])
        needed = pages_for(held + entries, PAGE_SIZE) - pages_for(held, PAGE_SIZE)
        if needed > self.allocator.free_pages:
            before = self._state()
            with pytest.raises(OutOfPages, match=f"needs {needed} more pages"):
                self.allocator.extend(name, entries)
            assert self._state() == before
            return
        slots = self.allocator.extend(name, entries)
        assert len(slots) == entries
        for slot in slots:
            self.values += 1
            self.memory[slot] = self.values
            self.written[name].append(self.values)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        name = self._name()
        if len(self.written[parent]) % PAGE_SIZE:
            with pytest.raises(ValueError, match="page boundary"):
                self.allocator.fork(parent, name)
            self.allocator.add(name)
            self.written[name] = []
        else:
            free = self.allocator.free_pages
            self.allocator.fork(parent, name)
            assert self.allocator.free_pages == free
            self.written[name] = list(self.written[parent])
        return name

    @rule(name=consumes(sequences))
    def free(self, name: int) -> None:
        self.allocator.free(name)
        del self.written[name]

    def _state(self) -> tuple[int, dict[int, list[int]]]:
        return self.allocator.free_pages, {n: self.allocator.page_table(n) for n in self.written}

    @invariant()
    def every_sequence_reads_its_own_values(self) -> None:
        for name, values in self.written.items():
            table = self.allocator.page_table(name)
            assert self.allocator.entries(name) == len(values)
            assert len(table) == pages_for(len(values), PAGE_SIZE)
            read = [self.memory[table[e // PAGE_SIZE] * PAGE_SIZE + e % PAGE_SIZE] for e in range(len(values))]
            assert read == values

    @invariant()
    def no_page_is_lost(self) -> None:
        held = {page for name in self.written for page in self.allocator.page_table(name)}
        assert held <= set(range(PAGES))
        assert len(held) + self.allocator.free_pages == PAGES


AllocatorAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase


def test_shared_pages_are_freed_by_the_last_holder() -> None:
    allocator = PageAllocator(4, 2)
    allocator.add("parent")
    allocator.extend("parent", 4)
    allocator.fork("parent", "child")
    slots = allocator.extend("child", 1)
    assert Counter(allocator.page_table("child")) & Counter(allocator.page_table("parent")) == Counter([0, 1])
    assert slots[0] // 2 not in allocator.page_table("parent")
    allocator.free("parent")
    assert allocator.free_pages == 1
    allocator.free("child")
    assert allocator.free_pages == 4


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 page"):
        PageAllocator(0, 4)
    allocator = PageAllocator(2, 4)
    allocator.add("a")
    with pytest.raises(ValueError, match="exists already"):
        allocator.add("a")
    with pytest.raises(ValueError, match="exists already"):
        allocator.fork("a", "a")
    with pytest.raises(ValueError, match="0 or more entries"):
        allocator.extend("a", -1)
    for call in (allocator.free, allocator.entries, allocator.page_table):
        with pytest.raises(KeyError, match="no sequence 'b'"):
            call("b")
