"""The suite is tested itself: each fault below is put into a copy of `select`, and the calls of `docs/selections.md`
must notice."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import selections
import torch
from mutants import each, mutant
from test_mutations import ROWS_FAULTS
from torch import Tensor

from sparse_attn import InvalidCall, Selected, reference
from sparse_attn.ops.select import Select

# (fault, text in the file, what stands there instead)
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
    ("heads dealt to key heads", "h * plane.heads // a.q.shape[1]", "h % plane.heads"),
    ("scores never rounded", 'if a.score_dtype == "bf16" else x', "if False else x"),
    ("products rounded at the end only", "x = rounded(a, torch.stack(products))", "x = torch.stack(products)"),
    ("mean for the maximum of a block", 'scores.max() if a.pool == "max"', 'scores.mean() if a.pool == "max"'),
    ("maximum for the sum of a block", "(scores * torch.tensor(times, device=scores.device)).sum()", "scores.max()"),
    ("each entry once in a block", "scores * torch.tensor(times, device=scores.device)", "scores"),
    ("first key of a block", "rows[g].mean(0)", "rows[g][0]"),
    ("upper bound alone", "torch.maximum(q * lower, q * upper)", "(q * upper)"),
    ("first key head for all", "read(plane, at, key_head)", "read(plane, at, 0)"),
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
    ("indices left as they were", "indices.fill_(-1)", "pass"),
    ("counts left as they were", "counts.zero_()", "pass"),
    ("values left as they were", "values.fill_(-INF)", "pass"),
    ("candidate blocks left as they were", "candidate_blocks.fill_(-1)", "pass"),
]


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


@each(select=SELECT_FAULTS, rows=ROWS_FAULTS)
def test_select_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert notices_selection(mutant(file, old, new).select)
