"""What `ascend_triton` has of its own on any machine: its chips, and how it refuses."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from sparse_attn import registry
from sparse_attn.backends import ascend_triton
from sparse_attn.backends.ascend_triton import soc


@pytest.fixture(autouse=True)
def _forget():
    soc.current.cache_clear()
    yield
    soc.current.cache_clear()


def machine(monkeypatch, name: str | None, cores: int = 25) -> None:
    """Become a machine with a device of this name, or without one."""
    monkeypatch.setattr(soc, "version", lambda package: "3.2.0")
    npu = types.SimpleNamespace(is_available=lambda: name is not None, get_device_name=lambda index: name)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    utils = types.SimpleNamespace(get_device_properties=lambda index: {"num_aicore": cores})
    driver = types.SimpleNamespace(active=types.SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", types.SimpleNamespace(driver=driver))


@pytest.mark.parametrize(
    ("name", "family"), [("Ascend910B2C", "A2"), ("Ascend910_9382", "A3"), ("Ascend950PR_9589", "950")]
)
def test_families_are_known_by_their_names(monkeypatch, name: str, family: str) -> None:
    machine(monkeypatch, name)
    assert soc.unavailable() is None
    assert soc.current() == soc.SOCS[family]._replace(cores=25)


def test_a_machine_that_cannot_run_kernels_says_why(monkeypatch) -> None:
    machine(monkeypatch, "Ascend310P3")
    assert soc.unavailable() == "the device is Ascend310P3, supported: Ascend910B*, Ascend910_93*, Ascend950*"
    machine(monkeypatch, None)
    assert soc.unavailable() == "torch_npu finds no device"
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert str(soc.unavailable()).startswith("torch_npu does not load (")
    monkeypatch.undo()
    missing = "triton-ascend is not installed; install the one for this CANN in place of triton"
    assert soc.unavailable() == missing


def test_kernels_take_npu_tensors_and_stand_behind_the_vendors() -> None:
    vendor = [impl for impl in registry.implementations() if impl.backend == "ascend_npu"]
    for impl in ascend_triton.IMPLS:
        assert impl.limits["device"] == registry.OneOf(("npu",))
        assert impl.priority < min(other.priority for other in vendor)
