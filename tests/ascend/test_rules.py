"""Every rule of the emulator refuses a wrong call, and what the operators are known to do wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulator
import pytest
import torch
from conftest import become
from emulator import KV_QUANT, LI, QLI, SFA, SMLA, SMLA_METADATA, Rule, RuleBroken

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


def smla(selected: bool = True) -> Arguments:
    """Two sequences of 20 and 40 tokens, with 2 and 1 query rows of 4 heads, and rows of ratio 4 of which some are
    selected, or of ratio 128."""
    lengths, ratio = torch.tensor([20, 40], dtype=torch.int32), 4 if selected else 128
    indices = torch.full((3, 1, 512), -1, dtype=torch.int32)
    indices[:, 0, :2] = torch.tensor([[3, 1], [4, 0], [9, 8]])
    a = dict(
        q=torch.randn(3, 4, 512).to(BF16),
        ori_kv=torch.randn(6, 16, 1, 512).to(BF16),
        cmp_kv=torch.randn(6, 16, 1, 512).to(BF16),
        cmp_sparse_indices=indices if selected else None,
        ori_block_table=torch.tensor([[1, 0, 77], [5, 4, 3]], dtype=torch.int32),
        cmp_block_table=torch.tensor([[1, 77], [5, 77]], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32),
        seqused_ori_kv=lengths,
        seqused_cmp_kv=lengths // ratio,
        cmp_residual_kv=lengths % ratio,
        sinks=torch.zeros(4),
        softmax_scale=0.04,
        cmp_ratio=ratio,
        ori_mask_mode=4,
        cmp_mask_mode=3,
        ori_win_left=127,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
    )
    return a | dict(metadata=metadata_of(a))


def metadata_of(a: Arguments, heads: int = 4) -> torch.Tensor:
    same = {name: value for name, value in a.items() if name in emulator.MARKED}
    lengths = dict(batch_size=2, max_seqlen_q=2, max_seqlen_ori_kv=40, max_seqlen_cmp_kv=10)
    return call(SMLA_METADATA, dict(num_heads_q=heads, num_heads_kv=1, head_dim=512) | lengths | same)


def indexer() -> Arguments:
    names = ("block_table", "actual_seq_lengths_query", "layout_query", "sparse_mode")
    a = {name: value for name, value in sfa().items() if name in names}
    return a | dict(
        query=torch.randn(3, 8, 128).to(BF16),
        key=torch.randn(6, 16, 1, 128).to(BF16),
        weights=torch.rand(3, 8).to(BF16),
        actual_seq_lengths_key=torch.tensor([20, 40], dtype=torch.int32),
        layout_key="PA_BSND",
        sparse_count=9,
    )


def quant_indexer() -> Arguments:
    return indexer() | dict(
        query=torch.randint(-127, 128, (3, 8, 128)).to(torch.int8),
        key=torch.randint(-127, 128, (6, 16, 1, 128)).to(torch.int8),
        weights=torch.rand(3, 8).half(),
        query_dequant_scale=torch.rand(3, 8).half(),
        key_dequant_scale=torch.rand(6, 16, 1).half(),
        query_quant_mode=0,
        key_quant_mode=0,
    )


VALID: dict[str, Callable[[], Arguments]] = {SFA: sfa, KV_QUANT: kv_quant, SMLA: smla, LI: indexer, QLI: quant_indexer}


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
OF_SMLA: dict[str, Callable[[Arguments], Arguments]] = {
    "queries are TND": lambda a: dict(layout_q="BSND"),
    "pages": lambda a: dict(layout_kv="TND"),
    "a window": lambda a: dict(ori_kv=None),
    "type": lambda a: dict(cmp_kv=a["cmp_kv"].half()),
    "dimension": lambda a: dict(q=a["q"][..., :448]),
    "one kv head": lambda a: dict(cmp_kv=a["cmp_kv"].expand(-1, -1, 2, -1).contiguous()),
    "query heads": lambda a: dict(q=a["q"][:, :3]),
    "query heads of 950": lambda a: dict(q=a["q"][:, :1]),
    "page size": lambda a: dict(ori_kv=a["ori_kv"].view(12, 8, 1, 512)),
    "page size of 950": lambda a: dict(ori_kv=torch.zeros(1, 1040, 1, 512).to(BF16)),
    "only pages may lie apart": lambda a: dict(ori_kv=apart(a["ori_kv"])),
    "no window indices": lambda a: dict(ori_sparse_indices=a["cmp_sparse_indices"]),
    "no counts": lambda a: dict(cmp_topk_length=torch.ones(3, 1, dtype=I32)),
    "query starts": lambda a: dict(cu_seqlens_q=None),
    "query starts ascend": lambda a: dict(cu_seqlens_q=torch.tensor([0, 3, 2], dtype=I32)),
    "query starts end in T": lambda a: dict(cu_seqlens_q=torch.tensor([0, 2, 4], dtype=I32)),
    "no query lengths": lambda a: dict(seqused_q=a["seqused_ori_kv"]),
    "kv lengths": lambda a: dict(seqused_ori_kv=None),
    "lengths, one each": lambda a: dict(seqused_cmp_kv=a["seqused_cmp_kv"][:1]),
    "lengths from 0 on": lambda a: dict(seqused_ori_kv=torch.tensor([-2, 40], dtype=I32)),
    "block tables": lambda a: dict(cmp_block_table=None),
    "block tables, a row each": lambda a: dict(cmp_block_table=a["cmp_block_table"][:1]),
    "block table width": lambda a: dict(ori_block_table=a["ori_block_table"][:, :2]),
    "a selection needs rows": lambda a: dict(cmp_kv=None),
    "selection": lambda a: dict(cmp_sparse_indices=a["cmp_sparse_indices"].long()),
    "selection width": lambda a: dict(cmp_sparse_indices=a["cmp_sparse_indices"][..., :300]),
    "ratio": lambda a: dict(cmp_ratio=3),
    "ratio of 950": lambda a: dict(cmp_ratio=129),
    "residual": lambda a: dict(cmp_residual_kv=None),
    "mask of the window": lambda a: dict(ori_mask_mode=0),
    "mask of compressed rows": lambda a: dict(cmp_mask_mode=0),
    "window": lambda a: dict(ori_win_left=128),
    "window of 950": lambda a: dict(ori_win_left=-2),
    "sinks": lambda a: dict(sinks=None),
    "sinks, one a head": lambda a: dict(sinks=torch.zeros(3)),
    "top-k mode": lambda a: dict(topk_value_mode=0),
    "metadata": lambda a: dict(metadata=None),
    "metadata of this call": lambda a: dict(metadata=metadata_of(a | dict(cmp_ratio=2))),
}
OF_INDEXER: dict[str, Callable[[Arguments], Arguments]] = {
    "queries are TND": lambda a: dict(layout_query="BSND"),
    "contiguous": lambda a: dict(key=apart(a["key"])),
    "type": lambda a: dict(query=a["query"].half()),
    "weights": lambda a: dict(weights=a["weights"][:, :3].contiguous()),
    "weights' type": lambda a: dict(weights=a["weights"].half()),
    "weights' type on 950": lambda a: dict(weights=a["weights"].float()),
    "pages": lambda a: dict(layout_key="BSND"),
    "one key head": lambda a: dict(key=a["key"].expand(-1, -1, 2, -1).contiguous()),
    "dimension": lambda a: dict(query=a["query"][..., :64].contiguous()),
    "page size": lambda a: dict(key=a["key"].view(12, 8, 1, 128)),
    "query heads": lambda a: dict(query=a["query"].repeat(1, 9, 1), weights=a["weights"].repeat(1, 9)),
    "query heads of 950": lambda a: dict(
        query=a["query"][:, :4].contiguous(), weights=a["weights"][:, :4].contiguous()
    ),
    "query lengths": lambda a: dict(actual_seq_lengths_query=None),
    "query lengths ascend": lambda a: dict(actual_seq_lengths_query=torch.tensor([3, 2], dtype=I32)),
    "query lengths end in T": lambda a: dict(actual_seq_lengths_query=torch.tensor([2, 4], dtype=I32)),
    "key lengths": lambda a: dict(actual_seq_lengths_key=None),
    "key lengths, one each": lambda a: dict(actual_seq_lengths_key=a["actual_seq_lengths_key"][:1]),
    "key lengths from 0 on": lambda a: dict(actual_seq_lengths_key=torch.tensor([-2, 40], dtype=I32)),
    "block table": lambda a: dict(block_table=None),
    "block table, a row each": lambda a: dict(block_table=a["block_table"][:1]),
    "block table width": lambda a: dict(block_table=a["block_table"][:, :2].contiguous()),
    "count": lambda a: dict(sparse_count=2049),
    "sparse mode": lambda a: dict(sparse_mode=1),
    "tokens before and after": lambda a: dict(next_tokens=0),
    "no values with pages": lambda a: dict(return_value=True),
}
OF_QUANT_INDEXER: dict[str, Callable[[Arguments], Arguments]] = {
    "contiguous": lambda a: dict(query=apart(a["query"])),
    "type": lambda a: dict(key=a["key"].view(torch.uint8)),
    "type on 950": lambda a: dict(query=a["query"].view(torch.uint8)),
    "float16 with int8": lambda a: dict(key_dequant_scale=a["key_dequant_scale"].float()),
    "scales of queries": lambda a: dict(query_dequant_scale=a["query_dequant_scale"][:, :3].contiguous()),
    "scales of keys": lambda a: dict(key_dequant_scale=a["key_dequant_scale"].view(6, 16)),
    "quant mode": lambda a: dict(key_quant_mode=2),
    "count": lambda a: dict(sparse_count=3072),
    "weights times scales fit float16": lambda a: dict(
        weights=a["weights"] + 1000, query_dequant_scale=a["query_dequant_scale"] + 100
    ),
}
WRONG: dict[tuple[str, str], Callable[[Arguments], Arguments]] = {
    **{(operator, name): change for operator in (SFA, KV_QUANT) for name, change in BOTH.items()},
    **{(operator, name): change for operator in (LI, QLI) for name, change in OF_INDEXER.items()},
    **{(QLI, name): change for name, change in OF_QUANT_INDEXER.items()},
    **{(SMLA, name): change for name, change in OF_SMLA.items()},
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


@pytest.mark.parametrize("change", [dict(max_seqlen_ori_kv=39), dict(batch_size=3), dict(head_dim=576)])
def test_wrong_metadata_calls(family, change: Arguments) -> None:
    same = {name: value for name, value in smla().items() if name in emulator.MARKED}
    lengths = dict(batch_size=2, max_seqlen_q=2, max_seqlen_ori_kv=40, max_seqlen_cmp_kv=10)
    with pytest.raises(RuleBroken, match=SMLA_METADATA):
        call(SMLA_METADATA, dict(num_heads_q=4, num_heads_kv=1, head_dim=512) | lengths | same | change)


def test_hazards_of_compressed_selection(family) -> None:
    arguments = smla()
    cases = [([-1, 3], "a -1 in front of a valid one"), ([3, 5], "one that the row may not see yet")]
    for row, what in cases:
        changed = arguments["cmp_sparse_indices"].clone()
        changed[0, 0, :2] = torch.tensor(row)
        out = first(call(SMLA, arguments | dict(cmp_sparse_indices=changed)))
        assert out[0].isnan().any() and out[2].isfinite().all(), what
    emulator.machine.readings.smla_counts = "never"
    assert first(call(SMLA, arguments)).isnan().any(), "fewer than are visible, on a version that does not count"
    emulator.machine.readings.smla_counts = "first row of a tile"
    changed = arguments["cmp_sparse_indices"].clone()
    changed[1, 0, 1] = -1
    assert first(call(SMLA, arguments | dict(cmp_sparse_indices=changed)))[1].isnan().any()


@pytest.mark.parametrize("operator", [SFA, KV_QUANT])
def test_rows_past_the_last_sequence_are_not_written(family, operator: str) -> None:
    arguments = VALID[operator]()
    ends = torch.tensor([1, 2], dtype=I32)
    assert first(call(operator, arguments | dict(actual_seq_lengths_query=ends)))[2].isnan().any()


def test_scores_that_are_no_numbers_give_any_list(family) -> None:
    arguments = quant_indexer()
    scales = arguments["key_dequant_scale"].clone()
    scales[1, 3] = float("nan")
    found = call(QLI, arguments | dict(key_dequant_scale=scales))
    assert torch.equal(found[0, 0], torch.arange(9, dtype=I32)) and not torch.equal(found[2, 0], found[0, 0])
