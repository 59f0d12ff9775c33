"""What launches depend on of a device."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Device(NamedTuple):
    """``arch`` is ten times the compute capability."""

    arch: int
    processors: int

    @property
    def hardware_fp8(self) -> bool:
        """Whether there are instructions that convert e4m3."""
        return self.arch >= 89

    @property
    def small(self) -> bool:
        """Whether a program has 99 KiB of shared memory, and not 163 or 227."""
        return self.arch in (86, 89, 120, 121)


INTERPRETED = Device(90, 4)
"""Stands for CPU tensors under Triton's interpreter. It has so few processors that tests with few rows cut lists."""


def device_of(t: Tensor) -> Device:
    return _device(t.device.index) if t.is_cuda else INTERPRETED


@cache
def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device(10 * found.major + found.minor, found.multi_processor_count)
