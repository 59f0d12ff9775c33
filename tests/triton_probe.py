"""Kernels that show single device functions to tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_attn.backends.cuda_triton.kernels.decode import e2m1_numbers, e4m3_numbers, e8m0_numbers


@triton.jit
def decode_kernel(stored, numbers, TYPE: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    at = tl.arange(0, 256)
    x = tl.load(stored + at)
    if TYPE == "e4m3":
        y = e4m3_numbers(x, HARDWARE_FP8)
    elif TYPE == "e8m0":
        y = e8m0_numbers(x)
    else:
        y = e2m1_numbers(x & 15)
    tl.store(numbers + at, y)


def decode_bytes(stored: Tensor, type: str, hardware_fp8: bool) -> Tensor:
    """The numbers of 256 bytes; of e2m1 the low halves."""
    numbers = torch.empty(256)
    decode_kernel[(1,)](stored, numbers, type, hardware_fp8)
    return numbers
