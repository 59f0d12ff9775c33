"""A real long text, and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .model import CannotRun

CHARACTERS_PER_TOKEN = 12
"""More than any text of words has, so that this many characters are enough."""


def read(path: Path | None) -> tuple[str, str]:
    """The text and a name for it: a UTF-8 file, or else Python's own reference manual."""
    if path is not None:
        return path.read_text(encoding="utf-8"), path.name
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)), "pydoc_data.topics"


def tokenize(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """The first ``tokens`` tokens of ``text``, int64."""
    text = text[: tokens * CHARACTERS_PER_TOKEN]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    if len(ids) < tokens:
        raise CannotRun(
            f"the text has {len(ids)} tokens, the run needs {tokens}: take a longer --text or less --context"
        )
    return torch.as_tensor(ids[:tokens])
