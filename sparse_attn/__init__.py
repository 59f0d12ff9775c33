"""Sparse attention over paged KV planes: ``torch.ops.sparse_attn`` on Ascend NPU, CUDA and CPU."""

from .checks import InvalidCall
from .ops import attend, store
from .library import resolve
from .registry import NoBackend

__all__ = ["InvalidCall", "NoBackend", "attend", "resolve", "store"]
