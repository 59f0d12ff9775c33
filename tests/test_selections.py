"""Every line of `docs/selections.md`, in every phase it names: the selection against one found entry by entry, and
`attend` with it against attention over that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import Paged
from selections import PHASES, Batch, Line, Row, batch, expected_of, lines, mistakes
from torch import Tensor

import sparse_attn
from sparse_attn.registry import Impl

CASES = [pytest.param(line, phase, id=f"{line.selector}-{phase}") for line in lines() for phase in line.phases]


def test_the_page_lists_every_selector() -> None:
    text = " ".join(line.selector for line in lines())
    for kind in (
        *("V3.2", "GLM-5", "GLM-5.3", "V4-Flash", "V4-Pro", "V4.1 Full", "Reindex", "makes candidates", "Qwen4"),
        *("LongCat", "HISA", "MiniMax-M3", "NSA", "InfLLM", "MoBA", "Quest", "Seer", "Llama", "draft", "shard"),
    ):
        assert kind in text
    assert {phase for line in lines() for phase in line.phases} == set(PHASES)


def tolerance(impl: Impl) -> tuple[float, float]:
    """The reference rounds as the oracle does; a kernel may swap units of nearly equal score."""
    return (0.0, 0.0) if impl.backend == "reference" else impl.tolerance["float32"]


@pytest.mark.parametrize(("line", "phase"), CASES)
def test_line(line: Line, phase: str, select_impl) -> None:
    given = batch(line, phase)
    args, kwargs = given.arguments()
    expected = expected_of(line, phase)
    for extra in ({}, {"return_values": True}):
        selected = sparse_attn.select(*args, **(kwargs | extra), backend=select_impl.backend)
        assert mistakes(given, selected, expected, tolerance(select_impl)) == []


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.selector)
def test_line_chooses(line: Line) -> None:
    """So the test of the line is one: some row may select more than its budget."""
    rows = [row for phase in line.phases for lists in expected_of(line, phase) for row in lists]
    assert any(set(row.scores) - set(row.indices) for row in rows)


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.selector)
def test_line_with_the_numbers_of_the_page(line: Line, select_impl) -> None:
    """Few tokens fit every released budget."""
    given = batch(line, line.phases[-1], small=False)
    args, kwargs = given.arguments()
    selected = sparse_attn.select(*args, **kwargs, backend=select_impl.backend)
    expected = expected_of(line, line.phases[-1], small=False)
    assert mistakes(given, selected, expected, tolerance(select_impl)) == []


def heads(line: Line) -> tuple[int, int]:
    """Query and KV heads of an `attend` that takes the line's lists."""
    lists = line.options().get("out_heads", 1)
    return {"all": (2, 1), "KV head": (2 * lists, lists), "query head": (lists, lists // 2)}[line.lists]


def attention(given: Batch, line: Line, expected: list[list[Row]]) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Arguments of an `attend` over planes of its own, and its output by the expected selection, entry by entry."""
    g = torch.Generator().manual_seed(5)
    q_heads, kv_heads = heads(line)
    options = line.attend_options()
    ratio, block = options.get("ratio", 1), options.get("select_block", 1)
    rows = [torch.randn(n // ratio, kv_heads, 16, generator=g) for n in given.lengths]
    paged = Paged(rows, 4, g)
    q = torch.randn(len(given.q), q_heads, 16, generator=g)
    out = torch.zeros(len(q), q_heads, 8, dtype=torch.float64)
    for t, (b, p) in enumerate(given.rows):
        low, high = 0, (given.lengths[b] if options.get("causal") is False else p + 1) // ratio
        if "kv_range" in options:
            low, high = given.range(b, p)
        for h in range(q_heads):
            chosen = expected[t][h * given.out_heads // q_heads].indices
            entries = [e for u in chosen for e in range(u * block, (u + 1) * block) if low <= e < high]
            if entries:
                keys = rows[b][entries, h * kv_heads // q_heads].double()
                out[t, h] = torch.softmax(0.25 * keys @ q[t, h].double(), 0) @ keys[:, :8]
    (_, _, starts, lens, _, _, _, _, *bounds), _ = given.arguments()
    keywords = {name: given.names.get(name, value) for name, value in options.items()}
    keywords |= {"kv": paged.plane, "page_table": paged.table, "format": "fp32"}
    return (q, starts, lens, 0.25, 8, *bounds), keywords, out


@pytest.mark.parametrize(("line", "phase"), CASES)
def test_attend_takes_the_selection_as_it_is(line: Line, phase: str, select_impl, attend_impl) -> None:
    given = batch(line, phase)
    args, kwargs = given.arguments()
    selected = sparse_attn.select(*args, **kwargs, backend=select_impl.backend)
    expected = expected_of(line, phase)
    if mistakes(given, selected, expected, (0.0, 0.0)):
        pytest.skip("the kernel chose another of two units of nearly equal score")
    leading, keywords, out = attention(given, line, expected)
    got = sparse_attn.attend(
        *leading, **keywords, indices=selected.indices, index_counts=selected.counts, backend=attend_impl.backend
    )
    atol, rtol = attend_impl.tolerance["float32"]
    torch.testing.assert_close(got.double(), out, atol=atol, rtol=rtol)
    assert (got[: len(given.rows)] != 0).any()


@pytest.mark.parametrize("phase", PHASES)
def test_two_levels(phase: str, select_impl) -> None:
    """V4.1: candidates made by one call restrict another, whose keys are the same and whose queries differ."""
    source, reindex = (
        next(x for x in lines() if name in x.selector) for name in ("makes candidates", "Reindex, ratio 1")
    )
    made, taken = batch(source, phase), batch(reindex, phase)
    taken.q = taken.q.flip(1)
    args, kwargs = made.arguments()
    blocks = sparse_attn.select(*args, **kwargs, backend=select_impl.backend).candidate_blocks
    taken.names["candidates"] = blocks
    args, kwargs = taken.arguments()
    selected = sparse_attn.select(*args, **kwargs, backend=select_impl.backend)
    assert mistakes(taken, selected, taken.expected_all(), tolerance(select_impl)) == []


@pytest.mark.parametrize("phase", PHASES)
def test_candidates_are_a_selection_of_blocks(phase: str, select_impl) -> None:
    source = batch(next(x for x in lines() if "makes candidates" in x.selector), phase)
    args, kwargs = source.arguments()
    made = sparse_attn.select(*args, **kwargs, backend=select_impl.backend).candidate_blocks
    args = (*args[:6], kwargs.pop("candidate_k"), *args[7:])
    blocks = dict(block=8, pool="max", keep_last=1, order="index", return_values=True)
    again = sparse_attn.select(*args, **kwargs, **blocks, backend=select_impl.backend)
    assert torch.equal(made, again.indices)
