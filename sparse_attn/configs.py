"""The layer plan of a model, from its Hugging Face configuration. Imports no torch and no transformers.

A configuration is what ``config.json`` holds, or ``config.to_dict()``. The fields are those of transformers and of the
released files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .layout import FORMATS
from .models import PRESETS, Layer, Model, Selection, deepseek_v4, deepseek_v41, gqa, mla, selecting

Config = Mapping[str, Any]

PLAIN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss"),
)
"""Model types whose attention layers are dense or have a window, as ``layer_types`` or ``sliding_window`` says."""

V4_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Compression of V4's types of layers, where the configuration does not say."""


def plan(config: Config) -> tuple[Model, str]:
    """The plan, and a sentence about what it leaves uncertain (empty: nothing).

    A model that is not known is taken for a dense one: its heads and layers are in every configuration.

    Raises:
        ValueError: a field is missing, or has a value that no plan describes.
    """
    config = config.get("text_config") or config
    kind = config.get("model_type", "")
    if kind == "deepseek_v3" and config.get("index_topk") is not None:
        kind = "deepseek_v32"  # vLLM loads both by one class, whose type is all that reaches its workers
    build = SPARSE.get(kind)
    try:
        if build is not None:
            model, note = build(config), ""
        else:
            model, note = _dense(config)
            if kind not in PLAIN:
                unknown = (
                    f"model type {kind!r} is not known: counted as a dense model with the heads of its configuration"
                )
                note = f"{unknown}; {note}" if note else unknown
    except KeyError as error:
        raise ValueError(f"configuration of {kind!r}: expected a field {error}, got none") from error
    preset = next((name for name, known in PRESETS.items() if known.layers == model.layers), kind)
    return replace(model, name=preset), note


def _format(name: str, dim: int) -> str:
    """The packed format, if it holds rows of so many elements."""
    return name if FORMATS[name].dim == dim else "bf16"


def _first(config: Config, *names: str) -> Any:
    """The first of these fields that is there."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(names[0])


def _dsa(config: Config) -> Model:
    """V3.2 and GLM-5: MLA with a lightning indexer, in every layer or in some."""
    layers, latent, rope = config["num_hidden_layers"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    selection = Selection(config["index_topk"], config["index_n_heads"], config["index_head_dim"], weighted=True)
    main = _format("fp8_v32", latent + rope)
    index = _format("fp8_index", selection.dim)
    full = [number for number, type in enumerate(_indexers(config, layers)) if type == "full"]
    if not full or full[0]:
        raise ValueError(f"indexer_types: expected that the first of {layers} layers is full, got full layers {full}")
    return mla("", layers, config["num_attention_heads"], selection, full, latent, rope, (main, index))


def _indexers(config: Config, layers: int) -> list[str]:
    pattern = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    if pattern:
        return list(pattern[:layers])
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(number - offset + 1, 0) % every == 0 else "shared" for number in range(layers)]


def _v4(config: Config) -> Model:
    layers, dim = config["num_hidden_layers"], config["head_dim"]
    ratios = config.get("compress_ratios")
    if ratios is None:
        of_types = V4_RATIOS | dict(config.get("compress_rates") or {})
        ratios = [of_types[type] for type in _first(config, "layer_types")]
    sparse = (config.get("compress_rates") or V4_RATIOS)["compressed_sparse_attention"]
    selection = Selection(config["index_topk"], config["index_n_heads"], config["index_head_dim"], weighted=True)
    formats = _format("fp8_v4", dim), _format("fp4_index", selection.dim)
    heads, window = config["num_attention_heads"], config["sliding_window"]
    return deepseek_v4("", ratios[:layers], heads, selection, dim, window, sparse, formats)


def _v41(config: Config) -> Model:
    if config["head_dim"] != 512:
        raise ValueError(f"head_dim: expected 512, got {config['head_dim']}")
    candidates = config.get("candidate_source_layer_id")
    selection = Selection(
        config["index_topk"],
        config["index_n_heads"],
        config["index_head_dim"],
        candidate_k=0 if candidates is None else config["candidate_topk_blocks"],
        candidate_block=0 if candidates is None else config["candidate_block_size"],
        weighted=True,
        score_dtype="bf16",
    )
    return deepseek_v41(
        "",
        config["compress_ratios"][: config["num_hidden_layers"]],
        config["kv_source_layer_ids"],
        config["index_source_layer_ids"],
        candidates,
        config["num_attention_heads"],
        config["sliding_window"],
        selection,
    )


def _minimax_m3(config: Config) -> Model:
    """Blocks by index keys that all heads share, one list for each index head, in the layers that say so."""
    old = config.get("sparse_attention_config") or {}
    heads = old.get("sparse_num_index_heads") or config["index_n_heads"]
    selection = Selection(
        old.get("sparse_topk_blocks") or config["index_topk_blocks"],
        heads,
        old.get("sparse_index_dim") or config["index_head_dim"],
        out_heads=heads,
        block=old.get("sparse_block_size") or config["index_block_size"],
        keep_last=old["sparse_local_block"] if "sparse_local_block" in old else config["index_local_blocks"],
        score="dot",
        pool="max",
    )
    sparse = old.get("sparse_attention_freq") or [type == "minimax_m3_sparse" for type in config["layer_types"]]
    return selecting(_gqa(config), [number for number, yes in enumerate(sparse) if yes], selection)


def _gqa(config: Config) -> Model:
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return gqa("", config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads, dim)


def _dense(config: Config) -> tuple[Model, str]:
    """Layers that attend to everything or to a window; layers of other types are left out."""
    if config.get("kv_lora_rank"):
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        format = _format("fp8_v32", latent + rope)
        heads = config["num_attention_heads"]
        return mla("", config["num_hidden_layers"], heads, None, (), latent, rope, (format, "fp8_index")), ""
    model = _gqa(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    default = "sliding_attention" if window else "full_attention"
    types = list(config.get("layer_types") or [default] * len(model.layers))[: len(model.layers)]
    layers: list[Layer] = []
    for layer, type in zip(model.layers, types, strict=True):
        if type == "sliding_attention" and window:
            plane = replace(layer.planes[0], kind="window", entries=window)
            layers.append(replace(layer, number=len(layers), planes=(plane,), window=window, kv_owner=None))
        elif type == "full_attention":
            layers.append(replace(layer, number=len(layers), kv_owner=len(layers)))
    others = sorted({type for type in types if type not in ("full_attention", "sliding_attention")})
    note = f"layers of type {', '.join(others)} are left out" if others else ""
    return Model("", tuple(layers)), note


SPARSE: dict[str, Callable[[Config], Model]] = {
    "deepseek_v32": _dsa,
    "glm_moe_dsa": _dsa,
    "deepseek_v4": _v4,
    "deepseek_v41": _v41,
    "deepseek_v41_text": _v41,
    "minimax_m3_text": _minimax_m3,  # as vLLM names it
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
}
"""Model types that select, and how their plan is made."""
