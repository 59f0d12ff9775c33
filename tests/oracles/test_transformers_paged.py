"""`PagedCache` of models that keep other than keys and values, against transformers' own attention and caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hf import VOCABULARY, build
from test_whole_models import glm, mla, v32
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

import sparse_attn
from sparse_attn import configs
from sparse_attn.checks import InvalidCall
from sparse_attn.integrations.capabilities import Unsupported
from sparse_attn.integrations.transformers import PagedCache, latent, register
from sparse_attn.layout import FORMATS
from sparse_attn.serving.pages import OutOfPages

register()
NAMES = ["DeepSeek V3.2", "GLM-5"]
STEPS = {"one": [150], "decode": [90] + [1] * 60, "chunks": [1, 37, 64, 2, 46]}
TOLERANCE = 1e-4


@cache
def eager(name: str) -> nn.Module:
    """Biases are there and random, norms too."""
    if name == "DeepSeek V3.2":
        config = v32.DeepseekV32Config(**mla(attention_bias=True))
        return build(v32.DeepseekV32ForCausalLM, config)
    types = ["full", "shared", "full", "shared"]
    return build(glm.GlmMoeDsaForCausalLM, glm.GlmMoeDsaConfig(**mla(attention_bias=True, indexer_types=types)))


@cache
def ours(name: str) -> nn.Module:
    model = copy.deepcopy(eager(name))
    model.set_attn_implementation("sparse_attn")
    return model


def ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def paged(name: str, tokens: int = 1024, page_size: int = 16, **options: Any) -> PagedCache:
    return PagedCache(ours(name).config, tokens=tokens, page_size=page_size, **options)


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor, steps: Sequence[int], cache: Any) -> Tensor:
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(list(steps), 1)], 1)


def expect_same(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Rows of logits ``[..., vocabulary]``. Where two index scores are equal but for rounding, either token is right,
    and a row may differ."""
    same = (got - expected).abs().amax(-1) <= tolerance
    assert same.float().mean() >= 0.99, (got - expected).abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", STEPS)
def test_logits(name: str, steps: str) -> None:
    tokens = ids(2, 150)
    expected = logits(eager(name), tokens, STEPS[steps], DynamicCache(config=eager(name).config))
    expect_same(logits(ours(name), tokens, STEPS[steps], paged(name)), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(name: str, side: str) -> None:
    """Each row's logits are those of the row alone, in chunks of which one is padding alone; padding takes no place."""
    tokens, seen = ids(3, 80), torch.ones(3, 80, dtype=torch.long)
    for b, pads in enumerate((0, 11, 43)):
        seen[b, slice(0, pads) if side == "left" else slice(80 - pads, 80)] = 0
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    cache, got, end = paged(name, tokens=80 + 69 + 37 + 3 * 15), [], 0
    for part, at in zip(tokens.split([20, 50, 10], 1), positions.split([20, 50, 10], 1), strict=True):
        end += part.shape[1]
        got.append(ours(name)(part, attention_mask=seen[:, :end], position_ids=at, cache=cache).logits)
    for b in range(3):
        real = seen[b].bool()
        expect_same(torch.cat(got, 1)[b, real], eager(name)(tokens[b : b + 1, real]).logits[0])
    assert cache.planes.tokens == [80, 69, 37] and cache.get_seq_length() == 80


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_holes(name: str) -> None:
    """A token that is hidden is none, wherever it stands."""
    tokens, seen = ids(1, 60), torch.ones(1, 60, dtype=torch.long)
    seen[0, 7:30] = 0
    options = dict(attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0))
    got, expected = ours(name)(tokens, cache=paged(name), **options).logits, eager(name)(tokens, **options).logits
    expect_same(got[seen.bool()], expected[seen.bool()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True, num_return_sequences=2), dict(prefill_chunk_size=17)],
    ids=["greedy", "sampled", "prefilled in chunks"],
)
def test_generate(name: str, options: dict[str, Any]) -> None:
    """A batch with padding on the left; the cache serves a second time."""
    tokens, seen = ids(3, 50), torch.ones(3, 50, dtype=torch.long)
    seen[1, :9] = seen[2, :31] = 0
    options = dict(attention_mask=seen, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0) | options
    cache, found = paged(name), []
    for model, kept in ((eager(name), None), (ours(name), cache), (ours(name), cache)):
        torch.manual_seed(1)
        found.append(model.generate(tokens, **options, cache=kept))
        cache.reset()
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("name", NAMES)
def test_turns(name: str) -> None:
    """A cache goes on where `generate` left it."""
    options = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens, cache = ids(2, 40), paged(name)
    for turn in range(3):
        expected = eager(name).generate(tokens, **options)
        assert torch.equal(ours(name).generate(tokens, **options, cache=cache), expected)
        tokens = torch.cat([expected, ids(2, 5, seed=turn)], 1)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bfloat16(name: str) -> None:
    """As near to float32 as transformers is, while every token fits the budget."""
    tokens = ids(2, 24)
    expected = eager(name)(tokens).logits
    theirs, half = (copy.deepcopy(model(name)).bfloat16() for model in (eager, ours))
    lost = (half(tokens, cache=paged(name)).logits - expected).abs().mean()
    assert lost < 1.5 * (theirs(tokens).logits - expected).abs().mean()
    cache = paged(name, format="fp8_v32", index_format="fp8_index")
    assert logits(half, ids(2, 90), [80, 10], cache).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_step_of_padding_alone(name: str) -> None:
    tokens, seen = ids(1, 50), torch.ones(1, 50, dtype=torch.long)
    seen[0, :20] = 0
    cache = paged(name)
    ours(name)(tokens[:, :10], attention_mask=seen[:, :10], cache=cache)
    assert cache.get_seq_length() == 10 and cache.planes.tokens == [0]
    got = ours(name)(tokens[:, 10:], attention_mask=seen, cache=cache).logits[0, 10:]
    expect_same(got, eager(name)(tokens[:, 20:]).logits[0])


@pytest.mark.parametrize("name", NAMES)
def test_assisted_generation(name: str) -> None:
    """Several query tokens a step, some rejected."""
    small = type(eager(name).config)(**mla(num_hidden_layers=1, mlp_layer_types=["dense"]))
    assistant = build(type(eager(name)), small, seed=1)
    tokens, options = ids(1, 40), dict(max_new_tokens=25, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = eager(name).generate(tokens, **options)
    assert torch.equal(ours(name).generate(tokens, **options, assistant_model=assistant, cache=paged(name)), expected)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_crop(name: str) -> None:
    """What was taken back leaves no trace, with padding among it."""
    tokens, seen = ids(2, 90), torch.ones(2, 90, dtype=torch.long)
    seen[1, 50:60] = 0
    positions = (seen.cumsum(-1) - 1).clamp(min=0)

    def run(cache: PagedCache, start: int, end: int, tokens: Tensor = tokens) -> Tensor:
        options = dict(attention_mask=seen[:, :end], position_ids=positions[:, start:end])
        return ours(name)(tokens[:, start:end], cache=cache, **options).logits

    cache, other = paged(name), paged(name)
    run(cache, 0, 45)
    run(cache, 45, 70, ids(2, 90, seed=1))
    cache.crop(-25)
    assert cache.planes.tokens == [45, 45]
    run(other, 0, 45)
    assert torch.equal(run(cache, 45, 90), run(other, 45, 90))


LOSS = {"fp32": 0, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4, "int8": 1 / 254, "fp4": 1 / 4}
"""What an element loses at most, as a share of the largest of its row."""


class Dequantised(DynamicCache):
    """transformers' own cache, but it hands out the rows that the planes of a ``PagedCache`` hold."""

    def __init__(self, of: PagedCache) -> None:
        super().__init__(config=of.config)
        self.planes = of.planes

    def held(self, kind: str, layer: int, rows: Tensor, new: Tensor) -> Tensor:
        """What stands for ``rows [B, 1, L, D]``, the last of which are ``new``."""
        plane = self.planes.layers[layer][kind]
        pages = torch.tensor([self.planes.pages.page_table(b) for b in range(len(rows))])
        entries, size = torch.arange(rows.shape[2]), self.planes.pages.page_size
        slots = (pages[:, entries // size] * size + entries % size).flatten()
        held = sparse_attn.load(plane.rows, slots, format=plane.format, dtype=torch.float32).view(rows.shape)
        share = next(share for name, share in LOSS.items() if plane.format.startswith(name))
        lost = (held[:, :, -new.shape[2] :] - new).abs()
        assert (lost <= share * new.abs().amax(-1, keepdim=True) + 2e-4).all(), (plane.format, lost.max())
        return held

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        latent, rope = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        new = torch.cat([key_states, value_states], -1)
        held = self.held("main", layer_idx, torch.cat([latent, rope], -1), new)
        return held.split([latent.shape[-1], rope.shape[-1]], -1)

    def update_indexer(self, states: Tensor, layer_idx: int) -> Tensor:
        return self.held("index", layer_idx, super().update_indexer(states, layer_idx)[:, None], states[:, None])[:, 0]


PAIRS = [
    *(("fp16", "bf16"), ("bf16", "fp16"), ("fp8_v32", "fp8_index")),
    *(("int8_v32", "int8_index"), ("fp32", "fp4_index")),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("formats", PAIRS, ids=" and ".join)
def test_formats(name: str, formats: tuple[str, str]) -> None:
    """What is stored is what transformers would keep, but for the rounding; and logits are those of transformers over
    the stored rows. The rounding is seen."""
    tokens, steps = ids(2, 120), [70, 1, 1, 48]
    cache = paged(name, format=formats[0], index_format=formats[1])
    got = logits(ours(name), tokens, steps, cache)
    expect_same(got, logits(eager(name), tokens, steps, Dequantised(cache)))
    exact = logits(eager(name), tokens, steps, DynamicCache(config=cache.config))
    assert ((got - exact).abs().amax(-1) > TOLERANCE).float().mean() > 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), *PAIRS], ids=" and ".join)
def test_bytes(name: str, formats: tuple[str, str]) -> None:
    """Those of the model's plan, for each token, and no more."""
    cache = paged(name, tokens=64, format=formats[0], index_format=formats[1])
    logits(ours(name), ids(2, 30), [30], cache)
    plan, _ = configs.plan(ours(name).config.to_dict())
    assert cache.nbytes == 64 * sum(plan.bytes_per_token({"main": formats[0], "index": formats[1]}).values())
    selecting = sum(layer.kind == "full" for layer in plan.layers)
    assert selecting == (4 if name == "DeepSeek V3.2" else 2)
    assert cache.nbytes == 64 * (
        4 * FORMATS[formats[0]].entry_bytes(576) + selecting * FORMATS[formats[1]].entry_bytes(128)
    )


@torch.no_grad()
def test_nothing_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of one token no tensor is as large as the keys of all heads, and what is read is what was selected."""
    name, seen = "DeepSeek V3.2", []
    attend = latent.attend

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return attend(*args, **kwargs)

    monkeypatch.setattr(latent, "attend", watched)
    cache = paged(name)
    logits(ours(name), ids(1, 100), [99, 1], cache)
    last = seen[-4:]
    assert [call["index_counts"].tolist() for call in last] == [[[24]]] * 4
    planes = [cache.planes.layers[n]["main"].rows for n in range(4)]
    assert all(call["kv"] is plane for call, plane in zip(last, planes, strict=True))


@torch.no_grad()
def test_a_step_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GLM-5"
    tokens, cache = ids(1, 60), paged(name)
    ours(name)(tokens[:, :40], cache=cache)
    broken = ours(name).model.layers[2].mlp
    with monkeypatch.context() as patch:
        patch.setattr(broken, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours(name)(tokens[:, 40:], cache=cache)
    assert cache.get_seq_length() == 40
    expect_same(ours(name)(tokens[:, 40:], cache=cache).logits, eager(name)(tokens).logits[:, 40:])


def test_with_another_cache_nothing_changes() -> None:
    """The wrapped classes pass on what they are called with, by place as well."""
    name, tokens = "DeepSeek V3.2", ids(1, 40)
    with torch.no_grad():
        expected = eager(name)(tokens).logits
        expect_same(ours(name)(tokens, use_cache=False).logits, expected)
        base = eager(name).model
        got = ours(name).model(tokens, None, None, paged(name)).last_hidden_state
        torch.testing.assert_close(got, base(tokens).last_hidden_state, atol=1e-4, rtol=0)


class Adapted(nn.Linear):
    """A layer whose weight is not all that it multiplies with."""


def test_refusals() -> None:
    name = "DeepSeek V3.2"
    model, cache, tokens = ours(name), paged(name), ids(2, 9)
    seen = torch.ones(2, 9, dtype=torch.long)
    seen[1, :3] = 0
    with pytest.raises(InvalidCall, match="attention: query: expected no gradient, got requires_grad; use torch.no_gr"):
        model(tokens, cache=paged(name))
    with torch.no_grad():
        model(tokens, attention_mask=seen, cache=cache)
        for mask, said in (
            (None, "attention_mask: expected a mask, as the cache was padded, got None"),
            (torch.ones(2, 1), r"attention_mask: expected a tensor \[2, 10\], got \[2, 1\]; pass the mask of padding"),
            (torch.ones(2, 10), "attention_mask: expected the tokens that were seen so far, got others; call reset"),
            (torch.zeros(2, 1, 1, 10), r"attention_mask: expected a tensor \[2, 10\], got \[2, 1, 1, 10\]"),
        ):
            with pytest.raises(InvalidCall, match=said):
                model(tokens[:, :1], attention_mask=mask, cache=cache)
        with pytest.raises(InvalidCall, match="input_ids: expected 2 sequences, got 1; call reset"):
            model(tokens[:1, :1], cache=cache)
        with pytest.raises(InvalidCall, match="crop: tokens_to_remove: expected -9 to 0, got -10"):
            cache.crop(-10)
        with pytest.raises(InvalidCall, match="output_attentions: expected False, got True"):
            model(tokens, cache=paged(name), output_attentions=True)
        with pytest.raises(InvalidCall, match="attn_implementation: expected 'sparse_attn', got 'eager'"):
            eager(name)(tokens, cache=PagedCache(eager(name).config, tokens=64))
        with pytest.raises(InvalidCall, match="model: expected glm_moe_dsa, got deepseek_v32; make the cache from"):
            model(tokens, cache=paged("GLM-5"))
        with pytest.raises(InvalidCall, match="attention: expected the module's, as register"):
            cache.update(torch.zeros(2, 1, 1, 512), torch.zeros(2, 1, 1, 64), 0)
        with pytest.raises(OutOfPages):
            model(tokens, cache=paged(name, tokens=16))
        with pytest.raises(InvalidCall, match="PagedCache: beams: expected none"):
            model.generate(tokens, num_beams=2, max_new_tokens=3, cache=paged(name), pad_token_id=0)
        adapted = copy.deepcopy(model)
        adapted.model.layers[0].self_attn.kv_b_proj.__class__ = Adapted
        with pytest.raises(InvalidCall, match="kv_b_proj: expected a torch.nn.Linear, got Adapted; load the model"):
            adapted(tokens, cache=paged(name))
    for options, said in (
        (dict(format="fp8_v4"), "prefill with the main plane in fp8_v4: expected bf16 or fp16 or fp32 or fp8_v32"),
        (dict(index_format="int4_index_h"), "prefill with the index plane in int4_index_h: expected bf16 or"),
    ):
        with pytest.raises(Unsupported, match=said):
            paged(name, **options)
    narrow = v32.DeepseekV32Config(**mla(kv_lora_rank=256))
    with pytest.raises(Unsupported, match="the main plane in fp8_v32: expected rows of 576 elements, got 320"):
        PagedCache(narrow, tokens=64, format="fp8_v32")


@pytest.mark.slow
@torch.no_grad()
def test_released_sizes() -> None:
    """A layer of V3.2 with the heads and ranks that were released, and a smaller budget."""
    sizes = mla(num_hidden_layers=1, mlp_layer_types=["dense"], hidden_size=7168, num_attention_heads=128)
    sizes |= dict(num_key_value_heads=128, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128, index_n_heads=64)
    model = build(
        v32.DeepseekV32ForCausalLM, v32.DeepseekV32Config(**sizes | dict(index_topk=256, initializer_range=0.02))
    )
    tokens, steps = ids(1, 520), [256, 256, 1, 7]
    expected = logits(model, tokens, steps, DynamicCache(config=model.config))
    model.set_attn_implementation("sparse_attn")
    cache = PagedCache(model.config, tokens=576)
    expect_same(logits(model, tokens, steps, cache), expected)
    assert cache.nbytes == 576 * 4 * (576 + 128)
