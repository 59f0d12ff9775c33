"""Sparse attention over paged KV planes: ``torch.ops.sparse_attn`` on Ascend NPU, CUDA and CPU."""

from .checks import InvalidCall
from .library import resolve
from .ops import Selected, attend, compress, convert, load, merge, select, select_merge, store
from .registry import NoBackend

__all__ = [
    "InvalidCall",
    "NoBackend",
    "Selected",
    "attend",
    "compress",
    "convert",
    "load",
    "merge",
    "resolve",
    "select",
    "select_merge",
    "store",
]
