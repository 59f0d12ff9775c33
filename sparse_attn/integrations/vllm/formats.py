"""Formats of this package by vLLM's names of types of cache."""

from __future__ import annotations

import torch

from ... import layout

PLAIN = {getattr(torch, layout.FORMATS[name].dtype): name for name in layout.PLAIN_FORMATS}
PACKED = {"fp8_ds_mla": "fp8_v32"}
"""Types of cache whose rows are packed."""
INDEX = {"fp8": "fp8_index", "auto": "fp8_index"}
"""Types of the indexer's cache; ``"bf16"`` keeps keys as the model computes them."""


def main(kind: str, dtype: torch.dtype) -> str:
    """The format of the plane that attention reads, with ``kv_cache_dtype`` and the model's dtype."""
    return PACKED.get(kind) or PLAIN[dtype if kind == "auto" else getattr(torch, kind)]


def index(kind: str, dtype: torch.dtype) -> str:
    """The format of index keys, with ``indexer_kv_dtype`` and the model's dtype."""
    return PLAIN[dtype] if kind == "bf16" else INDEX.get(kind, kind)
