"""``ascend_npu``: CANN's fused operators through torch_npu, on Atlas A2, A3 and Ascend 950.

Written from the operators' documents and tested against an emulator of them (``tests/ascend``). It has not run on a
device: ``docs/ascend.md`` says what that leaves open.
"""

from .kernels import KERNELS

IMPLS = tuple(kernel.impl() for kernel in KERNELS)
