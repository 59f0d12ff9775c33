"""vLLM's platform for CPUs, with layers that select."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from ... import configs
from .. import capabilities
from .platform import Choice


class SparseCpuPlatform(Choice, CpuPlatform):
    needs_sparse = True

    @classmethod
    def load_layers(cls) -> None:
        from . import indexer  # needs the platform, which is not there while this class is made

        indexer.install()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's, but chunks, cached prefixes and sizes stay as asked for where its own latent attention, which cannot
        have them, does not run."""
        scheduler, cache, model = (getattr(vllm_config, f"{part}_config") for part in ("scheduler", "cache", "model"))
        chunks, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes, block = cache.enable_prefix_caching, cache.block_size
        super().check_and_update_config(vllm_config)
        if model is None or capabilities.family(configs.plan(model.hf_text_config.to_dict())[0]) != "dsa":
            return
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks, tokens
        cache.enable_prefix_caching = prefixes
        if cache.user_specified_block_size:
            cache.block_size = block
