"""`attend` of a window with and without compressed rows (V4, V4.1) on the emulated machine."""

from __future__ import annotations

from typing import Any

import calls
import cases
import emulator
import npu
import operators
import pytest
import torch

from sparse_attn import library

NAN = float("nan")
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
WINDOWED: dict[str, Any] = dict(
    dtype="bfloat16",
    win_format="bf16",
    format="bf16",
    kv_heads=1,
    qk_dim=512,
    v_dim=512,
    page_size=16,
    win_page_size=32,
    window=128,
    lse=False,
    sinks=True,
    q_heads=4,
    lengths=(140, 1, 0, 57),
    rows=(3, 1, 1, 2),
)
FORMS: dict[str, dict[str, Any]] = {
    "window": dict(planes="window"),
    "ratio 4": dict(planes="main+window", ratio=4, index_heads=1, selected=9),
    "ratio 2": dict(planes="main+window", ratio=2, index_heads=1, selected=20),
    "ratio 1": dict(planes="main+window", ratio=1, index_heads=1, selected=500),
    "ratio 128": dict(planes="main+window", ratio=128, lengths=(400, 1, 0, 130)),
}


@pytest.fixture(params=FORMS)
def form(request) -> dict[str, Any]:
    return WINDOWED | FORMS[request.param]


def call(form: dict[str, Any], **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cases.attend(**(form | changes))


@pytest.mark.parametrize("heads", [1, 5, 64, 128])
def test_any_number_of_heads(family, form, heads: int) -> None:
    before = operators.calls[emulator.SMLA]
    npu.assert_agrees(*call(form, q_heads=heads))
    assert operators.calls[emulator.SMLA] > before


@pytest.mark.parametrize("counts", ["each row", "first row of a tile"])
def test_selections_of_any_length(family, counts: str) -> None:
    """Rows of one sequence that select differently many, under both readings of how many columns count."""
    emulator.machine.readings.smla_counts = counts
    library.forget()
    leading, kwargs = call(WINDOWED | FORMS["ratio 2"], lengths=(80,), rows=(9,), q_heads=2)
    for limit in (kwargs["indices"].shape[2], 1, 600, 1024):
        indices = torch.full((len(leading[0]), 1, limit), -1, dtype=torch.int32)
        for t in range(len(leading[0])):
            some = torch.randperm(40)[: torch.randint(0, 41, ())].to(torch.int32)
            indices[t, 0, : len(some)] = some[:limit]
        npu.assert_agrees(leading, dict(kwargs, indices=indices))


def test_hostile_indices(family) -> None:
    leading, kwargs = call(WINDOWED | FORMS["ratio 4"])
    hostile = torch.tensor([-1, -7, INT_MIN, INT_MAX, 10**6, -2, 1 << 30], dtype=torch.int32)
    indices = torch.cat([kwargs["indices"], hostile.expand(len(leading[0]), 1, 7)], -1)
    mixed = indices[..., torch.randperm(indices.shape[2])]
    npu.assert_agrees(leading, dict(kwargs, indices=mixed))
    for count in (0, -5, 3, INT_MAX):
        counts = torch.full((len(leading[0]), 1), count, dtype=torch.int32)
        npu.assert_agrees(leading, dict(kwargs, indices=mixed, index_counts=counts))
    npu.assert_agrees(leading, dict(kwargs, indices=mixed[..., :0]))


@pytest.mark.parametrize("sink", [float("inf"), float("-inf"), 1e30, -1e30, None])
def test_extreme_sinks(family, form, sink: float | None) -> None:
    leading, kwargs = call(form)
    sinks = None if sink is None else torch.tensor([sink, 0.3, sink, -0.5])
    npu.assert_agrees(leading, dict(kwargs, sinks=sinks))


def test_empty_rows_and_padding(family, form) -> None:
    leading, kwargs = call(form, lengths=(2, 0, -3, 25), rows=(4, 2, 1, 2))
    q = leading[0].clone()
    q[9:] = NAN
    npu.assert_agrees((q, *leading[1:]), kwargs)
    out = npu.attend((q, *leading[1:]), kwargs)
    assert (out[[0, 1, 4, 5, 6, 9, 10]] == 0).all() and out[[2, 3, 7, 8]].abs().amax(-1).gt(0).all()


def test_nothing_to_do(family, form) -> None:
    leading, kwargs = call(form, lengths=(4,), rows=(3,), padding=0)
    none = torch.empty(0, dtype=torch.int32)
    empty = {name: kwargs[name][:0] for name in ("page_table", "win_page_table") if name in kwargs}
    batchless = (leading[0], torch.zeros(1, dtype=torch.int32), none, *leading[3:])
    assert (npu.attend(batchless, kwargs | empty) == 0).all()
    if "indices" in kwargs:
        kwargs["indices"] = kwargs["indices"][:0]
    assert npu.attend((leading[0][:0], torch.zeros(2, dtype=torch.int32), *leading[2:]), kwargs).shape == (0, 4, 512)


def test_unread_slots_and_table_columns(family, form) -> None:
    leading, kwargs = call(form, padding=0)
    clean = npu.attend(leading, kwargs)
    changed = dict(kwargs)
    for plane, name, ratio in (("win", "win_page_table", 1), ("kv", "page_table", form.get("ratio", 1))):
        if kwargs.get(plane) is None:
            continue
        table, size = kwargs[name].clone(), kwargs[plane].shape[1]
        for b, length in enumerate(leading[2].tolist()):
            table[b, -(-(length // ratio) // size) :] = calls.NOWHERE
        unowned = torch.tensor([p for p in range(len(kwargs[plane])) if p not in table.flatten().tolist()])
        rows = kwargs[plane].clone()
        rows[unowned] = NAN
        changed |= {plane: rows, name: table}
    assert torch.equal(npu.attend(leading, changed), clean)


def test_pages_of_a_larger_pool(family, form) -> None:
    leading, kwargs = call(form)
    for name in ("win", "kv"):
        if kwargs.get(name) is not None:
            rows = kwargs[name]
            kwargs[name] = torch.cat([rows, rows], 1)[:, : rows.shape[1]]
    npu.assert_agrees(leading, kwargs)


LINES = [
    pytest.param(line, phase, id=f"{line.layer}-{phase}")
    for line in calls.lines()
    for phase in line.phases
    if "window_kv" in line.arguments
]


@pytest.mark.parametrize(("line", "phase"), LINES)
def test_lines_of_calls(family, line: calls.Line, phase: str) -> None:
    """Each line with a window runs and agrees, or is refused for a fact that it has."""
    batch = calls.Batch(line, phase, page=16, win_page=32)
    leading, kwargs = batch.arguments(torch.bfloat16)
    kwargs["return_lse"] = False
    everywhere = "ratio" not in kwargs or kwargs["ratio"] == 128 or "indices" in kwargs
    odd = {"win_range", "kv_range", "win_indices"} & set(kwargs) or not kwargs.get("causal", True)
    if odd or (not everywhere and family != "950") or kwargs["window"] != 128:
        assert "ascend_npu" in npu.refusal(leading, kwargs)
    else:
        npu.assert_agrees(leading, kwargs)


def test_what_is_refused(family, form) -> None:
    leading, kwargs = call(form)
    ranges = torch.zeros(len(leading[0]), 2, dtype=torch.int32)
    rows = torch.stack([kwargs["win"]] * 2, -2)[..., 0, :]
    for changes, sentence in (
        (dict(return_lse=True), "lse is True, supported: False"),
        (dict(win_range=ranges), "win_range is True, supported: False"),
        (dict(batch_invariant=True), "batch_invariant is True, supported: False"),
        (dict(win=rows), "win_strides is rows, supported: one of contiguous, pages"),
    ):
        assert sentence in npu.refusal(leading, kwargs | changes), changes
    if family == "950":
        npu.assert_agrees(leading, kwargs | dict(window=5))
    else:
        assert "window is 5, supported: 128" in npu.refusal(leading, kwargs | dict(window=5))


def test_operators_from_before_v41(family) -> None:
    emulator.machine.readings.smla_knows_v41 = False
    library.forget()
    npu.assert_agrees(*call(WINDOWED | FORMS["window"]))
    npu.assert_agrees(*call(WINDOWED | FORMS["ratio 4"]))
    if family != "950":
        assert "probing it failed: RuleBroken" in npu.refusal(*call(WINDOWED | FORMS["ratio 2"]))


def test_operators_that_do_not_count_are_refused(family) -> None:
    """Such a version attends to columns that it never wrote, wherever a row selects fewer than it might."""
    emulator.machine.readings.smla_counts = "never"
    library.forget()
    assert "its self check failed" in npu.refusal(*call(WINDOWED | FORMS["ratio 4"]))
    npu.assert_agrees(*call(WINDOWED | FORMS["window"]))
    npu.assert_agrees(*call(WINDOWED | FORMS["ratio 128"]))
