"""The suite is tested itself: each fault below is put into a copy of `attend`, and the calls of `docs/calls.md` must
notice."""

from __future__ import annotations

from functools import cache

import torch
from calls import Batch, lines
from mutants import OPS, each, mutant
from torch import Tensor

import sparse_attn
from sparse_attn import InvalidCall, layout, reference
from sparse_attn.ops.attend import Attend

# (fault, text in the file, what stands there instead)
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
        "torch.cat([rows, a.kv_rope[:, :, kv_head][at].double()], dim=-1)",
        "torch.cat([rows, 0 * a.kv_rope[:, :, kv_head][at].double()], dim=-1)",
    ),
    ("keys as values", "values = rows[:, : a.v_dim] if a.v is None", "values = rows[:, : a.v_dim] if True"),
    ("key scale for values", "Plane(a.v, a.value_format, a.v_scale)", "Plane(a.v, a.value_format, a.kv_scale)"),
    ("page of another sequence", "a.page_table[b], entries, plane", "a.page_table[b - 1], entries, plane"),
    ("window read one entry on", "a.win_page_table[b], entries", "a.win_page_table[b], entries + 1"),
    ("output left as it was", "out.zero_()", "pass"),
    ("lse left as it was", "lse.fill_(NEG_INF)", "pass"),
]

ROWS_FAULTS = [
    ("positions from the first row on", "position = length - (end - t)", "position = t - start"),
]


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


def test_a_mutant_leaves_nothing_behind() -> None:
    before = [sparse_attn.layout, sparse_attn.planes, *(getattr(reference, op) for op in OPS)]
    copy = mutant("planes", "start = 0", "start = 1")
    after = [sparse_attn.layout, sparse_attn.planes, *(getattr(reference, op) for op in OPS)]
    assert all(x is y for x, y in zip(before, after, strict=True))
    assert copy.layout is not layout and copy.attend is not reference.attend


@each(attend=ATTEND_FAULTS, rows=ROWS_FAULTS)
def test_attend_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert notices(mutant(file, old, new).attend)
