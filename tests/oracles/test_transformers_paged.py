"""`PagedCache` of models that keep other than keys and values, against transformers' own attention and caches."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import VOCABULARY, build
from test_whole_models import compressed, glm, mla, v4, v32
from test_whole_models import model as whole
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

import sparse_attn
from sparse_attn import configs
from sparse_attn.checks import InvalidCall
from sparse_attn.integrations.capabilities import Unsupported
from sparse_attn.integrations.transformers import PagedCache, latent, register
from sparse_attn.integrations.transformers import compressed as transformers_compressed
from sparse_attn.layout import FORMATS
from sparse_attn.serving.pages import OutOfPages

register()
LATENT = ["DeepSeek V3.2", "GLM-5"]
NAMES = [*LATENT, "DeepSeek V4"]
STEPS = {"one": [150], "decode": [90] + [1] * 60, "chunks": [1, 37, 64, 2, 46]}
TOLERANCE = 1e-4


@cache
def eager(name: str) -> nn.Module:
    """Biases are there and random, sinks and norms too. V4's window and larger ratio are small."""
    if name == "DeepSeek V4":
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
        config = v4.DeepseekV4Config(**compressed() | dict(sliding_window=24, compress_rates=rates))
        return build(v4.DeepseekV4ForCausalLM, config)
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


@pytest.fixture(autouse=True)
def tables_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_compressed, "POSITIONS", 16)


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


@pytest.mark.parametrize(
    "steps",
    [[300], [150, 1, 100, 49], pytest.param([140] + [1] * 160, marks=pytest.mark.slow)],
    ids=["one", "chunks", "decode"],
)
def test_logits_with_the_released_window_and_ratios(steps: list[int]) -> None:
    """Past the window of 128, and two entries of 128 tokens."""
    theirs, tokens = whole("DeepSeek V4"), ids(2, 300)
    model = copy.deepcopy(theirs)
    model.set_attn_implementation("sparse_attn")
    expected = logits(theirs, tokens, steps, DynamicCache(config=theirs.config))
    expect_same(logits(model, tokens, steps, PagedCache(model.config, tokens=1024)), expected)


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
    tokens, seen = ids(1, 90), torch.ones(1, 90, dtype=torch.long)
    seen[0, 7:30] = 0
    options = dict(attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0))
    got = ours(name)(tokens, cache=paged(name), **options).logits[seen.bool()]
    expect_same(got, eager(name)(tokens[:, seen[0].bool()]).logits[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, dict(prefill_chunk_size=17)], ids=["", "prefilled in chunks"])
def test_generate(name: str, options: dict[str, Any]) -> None:
    """A batch with padding on the left gives what its rows give alone; the cache serves a second time."""
    tokens, seen = ids(3, 50), torch.ones(3, 50, dtype=torch.long)
    seen[1, :9] = seen[2, :31] = 0
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0) | options
    alone = [
        eager(name).generate(row[real][None], **options)[0, -20:] for row, real in zip(tokens, seen.bool(), strict=True)
    ]
    cache = paged(name)
    for _ in range(2):
        got = ours(name).generate(tokens, **options, attention_mask=seen, cache=cache)
        assert torch.equal(got[:, -20:], torch.stack(alone))
        cache.reset()


@pytest.mark.parametrize("name", NAMES)
def test_sampling(name: str) -> None:
    tokens, found = ids(2, 30), []
    options = dict(max_new_tokens=20, do_sample=True, num_return_sequences=2, eos_token_id=None, pad_token_id=0)
    for model, kept in ((eager(name), None), (ours(name), paged(name))):
        torch.manual_seed(1)
        found.append(model.generate(tokens, **options, cache=kept))
    assert torch.equal(*found)


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
def test_batches_of_other_sizes(name: str) -> None:
    cache = paged(name, tokens=160)
    for batch in (2, 3, 1):
        tokens = ids(batch, 40, seed=batch)
        expected = logits(eager(name), tokens, [40], None)
        expect_same(logits(ours(name), tokens, [39, 1], cache), expected)
        cache.reset()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_loaded_in_bfloat16(name: str, tmp_path: Path) -> None:
    """As near to float32 as transformers is, while every token fits the budget."""
    tokens = ids(2, 24)
    expected = eager(name)(tokens).logits
    eager(name).save_pretrained(tmp_path)
    load = partial(type(eager(name)).from_pretrained, tmp_path, dtype=torch.bfloat16)
    half = load(attn_implementation="sparse_attn")
    lost = (half(tokens, cache=paged(name)).logits - expected).abs().mean()
    assert lost < 1.5 * (load(attn_implementation="eager")(tokens).logits - expected).abs().mean()
    main = "fp8_v4" if name == "DeepSeek V4" else "fp8_v32"
    cache = PagedCache(half.config, tokens=1024, format=main, index_format="fp8_index")
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
    assistant = build(v32.DeepseekV32ForCausalLM, v32.DeepseekV32Config(**mla(num_hidden_layers=4)), seed=1)
    tokens, options = ids(1, 40), dict(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected, cache = eager(name).generate(tokens, **options), paged(name, rewind=32)
    model = copy.deepcopy(ours(name))
    model._is_stateful = False  # what transformers keeps of V4 cannot go back
    assert torch.equal(model.generate(tokens, **options, assistant_model=assistant, cache=cache), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("back", [25, 12, 1])
@torch.no_grad()
def test_crop(name: str, back: int) -> None:
    """What was taken back, all of a step or some, leaves no trace; with padding among it."""
    tokens, seen = ids(2, 90), torch.ones(2, 90, dtype=torch.long)
    seen[1, 50:60] = 0
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    drafts = torch.cat([tokens[:, : 70 - back], ids(2, 20 + back, seed=1)], 1)

    def run(cache: PagedCache, tokens: Tensor, start: int, end: int) -> Tensor:
        options = dict(attention_mask=seen[:, :end], position_ids=positions[:, start:end])
        return ours(name)(tokens[:, start:end], cache=cache, **options).logits

    cache, other = paged(name, rewind=25), paged(name)
    run(cache, drafts, 0, 45)
    run(cache, drafts, 45, 70)
    cache.crop(-back)
    assert cache.planes.tokens == seen[:, : 70 - back].sum(1).tolist()
    run(other, tokens, 0, 70 - back)
    expected = run(other, tokens, 70 - back, 90)
    torch.testing.assert_close(run(cache, tokens, 70 - back, 90), expected, atol=2e-5, rtol=0)


LOSS = {"fp32": 0, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4, "int8": 1 / 254, "fp4": 1 / 4}
"""What an element loses at most, as a share of the largest of its row."""


class Dequantised(DynamicCache):
    """transformers' own cache, but it hands out the rows that the planes of a ``PagedCache`` hold."""

    def __init__(self, of: PagedCache) -> None:
        super().__init__(config=of.config)
        self.planes = of.planes
        for number, layer in enumerate(self.layers):
            for name in ("update", "update_indexer", "update_compressor_states"):
                if hasattr(layer, name):
                    setattr(layer, name, partial(getattr(self, "_" + name), number, getattr(layer, name)))

    def held(self, number: int, kind: str, rows: Tensor, new: int) -> Tensor:
        """What stands for ``rows [B, N, D]``, the last of the sequences, of which ``new`` were not seen before."""
        plane, last = self.planes.layers[number][kind], self.planes.tokens[0]
        ratio = next(p.ratio for p in self.planes.plan.layers[number].planes if p.kind == kind)
        entries = torch.arange(last // ratio - rows.shape[1], last // ratio)
        size = plane.rows.shape[1]
        if kind == "window":
            pages = torch.arange(len(rows))[:, None].expand(-1, len(entries))
        else:
            pages = torch.tensor([self.planes.pages.page_table(b) for b in range(len(rows))])[:, entries // size]
        slots = (pages * size + entries % size).flatten()
        held = sparse_attn.load(plane.rows, slots, format=plane.format, dtype=torch.float32).view(rows.shape)
        share = next(share for name, share in LOSS.items() if plane.format.startswith(name))
        lost = (held - rows)[:, rows.shape[1] - new :].abs()
        most = rows[:, rows.shape[1] - new :].abs().amax(-1, keepdim=True)
        assert (lost <= share * most + 2e-4).all(), (kind, plane.format, lost.max())
        return held

    def _update(self, number: int, update: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        theirs = update(keys, values, *args, **kwargs)
        if not self.planes.rings:
            held = self.held(number, "main", torch.cat(theirs, -1)[:, 0], keys.shape[2])
            return held[:, None].split([x.shape[-1] for x in theirs], -1)
        return [self.held(number, "window", theirs[0][:, 0], keys.shape[2])[:, None]] * 2

    def _update_indexer(self, number: int, update: Any, keys: Tensor) -> Tensor:
        return self.held(number, "index", update(keys), keys.shape[1])

    def _update_compressor_states(self, number: int, update: Any, name: str, new: Tensor) -> Tensor:
        kind = {"compressor": "main", "indexer": "index"}[name]
        return self.held(number, kind, update(name, new), new.shape[1])


PAIRS = [
    *(("fp16", "bf16"), ("bf16", "fp16"), ("fp8_v32", "fp8_index")),
    *(("int8_v32", "int8_index"), ("fp32", "fp4_index")),
]
V4_PAIRS = [
    *(("fp16", "bf16"), ("bf16", "fp16"), ("fp8_v4", "fp4_index")),
    *(("fp8_v4_640", "int8_index"), ("fp8_v4_608", "fp8_index")),
]
FORMATTED = [*((name, pair) for name in LATENT for pair in PAIRS), *(("DeepSeek V4", pair) for pair in V4_PAIRS)]


@pytest.mark.parametrize(("name", "formats"), FORMATTED)
def test_formats(name: str, formats: tuple[str, str]) -> None:
    """What is stored is what transformers would keep, but for the rounding; and logits are those of transformers over
    the stored rows. The rounding is seen. In larger steps it is the same."""
    tokens, steps = ids(2, 120), [40, 30, 1, 1, 48]
    cache = paged(name, format=formats[0], index_format=formats[1], rewind=47)
    reference, got, expected = Dequantised(cache), [], []
    for part in tokens.split(steps, 1):
        got.append(logits(ours(name), part, [part.shape[1]], cache))
        expected.append(logits(eager(name), part, [part.shape[1]], reference))
    expect_same(torch.cat(got, 1), torch.cat(expected, 1))
    exact = logits(eager(name), tokens, steps, DynamicCache(config=cache.config))
    lost = (torch.cat(got, 1) - exact).abs()
    assert (lost.amax(-1) > TOLERANCE).float().mean() > 0.5
    larger = logits(ours(name), tokens, [119, 1], paged(name, format=formats[0], index_format=formats[1]))
    assert (larger - torch.cat(got, 1)).abs().mean() < 0.2 * lost.mean()


@pytest.mark.parametrize(("name", "formats"), [*((name, ("fp32", "fp32")) for name in NAMES), *FORMATTED])
def test_bytes(name: str, formats: tuple[str, str]) -> None:
    """Those of the model's plan, for each token, and for each sequence what it keeps whatever its length."""
    cache = paged(name, tokens=64, format=formats[0], index_format=formats[1], rewind=3)
    logits(ours(name), ids(2, 30), [29, 1], cache)
    plan, _ = configs.plan(ours(name).config.to_dict())
    chosen = {"main": formats[0], "window": formats[0], "index": formats[1]}
    fixed = [(p, p.entry_bytes(chosen.get(p.kind, ""))) for layer in plan.layers for p in layer.planes if p.entries]
    a_sequence = sum(size * (plane.entries + 3) for plane, size in fixed)
    assert a_sequence == sum(plan.fixed_bytes(chosen).values()) + 3 * sum(size for _, size in fixed)
    assert cache.nbytes == 64 * sum(plan.bytes_per_token(chosen).values()) + 2 * a_sequence
    main, index = FORMATS[formats[0]], FORMATS[formats[1]].entry_bytes(128)
    if name in LATENT:
        selecting = 4 if name == "DeepSeek V3.2" else 2
        assert cache.nbytes == 64 * (4 * main.entry_bytes(576) + selecting * index)
        return
    row = main.entry_bytes(512)
    states = (
        2 * (8 + 3) * 4 * 4 * (512 + 128) + (16 + 3) * 2 * 4 * 512
    )  # values and gates, two of each where they overlap
    assert a_sequence == 4 * (24 + 3) * row + states
    assert cache.nbytes == 64 // 4 * 2 * (row + index) + 64 // 16 * row + 2 * a_sequence


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made, but for views of what is there already."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.there = {x.untyped_storage().data_ptr() for x in there}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.there:
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_nothing_grows_with_the_length(name: str) -> None:
    """A step of one token makes no tensor in which every token has a row, as transformers does."""
    tokens, cache = ids(1, 500), paged(name)
    theirs = DynamicCache(config=eager(name).config)
    found = {}
    for model, kept in ((ours(name), cache), (eager(name), theirs)):
        logits(model, tokens, [499, 1], kept)
        planes = [rows.rows for layer in cache.planes.layers for rows in layer.values()]
        with Largest([*model.parameters(), *planes, *cache.planes.rotations.values()]) as largest:
            model(tokens[:, :1], cache=kept)
        found[model] = largest.elements
    rows = 500 // 4 * 512 if name == "DeepSeek V4" else 500 * 6 * (32 + 64)
    assert found[ours(name)] < rows / 4 and found[eager(name)] >= rows


@torch.no_grad()
def test_what_is_read_is_what_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_step_that_fails_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last tokens alone are kept, if no more of them were new than may be taken back."""
    tokens, cache, small = ids(1, 60), paged(name, rewind=20), paged(name, rewind=19)
    broken = ours(name).model.layers[2].mlp
    for kept in (cache, small):
        ours(name)(tokens[:, :40], cache=kept)
        with monkeypatch.context() as patch:
            patch.setattr(broken, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ours(name)(tokens[:, 40:], cache=kept)
        assert kept.get_seq_length() == 40
    expect_same(ours(name)(tokens[:, 40:], cache=cache).logits, eager(name)(tokens).logits[:, 40:])
    if name == "DeepSeek V4":
        with pytest.raises(InvalidCall, match="sequence 0: expected a last step that came to its end, got a part"):
            ours(name)(tokens[:, 40:], cache=small)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_copies(name: str) -> None:
    """A copy of a cache goes its own way; and it holds nothing beside its planes that is as large."""
    first, cache = ids(2, 40), paged(name, tokens=256)
    ours(name)(first, cache=cache)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    for seed, kept in enumerate(copies):
        tokens = torch.cat([first, ids(2, 30, seed)], 1)
        expect_same(ours(name)(tokens[:, 40:], cache=kept).logits, eager(name)(tokens).logits[:, 40:])
    file = io.BytesIO()
    torch.save(cache, file)
    tables = sum(table.nbytes for table in cache.planes.rotations.values())
    assert cache.nbytes < file.tell() < cache.nbytes + tables + 50_000


def test_with_another_cache_nothing_changes() -> None:
    """The wrapped classes pass on what they are called with, by place as well."""
    name, tokens = "DeepSeek V3.2", ids(1, 40)
    with torch.no_grad():
        expected = eager(name)(tokens).logits
        expect_same(ours(name)(tokens, use_cache=False).logits, expected)
        base = eager(name).model
        got = ours(name).model(tokens, None, None, paged(name)).last_hidden_state
        torch.testing.assert_close(got, base(tokens).last_hidden_state, atol=1e-4, rtol=0)
        cache = paged(name)
        assert torch.equal(ours(name).model(tokens, past_key_values=cache).last_hidden_state, got)
        assert cache.planes.tokens == [40]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_weights_that_are_offloaded_are_refused(name: str) -> None:
    """Only when a module runs are they on its device, and attention here reads them itself."""
    model = copy.deepcopy(ours(name))
    model.model.layers[1].self_attn.to("meta")
    with pytest.raises(InvalidCall, match="weights: expected all of a layer's on its device, got offloaded ones; load"):
        model(ids(1, 9), cache=paged(name))


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
        with pytest.raises(InvalidCall, match="use_cache: expected True, got False; leave out the cache"):
            model.generate(tokens, cache=paged(name), use_cache=False, max_new_tokens=2)
        with pytest.raises(InvalidCall, match="attn_implementation: expected 'sparse_attn', got 'eager'"):
            eager(name)(tokens, cache=PagedCache(eager(name).config, tokens=64))
        with pytest.raises(InvalidCall, match="model: expected glm_moe_dsa, got deepseek_v32; make the cache from"):
            model(tokens, cache=paged("GLM-5"))
        with pytest.raises(InvalidCall, match="attention: expected that of the config's model, as register"):
            cache.update(torch.zeros(2, 1, 1, 512), torch.zeros(2, 1, 1, 64), 0)
        with pytest.raises(OutOfPages):
            model(tokens, cache=paged(name, tokens=16))
        with pytest.raises(InvalidCall, match="PagedCache: beams: expected none"):
            model.generate(tokens, num_beams=2, max_new_tokens=3, cache=paged(name), pad_token_id=0)
        adapted = copy.deepcopy(model)
        adapted.model.layers[0].self_attn.kv_b_proj.__class__ = Adapted
        with pytest.raises(InvalidCall, match="kv_b_proj: expected a torch.nn.Linear, got Adapted; load the model"):
            adapted(tokens, cache=paged(name))
    cache = paged("DeepSeek V4", rewind=4)
    assert cache.is_croppable and not paged("DeepSeek V4").is_croppable and paged("GLM-5").is_croppable
    v4_model, tokens = ours("DeepSeek V4"), ids(2, 30)
    with torch.no_grad():
        v4_model(tokens, cache=cache)
        with pytest.raises(InvalidCall, match="crop: tokens_to_remove: expected at most 4 tokens back from"):
            cache.crop(-5)
        cache.crop(-4)
        with pytest.raises(InvalidCall, match="got 5; make the cache with rewind=5 or more"):
            cache.crop(-1)
        positions = torch.tensor([[26, 27], [26, 28]])
        with pytest.raises(InvalidCall, match="position_ids: expected the tokens of sequence 1 numbered one by one"):
            v4_model(tokens[:, :2], position_ids=positions, cache=cache)
        with pytest.raises(InvalidCall, match="position_ids: expected the tokens of sequence 0 numbered one by one"):
            v4_model(tokens[:, :2], position_ids=positions[:1] + torch.tensor([[3], [0]]), cache=cache)
        dynamic = copy.deepcopy(v4_model)
        dynamic.model.rotary_emb.rope_type = {"main": "default", "compress": "dynamic"}
        with pytest.raises(InvalidCall, match="rope_type: expected rotations that do not depend on the length, got"):
            dynamic(tokens, cache=paged("DeepSeek V4"))
    with pytest.raises(InvalidCall, match="page_size: expected a multiple of 16 tokens, got 24"):
        paged("DeepSeek V4", page_size=24)
    with pytest.raises(InvalidCall, match="rewind: expected 0 or more tokens, got -1"):
        paged("DeepSeek V4", rewind=-1)
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
@pytest.mark.parametrize("name", ["DeepSeek V3.2", "DeepSeek V4"])
@torch.no_grad()
def test_released_sizes(name: str) -> None:
    """Layers with the heads, widths and ranks that were released, and a smaller budget."""
    if name == "DeepSeek V3.2":
        sizes = mla(num_hidden_layers=1, mlp_layer_types=["dense"], hidden_size=7168, num_attention_heads=128)
        sizes |= dict(num_key_value_heads=128, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128, index_n_heads=64)
        sizes |= dict(index_topk=256, initializer_range=0.02)
        model = build(v32.DeepseekV32ForCausalLM, v32.DeepseekV32Config(**sizes))
        held = 576 * (576 + 128)
    else:
        sizes = compressed() | dict(hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8)
        sizes |= dict(o_lora_rank=1024, index_n_heads=64, index_topk=64, initializer_range=0.02, hc_mult=4)
        model = build(v4.DeepseekV4ForCausalLM, v4.DeepseekV4Config(**sizes))
        states = 2 * 8 * 4 * (512 + 128) + 128 * 2 * 512
        held = 2 * 768 // 4 * (512 + 128) + 768 // 128 * 512 + 4 * 128 * 512 + states
    tokens, steps = ids(1, 520), [256, 256, 1, 7]
    expected = logits(model, tokens, steps, DynamicCache(config=model.config))
    model.set_attn_implementation("sparse_attn")
    cache = PagedCache(model.config, tokens=576)
    expect_same(logits(model, tokens, steps, cache), expected)
    assert cache.nbytes == 4 * held
