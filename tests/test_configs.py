"""Plans from configurations: the presets from the released fields, and what transformers makes of its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from sparse_attn.configs import plan
from sparse_attn.models import PRESETS, Plane
from sparse_attn.serving.stats import Counter

V32 = dict(
    model_type="deepseek_v32",
    num_hidden_layers=61,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=2048,
    index_n_heads=64,
    index_head_dim=128,
)
GLM = V32 | dict(model_type="glm_moe_dsa", num_hidden_layers=78, num_attention_heads=64, index_n_heads=32)
V4 = dict(
    model_type="deepseek_v4",
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    sliding_window=128,
    index_topk=512,
    index_n_heads=64,
    index_head_dim=128,
    compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],  # the last is a draft layer
)
V41 = V4 | dict(
    model_type="deepseek_v41_text",
    num_hidden_layers=40,
    index_n_heads=32,
    compress_ratios=[0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    kv_source_layer_ids=[2, 8, 14, 20],
    index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
)
M3 = dict(
    model_type="minimax_m3_vl_text",
    num_hidden_layers=60,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    sparse_attention_config=dict(
        sparse_num_index_heads=4,
        sparse_index_dim=128,
        sparse_block_size=128,
        sparse_topk_blocks=16,
        sparse_local_block=1,
        sparse_attention_freq=[0] * 3 + [1] * 57,
    ),
)
LLAMA = dict(model_type="llama", num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
RELEASED = {
    "deepseek-v3.2": V32,
    "glm-5": GLM,
    "glm-5.2": GLM | dict(index_topk_freq=4, index_skip_topk_offset=3),
    "deepseek-v4-flash": V4,
    "deepseek-v4-pro": V4
    | dict(
        num_hidden_layers=61, num_attention_heads=128, index_topk=1024, compress_ratios=[128, 128, *[4, 128] * 29, 4, 0]
    ),
    "deepseek-v4.1-flash": V41,
    "minimax-m3": M3,
    "llama-3.1-8b": LLAMA,
    "qwen3-8b": LLAMA | dict(model_type="qwen3", num_hidden_layers=36, head_dim=128),
    "smollm2-135m": dict(
        model_type="llama", num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_configuration_gives_the_preset(name: str) -> None:
    assert plan(RELEASED[name]) == (PRESETS[name], "")
    assert plan({"model_type": "wrapper", "text_config": RELEASED[name]})[0] == PRESETS[name]


def test_every_preset_is_tested() -> None:
    assert RELEASED.keys() == PRESETS.keys()


@pytest.mark.parametrize(
    ("kind", "fields", "preset"),
    [
        ("DeepseekV32Config", {}, "deepseek-v3.2"),
        ("GlmMoeDsaConfig", {}, "glm-5"),
        ("GlmMoeDsaConfig", {"index_topk_freq": 4, "index_skip_topk_offset": 3}, "glm-5.2"),
        ("DeepseekV4Config", {"compress_ratios": V4["compress_ratios"][:43]}, "deepseek-v4-flash"),
        ("MiniMaxM3VLTextConfig", M3["sparse_attention_config"], "minimax-m3"),
        ("LlamaConfig", {k: v for k, v in LLAMA.items() if k != "model_type"}, "llama-3.1-8b"),
    ],
)
def test_the_configuration_of_transformers_gives_the_preset(kind: str, fields: dict[str, Any], preset: str) -> None:
    """transformers renames fields and has defaults of its own."""
    if kind.startswith("MiniMax"):
        fields = {"sparse_attention_config": fields}
    config = getattr(transformers, kind)(**fields)
    assert plan(config.to_dict()) == (PRESETS[preset], "")


def test_other_sizes_are_those_of_the_configuration() -> None:
    small = V32 | dict(num_hidden_layers=2, kv_lora_rank=32, qk_rope_head_dim=8, index_topk=16, index_head_dim=32)
    model, _ = plan(small)
    assert [layer.qk_dim for layer in model.layers] == [40, 40]
    assert model.plane("main", 1) == Plane("main", (40,), "bf16")  # packed formats hold the released rows alone
    assert model.plane("index", 1) == Plane("index", (32,), "bf16")
    assert Counter(model)([(99, 100)]).pairs == {"dense": 200, "main": 32, "scored": 200}
    model, _ = plan(V4 | dict(num_hidden_layers=3, compress_ratios=None, layer_types=[
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    ], compress_rates={"compressed_sparse_attention": 8, "heavily_compressed_attention": 32}))  # fmt: skip
    assert [layer.kind for layer in model.layers] == ["window", "full", "dense"]
    assert [model.plane("main", n).ratio for n in (1, 2)] == [8, 32]
    assert [plane.entries for plane in model.layers[1].planes if plane.kind == "state"] == [16, 16]


def test_an_unknown_model_is_dense_and_says_so() -> None:
    model, note = plan(LLAMA | dict(model_type="something_new"))
    assert model.layers == PRESETS["llama-3.1-8b"].layers
    assert note == (
        "model type 'something_new' is not known: counted as a dense model with the heads of its configuration"
    )


def test_windows_and_what_is_no_attention() -> None:
    types = ["full_attention", "linear_attention", "sliding_attention"]
    model, note = plan(LLAMA | dict(num_hidden_layers=3, layer_types=types, sliding_window=16))
    assert [layer.kind for layer in model.layers] == ["dense", "window"]
    assert note == "layers of type linear_attention are left out"
    assert Counter(model)([(99, 100)]).pairs == {"dense": 200, "main": 100, "window": 16}
    windows, _ = plan(LLAMA | dict(model_type="mistral", sliding_window=16))
    assert {layer.kind for layer in windows.layers} == {"window"}
    unused, _ = plan(LLAMA | dict(model_type="qwen2", sliding_window=16, use_sliding_window=False))
    assert {layer.kind for layer in unused.layers} == {"dense"}


def test_dense_mla() -> None:
    model, note = plan({k: v for k, v in V32.items() if "index" not in k} | {"model_type": "deepseek_v3"})
    assert not note
    assert {layer.kind for layer in model.layers} == {"dense"}
    assert model.bytes_per_token() == {"main": 61 * 656}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({k: v for k, v in V32.items() if k != "index_topk"}, "expected a field 'index_topk', got none"),
        (GLM | dict(indexer_types=["shared"] * 78), "expected that the first of 78 layers is full"),
        (V41 | dict(head_dim=256), "head_dim: expected 512, got 256"),
        ({"model_type": "llama"}, "expected a field 'num_attention_heads', got none"),
    ],
)
def test_refusals(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(config)


def test_the_type_by_which_vllm_loads_v32_does_not_hide_its_selection() -> None:
    """Its workers see ``deepseek_v3`` for both."""
    assert plan(V32 | dict(model_type="deepseek_v3")) == plan(V32)
    dense = {name: value for name, value in V32.items() if not name.startswith("index_")}
    assert plan(dense | dict(model_type="deepseek_v3"))[0].layers[0].selection is None
