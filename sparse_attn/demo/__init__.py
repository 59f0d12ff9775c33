"""The main job: a real language model decodes through ``sparse_attn.attend``. Run ``python -m sparse_attn demo``."""

from .cli import main

__all__ = ["main"]
