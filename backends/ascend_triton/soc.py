"""Families of Ascend chips, and the one that is in this machine."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch


class Soc(NamedTuple):
    """What launches depend on. An AI core has one cube unit, for products of matrices, and two vector units, each with
    a unified buffer of ``buffer`` bytes. ``names`` is how ``torch.npu.get_device_name`` begins."""

    names: str
    cores: int
    buffer: int
    both_vector_units: bool
    """Whether the compiler deals the rows of a result out to both."""

    @property
    def vector_cores(self) -> int:
        return 2 * self.cores


SOCS = {
    "A2": Soc("Ascend910B", 20, 192 << 10, True),
    "A3": Soc("Ascend910_93", 24, 192 << 10, True),
    "950": Soc("Ascend950", 32, 248 << 10, False),
}
"""As AscendNPU IR plans for 910B3, 910_9382 and 950PR_9589. Members of a family differ in cores: the driver knows."""


@cache
def current() -> Soc:
    """The chip of the first device. Raises ``RuntimeError`` with the reason if there is none that is known."""
    try:
        version("triton-ascend")
    except PackageNotFoundError:
        raise RuntimeError("triton-ascend is not installed; install the one for this CANN in place of triton") from None
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"torch_npu does not load ({error}); install it with the CANN that it needs") from error
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        raise RuntimeError("torch_npu finds no device")
    name = str(npu.get_device_name(0))
    for soc in SOCS.values():
        if name.startswith(soc.names):
            from triton.runtime import driver

            return soc._replace(cores=driver.active.utils.get_device_properties(0)["num_aicore"])
    raise RuntimeError(f"the device is {name}, supported: {', '.join(f'{soc.names}*' for soc in SOCS.values())}")


def unavailable() -> str | None:
    """Why no kernel here can run, in one sentence."""
    try:
        current()
    except RuntimeError as error:
        return str(error)
    return None
