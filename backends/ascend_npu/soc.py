"""Families of Ascend chips, and the one that is in this machine."""

from __future__ import annotations

import importlib
from functools import cache

import torch

FAMILIES = {"A2": "Ascend910B", "A3": "Ascend910_93", "950": "Ascend950"}
"""Family to the start of the names that ``torch.npu.get_device_name`` gives its chips. Atlas A2 and A3 run one kind of
kernel (architecture 22), the 950PR and 950DT another (35)."""


@cache
def family() -> str:
    """The family of the first device. Raises ``RuntimeError`` with the reason if there is none that is known."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"torch_npu does not load ({error}); install it with the CANN toolkit that it needs"
        ) from error
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        raise RuntimeError("torch_npu finds no device")
    name = str(npu.get_device_name(0))
    for known, start in FAMILIES.items():
        if name.startswith(start):
            return known
    raise RuntimeError(f"the device is {name}, supported: {', '.join(f'{s}*' for s in FAMILIES.values())}")


def refusal(families: tuple[str, ...]) -> str | None:
    """Why a kernel of ``families`` cannot run here, or None."""
    try:
        found = family()
    except RuntimeError as error:
        return str(error)
    return None if found in families else f"the device is of family {found}, supported: {', '.join(families)}"
