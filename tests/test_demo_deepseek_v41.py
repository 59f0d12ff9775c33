"""DeepSeek-V4.1's attention in the demo: layers share; rewind, fork and preemption change no bit; and the command.

`tests/oracles/test_deepseek_v41.py` tests that its numbers are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparse_attn import demo
from sparse_attn.demo import deepseek_v41 as module
from sparse_attn.demo import deepseek_v41_run
from sparse_attn.demo.deepseek_v41 import Attention, Cache, Config
from sparse_attn.demo.deepseek_v41_run import random_inputs, random_layers, scored
from sparse_attn.models import PRESETS, Selection, deepseek_v41
from sparse_attn.ops import Selected
from sparse_attn.serving.pages import OutOfPages

SELECTION = Selection(6, 8, 128, candidate_k=3, candidate_block=4, weighted=True, score_dtype="bf16")
CONFIG = Config(hidden=32, q_lora=32, o_groups=2, o_lora=16, positions=128)
PLAN = deepseek_v41("tiny", (0, 2, 2, 2, 1, 1, 1, 1), (1, 4), (1, 3, 4, 6), 4, 4, 8, SELECTION)
LAYERS = random_layers(CONFIG, PLAN)
INPUTS = random_inputs(CONFIG, PLAN, 64)
OTHERS = random_inputs(CONFIG, PLAN, 64, seed=5)
DRAFTS = 5

Given = list[Tensor]


def make(max_step: int = 24) -> Cache:
    cache = Cache(PLAN, 256, 3, page_size=8, max_step=max_step, max_rewind=DRAFTS)
    for plane in [plane for planes in cache.planes for plane in planes.values()]:
        plane.view(torch.uint8).fill_(255)  # NaN, so that nothing is read before it is written
    cache.add("a")
    return cache


def feed(cache: Cache, sequence: str, begin: int, end: int, inputs: Given = INPUTS) -> tuple[Given, list]:
    return LAYERS([x[begin:end] for x in inputs], cache, cache.step({sequence: end - begin}))


def same(first: tuple[Given, list], second: tuple[Given, list]) -> bool:
    """Outputs and lists, bit by bit."""
    outputs = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first[0], second[0], strict=True))
    lists = zip(first[1], second[1], strict=True)
    return outputs and all(a is b is None or torch.equal(a.indices, b.indices) for a, b in lists)


def decode(cache: Cache, sequence: str, begin: int, end: int, inputs: Given = INPUTS) -> list[tuple[Given, list]]:
    return [feed(cache, sequence, n, n + 1, inputs) for n in range(begin, end)]


def all_same(first: list, second: list) -> bool:
    return all(same(a, b) for a, b in zip(first, second, strict=True))


# --- Sharing ---------------------------------------------------------------------------------------------------------


def test_layers_share_planes_and_selections() -> None:
    cache = make()
    _, selected = feed(cache, "a", 0, 20)
    assert [selected[n] is selected[owner] for n, owner in ((2, 1), (5, 4), (7, 6))] == [True] * 3
    assert selected[0] is None
    assert len({id(selected[n].indices) for n in (1, 3, 4, 6)}) == 4
    for n, owner in ((2, 1), (3, 1), (5, 4), (6, 4), (7, 4)):
        assert cache.read(n)["main"] is cache.planes[owner]["main"]
        assert cache.read(n)["window"] is cache.planes[n]["window"]
    assert cache.read(3)["index"] is cache.planes[1]["index"] and cache.read(6)["index"] is cache.planes[4]["index"]


@pytest.mark.parametrize("owner", [1, 4])
def test_every_reader_sees_the_owners_planes(owner: int) -> None:
    """Another input of the owner changes all that attend to its entries, and nobody else."""
    changed = [other if n == owner else x for n, (x, other) in enumerate(zip(INPUTS, OTHERS, strict=True))]
    first, _ = feed(make(), "a", 0, 20)
    second, _ = feed(make(), "a", 0, 20, changed)
    readers = PLAN.readers("main", owner)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [n not in readers for n in range(8)]


# --- The page --------------------------------------------------------------------------------------------------------

MODEL = PRESETS["deepseek-v4.1-flash"]
PAGE = Path(__file__).parents[1] / "docs" / "deepseek-v4.1.md"


def table(head: str) -> list[list[str]]:
    """The rows of the page's table that begins with ``head``."""
    lines = PAGE.read_text().split(f"| {head} |")[1].splitlines()[2:]
    cut = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines[:cut]]


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_page_tells_the_calls(monkeypatch) -> None:
    calls: list[str] = []
    for op in ("compress", "select", "attend"):
        real = getattr(module, op)
        monkeypatch.setattr(module, op, lambda *a, _op=op, _real=real, **k: calls.append(_op) or _real(*a, **k))
    made: dict[int, tuple[int, ...]] = {}

    def count(layer: Attention, *_: object) -> None:
        made[layer.plan.number] = tuple(map(calls.count, ("compress", "select", "attend")))
        calls.clear()

    hooks = [layer.register_forward_hook(count) for layer in LAYERS.layers]
    feed(make(), "a", 0, 9)
    for hook in hooks:
        hook.remove()
    shown = {}
    for kind, layers, *counts, _ in table("kind"):
        name, _, ratio = kind.partition(", ratio ")
        shown[name, int(ratio or 0)] = tuple(map(int, counts))
        expected = {n for n in MODEL.by_kind()[name] if not ratio or MODEL.plane("main", n).ratio == int(ratio)}
        assert numbers(layers) == expected
    assert len(shown) == 6
    for layer in PLAN.layers:
        ratio = PLAN.plane("main", layer.number).ratio if "main" in layer.reads else 0
        key = (layer.kind, ratio) if (layer.kind, ratio) in shown else (layer.kind, 1)  # reindex at ratio 2: as at 1
        assert made[layer.number] == shown[key]


def test_the_page_tells_the_planes() -> None:
    grown, fixed = MODEL.bytes_per_token(), MODEL.fixed_bytes()
    found = []
    for kind in ("main", "index", "window", "state"):
        planes = [plane for layer in MODEL.layers for plane in layer.planes if plane.kind == kind]
        size = [f"{grown[kind]:,.0f}", ""] if kind in grown else ["", f"{fixed[kind]:,}"]
        found.append([kind, planes[0].format, f"{planes[0].entry_bytes():,}", str(len(planes)), *size])
    assert table("plane") == found


# --- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [20, 21])
@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_rejected_drafts_leave_nothing_behind(start: int, accepted: int) -> None:
    """Whether drafts were rejected, or another sequence had their rows in the step: what follows is the same."""
    drafting, plain = make(), make()
    end = start + accepted
    rows = [torch.cat([x[start:end], y[: DRAFTS - accepted]]) for x, y in zip(INPUTS, OTHERS, strict=True)]
    for cache in (drafting, plain):
        cache.add("b")
        feed(cache, "a", 0, start)
    LAYERS(rows, drafting, drafting.step({"a": DRAFTS}))
    drafting.rewind("a", DRAFTS - accepted)
    LAYERS(rows, plain, plain.step({"a": accepted, "b": DRAFTS - accepted} if accepted else {"b": DRAFTS}))
    assert all_same(decode(drafting, "a", end, end + 12), decode(plain, "a", end, end + 12))


def test_the_longest_steps() -> None:
    """They overwrite no row of the window that their first token needs."""
    found = []
    for max_step in (24, 64):
        cache = make(max_step=max_step)
        found.append([feed(cache, "a", 0, 24), feed(cache, "a", 24, 48)])
    assert all_same(*found)


def test_fork() -> None:
    """Parent and child go on with other tokens, each as if it were alone."""
    cache, alone, other = make(), make(), make()
    for one in (cache, alone, other):
        feed(one, "a", 0, 24)
    cache.fork("a", "b")
    expected = decode(alone, "a", 24, 40), decode(other, "a", 24, 40, OTHERS)
    for n in range(24, 40):
        assert same(feed(cache, "a", n, n + 1), expected[0][n - 24])
        assert same(feed(cache, "b", n, n + 1, OTHERS), expected[1][n - 24])
    free = cache.pages.free_pages
    cache.free("a")
    assert cache.pages.free_pages == free + 2  # three pages are the child's too
    assert same(feed(cache, "b", 40, 41, OTHERS), feed(other, "a", 40, 41, OTHERS))


@pytest.mark.parametrize("length", [20, 21])
def test_preempted_and_resumed(length: int) -> None:
    cache, alone = make(), make()
    for one in (cache, alone):
        feed(one, "a", 0, length)
    saved = cache.preempt("a")
    cache.add("b")
    feed(cache, "b", 0, 24, OTHERS)  # takes the pages and the ring
    cache.resume("a", saved)
    assert all_same(decode(cache, "a", length, length + 12), decode(alone, "a", length, length + 12))


def test_two_sequences_in_a_step() -> None:
    """Each row has the bits that it has in any other batch of as many rows."""
    found = []
    for inputs in (INPUTS, OTHERS):
        cache = make()
        cache.add("b")
        feed(cache, "a", 0, 9)
        feed(cache, "b", 0, 20, inputs)
        together = [torch.cat([x[9:16], y[20:23]]) for x, y in zip(INPUTS, inputs, strict=True)]
        found.append(LAYERS(together, cache, cache.step({"a": 7, "b": 3})))
    first, second = ([x[:7] for x in outputs] for outputs, _ in found)
    assert all(map(torch.equal, first, second))
    assert not any(torch.equal(a[7:], b[7:]) for a, b in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.step({"a": 25}), "'a': expected 1 to 24 tokens, got 25"),
        (lambda cache: cache.step({"a": 0}), "expected 1 to 24 tokens, got 0"),
        (lambda cache: cache.rewind("a", DRAFTS + 1), "take back at most 5 of its newest tokens.* got 6"),
        (lambda cache: cache.rewind("a", -1), "got -1"),
        (lambda cache: (cache.rewind("a", 3), cache.rewind("a", 3)), "got 3"),
        (lambda cache: (cache.rewind("a", 5), cache.step({"a": 1}), cache.rewind("a", 2)), "got 2"),
        (lambda cache: (cache.rewind("a", 5), cache.resume("b", cache.preempt("a")), cache.rewind("b", 1)), "got 1"),
        (lambda cache: (cache.fork("a", "b"), cache.rewind("b", 1)), "none of them shared, got 1"),
        (lambda cache: (cache.fork("a", "b"), cache.rewind("a", 1)), "none of them shared, got 1"),
        (lambda cache: (cache.rewind("a", 1), cache.fork("a", "b")), "full pages, got 15 tokens after a rewind"),
        (lambda cache: (cache.step({"a": 1}), cache.fork("a", "b")), "full pages of 8 entries, got 17"),
    ],
)
def test_refusals(call: Callable[[Cache], object], message: str) -> None:
    cache = make()
    cache.step({"a": 16})
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_a_step_without_room_changes_no_length() -> None:
    cache = make()
    cache.add("b")
    feed(cache, "a", 0, 21)
    for _ in range(9):
        cache.step({"b": 24})
    with pytest.raises(OutOfPages):
        cache.step({"a": 2, "b": 24})
    assert {name: tokens.now for name, tokens in cache.sequences.items()} == {"a": 21, "b": 216}
    alone = make()
    feed(alone, "a", 0, 21)
    assert all_same(decode(cache, "a", 21, 24), decode(alone, "a", 21, 24))


# --- The command -----------------------------------------------------------------------------------------------------


def test_what_is_shown_are_all_kinds_of_layers() -> None:
    model, shown = PRESETS["deepseek-v4.1-flash"], deepseek_v41_run.SHOWN

    def kinds(numbers) -> set[tuple[str, int]]:
        layers = [model.layers[n] for n in numbers]
        return {(layer.kind, model.plane("main", layer.number).ratio if layer.kv_owner else 0) for layer in layers}

    assert kinds(shown) == kinds(range(40)) and len(kinds(shown)) == len(shown)
    model.excerpt(shown)


def test_scored_pairs() -> None:
    """As ``select`` is asked: with values, it gives one for each entry that it scores."""
    blocks = torch.tensor([[[0, 2, -1]], [[1, 5, -1]]], dtype=torch.int32)
    selected = [None] * 4 + [Selected(blocks, blocks[:, 0], None, blocks), None, None, None]
    seen = torch.tensor([10, 23])
    assert scored(PLAN, PLAN.layers[1], seen, selected) == 11  # 5 fit the budget of 6
    assert scored(PLAN, PLAN.layers[4], seen, selected) == 33
    assert scored(PLAN, PLAN.layers[6], seen, selected) == 7  # blocks 1 and 5: 4 and 3 entries; 0 and 2: 4 and 2 fit


@pytest.mark.parametrize("wrong", [False, True])
def test_command(wrong: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(deepseek_v41_run, "MODEL", PLAN)
    monkeypatch.setattr(deepseek_v41_run, "SHOWN", tuple(range(8)))
    monkeypatch.setattr(deepseek_v41_run, "HIDDEN", 32)
    found = ("9 tokens against an oracle", {2: "output off by 1"} if wrong else {})
    monkeypatch.setattr(deepseek_v41_run, "compare", lambda *_: found)
    argv = ["--model", "deepseek-v4.1-flash", "--context", "20", "--new", "2", "--compared", "9"]
    assert demo.main(argv) == wrong
    text = capsys.readouterr().out
    assert ("FAILED: 9 tokens" in text and "layer 2: output off by 1" in text) if wrong else "PASSED: 9 tokens" in text
    size = PLAN.bytes_per_token()
    for kind, format in (("main", "fp4_v41"), ("index", "fp4_index")):
        (line,) = (line for line in text.splitlines() if line.split()[:2] == [kind, format])
        assert line.count(f"{size[kind]:,.0f} a token") == 2  # as allocated, and by the plan
    assert {line.split()[0] for line in text.splitlines() if "reference" in line or "cpu_native" in line} == {
        *("attend", "compress", "load", "select", "store")
    }


def test_command_refuses(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--model", "deepseek-v4.1-flash", "--new", "0"])
    assert stopped.value.code == 2 and "--new: expected at least 1, got 0" in capsys.readouterr().err
