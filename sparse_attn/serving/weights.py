"""Sizes of models beyond their attention layers, each with its source. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Figure


@dataclass(frozen=True)
class Weights:
    """Of a whole model: ``size`` in bytes on the devices, ``active`` parameters that a token passes in decode, and
    ``context``, the most tokens of a sequence. None: no source."""

    size: Figure | None = None
    active: Figure | None = None
    context: Figure | None = None


def _published(value: float, source: str) -> Figure:
    return Figure(value, "published", source)


def _dense(parameters: int, context: Figure | None) -> Weights:
    """A model whose tokens pass every parameter, in bf16."""
    source = "counted from the published configuration, two bytes each"
    return Weights(Figure(2 * parameters, "derived", source), Figure(parameters, "derived", source), context)


_CARD = "model card"
_MILLION = _published(1048576, "model configuration")

WEIGHTS: dict[str, Weights] = {
    "deepseek-v4.1-flash": Weights(
        _published(320e9, "about, github.com/wtdcode/vllm-backport/issues/69; without 196 GB of tables in host memory"),
        _published(16e9, "docs.oxen.ai, for decode; 8e9 in prefill"),
        _MILLION,
    ),
    "deepseek-v4-flash": Weights(
        _published(162e9, "unsloth.ai/docs: the lossless 8-bit file"), _published(13e9, _CARD), _MILLION
    ),
    "deepseek-v4-pro": Weights(None, _published(49e9, _CARD), _MILLION),
    "llama-3.1-8b": _dense(8_030_261_248, _published(131072, "model configuration")),
    "qwen3-8b": _dense(8_190_735_360, None),
    "smollm2-135m": _dense(134_515_008, _published(8192, "model configuration")),
}
"""By the name of a preset. Presets that are missing have no source yet."""
