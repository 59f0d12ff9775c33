"""``ascend_triton``: own kernels for Ascend A2, A3 and 950 on triton-ascend, where CANN has no operator for a call.

No kernel here has run on a device: the compiler's own lowering of each is executed on a CPU, and planned for the
memories of each chip (``docs/ascend-triton.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparse_attn.registry import Between, Impl, Limit, OneOf

from . import attend, merge, soc


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


IMPLS = (
    _impl(
        attend.attend,
        limits={"qk_dim": Between(1, 640), "v_dim": Between(1, 640), "selected": Between(0, 1 << 24)},
        # Standard normal inputs. Products of bfloat16 queries round keys, values and weights to bfloat16.
        tolerance={"float32": (4e-6, 4e-6), "bfloat16": (1e-2, 1e-2), "float16": (1e-3, 1e-3)},
    ),
    _impl(merge.merge, tolerance={"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}),
)
