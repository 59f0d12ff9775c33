"""The emulated machine: a device ``npu`` in host memory, and CANN's operators as their documents describe them."""

from __future__ import annotations

import device
import emulator
import operators
import pytest

from sparse_attn import library

device.install()
operators.install()

CHIPS = {"A2": "Ascend910B3", "A3": "Ascend910_9382", "950": "Ascend950PR_9589"}


def become(family: str) -> None:
    """Make the machine one of another family, and forget what was found on the last."""
    from sparse_attn.backends.ascend_npu import operators as found
    from sparse_attn.backends.ascend_npu import soc

    device.chip.name, emulator.machine.family = CHIPS[family], family
    emulator.machine.readings = emulator.Readings()
    soc.family.cache_clear()
    found.find.cache_clear()
    library.forget()


@pytest.fixture(params=CHIPS)
def family(request):
    """Each family of chips in turn."""
    become(request.param)
    return request.param
