"""What `ascend_triton` has of its own on any machine: its chips, and how it refuses."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from sparse_attn import registry
from sparse_attn.backends import ascend_triton
from sparse_attn.backends.ascend_triton import schedule, soc


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
    for impl in ascend_triton.IMPLS:
        assert impl.limits["device"] == registry.OneOf(("npu",))
    ours = next(impl.priority for impl in ascend_triton.IMPLS if impl.op == "attend")
    behind = [impl.label for impl in registry.implementations("attend") if -1 < impl.priority < ours]
    assert behind == ["ascend_npu any call, A2/A3/950"]  # torch's own operations


def test_tiles_hold_every_column() -> None:
    for dim in range(1, 641):
        shape = schedule.shape_of(dim, dim, False)
        assert dim <= shape.row < 2 * max(dim, 16), dim
        for width in (shape.lead, shape.tail):
            assert width <= 256 and (width == 0 or (width >= 16 and width & (width - 1) == 0))


def test_tiles_of_released_models() -> None:
    assert schedule.shape_of(576, 512, False)[2:] == (256, 2, 64, 256, 2, 0)
    assert schedule.shape_of(512, 512, False)[2:] == (256, 2, 0, 256, 2, 0)
    assert schedule.shape_of(192, 128, True)[2:] == (128, 1, 64, 128, 1, 0)
    latent = schedule.shape_of(512, 512, False)
    assert schedule.chunk_of(512, latent) == 256
    assert schedule.chunk_of(448, latent) == 64  # no tile holds numbers of both kinds
    assert schedule.heads_of(soc.SOCS["A2"], 128, latent) == 64
    assert schedule.heads_of(soc.SOCS["950"], 128, latent) == 32


def test_lists_are_cut_only_while_cores_are_free() -> None:
    assert schedule.parts_of(20, 20, 32) == (1, 32)
    assert schedule.parts_of(20, 11, 32) == (1, 32)
    assert schedule.parts_of(20, 2, 32) == (8, 4)
    assert schedule.parts_of(20, 1, 1) == (1, 1)
    for tasks in (1, 3, 8):
        for tiles in (1, 7, 33, 1000):
            parts, part_tiles = schedule.parts_of(20, tasks, tiles)
            assert (parts - 1) * part_tiles < tiles <= parts * part_tiles  # no part is empty, none is missing
