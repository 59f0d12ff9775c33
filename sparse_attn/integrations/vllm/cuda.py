"""vLLM's platform for NVIDIA devices, with ``CUSTOM`` for every kind of layer."""

from vllm.platforms.cuda import CudaPlatform

from .platform import Choice


class SparseCudaPlatform(Choice, CudaPlatform):
    pass
