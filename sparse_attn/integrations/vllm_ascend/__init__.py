"""vllm-ascend: attention of layers that select by this package's op, where asked for; and counts for ms_service_metric.

    --additional-config '{"sparse_attn": {"attention": true}}'

vllm-ascend ignores ``--attention-backend``, and vLLM takes no second platform beside it.
"""

from __future__ import annotations

import functools
from typing import Any

THEIRS = "vllm_ascend.attention.sfa_v1.AscendSFABackend"
OURS = f"{__name__}.attention.SparseSFABackend"


def choose(platform: Any) -> None:
    """Have vllm-ascend's platform, a class, answer with this package's backend in the place of its own for layers that
    select. Calling it again does nothing."""
    theirs = platform.get_attn_backend_cls
    if hasattr(theirs, "sparse_attn"):
        return

    @functools.wraps(theirs)
    def get_attn_backend_cls(*args: Any, **kwargs: Any) -> str:
        path: str = theirs(*args, **kwargs)
        return OURS if path == THEIRS and _asked() else path

    get_attn_backend_cls.sparse_attn = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = get_attn_backend_cls


def _asked() -> bool:
    from vllm.config import get_current_vllm_config

    asked = (get_current_vllm_config().additional_config or {}).get("sparse_attn", {})
    return bool(asked.get("attention", False))
