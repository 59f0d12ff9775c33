"""The suite is tested itself: each fault below is put into a copy of `merge` or `select_merge`, and joined parts must
differ from the whole."""

from __future__ import annotations

from typing import Any

import torch
from merges import merges
from mutants import each, mutant
from test_merge import parts_of, whole

from sparse_attn import reference
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select_merge import SelectMerge

# (fault, text in the file, what stands there instead)
MERGE_FAULTS = [
    ("base 2 taken as e", '(math.log(2) if a.base == "2" else 1.0)', "1.0"),
    ("base e taken as 2", '(math.log(2) if a.base == "2" else 1.0)', "math.log(2)"),
    ("lse in base 2", "lse.copy_(total)", 'lse.copy_(total / (math.log(2) if a.base == "2" else 1.0))'),
    (
        "sink in the lse",
        "lse.copy_(total)",
        "lse.copy_(total if a.sinks is None else torch.logaddexp(total, a.sinks.double()))",
    ),
    ("sink dropped", "total = torch.logaddexp(total, a.sinks.double())", "pass"),
    (
        "sink once for each part",
        "torch.logaddexp(total, a.sinks.double())",
        "torch.logaddexp(total, a.sinks.double() + math.log(len(lses)))",
    ),
    ("last part dropped", "for part in lses:", "for part in lses[:-1]:"),
    ("parts weighted alike", "torch.exp(part - total)", "(torch.ones_like(part) / len(lses))"),
    ("what empty parts hold leaks", "weighted.where((part != NEG_INF)[..., None], 0.0)", "weighted"),
    ("+inf is always empty", "if a.inf_is_empty:", "if True:"),
    ("+inf is never empty", "if a.inf_is_empty:", "if False:"),
    ("heads of another row", "a.outs, strict=True", "a.outs.flip(1), strict=True"),
]

SELECT_MERGE_FAULTS = [
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


def merge_faults(merge: Any) -> bool:
    torch.manual_seed(0)
    scores, values = torch.randn(5, 3, 40) * 4, torch.randn(40, 8)
    sinks = torch.tensor([0.5, -2.0, 7.0])
    outs, lses = (x.float() for x in parts_of(scores, values, [7, 30]))
    outs[1, 2], lses[1, 2] = torch.nan, -torch.inf  # an empty part in row 2
    for mark in (-torch.inf, torch.inf):
        lses[1, 2] = mark
        for base, sink, scale in (("e", None, 1.0), ("2", sinks, 0.6931471805599453)):
            out, lse = torch.empty(5, 3, 8), torch.empty(5, 3)
            merge(Merge(outs, lses / scale, sink, base, mark > 0), out, lse)
            rows = [0, 1, 3, 4]
            expected, expected_lse = whole(scores[rows], values, sink)
            kept = torch.cat([scores[2:3, :, :7], scores[2:3, :, 30:]], -1), torch.cat([values[:7], values[30:]])
            for got, wanted in (
                (out[rows], expected),
                (lse[rows], expected_lse),
                *zip((out[2:3], lse[2:3]), whole(*kept, sink), strict=True),
            ):
                if not torch.allclose(got.double(), wanted, atol=1e-5, rtol=1e-5):
                    return True
    out, lse = torch.empty(5, 3, 8), torch.empty(5, 3)
    merge(Merge(outs, lses), out, lse)  # +inf that nobody said is empty
    return not bool(out[2].isnan().all())


def test_merge_itself_passes() -> None:
    assert not merge_faults(reference.merge)


@each(merge=MERGE_FAULTS)
def test_merge_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert merge_faults(mutant(file, old, new).merge)


def select_merge_faults(merge: Any) -> bool:
    for call in merges():
        args, kwargs = call.arguments()
        a, expected = SelectMerge(*args, **kwargs), call.expected()
        outputs = [torch.full_like(x, 5) for x in expected]
        try:
            merge(a, *outputs)
        except RuntimeError:
            return True
        if not all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True)):
            return True
    return False


def test_select_merge_itself_passes() -> None:
    assert not select_merge_faults(reference.select_merge)


@each(select_merge=SELECT_MERGE_FAULTS)
def test_select_merge_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert select_merge_faults(mutant(file, old, new).select_merge)
