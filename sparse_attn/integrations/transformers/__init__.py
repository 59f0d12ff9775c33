"""Hugging Face transformers: ``model.set_attn_implementation("sparse_attn")`` after one ``register()``."""

from .attention import Selection, set_selection
from .cache import PagedCache
from .forwards import register

__all__ = ["PagedCache", "Selection", "register", "set_selection"]
