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


def become(family: str, every_kernel: bool = False) -> None:
    """Make the machine one of another family, and forget what was found on the last.

    Unless with ``every_kernel``, the backend has none that could stand in for an operator, so that a call that an
    operator answers wrongly is refused.
    """
    from sparse_attn.backends import ascend_npu
    from sparse_attn.backends.ascend_npu import operators as found
    from sparse_attn.backends.ascend_npu import soc
    from sparse_attn.backends.ascend_npu.kernels import KERNELS, OPERATORS

    operated = [k.op for k in OPERATORS]
    kernels = KERNELS if every_kernel else [k for k in KERNELS if k in OPERATORS or k.op not in operated]
    ascend_npu.IMPLS = tuple(kernel.impl() for kernel in kernels)
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


@pytest.fixture(params=CHIPS)
def whole_family(request):
    """The same, with every kernel of the backend."""
    become(request.param, every_kernel=True)
    return request.param
