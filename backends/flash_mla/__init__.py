"""``flash_mla``: DeepSeek's FlashMLA behind ``attend``, where it is installed and takes the call.

Written from its sources and tested against a stand-in of them (``tests/flash_mla_standin.py``). It has not run on a
device: ``docs/cuda.md`` says what that leaves open.
"""

from .kernels import KERNELS

IMPLS = tuple(kernel.impl() for kernel in KERNELS)
