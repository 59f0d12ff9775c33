"""Every rule of the emulator refuses a wrong call, and what the operators are known to do wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulator
import pytest
import torch
from conftest import become
from emulator import KV_QUANT, SFA, Rule, RuleBroken

Arguments = dict[str, Any]
BF16 = torch.bfloat16


def sfa() -> Arguments:
    """Two sequences of 20 and 40 tokens, with 2 and 1 query rows of 4 heads."""
    key = torch.randn(6, 16, 1, 512).to(BF16)
    return dict(
        query=torch.randn(3, 4, 512).to(BF16),
        key=key,
        value=key,
        sparse_indices=torch.tensor([[[3, 5, -1]], [[19, 0, 4]], [[39, 38, -1]]], dtype=torch.int32),
        scale_value=0.04,
        block_table=torch.tensor([[1, 0, 77], [5, 4, 3]], dtype=torch.int32),
        actual_seq_lengths_query=torch.tensor([2, 3], dtype=torch.int32),
        actual_seq_lengths_kv=torch.tensor([20, 40], dtype=torch.int32),
        query_rope=torch.randn(3, 4, 64).to(BF16),
        key_rope=torch.randn(6, 16, 1, 64).to(BF16),
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
    )


def kv_quant() -> Arguments:
    a = sfa()
    parts = (torch.ones(6, 16, 1, 512).to(torch.int8), a.pop("key_rope"), torch.ones(6, 16, 1, 4))
    a["key"] = a["value"] = torch.cat([part.view(torch.int8) for part in parts], -1)
    a["query"] = torch.cat([a["query"], a.pop("query_rope")], -1)
    return a | dict(key_quant_mode=2, value_quant_mode=2)


VALID: dict[str, Callable[[], Arguments]] = {SFA: sfa, KV_QUANT: kv_quant}


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that do not lie back to back."""
    return torch.cat([t, t], -1)[..., : t.shape[-1]]


def pages_apart(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def rows(a: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    """Another plane, as keys and as values."""
    key = change(a["key"])
    return dict(key=key, value=key)


def block(n: int) -> Callable[[Arguments], Arguments]:
    return lambda a: dict(sparse_block_size=n)


I32 = torch.int32
BOTH: dict[str, Callable[[Arguments], Arguments]] = {
    "queries are TND": lambda a: dict(layout_query="BSND"),
    "queries are contiguous": lambda a: dict(query=apart(a["query"])),
    "query type": lambda a: dict(query=a["query"].float()),
    "pages": lambda a: dict(layout_kv="BSND"),
    "one kv head": lambda a: rows(a, lambda t: t.expand(-1, -1, 2, -1).contiguous()),
    "page size": lambda a: rows(a, lambda t: t.view(12, 8, 1, -1)),
    "indices shape": lambda a: dict(sparse_indices=a["sparse_indices"][..., :0]),
    "indices type": lambda a: dict(sparse_indices=a["sparse_indices"].long()),
    "indices are contiguous": lambda a: dict(sparse_indices=apart(a["sparse_indices"])),
    "query lengths": lambda a: dict(actual_seq_lengths_query=None),
    "query lengths ascend": lambda a: dict(actual_seq_lengths_query=torch.tensor([3, 2], dtype=I32)),
    "query lengths end in T": lambda a: dict(actual_seq_lengths_query=torch.tensor([2, 4], dtype=I32)),
    "kv lengths": lambda a: dict(actual_seq_lengths_kv=a["actual_seq_lengths_kv"].long()),
    "kv lengths, one each": lambda a: dict(actual_seq_lengths_kv=a["actual_seq_lengths_kv"][:1]),
    "kv lengths from 0 on": lambda a: dict(actual_seq_lengths_kv=torch.tensor([-2, 40], dtype=I32)),
    "block table": lambda a: dict(block_table=None),
    "block table, a row each": lambda a: dict(block_table=a["block_table"][:1]),
    "block table width": lambda a: dict(block_table=a["block_table"][:, :2]),
    "sparse mode": lambda a: dict(sparse_mode=4),
    "attention mode": lambda a: dict(attention_mode=0),
    "tokens before and after": lambda a: dict(pre_tokens=5),
}
WRONG: dict[tuple[str, str], Callable[[Arguments], Arguments]] = {
    **{(operator, name): change for operator in (SFA, KV_QUANT) for name, change in BOTH.items()},
    (SFA, "query heads"): lambda a: dict(query=a["query"][:, :3].contiguous(), query_rope=a["query_rope"][:, :3]),
    (SFA, "512 and 64"): lambda a: dict(query_rope=a["query_rope"][..., :32]),
    (SFA, "one type"): lambda a: dict(query=a["query"].half()),
    (SFA, "rows are contiguous"): lambda a: rows(a, pages_apart),
    (SFA, "ropes are contiguous"): lambda a: dict(key_rope=apart(a["key_rope"])),
    (SFA, "values are the rows"): lambda a: dict(value=a["key"].clone()),
    (SFA, "block"): block(3),
    (SFA, "block divides a page"): block(32),
    (SFA, "block of 1"): block(2),
    (SFA, "no LSE with pages"): lambda a: dict(return_softmax_lse=True),
    (SFA, "no sinks"): lambda a: dict(sinks=torch.zeros(4)),
    (KV_QUANT, "query heads"): lambda a: dict(query=a["query"][:, :3].contiguous()),
    (KV_QUANT, "query heads of 950"): lambda a: dict(query=a["query"][:, :3].contiguous()),
    (KV_QUANT, "576 and 656"): lambda a: dict(query=a["query"][..., :512].contiguous()),
    (KV_QUANT, "int8 rows"): lambda a: rows(a, lambda t: t.view(torch.uint8)),
    (KV_QUANT, "rows are contiguous"): lambda a: rows(a, pages_apart),
    (KV_QUANT, "only pages may lie apart"): lambda a: rows(a, apart),
    (KV_QUANT, "quant mode"): lambda a: dict(key_quant_mode=0),
    (KV_QUANT, "scales in the row"): lambda a: dict(quant_scale_repo_mode=0),
    (KV_QUANT, "no scales apart"): lambda a: dict(key_dequant_scale=torch.ones(4)),
    (KV_QUANT, "tile"): lambda a: dict(tile_size=64),
    (KV_QUANT, "rope"): lambda a: dict(rope_head_dim=32),
    (KV_QUANT, "block"): block(3),
    (KV_QUANT, "block of 1"): block(2),
}
"""For each rule a change that makes a valid call break it."""


def call(operator: str, arguments: Arguments) -> Any:
    namespace, _ = emulator.SCHEMAS[operator]
    return getattr(getattr(torch.ops, namespace), operator)(**arguments)


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("operator", VALID)
def test_a_valid_call_runs(family, operator: str) -> None:
    assert first(call(operator, VALID[operator]())).isfinite().all()


RULES = [
    pytest.param(rule, on, id=f"{rule.operator}-{rule.name}-{on}") for rule in emulator.RULES for on in rule.families
]


@pytest.mark.parametrize(("rule", "on"), RULES)
def test_each_rule_refuses_a_wrong_call(rule: Rule, on: str) -> None:
    become(on)
    arguments = VALID[rule.operator]()
    with pytest.raises(RuleBroken, match=f"{rule.operator} on {on}: {rule.name} "):
        call(rule.operator, arguments | WRONG[rule.operator, rule.name](arguments))


@pytest.mark.parametrize("operator", [SFA, KV_QUANT])
def test_hazards_of_selection(family, operator: str) -> None:
    arguments = VALID[operator]()
    for row, what in (([-1, 3, 5], "a -1 in front of valid ones"), ([-1, -1, -1], "nothing valid")):
        changed = arguments["sparse_indices"].clone()
        changed[0, 0] = torch.tensor(row)
        out = first(call(operator, arguments | dict(sparse_indices=changed)))
        assert out[0].isnan().any() and out[1:].isfinite().all(), what
    past = arguments["sparse_indices"].clone()
    past[0, 0, 0] = 10**6
    with pytest.raises(RuleBroken, match="index past the 20 tokens"):
        call(operator, arguments | dict(sparse_indices=past))
    stale = arguments["block_table"].clone()
    stale[1, 2] = 6
    with pytest.raises(RuleBroken, match="page 6 of 6"):
        call(operator, arguments | dict(block_table=stale))


@pytest.mark.parametrize("operator", [SFA, KV_QUANT])
def test_rows_past_the_last_sequence_are_not_written(family, operator: str) -> None:
    arguments = VALID[operator]()
    ends = torch.tensor([1, 2], dtype=I32)
    assert first(call(operator, arguments | dict(actual_seq_lengths_query=ends)))[2].isnan().any()
