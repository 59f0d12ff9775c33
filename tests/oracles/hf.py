"""Tiny random models of Hugging Face transformers on ``attend``, without patching.

A model hands queries, keys and values to a registered attention function. Forward hooks see what it
does not hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

transformers = pytest.importorskip(
    "transformers", minversion="5.24.0", reason="the models need transformers 5.24 or newer"
)
from transformers.cache_utils import DynamicCache  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, eager_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

NAME = "attend_oracle"
VOCABULARY = 97

AttentionFunction = Callable[..., tuple[Tensor, None]]


def build(model_class: type, config: Any, seed: int = 0) -> nn.Module:
    """A random model.

    transformers fills sinks, biases and norms with constants, zeros among them, to which a test is
    blind: they get noise.
    """
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter += 0.5 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token
                buffer.random_(int(config.n_routed_experts))
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor, steps: Sequence[int]) -> Tensor:
    """Logits of every token when ``steps[i]`` tokens go in at step ``i``."""
    cache = DynamicCache(config=model.config)
    return torch.cat(
        [model(input_ids=part, cache=cache, use_cache=True).logits for part in tokens.split(steps, dim=1)],
        dim=1,
    )


@contextmanager
def attention(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """Run ``model`` with ``function`` as its attention.

    A mask function must be registered with it: without one the models drop their mask, and with it
    the selection.
    """
    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


class Selections:
    """Keeps what the indexers of one run chose and makes other runs choose the same.

    Rounding may swap two entries of nearly equal score, and then two correct runs have different
    logits.
    """

    def __init__(self, indexers: Sequence[nn.Module]) -> None:
        self.chosen: dict[nn.Module, list[Tensor]] = {indexer: [] for indexer in indexers}

    @contextmanager
    def record(self) -> Iterator[None]:
        def keep(indexer: nn.Module, _: Any, chosen: Tensor) -> None:
            self.chosen[indexer].append(chosen)

        with hooks([indexer.register_forward_hook(keep) for indexer in self.chosen]):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        steps = {indexer: iter(chosen) for indexer, chosen in self.chosen.items()}

        def replace(indexer: nn.Module, _: Any, chosen: Tensor) -> Tensor:
            return next(steps[indexer])

        with hooks([indexer.register_forward_hook(replace) for indexer in self.chosen]):
            yield


@contextmanager
def hooks(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def packed(per_sequence: Tensor) -> Tensor:
    """``[B, heads, S, D]`` as the op's ``[B * S, heads, D]``."""
    return per_sequence.transpose(1, 2).flatten(0, 1).contiguous()


def lengths(batch: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """``cu_seqlens_q`` and ``seq_lens`` of sequences of ``tokens`` tokens, ``rows`` of them new."""
    cu_seqlens_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32)
    return cu_seqlens_q, torch.full((batch,), tokens, dtype=torch.int32)
