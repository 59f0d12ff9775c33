"""Sparse attention over paged KV planes: ``torch.ops.sparse_attn`` on Ascend NPU, CUDA and CPU.

Without torch there are no operators; plans of models, counts, metrics and the commands work all the same.
"""

from importlib.util import find_spec

__all__ = [
    "InvalidCall",
    "NoBackend",
    "Selected",
    "attend",
    "attend_plan",
    "compress",
    "convert",
    "load",
    "merge",
    "resolve",
    "select",
    "select_merge",
    "store",
]

if find_spec("torch"):
    from .checks import InvalidCall
    from .library import resolve
    from .ops import Selected, attend, attend_plan, compress, convert, load, merge, select, select_merge, store
    from .registry import NoBackend
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(f"sparse_attn.{name} needs torch 2.9 or newer, which is not installed: pip install torch")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
