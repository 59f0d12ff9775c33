"""`attend_plan` on the emulated machine: the operator's schedule is made once a step and used by all layers, and one
that does not fit is never met by the operator."""

from __future__ import annotations

from typing import Any

import emulator
import npu
import operators
import pytest
import torch
from test_sparse_flash import FORMS as LATENT_FORMS
from test_sparse_flash import LATENT
from test_sparse_mla import FORMS, WINDOWED, call, form  # noqa: F401
from torch import Tensor

import sparse_attn


def moved(options: dict[str, Any], **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Leading and keyword arguments of a call on the device, and the call on the host."""
    leading, kwargs = call(options, **changes)
    device = tuple(map(npu.on_npu, leading)), {name: npu.on_npu(value) for name, value in kwargs.items()}
    return *device, (leading, kwargs)


def attend(leading: tuple[Any, ...], kwargs: dict[str, Any], plan: Tensor | None) -> Tensor:
    return sparse_attn.attend(*leading, **kwargs, plan=plan, backend="ascend_npu").cpu()


def test_one_schedule_for_all_layers(family, form) -> None:  # noqa: F811
    before = operators.calls.copy()
    leading, kwargs, _ = moved(form)
    plan = sparse_attn.attend_plan(*leading, **kwargs, backend="ascend_npu")
    asked = operators.calls[emulator.SMLA_METADATA]
    for seed in range(3):
        leading, kwargs, given = moved(form, seed=seed)
        lists = {"indices": kwargs["indices"].flip(0)} if kwargs.get("indices") is not None else {}
        host = given[0], given[1] | {name: x.cpu() for name, x in lists.items()}
        out = attend(leading, kwargs | lists, plan)
        torch.testing.assert_close(out.double(), npu.expected(*host), atol=npu.TOLERANCE, rtol=npu.TOLERANCE)
    assert operators.calls[emulator.SMLA_METADATA] == asked
    assert operators.calls[emulator.SMLA] >= before[emulator.SMLA] + 3


def test_steps_in_a_buffer_of_the_callers(family, form) -> None:  # noqa: F811
    buffer = torch.zeros(1024 + 9, dtype=torch.int32).to("npu")
    longest = 2 * max(form["lengths"])
    for lengths in (form["lengths"], (9, 0, 70, 33), (1, 1, 1, longest)):
        leading, kwargs, given = moved(form, lengths=lengths)
        leading = (*leading[:6], longest)
        made = sparse_attn.attend_plan(*leading, **kwargs, plan=buffer, backend="ascend_npu")
        assert made.data_ptr() == buffer.data_ptr()
        out = attend(leading, kwargs, buffer)
        torch.testing.assert_close(out.double(), npu.expected(*given), atol=npu.TOLERANCE, rtol=npu.TOLERANCE)


@pytest.mark.parametrize("which", [1, 2], ids=["cu_seqlens_q", "seq_lens"])
def test_a_stale_plan_is_seen(family, form, which: int) -> None:  # noqa: F811
    leading, kwargs, _ = moved(form)
    plan = sparse_attn.attend_plan(*leading, **kwargs, backend="ascend_npu")
    changed = leading[which].clone()
    changed[1] = 2
    leading = (*leading[:which], changed, *leading[which + 1 :])
    for name in ("page_table", "win_page_table"):
        if kwargs.get(name) is not None:
            kwargs[name][1:] = 1 << 30  # what the plan's lengths would read
    assert attend(leading, kwargs, plan).isnan().all()


def test_debug_refuses_a_stale_plan(family, debug_checks) -> None:
    leading, kwargs, _ = moved(WINDOWED | FORMS["ratio 4"])
    plan = sparse_attn.attend_plan(*leading, **kwargs, backend="ascend_npu")
    attend(leading, kwargs, plan)
    leading[2][0] -= 1
    with pytest.raises(sparse_attn.InvalidCall, match="attend: plan: expected one for the lengths of this step, got a"):
        attend(leading, kwargs, plan)


def test_a_plan_of_another_kind_is_refused(family) -> None:
    ratio_4, ratio_2 = moved(WINDOWED | FORMS["ratio 4"]), moved(WINDOWED | FORMS["ratio 2"])
    plan = sparse_attn.attend_plan(*ratio_4[0], **ratio_4[1], backend="ascend_npu")
    sentence = "attend: plan: expected the plan of a layer of this kind and the same bounds, got one "
    with pytest.raises(sparse_attn.InvalidCall, match=f"{sentence}of another; call attend_plan"):
        attend(*ratio_2[:2], plan)
    leading, kwargs, _ = ratio_4
    with pytest.raises(sparse_attn.InvalidCall, match=f"{sentence}of another"):
        attend((*leading[:6], leading[6] + 1), kwargs, plan)
    with pytest.raises(sparse_attn.InvalidCall, match=f"{sentence}that no kernel made"):
        attend(leading, kwargs, plan.clone())
    with pytest.raises(sparse_attn.InvalidCall, match=r"plan: expected int32 \[1024 \+ 2 B \+ 1\]"):
        attend(leading, kwargs, plan[1:])


def test_memory_of_a_plan_that_is_gone(family) -> None:
    leading, kwargs, _ = moved(WINDOWED | FORMS["ratio 4"])
    memory = torch.zeros(1024 + 9, dtype=torch.int32).to("npu")
    plan = sparse_attn.attend_plan(*leading, **kwargs, plan=memory.view(-1), backend="ascend_npu")
    attend(leading, kwargs, plan.view(-1))
    attend(leading, kwargs, memory)
    del plan
    with pytest.raises(sparse_attn.InvalidCall, match="got one that no kernel made"):
        attend(leading, kwargs, memory)


def test_kernels_without_a_schedule_ignore_it(whole_family) -> None:
    for options, limits in (
        (LATENT | LATENT_FORMS["bf16"], {}),
        (WINDOWED | FORMS["window"], {"return_lse": True}),  # torch's own operations
        (WINDOWED | FORMS["window"], {"win_format": "fp8_v41", "dtype": "bfloat16"}),  # gathered first
    ):
        changes = {name: value for name, value in limits.items() if name != "return_lse"}
        leading, kwargs, given = moved(options, **changes)
        kwargs |= {name: value for name, value in limits.items() if name == "return_lse"}
        plan = sparse_attn.attend_plan(*leading, **kwargs, backend="ascend_npu")
        out = sparse_attn.attend(*leading, **kwargs, plan=plan, backend="ascend_npu")
        got = out[0] if kwargs["return_lse"] else out
        torch.testing.assert_close(got.cpu().double(), npu.expected(*given), atol=npu.TOLERANCE, rtol=npu.TOLERANCE)
        direct = moved(WINDOWED | FORMS["window"])
        with pytest.raises(sparse_attn.InvalidCall, match="got one that no kernel made"):
            attend(*direct[:2], plan)
