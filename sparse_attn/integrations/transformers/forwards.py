"""Lets transformers' own classes attend here where the cache is a ``PagedCache`` that has planes for them.

The forward passes of the model, which says what a step adds, and of its attention modules are wrapped. With any other
cache they do what they did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ...checks import expect
from . import compressed, latent
from .attention import NAME, attention, mask
from .cache import CLASSES, PagedCache
from .planes import Planes

ATTENTION: dict[str, Callable[..., tuple[Any, ...]]] = {
    "deepseek_v32": latent.forward,
    "glm_moe_dsa": latent.forward,
    "deepseek_v4": compressed.forward,
}
NO_MASK = {"indexed_attention": None}
"""A mask that is made already: the planes know what is visible."""


def register() -> None:
    """Make ``"sparse_attn"`` an attention implementation of transformers, and ``PagedCache`` a cache of the models in
    ``CLASSES``. Call it before a model is loaded. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    for kind, prefix in CLASSES.items():
        classes = import_module(f"transformers.models.{kind}.modeling_{kind}")
        for name, wrap in (("Model", stepping), ("Attention", attending)):
            wrapped = getattr(classes, prefix + name)
            if not hasattr(wrapped.forward, "sparse_attn"):
                wrapped.forward = wrap(wrapped.forward)
                wrapped.forward.sparse_attn = True


def naming(forward: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What gives the arguments of a call by name, the cache under its present one."""
    names = [*inspect.signature(forward).parameters][1:]

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if "past_key_values" in arguments:
            arguments["cache"] = arguments.pop("past_key_values")
        return arguments

    return named


def planes_of(cache: Any) -> Planes | None:
    return cache.planes if isinstance(cache, PagedCache) else None


def stepping(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward pass that tells the cache what is new, and what of it is padding."""
    named = naming(forward)

    @functools.wraps(forward)
    def step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = named(*args, **kwargs)
        cache: Any = arguments.get("cache")
        planes = planes_of(cache)
        if planes is None:
            return forward(self, *args, **kwargs)
        cache.expect_implementation()
        config: Any = self.config
        kind, do = cache.config.model_type, "make the cache from the model's config"
        expect(config.model_type == kind, "PagedCache", "model", kind, config.model_type, do)
        use = arguments.get("use_cache")  # without, ``generate`` would pass all tokens in every step
        expect(use is not False, "PagedCache", "use_cache", "True", use, "leave out the cache")
        weights = arguments.get("output_attentions") or config.output_attentions
        expect(not weights, "attention", "output_attentions", "False", weights, "use another implementation")
        inputs: Any = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        expect(inputs is not None, "PagedCache", "input_ids", "input_ids or inputs_embeds", "None")
        seen = planes.begin((inputs.shape[0], inputs.shape[1]), arguments.get("attention_mask"), inputs.device)
        if planes.rings:
            compressed.prepare(self, planes, arguments.get("position_ids"))
        output = forward(self, **arguments | dict(attention_mask=NO_MASK))
        planes.ended(seen)
        return output

    return step


def attending(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention module's forward pass over the planes of the cache."""
    named = naming(forward)

    @functools.wraps(forward)
    def attend(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = named(*args, **kwargs)
        planes = planes_of(arguments.pop("cache", None))
        if planes is None:
            return forward(self, *args, **kwargs)
        expect(planes.step is not None, "PagedCache", "attention", "a call by its model", "another")
        gradient = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        expect(not gradient, "attention", "query", "no gradient", "requires_grad", "use torch.no_grad()")
        projection: Any = self.q_a_proj  # is offloaded like the others
        offloaded = any(p.is_meta for p in projection.parameters())
        do = "load the model without offloading"
        expect(not offloaded, "PagedCache", "weights", "all of a layer's on its device", "offloaded ones", do)
        config: Any = self.config
        dropout = self.training and config.attention_dropout
        expect(not dropout, "attention", "dropout", "0", dropout, "call model.eval()")
        return ATTENTION[config.model_type](self, planes, **arguments)

    return attend
