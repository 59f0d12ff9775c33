"""vLLM's platform for CPUs, with layers that select."""

from vllm.platforms.cpu import CpuPlatform

from .platform import Choice


class SparseCpuPlatform(Choice, CpuPlatform):
    needs_sparse = True

    @classmethod
    def load_layers(cls) -> None:
        from . import indexer  # needs the platform, which is not there while this class is made

        indexer.install()
