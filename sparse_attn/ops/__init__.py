"""The ops: one card per file. Importing this package defines them under ``torch.ops.sparse_attn``."""

from .attend import attend
from .store import store

__all__ = ["attend", "store"]
