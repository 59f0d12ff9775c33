"""Sparse attention over paged KV planes: ``torch.ops.sparse_attn`` on Ascend NPU, CUDA and CPU."""

from .checks import InvalidCall
from .library import resolve
from .ops import attend, convert, load, merge, store
from .registry import NoBackend

__all__ = ["InvalidCall", "NoBackend", "attend", "convert", "load", "merge", "resolve", "store"]
