"""`select` of the lightning indexer on the emulated machine."""

from __future__ import annotations

from typing import Any

import calls
import emulator
import npu
import operators
import pytest
import torch
from torch import Tensor

import sparse_attn
from sparse_attn import library

NAN = float("nan")


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of one selection: four sequences, padding rows, keys with holes of NaN."""
    o = dict(lengths=(40, 1, 0, 57), rows=(3, 1, 1, 2), heads=8, k=9, padding=2, dtype=torch.bfloat16) | changes
    tokens, pages = sum(o["rows"]) + o["padding"], [-(-max(n, 0) // 16) for n in o["lengths"]]
    keys = torch.full((sum(pages) + 3, 16, 1, 128), NAN)
    table = torch.full((len(pages), max(pages) + 1), calls.NOWHERE, dtype=torch.int32)
    pool = torch.randperm(len(keys)).tolist()
    for b, length in enumerate(o["lengths"]):
        for i in range(pages[b]):
            table[b, i] = pool.pop()
            keys[table[b, i], : min(16, length - 16 * i)] = torch.randn(min(16, length - 16 * i), 1, 128)
    q = torch.randn(tokens, o["heads"], 128)
    q[sum(o["rows"]) :] = NAN
    starts = torch.tensor([sum(o["rows"][:b]) for b in range(len(pages) + 1)], dtype=torch.int32)
    return dict(
        q=q.to(o["dtype"]),
        weights=torch.rand(tokens, o["heads"]).to(o["dtype"]),
        cu_seqlens_q=starts,
        seq_lens=torch.tensor(o["lengths"], dtype=torch.int32),
        keys=keys.to(o["dtype"]),
        page_table=table,
        k=o["k"],
        scale=0.5,
        max_seqlen_q=max(o["rows"]),
        max_seq_len=max(o["lengths"]),
        ties="any",
    )


def select(a: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    moved = {name: npu.on_npu(value) for name, value in (a | changes).items()}
    found = sparse_attn.select(**moved, backend="ascend_npu")
    return found.indices.cpu(), found.counts.cpu()


def assert_agrees(a: dict[str, Any]) -> None:
    indices, counts = select(a)
    expected = sparse_attn.select(**a, backend="reference")
    assert torch.equal(counts, expected.counts)
    assert torch.equal(indices.sort(-1).values, expected.indices.sort(-1).values)
    valid = torch.arange(a["k"]) < counts[..., None]
    assert (indices[~valid] == -1).all() and (indices[valid] >= 0).all()


@pytest.mark.parametrize("heads", [1, 8, 9, 64])
@pytest.mark.parametrize("k", [1, 9, 64, 2048])
def test_selection(family, heads: int, k: int) -> None:
    before = operators.calls[emulator.LI]
    assert_agrees(call(heads=heads, k=k))
    assert operators.calls[emulator.LI] > before


def test_weights_of_other_types(family) -> None:
    a = call()
    single = a | dict(weights=a["weights"].float())
    if family == "950":
        with pytest.raises(sparse_attn.NoBackend, match="weights is float32, supported: bfloat16"):
            select(single)
    else:
        assert_agrees(single)
    with pytest.raises(sparse_attn.NoBackend, match="weights is float16, supported: "):
        select(a | dict(weights=a["weights"].half()))


def test_not_causal(family) -> None:
    assert_agrees(call() | dict(causal=False))


def test_empty_rows(family) -> None:
    assert_agrees(call(lengths=(2, 0, -3, 25), rows=(4, 2, 1, 2)))
    assert_agrees(call(k=0))


def test_equal_scores_under_both_readings(family) -> None:
    a = call(k=5)
    a["keys"] = torch.where(a["keys"].isnan(), NAN, 1.0).to(torch.bfloat16)
    a["q"] = a["q"].abs()
    for last in (False, True):
        emulator.machine.readings.last_of_equals = last
        library.forget()
        indices, counts = select(a)
        assert torch.equal(counts, sparse_attn.select(**a, backend="reference").counts)
        listed = indices[0, 0].tolist()
        assert len(set(listed)) == 5 and all(0 <= e < 38 for e in listed) and (0 in listed) != last


def test_what_is_refused(family) -> None:
    a = call()
    for changes, sentence in (
        (dict(ties="lowest"), "ties is lowest, supported: any"),
        (dict(order="score"), "order is score, supported: any"),
        (dict(score_dtype="bf16"), "score_dtype is bf16, supported: fp32"),
        (dict(return_values=True), "values is True, supported: False"),
        (dict(keep_last=1), "kept is 1, supported: 0"),
        (dict(ratio=4), "ratio is 4, supported: 1"),
        (dict(k=2049), "k is 2049, supported: 0 to 2048"),
        (dict(row_k=torch.ones(9, dtype=torch.int32)), "row_k is True, supported: False"),
        (dict(weights=None), "weights is , supported: "),
    ):
        with pytest.raises(sparse_attn.NoBackend, match=sentence):
            select(a, **changes)


def quantised(**changes: Any) -> dict[str, Any]:
    """The same call with int8 queries and keys, no two entries of which have nearly one score."""
    a = call(**changes)
    largest = a["q"].abs().amax(-1).float().nan_to_num(1.0)
    keys = a["keys"].float()
    key_scale = (keys.abs().amax(-1).nan_to_num(1.0) / 127).half()
    stored = (keys / key_scale[..., None]).round().clamp(-127, 127).nan_to_num(77).to(torch.int8)
    key_scale = torch.where(keys.isnan().any(-1), NAN, key_scale)  # holes
    q_scale = largest / 127
    q = (a["q"].float() / q_scale[..., None]).round().nan_to_num(3).to(torch.int8)
    return a | dict(q=q, q_scale=q_scale.half(), keys=stored, key_scale=key_scale, format="int8_index_h")


def scores(a: dict[str, Any]) -> list[dict[int, float]]:
    """Of each row, of every entry that it sees."""
    most = max(a["max_seq_len"], 1)
    found = sparse_attn.select(**a | dict(k=most, order="score"), return_values=True, backend="reference")
    rows = zip(found.indices[:, 0].tolist(), found.values[:, 0].tolist(), strict=True)
    return [{e: v for e, v in zip(*row, strict=True) if e >= 0} for row in rows]


@pytest.mark.parametrize("reading", ["fp32", "fp16"])
@pytest.mark.parametrize("changes", [{}, {"heads": 64}, {"heads": 9, "k": 64}, {"k": 1}, {"heads": 1, "k": 2048}])
def test_int8_queries_and_keys(family, reading: str, changes: dict[str, Any]) -> None:
    """Whatever the operator rounds, what is left out scores no more than what is selected, but for the tolerance."""
    emulator.machine.readings.quant_weights = reading
    a = quantised(**changes)
    a["weights"] = torch.randn(a["weights"].shape) * 1e8  # the products with scales would not fit float16
    before = operators.calls[emulator.QLI]
    for causal in (True, False):
        indices, counts = select(a, causal=causal)
        assert torch.equal(counts, sparse_attn.select(**a | dict(causal=causal), backend="reference").counts)
        for row, count, score in zip(
            indices[:, 0], counts[:, 0].tolist(), scores(a | dict(causal=causal)), strict=True
        ):
            listed = row[:count].tolist()
            assert len(set(listed)) == count and set(listed) <= set(score) and (row[count:] == -1).all()
            left = [value for e, value in score.items() if e not in listed]
            if listed and left:
                worst, best = min(score[e] for e in listed), max(left)
                largest = max(map(abs, score.values()))
                assert worst >= best - 1e-3 * largest
    assert operators.calls[emulator.QLI] > before


def test_int8_queries_of_calls_that_no_operator_takes(whole_family) -> None:
    """By torch's own operations, with their float32 products."""
    a = quantised() | dict(ties="lowest", k=5, return_values=True)
    before = operators.calls[emulator.QLI]
    got = sparse_attn.select(**{n: npu.on_npu(v) for n, v in a.items()}, backend="ascend_npu")
    want = sparse_attn.select(**a, backend="reference")
    torch.testing.assert_close(got.values.cpu(), want.values, atol=4e-6, rtol=4e-6)
    assert torch.equal(got.counts.cpu(), want.counts)
    assert operators.calls[emulator.QLI] == before


def test_int8_queries_that_are_refused(family) -> None:
    a = quantised()
    apart = torch.cat([a["key_scale"], a["key_scale"]], 1)[:, :16]
    for changes, sentence in (
        (dict(ties="lowest"), "ties is lowest, supported: any"),
        (dict(key_scale=apart), "key_strides is pages, supported: contiguous"),
        (dict(k=2049), "k is 2049, supported: 0 to 2048"),
        (dict(keys=call()["keys"], key_scale=None, format="bf16"), "format is bf16, supported: int8_index_h"),
    ):
        with pytest.raises(sparse_attn.NoBackend, match=sentence):
            select(a, **changes)
