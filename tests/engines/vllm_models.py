"""Small random models as folders that vLLM and transformers load, and the tokens that transformers generates.

    python vllm_models.py FOLDER MODEL

The last line printed is a list of lists of tokens, as JSON: the greedy continuation of each of ``PROMPTS``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

NEW_TOKENS = 24
PROMPTS = [
    [3 + (7 * i + 11 * j + j * j) % 500 for j in range(length)] for i, length in enumerate((5, 90, 33, 64, 200, 1))
]
PROMPTS.append(PROMPTS[4][:160] + [9, 8, 7])  # begins as another: its cached pages are not computed again

COMMON = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=128,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
    dtype="float32",
)
DENSE = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
LATENT = dict(
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    index_topk=24,
    index_head_dim=128,
    index_n_heads=16,
    first_k_dense_replace=2,
    moe_intermediate_size=64,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    mlp_layer_types=["dense", "dense", "sparse"],
    topk_method="noaux_tc",  # vLLM asks for these two; transformers knows no other way
    scoring_func="sigmoid",
)
MODELS = {
    "qwen3": ("Qwen3", DENSE),
    "mistral": ("Mistral", DENSE | dict(sliding_window=24)),
    "deepseek_v32": ("DeepseekV32", LATENT),
    "deepseek_v32_released": ("DeepseekV32", LATENT | dict(kv_lora_rank=512, qk_rope_head_dim=64)),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | dict(indexer_rope_interleave=True)),
}


def build(folder: Path, name: str) -> torch.nn.Module:
    """A model with random weights, also written to the folder."""
    import transformers

    family, fields = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**COMMON | fields)
    torch.manual_seed(1)  # no two index scores are so near that rounding decides
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():  # the default start is so flat that all logits are near
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    model = build(folder, name)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
