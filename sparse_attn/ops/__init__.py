"""The ops: one card per file. Importing this package defines them under ``torch.ops.sparse_attn``."""

from .attend import attend
from .convert import convert
from .load import load
from .merge import merge
from .store import store

__all__ = ["attend", "convert", "load", "merge", "store"]
