"""The suite is tested itself: each fault below is put into a copy of the source, and the calls of `docs/calls.md` must
notice."""

from __future__ import annotations

import dataclasses
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import selections
import torch
from calls import Batch, lines
from merges import merges
from torch import Tensor

from sparse_attn import InvalidCall, Selected, reference
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select
from sparse_attn.ops.select_merge import SelectMerge
from sparse_attn.ops.store import Store

# (fault, text in the op's reference or in rows.py, what stands there instead)
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
    ("page of another sequence", "a.page_table[b], entries, a.kv", "a.page_table[b - 1], entries, a.kv"),
    ("window read one entry on", "a.win_page_table[b], entries", "a.win_page_table[b], entries + 1"),
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

SELECT_FAULTS = [
    ("visible = p // ratio", "tokens // a.ratio - a.strides", "(tokens - 1) // a.ratio - a.strides"),
    (
        "ratio ignored",
        "tokens // a.ratio - a.strides",
        "min(tokens // a.ratio + 1, int(a.seq_lens[b]) // a.ratio) - a.strides",
    ),
    ("span ignored", "tokens // a.ratio - a.strides + 1", "tokens // a.ratio"),
    ("never causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if False else"),
    ("always causal", "tokens = position + 1 if a.causal else", "tokens = position + 1 if True else"),
    ("kv_range ignored", "if a.kv_range is not None:", "if False:"),
    ("lower bound ignored", "entries = range(max(low, 0)", "entries = range(0"),
    ("tail ignored", 'if a.tail != "none" else covered', "if False else covered"),
    ("tail scored, not kept", "max(a.keep_last, len(tail))", "a.keep_last"),
    ("reserved place used", 'empty = a.tail == "reserved" and not tail', "empty = False"),
    ("place reserved beside a tail", "and not tail", ""),
    ("row_k ignored", "a.k if a.row_k is None else", "a.k if True else"),
    ("budget one short", "best(free, scores, room - len(kept))", "best(free, scores, room - len(kept) - 1)"),
    ("what is kept not counted", "best(free, scores, room - len(kept))", "best(free, scores, room)"),
    ("keep_first ignored", "units[: a.keep_first]", "units[:0]"),
    ("keep_last ignored", "max(a.keep_last, len(tail))", "len(tail)"),
    ("keep_last one short", "max(a.keep_last, len(tail))", "max(a.keep_last - 1, len(tail))"),
    (
        "first ones kept before the newest",
        "always_kept(a, units, tail)[:room]",
        "always_kept(a, units, tail)[::-1][:room]",
    ),
    ("kept units at their score", "scores | dict.fromkeys(kept, INF)", "dict.fromkeys(kept, 0.0) | scores"),
    ("ties reversed", "key=lambda u: (-scores[u], u)", "key=lambda u: (-scores[u], -u)"),
    ("worst instead of best", "key=lambda u: (-scores[u], u)", "key=lambda u: (scores[u], u)"),
    ("NaN selected", "scores.nan_to_num(-INF, INF, -INF)", "scores.nan_to_num(INF, INF, -INF)"),
    ("-inf selected", "if scores.get(u, -INF) > -INF]", "]"),
    ("rows that fit are scored", "if a.scores_all or len(kept) + len(free) > room:", "if True:"),
    ("rows that fit are not scored", "if a.scores_all or len", "if len"),
    ("relu dropped", 'elif a.score == "relu_sum":', "elif False:"),
    ("relu for every score", 'elif a.score == "relu_sum":', "else:"),
    ("weights ignored", "if a.weights is not None:", "if False:"),
    ("sign of the weights lost", "heads.stop, None].double()", "heads.stop, None].double().abs()"),
    ("sign of the scale", "a.scale * total", "-a.scale * total"),
    ("scale dropped", "rounded(a, a.scale * total)", "rounded(a, total)"),
    ("softmax without the scale", "x = a.scale * x", "x = 1.1 * x"),
    ("softmax without the normaliser", "as_numbers(x).logsumexp(-1", "as_numbers(x).amax(-1"),
    ("NaN in the normaliser", "as_numbers(x).logsumexp", "x.logsumexp"),
    ("sum for the maximum of heads", 'x.amax(0) if a.score == "max" else', 'x.sum(0) if a.score == "max" else'),
    ("one list's heads for another", "range(head * size, (head + 1) * size)", "range(0, size)"),
    ("heads dealt to lists", "range(head * size, (head + 1) * size)", "range(head, a.q.shape[1], a.out_heads)"),
    ("heads dealt to key heads", "h * a.keys.shape[2] // a.q.shape[1]", "h % a.keys.shape[2]"),
    ("scores never rounded", 'if a.score_dtype == "bf16" else x', "if False else x"),
    ("products rounded at the end only", "x = rounded(a, torch.stack(products))", "x = torch.stack(products)"),
    ("mean for the maximum of a block", 'scores.max() if a.pool == "max"', 'scores.mean() if a.pool == "max"'),
    ("maximum for the sum of a block", "(scores * torch.tensor(times, device=scores.device)).sum()", "scores.max()"),
    ("each entry once in a block", "scores * torch.tensor(times, device=scores.device)", "scores"),
    ("first key of a block", "rows[g].mean(0)", "rows[g][0]"),
    ("upper bound alone", "torch.maximum(q * lower, q * upper)", "(q * upper)"),
    ("key scale dropped", "read(a.keys, a.key_scale, at, key_head)", "read(a.keys, None, at, key_head)"),
    ("page of another sequence", "a.page_table[b], numbers", "a.page_table[b - 1], numbers"),
    ("candidates ignored", "if a.candidates is None:", "if True:"),
    ("candidates as entries", "e // a.candidate_block in blocks", "e in blocks"),
    ("candidates of the first list", "head if a.candidates.shape[1] > 1 else 0", "0"),
    (
        "own candidates restrict their maker",
        "free = best(free, scores, room - len(kept))",
        "made = best_blocks(a, scores, units[-1]) if a.candidate_k else [u // a.candidate_block for u in units]\n"
        "                free = best([u for u in free if u // a.candidate_block in made], scores, room - len(kept))",
    ),
    (
        "newest block not pinned",
        "[pinned, *best((b for b in maxima if b != pinned), maxima, a.candidate_k - 1)]",
        "best(maxima, maxima, a.candidate_k)",
    ),
    ("pinned block not counted", "maxima, a.candidate_k - 1)", "maxima, a.candidate_k)"),
    (
        "mean for the maximum of a candidate block",
        "maxima[block] = max(maxima.get(block, -INF), score)",
        "maxima[block] = maxima.get(block, 0.0) + score / a.candidate_block",
    ),
    ("candidate blocks by score", "return sorted([pinned", "return ([pinned"),
    ("order of scores ignored", 'if a.order == "score":', "if False:"),
    ("positions from the first row on", "position = length - (end - t)", "position = t - start"),
    ("indices left as they were", "indices.fill_(-1)", "pass"),
    ("counts left as they were", "counts.zero_()", "pass"),
    ("values left as they were", "values.fill_(-INF)", "pass"),
    ("candidate blocks left as they were", "candidate_blocks.fill_(-1)", "pass"),
]

MERGE_FAULTS = [
    ("offset dropped", "a.shard_offsets[..., None, None] + local", "local"),
    ("stride ignored", "local // a.run * a.stride", "local // a.run * a.run"),
    ("run ignored", "local % a.run", "0"),
    ("smallest values", "descending=True", "descending=False"),
    ("ties by shard", "together(numbers, scores, numbers.sort(-1).indices)", "numbers, scores"),
    ("ties reversed", "numbers.sort(-1).indices)", "numbers.sort(-1, descending=True).indices)"),
    ("NaN taken", '(local >= 0) & (a.shard_values > float("-inf"))', "local >= 0"),
    ("-1 taken", "(local >= 0) & ", ""),
    ("row_k ignored", "if a.row_k is None else", "if True else"),
    ("order of scores ignored", 'if a.order != "score":', "if True:"),
    ("always by score", 'if a.order != "score":', "if False:"),
]

REFERENCE = Path(reference.__file__).parent


def mutant(op: str, old: str, new: str) -> Any:
    """The reference of ``op`` with one fault, in its own file or in what all share."""
    names = ("rows", op)
    source = {name: (REFERENCE / f"{name}.py").read_text() for name in names}
    (place,) = [name for name in names if old in source[name]]  # if it is gone: move it along with the source
    source[place] = source[place].replace(old, new)
    for name in names:
        module = types.ModuleType(f"sparse_attn.mutant.{name}")
        module.__package__ = "sparse_attn.mutant"
        sys.modules[module.__name__] = module
        exec(compile(source[name], f"mutant {name}", "exec"), module.__dict__)
    return getattr(module, op)


def each(faults: list[tuple[str, str, str]]) -> Any:
    return pytest.mark.parametrize(("old", "new"), [fault[1:] for fault in faults], ids=[fault[0] for fault in faults])


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


@each(ATTEND_FAULTS)
def test_attend_fault_is_noticed(old: str, new: str) -> None:
    assert notices(mutant("attend", old, new))


@each(STORE_FAULTS)
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
        same = torch.equal(bytes_after(mutant("store", old, new)), expected)
    except IndexError:
        same = False
    assert not same


def integers(*shape: int, generator: torch.Generator) -> Tensor:
    """Small numbers, so that many scores are equal."""
    return torch.randint(-1, 2, shape, generator=generator).float()


@cache
def select_batches() -> list[tuple[selections.Batch, bool, list[list[selections.Row]]]]:
    """Batches that together use every argument, whether values are asked for, and what they should select."""
    kept = []
    for line in selections.lines():
        if line.q_heads > 16:
            line = dataclasses.replace(line, q_heads=8)  # as many heads change nothing for the reference
        kept.append(selections.batch(line, "chunk" if "chunk" in line.phases else line.phases[0]))
    lengths, news = [40, 0, 9], [3, 1, 2]
    more = dict(lengths=lengths, news=news, dim=4)
    small = dict(more, draw=integers, seed=3)
    faulty = dict(more, faulty=[(0, 2), (0, 30), (2, 1)])
    kept += [
        selections.Batch(dict(k=6), 4, 1, True, **small),
        selections.Batch(dict(k=6, order="score", candidate_k=3, candidate_block=4), 4, 1, True, **small),
        selections.Batch(dict(k=9, order="score", keep_first=1, keep_last=2, score="dot"), 2, 1, True, **small),
        selections.Batch(dict(k=9, score="softmax_sum", out_heads=2), 4, 2, False, **faulty),
        selections.Batch(dict(k=39, candidate_k=3, candidate_block=1), 4, 2, True, **faulty),
        selections.Batch(dict(k=9, score="max", out_heads=2, candidates="", candidate_heads=2), 4, 2, True, **more),
    ]
    found = []
    for batch in kept:
        expected = batch.expected_all(scored=True)
        found.append((batch, True, expected))
        found.append((batch, False, batch.expected_all() if batch.faulty else expected))
    return found


def notices_selection(select: Any) -> bool:
    for batch, scored, expected in select_batches():
        args, kwargs = batch.arguments()
        a = Select(*args, **(kwargs | {"return_values": scored}))
        lists = len(batch.q), batch.out_heads
        blocks = torch.full((*lists, a.candidate_k), 7, dtype=torch.int32) if a.candidate_k else None
        indices = torch.full((*lists, a.k), 7, dtype=torch.int32)
        selected = Selected(
            indices, torch.full(lists, 1, dtype=torch.int32), torch.zeros(indices.shape) if scored else None, blocks
        )
        try:
            select(a, *selected)
        except (InvalidCall, IndexError, KeyError, RuntimeError):
            return True
        if selections.mistakes(batch, selected, expected, (0.0, 0.0)):
            return True
    return False


def test_the_reference_of_select_passes() -> None:
    assert not notices_selection(reference.select)


@each(SELECT_FAULTS)
def test_select_fault_is_noticed(old: str, new: str) -> None:
    assert notices_selection(mutant("select", old, new))


@each(MERGE_FAULTS)
def test_select_merge_fault_is_noticed(old: str, new: str) -> None:
    merge = mutant("select_merge", old, new)
    for call in merges():
        args, kwargs = call.arguments()
        a, expected = SelectMerge(*args, **kwargs), call.expected()
        outputs = [torch.full_like(x, 5) for x in expected]
        try:
            merge(a, *outputs)
        except RuntimeError:
            return
        if not all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True)):
            return
    raise AssertionError("no call gave another result")
