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
