"""`attn_implementation="sparse_attn"` of transformers against its eager attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from sparse_attn.checks import InvalidCall  # noqa: E402
from sparse_attn.integrations.transformers import (  # noqa: E402
    PagedCache,
    Selection,
    attention,
    register,
    set_selection,
)
from sparse_attn.serving.pages import OutOfPages  # noqa: E402

register()
COMMON = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6)
COMMON |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)


def tiny(kind: str, **changes) -> nn.Module:
    options = COMMON | changes
    if kind == "mistral":
        options |= dict(sliding_window=7)
    if kind == "gpt_oss":
        options |= dict(num_local_experts=2, num_experts_per_tok=1, sliding_window=8, eos_token_id=2)
        options |= dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    if kind == "gemma3_text":
        options |= dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    if kind == "deepseek_v3":
        options |= dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
        options |= dict(num_key_value_heads=6, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2)
        options |= dict(n_group=1, topk_group=1, moe_intermediate_size=32, head_dim=4)
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def pair(kind: str, **changes) -> tuple[nn.Module, nn.Module]:
    eager = tiny(kind, **changes)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("sparse_attn")
    return eager, ours


KINDS = ["llama", "qwen2", "qwen3", "mistral", "gpt_oss", "gemma3_text"]


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3"])
@torch.no_grad()
def test_logits(kind: str) -> None:
    eager, ours = pair(kind)
    ids = torch.randint(3, 97, (2, 30))
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(kind: str, side: str) -> None:
    """Each row's logits are those of the row alone, whichever side is padded."""
    eager, ours = pair(kind)
    ids = torch.randint(3, 97, (3, 20))
    seen = torch.ones_like(ids)
    for b, pads in enumerate((0, 5, 13)):
        seen[b, slice(0, pads) if side == "left" else slice(20 - pads, 20)] = 0
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    got = ours(ids, attention_mask=seen, position_ids=positions).logits
    expected = eager(ids, attention_mask=seen, position_ids=positions).logits
    real = seen.bool()
    torch.testing.assert_close(got[real], expected[real], atol=2e-5, rtol=2e-5)
    for b in range(3):
        alone = eager(ids[b : b + 1, real[b]]).logits[0]
        torch.testing.assert_close(got[b, real[b]], alone, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3"])
@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_generate_in_a_batch_with_padding(kind: str, cache: str | None) -> None:
    eager, ours = pair(kind)
    ids = torch.randint(3, 97, (3, 12))
    seen = torch.ones_like(ids)
    seen[1, :4] = seen[2, :9] = 0
    options = dict(attention_mask=seen, max_new_tokens=15, do_sample=False, cache_implementation=cache)
    options |= dict(disable_compile=True)
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma3_text", "llama with a selection"])
@torch.no_grad()
def test_generate_compiled(kind: str) -> None:
    """With a static cache one graph serves every step; nothing breaks it."""
    kind, _, selected = kind.partition(" ")
    eager, ours = pair(kind)
    ids = torch.randint(3, 97, (3, 12))
    seen = torch.ones_like(ids)
    seen[1, :4] = seen[2, :9] = 0
    options = dict(attention_mask=seen, max_new_tokens=8, do_sample=False, cache_implementation="static")
    expected = eager.generate(ids, **options, disable_compile=True)
    if selected:
        set_selection(ours, Selection(0.5, keep_first=1, keep_last=2, least=0))
        assert not torch.equal(ours.generate(ids, **options, disable_compile=True), expected)
        expected = ours.generate(ids, **options, disable_compile=True)
    compiled = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert torch.equal(ours.generate(ids, **options, compile_config=compiled), expected)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@torch.no_grad()
def test_assisted_generation() -> None:
    """Several query tokens a step, some rejected."""
    eager, ours = pair("llama")
    assistant = tiny("llama", num_hidden_layers=1)
    ids = torch.randint(3, 97, (1, 12))
    options = dict(max_new_tokens=20, do_sample=False)
    expected = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options, assistant_model=assistant), expected)


@torch.no_grad()
def test_beams_and_chunked_prefill() -> None:
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (2, 20))
    for options in (dict(num_beams=3), dict(prefill_chunk_size=7)):
        options |= dict(max_new_tokens=8, do_sample=False)
        assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@torch.no_grad()
def test_packed_sequences_and_holes() -> None:
    """Masks with holes become lists of entries."""
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (1, 20))
    positions = torch.tensor([[*range(8), *range(12)]])
    options = dict(position_ids=positions, use_cache=False)
    torch.testing.assert_close(ours(ids, **options).logits, eager(ids, **options).logits, atol=2e-5, rtol=2e-5)
    seen = torch.ones_like(ids)
    seen[0, 5:9] = 0
    got, expected = (model(ids, attention_mask=seen).logits[seen.bool()] for model in (ours, eager))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def encoder_decoder(kind: str) -> tuple[nn.Module, nn.Module]:
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, num_heads=2)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = transformers.AutoConfig.for_model(kind, vocab_size=97, decoder_start_token_id=2, **sizes | heads)
    torch.manual_seed(0)
    eager = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("sparse_attn")
    return eager, ours


@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_encoder_and_decoder(padded: bool) -> None:
    """Layers that see all tokens, with a mask and without one, and cross attention."""
    eager, ours = encoder_decoder("bart")
    ids = torch.randint(3, 97, (2, 12))
    seen = torch.ones_like(ids)
    seen[1, 7:] = 1 - padded
    options = dict(attention_mask=seen, max_new_tokens=8, do_sample=False, num_beams=1)
    expected = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    own = transformers.EncoderDecoderCache(PagedCache(ours.config, tokens=64, page_size=8), transformers.DynamicCache())
    assert torch.equal(ours.generate(ids, **options, cache=own), expected)
    step = dict(attention_mask=seen, decoder_input_ids=expected)
    torch.testing.assert_close(ours(ids, **step).logits, eager(ids, **step).logits)


@torch.no_grad()
def test_images() -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config.image_size, config.patch_size = 32, 8
    torch.manual_seed(0)
    eager = transformers.ViTModel._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("sparse_attn")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images).last_hidden_state, eager(images).last_hidden_state)


@torch.no_grad()
def test_bfloat16() -> None:
    eager, ours = (model.bfloat16() for model in pair("llama"))
    ids = torch.randint(3, 97, (2, 30))
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, atol=6e-2, rtol=6e-2)


@torch.no_grad()
def test_selection(monkeypatch) -> None:
    """A share of 1 changes nothing; a smaller one attends to as many tokens as it says."""
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (2, 40))
    options = dict(max_new_tokens=12, do_sample=False)
    expected = eager.generate(ids, **options)
    set_selection(ours, Selection(1.0, least=0))
    assert torch.equal(ours.generate(ids, **options), expected)
    attended = []
    attend = attention.attend

    def watched(*args, **kwargs):
        if kwargs["index_counts"] is not None:
            attended.append(kwargs["index_counts"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention, "attend", watched)
    set_selection(ours, Selection(0.25, keep_first=1, keep_last=3, least=0))
    ours.generate(ids, **options)
    lengths = torch.cat([counts.flatten() for counts in attended])
    assert lengths.min() >= 40 // 4 and lengths.max() <= -(-52 // 4)
    set_selection(ours, None)
    assert torch.equal(ours.generate(ids, **options), expected)


def test_refusals() -> None:
    _, ours = pair("llama")
    ids = torch.randint(3, 97, (1, 9))
    with pytest.raises(
        InvalidCall, match="attention: query: expected no gradient, got requires_grad; use torch.no_grad"
    ):
        ours(ids)
    with (
        torch.no_grad(),
        pytest.raises(InvalidCall, match="attention_mask: expected a mask that only hides, got a bias"),
    ):
        ours(ids, attention_mask=torch.randn(1, 1, 9, 9))
    whole = torch.ones(1, 1, 9, 9, dtype=torch.int32)
    with torch.no_grad(), pytest.raises(InvalidCall, match="expected bool or a floating type, got torch.int32"):
        ours(ids, attention_mask=whole)
    biased = encoder_decoder("t5")[1]
    with torch.no_grad(), pytest.raises(InvalidCall, match="position_bias: expected None, got float32 .*; use another"):
        biased(ids, decoder_input_ids=ids)
    with pytest.raises(ValueError, match="Selection: ratio: expected a number above 0 and at most 1, got 0"):
        Selection(0)
    with pytest.raises(InvalidCall, match="set_selection: selection: expected a Selection or None, got float"):
        set_selection(ours, 0.25)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_paged_cache(kind: str) -> None:
    """A batch with padding on the left, in pages of 4 tokens, gives the tokens that eager attention gives."""
    eager, ours = pair(kind)
    ids = torch.randint(3, 97, (3, 12))
    seen = torch.ones_like(ids)
    seen[1, :4] = seen[2, :9] = 0
    options = dict(attention_mask=seen, max_new_tokens=15, do_sample=False)
    cache = PagedCache(ours.config, tokens=3 * 28, page_size=4)
    got = ours.generate(ids, **options, cache=cache)
    assert torch.equal(got, eager.generate(ids, **options))
    assert cache.get_seq_length() == 26
    cache.reset()
    assert torch.equal(ours.generate(ids, **options, cache=cache), got)


@torch.no_grad()
def test_paged_cache_of_assisted_generation() -> None:
    eager, ours = pair("llama")
    assistant = tiny("llama", num_hidden_layers=1)
    ids = torch.randint(3, 97, (1, 12))
    options = dict(max_new_tokens=20, do_sample=False)
    cache = PagedCache(ours.config, tokens=64, page_size=8)
    got = ours.generate(ids, **options, assistant_model=assistant, cache=cache)
    assert torch.equal(got, eager.generate(ids, **options))


@torch.no_grad()
def test_paged_cache_in_int8() -> None:
    """A quarter of the bytes of float32, and a scale of 2 bytes for each row and head; logits move little."""
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (2, 60))
    expected = eager(ids).logits
    cache = PagedCache(ours.config, tokens=128, format="int8", index_format="int4_index_h")
    got = torch.cat([ours(part, cache=cache).logits for part in ids.split([40, 1, 1, 18], 1)], 1)
    assert 0 < (got - expected).abs().max() < 0.05 * expected.std()
    assert cache.nbytes == 3 * 128 * 2 * (2 * (8 + 2) + 4 + 2)
    set_selection(ours, Selection(0.5, keep_first=1, keep_last=4, least=0, queries=0))
    cache.reset()
    sparse = ours(ids, cache=cache).logits
    assert (sparse - expected).abs().max() > 0
    assert torch.equal(sparse[:, :5].argmax(-1), expected[:, :5].argmax(-1))
    plain = PagedCache(ours.config, tokens=128, format="int8", index_format="bf16")
    ours(ids, cache=plain)
    assert plain.nbytes == 3 * 128 * 2 * (2 * (8 + 2) + 2 * 8)


def test_paged_cache_refuses() -> None:
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (1, 9))
    with pytest.raises(InvalidCall, match="attn_implementation: expected 'sparse_attn', got 'eager'"), torch.no_grad():
        eager(ids, cache=PagedCache(eager.config, tokens=64))
    needed = "tokens: expected 48 or more for 3 sequences of up to 9 tokens in whole pages of 8, got 40; make a larger"
    with pytest.raises(OutOfPages, match=needed), torch.no_grad():
        ours(ids.expand(3, 9), cache=PagedCache(ours.config, tokens=33, page_size=8))
    with pytest.raises(InvalidCall, match="PagedCache: beams"):
        ours.generate(ids, num_beams=2, max_new_tokens=2, cache=PagedCache(ours.config, tokens=640))
    with pytest.raises(InvalidCall, match="format: expected one of '', 'fp32', 'bf16', 'fp16', 'int8', got 'fp8_v32'"):
        PagedCache(ours.config, tokens=8, format="fp8_v32")
    with pytest.raises(InvalidCall, match="config: expected the model's config, got LlamaForCausalLM"):
        PagedCache(ours, tokens=8)
    with pytest.raises(InvalidCall, match="tokens: expected 1 or more, got 0"):
        PagedCache(ours.config, tokens=0)


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "mamba"])
def test_paged_cache_refuses_models_that_keep_states(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=4)
    with pytest.raises(InvalidCall, match=f"a model whose cache holds keys and values, got {kind}; use its own cache"):
        PagedCache(config, tokens=64)


@torch.no_grad()
def test_paged_cache_of_another_batch() -> None:
    """Refused until ``reset``, which gives all pages back."""
    eager, ours = pair("llama")
    cache = PagedCache(ours.config, tokens=64, page_size=8)
    for shape in ((1, 60), (4, 16), (2, 32)):
        ids = torch.randint(3, 97, shape)
        torch.testing.assert_close(ours(ids, cache=cache).logits, eager(ids).logits)
        more = torch.randint(3, 97, (3, 1))
        with pytest.raises(InvalidCall, match=f"input_ids: expected {shape[0]} sequences, got 3; call reset"):
            ours(more, cache=cache)
        cache.reset()


@pytest.mark.parametrize("others", ["eager", "sdpa"])
@torch.no_grad()
def test_paged_cache_under_another_implementation(others: str) -> None:
    """The cache knows the config of one model, and meets another that attends in another way."""
    eager, ours = pair("llama")
    eager.set_attn_implementation(others)
    cache = PagedCache(ours.config, tokens=64)
    with pytest.raises(InvalidCall, match="expected 'sparse_attn', which reads keys and values in their pages, got at"):
        eager(torch.randint(3, 97, (1, 9)), cache=cache)


@torch.no_grad()
def test_paged_cache_of_a_model_that_computes_with_what_its_cache_returns() -> None:
    """DiffLlama splits values, so those of earlier tokens would be missing."""
    eager, ours = pair("diffllama")
    ids = torch.randint(3, 97, (1, 9))
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits)
    with pytest.raises(InvalidCall, match="in their pages, got aten.* on those of a step"):
        ours(ids, cache=PagedCache(ours.config, tokens=64))


@torch.no_grad()
def test_a_step_of_a_paged_cache_that_fails() -> None:
    """It leaves its tokens in some layers, and the next step says so."""
    eager, ours = pair("llama")
    ids = torch.randint(3, 97, (1, 9))
    cache = PagedCache(ours.config, tokens=64)
    for done in ([], [5]):
        for part in done:
            ours(ids[:, :part], cache=cache)
        with pytest.raises(InvalidCall, match="output_attentions"):
            ours(ids[:, 5:], cache=cache, output_attentions=True)
        with pytest.raises(InvalidCall, match="layers: expected a last step that came to its end, got a part of one"):
            ours(ids[:, 5:], cache=cache)
        cache.reset()
    torch.testing.assert_close(ours(ids, cache=cache).logits, eager(ids).logits)
