"""``ascend_triton``: own kernels for Ascend A2, A3 and 950 on triton-ascend, where CANN has no operator for a call.

No kernel here has run on a device: the compiler's own lowering of each is executed on a CPU, and planned for the
memories of each chip (``docs/ascend-triton.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparse_attn.layout import PLAIN_FORMATS
from sparse_attn.registry import Between, Impl, Limit, OneOf

from . import attend, compress, convert, load, merge, select, select_merge, soc, store


def _impl(
    run: Callable[..., None],
    limits: Mapping[str, Limit] | None = None,
    tolerance: Mapping[str, tuple[float, float]] | None = None,
) -> Impl:
    """A kernel of the op that ``run`` is named after. CANN's operators go first where both fit, as nothing here was
    measured; what torch's own operations make up goes last."""
    return Impl(
        run.__name__,
        "ascend_triton",
        limits={"device": OneOf(("npu",)), **(limits or {})},
        run=run,
        tolerance=tolerance or {},
        priority=5,
        available=soc.unavailable,
    )


_SCALED_ROWS = (
    "int8",
    "int8_index_h",
    "int4_index_h",
    "fp8_index",
    "fp8_index_planar",
    "int8_index",
    "int8_index_planar",
    "fp4_index",
    "fp4_index_planar",
)
_WIDEST_PIECE = Between(1, 2048)  # what shares a scale is never cut

IMPLS = (
    _impl(
        attend.attend,
        limits={"qk_dim": Between(1, 640), "v_dim": Between(1, 640), "selected": Between(0, 1 << 24)},
        # Standard normal inputs. Products of bfloat16 queries round keys, values and weights to bfloat16.
        tolerance={"float32": (4e-6, 4e-6), "bfloat16": (1e-2, 1e-2), "float16": (1e-3, 1e-3)},
    ),
    _impl(
        compress.compress,
        limits={"dim": Between(1, 512)},
        tolerance={"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
    ),
    _impl(convert.convert, limits={"dim": _WIDEST_PIECE}),
    _impl(load.load, limits={"dim": _WIDEST_PIECE}),
    _impl(merge.merge, tolerance={"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}),
    _impl(
        select.select,
        limits={
            "format": OneOf((*PLAIN_FORMATS, *_SCALED_ROWS)),
            "dim": Between(1, 256),
            "block": Between(1, 4096),
            "strides": Between(1, 64),
            "candidate_block": Between(1, 4096),
        },
        # a score is a sum in float32
        tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), (4e-6, 4e-6)),
    ),
    _impl(select_merge.select_merge),
    _impl(store.store, limits={"dim": _WIDEST_PIECE}),
)
