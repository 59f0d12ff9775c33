"""Keys of prefixes: equal exactly if all tokens up to there are. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def prefix_keys(tokens: Sequence[int], block: int, salt: bytes = b"") -> list[bytes]:
    """A key for each full block of ``block`` tokens, of all tokens up to its end.

    ``salt`` must differ where the same tokens give other bytes, or must not be shared: model, formats, adapter, tenant.
    """
    if block < 1:
        raise ValueError(f"block: expected at least 1 token, got {block}")
    found, key = [], hashlib.sha256(salt).digest()
    for end in range(block, len(tokens) + 1, block):
        numbers = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens[end - block : end])
        key = hashlib.sha256(key + numbers).digest()
        found.append(key)
    return found
