"""FlashMLA where it is installed, and why it cannot be used where not."""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from types import ModuleType

import torch

MODULE = "flash_mla"

Device = tuple[int, ...]
"""A compute capability; a major number alone stands for all of its minor ones."""


def module() -> ModuleType:
    return importlib.import_module(MODULE)


def refusal(devices: tuple[Device, ...]) -> str | None:
    """Why FlashMLA cannot run here, in one sentence."""
    if find_spec(MODULE) is None:
        return "flash_mla is not installed; build FlashMLA for this torch and device"
    here = capability()
    if here is None:
        return "torch finds no CUDA device"
    if not any(here[: len(device)] == device for device in devices):
        return f"the device is {_name(here)}, FlashMLA reads such rows on {' and '.join(map(_name, devices))}"
    if "attn_sink" not in inspect.signature(module().flash_mla_sparse_fwd).parameters:
        return "the installed flash_mla is of 2025, with an LSE of base 2 and no sinks; install that of January 2026"
    return None


def capability() -> Device | None:
    """Of the current device, None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _name(device: Device) -> str:
    return f"sm_{device[0]}{device[1] if len(device) > 1 else 'x'}"
