"""What is refused for the machine, the plug-ins or a wrong answer, in words; and that the self check can fail."""

from __future__ import annotations

import sys

import emulator
import npu
import operators as emulated
import pytest
import torch
from conftest import CHIPS, become
from test_sparse_flash import FORMS, LATENT, call

from sparse_attn import doctor, library, registry
from sparse_attn.backends.ascend_npu import KERNELS, operators, soc


def labels(op: str) -> dict[str, str | None]:
    return {i.variant: registry.availability(i) for i in registry.implementations(op) if i.backend == "ascend_npu"}


OLDER = "before V4.1"  # a kernel for another version of its operator


def test_each_chip_has_its_kernels(family) -> None:
    for variant, reason in labels("attend").items():
        if OLDER in variant:
            assert reason is not None
        elif family in variant.rpartition(", ")[2].split("/"):
            assert reason is None, variant
        else:
            assert reason is not None and f"the device is of family {family}, supported: " in reason


def test_unknown_chips(family, monkeypatch) -> None:
    monkeypatch.setitem(CHIPS, "A2", "Ascend310P3")
    become("A2")
    assert "the device is Ascend310P3, supported: Ascend910B*, Ascend910_93*, Ascend950*" in npu.refusal(
        *call(LATENT | FORMS["bf16"])
    )


def test_without_torch_npu(family, monkeypatch) -> None:
    become("A2")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert "torch_npu does not load" in npu.refusal(*call(LATENT | FORMS["bf16"]))
    monkeypatch.undo()
    become("A2")


def test_a_missing_operator(family, monkeypatch) -> None:
    monkeypatch.setitem(operators.PLACES, operators.SFA, (("npu", "npu_of_another_version"),))
    become(family)
    reason = npu.refusal(*call(LATENT | FORMS["bf16"]))
    assert "there is no operator torch.ops.npu.npu_of_another_version; install" in reason
    monkeypatch.undo()
    become(family)


def test_an_operator_is_found_where_an_engine_ships_it(family, monkeypatch) -> None:
    places = (("npu", "npu_of_another_version"), ("npu", operators.SFA))
    monkeypatch.setitem(operators.PLACES, operators.SFA, places)
    become(family)
    npu.assert_agrees(*call(LATENT | FORMS["bf16"]))
    monkeypatch.undo()
    become(family)


def faulty(name: str, fault: str):
    """An operator with one of the faults that older versions have."""
    right = emulator.COMPUTE[name]

    def run(a):
        if fault == "ignores the selection":
            most = int(a.actual_seq_lengths_kv.max())
            a.sparse_indices = torch.arange(most, dtype=torch.int32).expand(len(a.query), 1, most)
        elif fault == "forgets the scale":
            a.scale_value = 0.0
        elif fault == "reads one page":
            a.block_table = a.block_table[:, :1].expand_as(a.block_table)
        return right(a)

    return run


@pytest.mark.parametrize("fault", ["ignores the selection", "forgets the scale", "reads one page"])
@pytest.mark.parametrize("name", [emulator.SFA, emulator.KV_QUANT])
def test_the_self_check_finds(family, monkeypatch, name: str, fault: str) -> None:
    monkeypatch.setitem(emulator.COMPUTE, name, faulty(name, fault))
    library.forget()
    reason = npu.refusal(*call(LATENT | FORMS["int8" if name == emulator.KV_QUANT else "bf16"]))
    assert "its self check failed: expected [[" in reason
    monkeypatch.undo()
    library.forget()


def test_doctor_shows_it(whole_family) -> None:
    states = doctor.backends()["ops"]["attend"]
    here = [label for label, state in states.items() if state == "available" and "ascend_npu" in label]
    having = [kernel for kernel in KERNELS if kernel.op == "attend" and whole_family in kernel.families]
    assert len(here) == sum(OLDER not in kernel.form for kernel in having)
    assert soc.family() == whole_family


def test_only_what_a_call_needs_is_asked(family) -> None:
    """A known answer is asked of the operator that a call would run, and not of its neighbours."""
    operators_run = emulated.calls
    operators_run.clear()
    npu.assert_agrees(*call(LATENT | FORMS["bf16"]))
    assert set(operators_run) == {emulator.SFA}
