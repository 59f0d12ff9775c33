"""Every line of `docs/calls.md`, in every phase it names, against a softmax computed entry by entry."""

from __future__ import annotations

import pytest
import torch
from calls import PHASES, Batch, Line, lines

import sparse_attn

CASES = [pytest.param(line, phase, id=f"{line.layer}-{phase}") for line in lines() for phase in line.phases]


def test_the_page_lists_every_layer_kind() -> None:
    text = " ".join(line.layer for line in lines())
    for kind in (
        "V3.2",
        "GLM-5",
        "V4 ratio 0",
        "V4 ratio 4",
        "V4 ratio 128",
        "V4.1 Full",
        "Reindex",
        "Reuse",
        "V4.1 window",
        "MiniMax-M3",
        "NSA compressed",
        "NSA selected",
        "NSA window",
        "MoBA",
        "Quest",
        "index plane",
        "draft tree",
        "non-causal drafts",
        "bounded replay",
        "prefix cascade",
        "context-parallel",
    ):
        assert kind in text
    assert {phase for line in lines() for phase in line.phases} == set(PHASES)


@pytest.mark.parametrize(("line", "phase"), CASES)
def test_line(line: Line, phase: str, attend_impl) -> None:
    batch = Batch(line, phase, page=4)
    args, kwargs = batch.arguments()
    out, lse = sparse_attn.attend(*args, **kwargs, backend=attend_impl.backend)
    expected_out, expected_lse = batch.expected()
    atol, rtol = attend_impl.tolerance["float32"]
    torch.testing.assert_close(out.double(), expected_out, atol=atol, rtol=rtol)
    torch.testing.assert_close(lse.double(), expected_lse, atol=atol, rtol=rtol)


def test_cascade_joined_by_lse_is_one_softmax(attend_impl) -> None:
    parts = [line for line in lines() if line.layer.startswith("prefix cascade")]
    whole = next(line for line in lines() if line.layer.startswith("sliding window"))
    batches = [Batch(line, "chunk", page=4) for line in parts]
    results = []
    for batch in batches:
        args, kwargs = batch.arguments()
        results.append(sparse_attn.attend(*args, **kwargs, backend=attend_impl.backend))
    args, kwargs = batches[0].arguments()
    del kwargs["kv_range"]
    out, lse = sparse_attn.attend(*args, **kwargs, backend=attend_impl.backend)
    assert len(parts) == 2 and whole.q_heads == parts[0].q_heads
    joined = torch.logaddexp(results[0][1], results[1][1])
    weights = [torch.exp(part_lse - joined).nan_to_num() for _, part_lse in results]
    torch.testing.assert_close(
        sum(w[..., None] * o for w, (o, _) in zip(weights, results, strict=True)), out, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(joined, lse, atol=1e-5, rtol=1e-5)
