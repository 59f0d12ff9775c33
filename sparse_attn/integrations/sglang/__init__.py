"""SGLang: an attention backend, admission, and observe mode. Installing the package is enough.

SGLang calls ``register`` in each of its processes. Of itself it only observes: the backend is for those who ask for
``--attention-backend sparse_attn``, and admission for those who set ``SPARSE_ATTN_ADMISSION``.
"""

from __future__ import annotations

from typing import Any

from ... import env

NAME = "sparse_attn"


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from . import observe

    observe.register()
    register_attention_backend(NAME)(_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    if env.ADMISSION.get():
        from . import admission

        admission.register()


def _backend(runner: Any) -> Any:
    from .attention import SparseAttnBackend

    return SparseAttnBackend(runner)
