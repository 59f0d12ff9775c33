"""``cuda_triton``: Triton kernels for NVIDIA devices from sm_80 on.

No kernel here has run on a device yet: each is tested by Triton's interpreter and compiled for every architecture
(``docs/cuda.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_attn import env
from sparse_attn.registry import Between, Impl, Limit, OneOf

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend
    from sparse_attn.ops.compress import Compress
    from sparse_attn.ops.convert import Convert
    from sparse_attn.ops.load import Load
    from sparse_attn.ops.merge import Merge
    from sparse_attn.ops.select import Select
    from sparse_attn.ops.select_merge import SelectMerge
    from sparse_attn.ops.store import Store

OLDEST = 80

_INTERPRETED = env.TRITON_INTERPRET.get() == "1"
_DEVICES = OneOf(("cpu",) if _INTERPRETED else ("cuda",))


def _unavailable() -> str | None:
    """Why no kernel here can run, in one sentence."""
    if find_spec("triton") is None:
        return "triton is not installed; install the triton that belongs to this torch"
    if _INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip is not None:
        return "the device is not NVIDIA's"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < OLDEST:
        return f"the device is sm_{major}{minor}, sm_{OLDEST} or newer is needed"
    return None


def _attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    from .attend import attend

    attend(a, out, lse)


def _compress(a: Compress, latent: Tensor | None) -> None:
    from .compress import compress

    compress(a, latent)


def _convert(a: Convert) -> None:
    from .convert import convert

    convert(a)


def _load(a: Load, out: Tensor) -> None:
    from .rows import load

    load(a, out)


def _merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    from .merge import merge

    merge(a, out, lse)


def _select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    from .select import select

    select(a, indices, counts, values, candidate_blocks)


def _select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    from .select_merge import select_merge

    select_merge(a, indices, counts, values)


def _store(a: Store) -> None:
    from .rows import store

    store(a)


_WIDEST_ROW = 640
_WIDEST_STORED = 2048  # a program holds whole rows
_MOST_POSITIONS = (1 << 31) - 1 - 128  # a kernel counts them, and a block more, in 32 bits


def _impl(
    op: str,
    run: Callable[..., None],
    limits: Mapping[str, Limit] | None = None,
    tolerance: Mapping[str, tuple[float, float]] | None = None,
) -> Impl:
    return Impl(
        op,
        "cuda_triton",
        limits={"device": _DEVICES, **(limits or {})},
        run=run,
        tolerance=tolerance or {},
        priority=10,
        available=_unavailable,
    )


_STORED = {"dim": Between(1, _WIDEST_STORED)}
_ROUNDED_ONCE = {"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}

IMPLS = (
    _impl(
        "attend",
        _attend,
        {
            "qk_dim": Between(1, _WIDEST_ROW),
            "v_dim": Between(1, _WIDEST_ROW),
            "selected": Between(0, _MOST_POSITIONS),
        },
        # Standard normal inputs. Products of bfloat16 queries round keys, values and weights to bfloat16.
        tolerance={"float32": (4e-6, 4e-6), "bfloat16": (1e-2, 1e-2), "float16": (1e-3, 1e-3)},
    ),
    _impl("compress", _compress, _STORED, _ROUNDED_ONCE),
    _impl("convert", _convert, _STORED),
    _impl("load", _load),
    _impl("merge", _merge, tolerance=_ROUNDED_ONCE),
    _impl(
        "select",
        _select,
        {"dim": Between(1, _WIDEST_ROW)},
        # Standard normal inputs. Products are of queries and keys as they are, sums are of float32.
        tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), (2e-5, 2e-5)),
    ),
    _impl("select_merge", _select_merge),
    _impl("store", _store, _STORED),
)
