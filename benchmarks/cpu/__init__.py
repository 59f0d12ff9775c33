"""Times of the ops beside what a user could run instead, and beside the machine's limits:
``python -m sparse_attn bench --suite cpu``.
"""

from .cli import main

__all__ = ["main"]
