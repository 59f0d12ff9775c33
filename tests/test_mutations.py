"""The suite is tested itself: each fault below is put into a copy of the source, and the calls of `docs/calls.md` must
notice."""

from __future__ import annotations

import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from calls import Batch, lines
from torch import Tensor

from sparse_attn import InvalidCall, reference
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.store import Store

# (fault, text in reference.py, what stands there instead)
ATTEND_FAULTS = [
    ("sink dropped", "if a.sinks is not None:", "if False:"),
    (
        "sink in the lse",
        "lse[t, heads] = total.float()",
        "lse[t, heads] = torch.logaddexp(total, a.sinks[heads].double()).float() "
        "if a.sinks is not None else total.float()",
    ),
    ("sink scaled", "a.sinks[heads].double()", "a.scale * a.sinks[heads].double()"),
    ("scale derived from the row", "scores = a.scale *", "scores = a.q.shape[2] ** -0.5 * 1.01 *"),
    ("window one short", "position - a.window + 1 if", "position - a.window + 2 if"),
    ("window one long", "position - a.window + 1 if", "position - a.window if"),
    ("window without the token itself", "if a.window else 0, position + 1", "if a.window else 0, position"),
    ("visible = p // ratio", "low, high = 0, tokens // a.ratio", "low, high = 0, (tokens - 1) // a.ratio"),
    ("ratio ignored", "low, high = 0, tokens // a.ratio", "low, high = 0, len(a.page_table[b]) * a.kv.shape[1] // 2"),
    ("never causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if False else"),
    ("always causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if True else"),
    ("kv_range ignored", "if a.kv_range is not None:", "if False:"),
    ("win_range ignored", "if a.win_range is not None:", "if False:"),
    ("indices ignored", "if a.indices is None:\n        return", "if True:\n        return"),
    ("win_indices ignored", "if a.win_indices is None:", "if True:"),
    ("counts ignored", "if a.index_counts is not None:", "if False:"),
    ("-1 read as row 0", "chosen.long()[:, None]", "chosen.long().clamp(min=0)[:, None]"),
    (
        "selection not causal",
        "(entries >= max(low, 0)) & (entries < high)",
        "(entries >= max(low, 0)) & (entries < high + 1)",
    ),
    ("lower bound ignored", "(entries >= max(low, 0)) & (entries < high)", "(entries >= 0) & (entries < high)"),
    ("block numbers taken as entries", "chosen.long()[:, None] * a.select_block", "chosen.long()[:, None]"),
    ("first index head for all", "g * index_heads // groups", "0"),
    ("first KV head for all", "g * a.kv_heads // groups", "0"),
    (
        "rope dropped",
        "torch.cat([rows, read(a.kv_rope, None, at, kv_head)], dim=-1)",
        "torch.cat([rows, 0 * read(a.kv_rope, None, at, kv_head)], dim=-1)",
    ),
    ("keys as values", "values = rows[:, : a.v_dim] if a.v is None", "values = rows[:, : a.v_dim] if True"),
    ("value scale dropped", "read(a.v, a.v_scale, at, kv_head)", "read(a.v, None, at, kv_head)"),
    ("key scale for values", "read(a.v, a.v_scale, at, kv_head)", "read(a.v, a.kv_scale, at, kv_head)"),
    ("page of another sequence", "where(a.page_table[b], entries, a.kv", "where(a.page_table[b - 1], entries, a.kv"),
    (
        "main plane through the window's pages",
        "where(a.win_page_table[b], entries",
        "where(a.win_page_table[b], entries + 1",
    ),
    ("positions from the first row on", "position = length - (end - t)", "position = t - start"),
    ("output left as it was", "out.zero_()", "pass"),
    ("lse left as it was", "lse.fill_(NEG_INF)", "pass"),
]

STORE_FAULTS = [
    ("-1 writes the last row", "kept = a.slots >= 0", "kept = a.slots >= -1"),
    ("scale rounded to nearest", "clips = ", "clips = torch.zeros_like(scale, dtype=torch.bool) if True else "),
    ("halves away from zero", "(rows / divisor).round()", "torch.trunc(rows / divisor + 0.5 * torch.sign(rows))"),
    ("offset and page swapped", "slots // page_size, slots % page_size", "slots % page_size, slots // page_size"),
]

SOURCE = Path(reference.__file__).read_text()


def mutant(old: str, new: str) -> types.ModuleType:
    """The reference with one fault."""
    assert old in SOURCE, "the fault's place is gone: move it along with the source"
    module = types.ModuleType("sparse_attn.mutant")
    module.__package__ = "sparse_attn"
    sys.modules[module.__name__] = module
    exec(compile(SOURCE.replace(old, new), "mutant", "exec"), module.__dict__)
    return module


@cache
def batches() -> list[tuple[Batch, Tensor, Tensor]]:
    """Batches that together use every argument, small enough to run for each fault, with what they should give."""
    kept = []
    for line in lines():
        if line.q_heads > 16 and "64" in f"{line.q_heads}":
            line = type(line)(**dict(line.__dict__, q_heads=4))  # as many heads change nothing for the reference
        kept.append(Batch(line, "chunk" if "chunk" in line.phases else line.phases[0], page=4))
    return [(batch, *batch.expected()) for batch in kept]


def notices(attend) -> bool:
    for batch, out, lse in batches():
        leading, kwargs = batch.arguments()
        got, got_lse = torch.full(out.shape, 3.0), torch.full(lse.shape, 3.0)
        try:
            attend(Attend(*leading, **kwargs), got, got_lse)
        except (InvalidCall, IndexError):
            return True
        close = torch.allclose(got.double(), out, atol=1e-5, equal_nan=True)
        if not close or not torch.allclose(got_lse.double(), lse, atol=1e-5, equal_nan=True):
            return True
    return False


def test_the_reference_itself_passes() -> None:
    assert not notices(reference.attend)


@pytest.mark.parametrize(
    ("old", "new"), [fault[1:] for fault in ATTEND_FAULTS], ids=[fault[0] for fault in ATTEND_FAULTS]
)
def test_attend_fault_is_noticed(old: str, new: str) -> None:
    assert notices(mutant(old, new).attend)


@pytest.mark.parametrize(
    ("old", "new"), [fault[1:] for fault in STORE_FAULTS], ids=[fault[0] for fault in STORE_FAULTS]
)
def test_store_fault_is_noticed(old: str, new: str) -> None:
    rows = torch.randn(6, 2, 20)
    rows[2, 1, 4], rows[3] = float("inf"), torch.tensor([127.0, 0.5, 1.5, -2.5] * 5)
    slots = torch.tensor([0, 7, 5, 3, 9, -1])

    def bytes_after(store) -> Tensor:
        plane, scale = torch.zeros(4, 3, 2, 20, dtype=torch.int8), torch.zeros(4, 3, 2, dtype=torch.half)
        store(Store(rows, plane, slots, scale, "int8"))
        return torch.cat([plane.flatten().view(torch.uint8), scale.flatten().view(torch.uint8)])

    expected = bytes_after(reference.store)
    try:
        same = torch.equal(bytes_after(mutant(old, new).store), expected)
    except IndexError:
        same = False
    assert not same
