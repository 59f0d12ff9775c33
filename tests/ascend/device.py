"""Builds and installs the device ``npu`` of ``device.cpp``, and a stand-in for torch_npu that names its chip."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "ascend"

chip = types.SimpleNamespace(name="Ascend910B3")
"""What the device says it is."""


def install() -> None:
    """Once in a process, before any tensor is made on ``npu``."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-std=c++20", "-w"]
    native = load("host_npu", [str(HERE / "device.cpp")], extra_cflags=flags, build_directory=str(BUILD))
    native.install()
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=0: chip.name,
        "synchronize": lambda *_: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module("npu", module)
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
