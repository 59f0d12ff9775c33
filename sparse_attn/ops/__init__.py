"""The ops: one card per file. Importing this package defines them under ``torch.ops.sparse_attn``."""

from .attend import attend, attend_plan
from .compress import compress
from .convert import convert
from .load import load
from .merge import merge
from .select import Selected, select
from .select_merge import select_merge
from .store import store

__all__ = [
    "Selected",
    "attend",
    "attend_plan",
    "compress",
    "convert",
    "load",
    "merge",
    "select",
    "select_merge",
    "store",
]
