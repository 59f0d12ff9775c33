"""`attend` over latent rows (V3.2, GLM-5) on the emulated machine."""

from __future__ import annotations

from typing import Any

import calls
import cases
import emulator
import npu
import operators
import pytest
import torch

from sparse_attn import registry

NAN = float("nan")
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
FORMS: dict[str, dict[str, Any]] = {
    "bf16": dict(format="bf16", rope_dim=64),
    "int8": dict(format="int8_v32", rope_dim=0),
}
LATENT: dict[str, Any] = dict(
    dtype="bfloat16", kv_heads=1, qk_dim=576, v_dim=512, page_size=16, index_heads=1, lse=False, q_heads=4
)


@pytest.fixture(params=FORMS)
def form(request) -> dict[str, Any]:
    return LATENT | FORMS[request.param]


def call(form: dict[str, Any], **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cases.attend(**(form | dict(lengths=(40, 1, 0, 57), rows=(3, 1, 1, 2), selected=24) | changes))


@pytest.mark.parametrize("heads", [1, 3, 16, 40, 128])
def test_any_number_of_heads(family, form, heads: int) -> None:
    npu.assert_agrees(*call(form, q_heads=heads))


@pytest.mark.parametrize("selected", [1, 7, 64, 2048])
def test_widths_of_selection(family, form, selected: int) -> None:
    npu.assert_agrees(*call(form, selected=selected))


def test_it_ran_the_operator(family, form) -> None:
    before = operators.calls.copy()
    npu.attend(*call(form))
    name = emulator.KV_QUANT if form["format"] == "int8_v32" else emulator.SFA
    assert operators.calls[name] > before[name]


def test_not_causal(family, form) -> None:
    npu.assert_agrees(*call(form, causal=False))


def test_hostile_indices(family, form) -> None:
    leading, kwargs = call(form)
    hostile = torch.tensor([-1, -7, INT_MIN, INT_MAX, 10**6, -2, 1 << 30], dtype=torch.int32)
    indices = torch.cat([kwargs["indices"], hostile.expand(len(leading[0]), 1, 7)], -1)
    mixed = indices[..., torch.randperm(indices.shape[2])]
    npu.assert_agrees(leading, dict(kwargs, indices=mixed))
    npu.assert_agrees(leading, dict(kwargs, indices=mixed.transpose(0, 2).contiguous().transpose(0, 2)))
    for count in (0, -5, 3, 5, INT_MAX):
        counts = torch.full((len(leading[0]), 1), count, dtype=torch.int32)
        npu.assert_agrees(leading, dict(kwargs, indices=mixed, index_counts=counts))


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
    table = kwargs["page_table"]
    batchless = (leading[0], torch.zeros(1, dtype=torch.int32), none, *leading[3:])
    assert (npu.attend(batchless, dict(kwargs, page_table=table[:0])) == 0).all()
    assert npu.attend(
        (leading[0][:0], torch.zeros(2, dtype=torch.int32), *leading[2:]), dict(kwargs, indices=kwargs["indices"][:0])
    ).shape == (0, 4, 512)
    assert (npu.attend(leading, dict(kwargs, indices=kwargs["indices"][..., :0])) == 0).all()


def test_unread_slots_and_table_columns(family, form) -> None:
    leading, kwargs = call(form, padding=0)
    clean = npu.attend(leading, kwargs)
    table = kwargs["page_table"].clone()
    for b, length in enumerate(leading[2].tolist()):
        table[b, -(-length // 16) :] = calls.NOWHERE
    poisoned = dict(kwargs, page_table=table)
    unowned = torch.tensor([p for p in range(len(kwargs["kv"])) if p not in table.flatten().tolist()])
    for name in ("kv", "kv_rope"):
        if kwargs.get(name) is not None:
            poisoned[name] = kwargs[name].clone()
            poisoned[name][unowned] = 255 if kwargs[name].dtype == torch.uint8 else NAN
    assert len(unowned) and torch.equal(npu.attend(leading, poisoned), clean)


LINES = [
    pytest.param(line, phase, id=f"{line.layer}-{phase}")
    for line in calls.lines()
    for phase in line.phases
    if "latent" in line.arguments or "c_kv" in line.arguments
]


@pytest.mark.parametrize(("line", "phase"), LINES)
def test_lines_of_calls(family, line: calls.Line, phase: str) -> None:
    """Each line on latent rows runs and agrees, or is refused for a fact that it has."""
    batch = calls.Batch(line, phase, page=16)
    leading, kwargs = batch.arguments(torch.bfloat16)
    kwargs["return_lse"] = False
    for name in ("kv", "kv_rope"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].contiguous()
    if kwargs.get("kv_rope") is None or "indices" not in kwargs or "kv_range" in kwargs or "win" in kwargs:
        assert "ascend_npu" in npu.refusal(leading, kwargs)
    else:
        npu.assert_agrees(leading, kwargs)


def test_what_is_refused(family, form) -> None:
    leading, kwargs = call(form)
    q_heads = leading[0].shape[1]
    sinks = torch.zeros(q_heads)
    starts = torch.zeros(len(leading[0]), 2, dtype=torch.int32)
    for changes, sentence in (
        (dict(return_lse=True), "lse is True, supported: False"),
        (dict(sinks=sinks), "sinks is True, supported: False"),
        (dict(kv_range=starts), "kv_range is True, supported: False"),
        (dict(batch_invariant=True), "batch_invariant is True, supported: False"),
        (dict(select_block=2), "select_block is 2, supported: 1"),
        (dict(indices=None), "index_heads is 0, supported: 1"),
        (dict(kv=torch.stack([kwargs["kv"]] * 2, -2)[..., 0, :]), "kv_strides is rows, supported: contiguous"),
    ):
        assert sentence in npu.refusal(leading, kwargs | changes), changes
    leading, kwargs = call(form, page_size=24)
    assert "page_size is 24, supported: 16 to 1024 in steps of 16" in npu.refusal(leading, kwargs)


def test_pages_apart(family, form) -> None:
    leading, kwargs = call(form)
    pool = torch.cat([kwargs["kv"]] * 2, 1)
    kwargs["kv"] = pool[:, :16]
    if family == "950" and form["format"] == "int8_v32":
        npu.assert_agrees(leading, kwargs)
    else:
        assert "kv_strides is pages, supported: contiguous" in npu.refusal(leading, kwargs)


def test_large_pools_are_refused(family, form) -> None:
    found = npu.call_of(*call(form))
    large = found._replace(facts=tuple((n, INT_MAX + 1 if n == "kv_reach" else v) for n, v in found.facts))
    assert registry.choose(found, "ascend_npu")
    with pytest.raises(registry.NoBackend, match=f"kv_reach is {INT_MAX + 1}, supported: 0 to {INT_MAX}"):
        registry.choose(large, "ascend_npu")


@pytest.mark.parametrize("width", [512, 576])
def test_both_readings_of_the_output_width(family, width: int) -> None:
    emulator.machine.readings.kv_quant_width = width
    npu.assert_agrees(*call(LATENT | FORMS["int8"]))
