"""vLLM's platforms, but for the choice of an attention backend: ``--attention-backend CUSTOM`` is this package's.

On CPU, layers that select are this package's without being asked, as vLLM refuses them there.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.interface import Platform

from ...checks import InvalidCall
from .. import capabilities
from . import formats

GQA, LATENT = (
    f"sparse_attn.integrations.vllm.{name}" for name in ("attention.SparseAttnBackend", "latent.SparseLatentBackend")
)


def backend(config: Any, device: str, selects: bool) -> str:
    """The path of this package's backend for layers of a kind, or a refusal that names what it lacks.

    Args:
        config: vLLM's ``AttentionSelectorConfig``.
        selects: this package finds the lists, too, so the format of the index keys is its own.
    """
    from vllm.config import get_current_vllm_config  # vLLM resolves its platform while it imports these
    from vllm.utils.import_utils import resolve_obj_by_qualname

    path = LATENT if config.use_sparse else GQA
    found: list[str] = resolve_obj_by_qualname(path).validate_configuration(**config._asdict(), device_capability=None)
    if found:
        layer = "latent" if config.use_mla else "keys and values"
        raise InvalidCall(
            f"vllm: attention backend CUSTOM: expected layers that it supports, got {layer}: {', '.join(found)}; "
            "leave out --attention-backend"
        )
    current = get_current_vllm_config()
    kept = {"main": formats.main(config.kv_cache_dtype or "auto", config.dtype)}
    if selects:
        kept["index"] = formats.index(current.attention_config.indexer_kv_dtype, config.dtype)
    capabilities.check_config("vllm", device, current.model_config.hf_text_config.to_dict(), kept)
    return path


class Choice(Platform):
    """What both platforms change."""

    needs_sparse = False
    """Whether layers that select are this package's even unasked."""

    @classmethod
    def load_layers(cls) -> None:
        """Replace layers of vLLM; called in each process before a model is built."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        asked = selected_backend is not None and selected_backend.name == "CUSTOM"
        if asked or (cls.needs_sparse and attn_selector_config.use_sparse):
            selects = cls.needs_sparse and attn_selector_config.use_sparse
            return backend(attn_selector_config, cls.device_type, selects)
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return path
