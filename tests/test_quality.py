"""benchmarks/quality.py on a small random model: against transformers, dense attention and formats read as they are."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from sparse_attn import attend, select, store

pytest.importorskip("transformers")

KV_HEADS, GROUP, DIM, TOKENS = 2, 3, 16, 320
FORMATS = {"int8_index_h": torch.int8, "int4_index_h": torch.uint8, "int8": torch.int8}


@pytest.fixture(scope="module")
def quality():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
        yield importlib.import_module("quality")


@pytest.fixture(scope="module")
def llama(quality):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=KV_HEADS * GROUP * DIM, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS, head_dim=DIM, initializer_range=0.3,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    quality.register()
    return made


def read(quality, llama, setting, tokens, chunk):
    llama.set_attn_implementation("quality")
    cache = quality.Cache(llama.config, setting, TOKENS)
    return quality.losses(llama, cache, tokens, 0, chunk), cache


def test_dense_is_the_perplexity_of_transformers(quality, llama):
    tokens = torch.randint(67, (TOKENS + 1,))
    llama.set_attn_implementation("sdpa")
    with torch.inference_mode():
        expected = cross_entropy(llama(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
    found, cache = read(quality, llama, quality.DENSE, tokens, 100)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert cache.pairs == cache.dense_pairs == 2 * KV_HEADS * TOKENS * (TOKENS + 1) // 2


@pytest.mark.parametrize("scorer", ["tokens", "block max", "block mean", "quest", "nsa"])
def test_a_scorer_keeps_its_budget_and_sees_no_future(quality, llama, scorer):
    tokens = torch.randint(67, (TOKENS + 1,))
    dense, _ = read(quality, llama, quality.DENSE, tokens, 100)
    everything, cache = read(quality, llama, quality.Setting("1", scorer, "softmax_sum", "fp32"), tokens, 100)
    assert cache.pairs == cache.dense_pairs
    torch.testing.assert_close(everything, dense, atol=2e-4, rtol=1e-4)

    setting = quality.Setting("1/4", scorer, "softmax_sum", "int4_index_h", "int8")
    sparse, cache = read(quality, llama, setting, tokens, 100)
    unit = {"tokens": 1, "nsa": 64}.get(scorer, 16)
    kept = {"tokens": 36, "nsa": 3}.get(scorer, 4)
    pairs = 0
    for seen in range(1, TOKENS + 1):
        units = min(max(math.ceil(math.ceil(seen / 4) / unit), kept), math.ceil(seen / unit))
        pairs += units * unit - (math.ceil(seen / unit) * unit - seen)
    assert cache.pairs == 2 * KV_HEADS * pairs
    assert (sparse - dense).abs().max() > 0.1
    again, _ = read(quality, llama, setting, tokens, 7)
    torch.testing.assert_close(again, sparse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("scorer", ["block mean", "quest", "nsa"])
def test_planes_hold_rounded_rows_and_summaries_of_exact_keys(quality, llama, scorer):
    k, v = torch.randn(2, 3, 100, KV_HEADS, DIM)
    cache = quality.Cache(llama.config, quality.Setting("1/4", scorer, "softmax_sum", "fp32", "int4_index_h"), TOKENS)
    for start, end in ((0, 7), (7, 50), (50, 100)):
        cache.write(1, k[1, start:end], v[1, start:end], start)
    assert torch.equal(cache.keys[1, :100], quality.rounded(k[1], "int4_index_h"))
    assert torch.equal(cache.values[1, :100], quality.rounded(v[1], "int4_index_h"))
    span = 32 if scorer == "nsa" else 16
    for n in range((100 - span) // 16 + 1):
        part = k[1, 16 * n : 16 * n + span]
        expected = torch.cat([part.amin(0), part.amax(0)], -1) if scorer == "quest" else part.mean(0)
        torch.testing.assert_close(cache.index[1, n], expected)
    assert not cache.index[1, (100 - span) // 16 + 1 :].any() and not cache.index[0].any()


def test_coarser_formats_change_more(quality, llama):
    tokens = torch.randint(67, (TOKENS + 1,))

    def moved(setting, base):
        sparse, dense = (read(quality, llama, s, tokens, 100)[0] for s in (setting, base))
        return float((sparse - dense).square().mean())

    kv8, kv4 = (moved(quality.Setting(kv=kv), quality.DENSE) for kv in ("int8", "int4_index_h"))
    assert 0 < 20 * kv8 < kv4
    exact, fine, coarse, before = (
        quality.Setting("1/4", "tokens", "softmax_sum", index, kv)
        for index, kv in (("fp32", "fp32"), ("int8_index_h", "fp32"), ("int4_index_h", "fp32"), ("kv", "int4_index_h"))
    )
    assert 0 < 2 * moved(fine, exact) < moved(coarse, exact)
    after = quality.Setting("1/4", "tokens", "softmax_sum", "fp32", "int4_index_h")
    assert moved(before, after) > 0
    own = quality.Setting("1/4", "tokens", "softmax_sum", "int4_index_h", "int4_index_h")
    assert moved(before, own) == 0  # keys that are attended, rounded as the index would be


def plane(rows, format):
    width = DIM // 2 if format == "int4_index_h" else DIM
    made = torch.zeros(5, 64, KV_HEADS, width, dtype=FORMATS[format])
    scale = torch.zeros(5, 64, KV_HEADS, dtype=torch.float16)
    store(rows, made, torch.arange(TOKENS), scale=scale, format=format)
    return made, scale


def test_rounded_rows_are_what_the_ops_read_in_the_format(quality):
    k, v, q = (torch.randn(TOKENS, heads, DIM) for heads in (KV_HEADS, KV_HEADS, KV_HEADS * GROUP))
    lengths = dict(
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32), seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        scale=0.3, max_seqlen_q=8, max_seq_len=TOKENS, page_table=torch.arange(5, dtype=torch.int32)[None],
    )  # fmt: skip
    for format in ("int8_index_h", "int4_index_h"):
        arguments = dict(weights=None, k=40, score="softmax_sum", out_heads=KV_HEADS, order="index", **lengths)
        keys, scale = plane(k, format)
        as_is = select(q[:8], keys=keys, key_scale=scale, format=format, **arguments)
        values = select(q[:8], keys=quality.rounded(k, format).view(5, 64, KV_HEADS, DIM), format="fp32", **arguments)
        assert torch.equal(as_is.indices, values.indices)
    (keys, k_scale), (vs, v_scale) = plane(k, "int8"), plane(v, "int8")
    as_is = attend(q[:8], kv=keys, v=vs, kv_scale=k_scale, v_scale=v_scale, format="int8", v_dim=DIM, **lengths)
    k8, v8 = (quality.rounded(rows, "int8").view(5, 64, KV_HEADS, DIM) for rows in (k, v))
    values = attend(q[:8], kv=k8, v=v8, format="fp32", v_dim=DIM, **lengths)
    torch.testing.assert_close(as_is, values, atol=1e-5, rtol=1e-5)


def test_a_run_of_the_script(quality, llama, tmp_path, monkeypatch, capsys):
    """Every phase, on a short context; a second run adds nothing."""

    def tokenizer(text, **_):
        return {"input_ids": [ord(c) % 67 for c in text]}

    for name, value in dict(CONTEXT=1024, PROMPT=896, SCORED=512, STEPS=128, TEXTS=("argparse",)).items():
        monkeypatch.setattr(quality, name, value)
    monkeypatch.setattr(quality.model, "load", lambda say: (llama, tokenizer))
    settings = quality.DENSE, quality.BEST
    monkeypatch.setattr(
        quality,
        "cells",
        lambda: [(p, "argparse", s) for p in ("prefill", "decode", "steps", "needle") for s in settings],
    )
    results = tmp_path / "results.jsonl"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["quality.py", str(results), "--work", str(tmp_path)])
        quality.main()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({line["cell"] for line in lines}) == len(lines) == 8
    by_phase = {line["phase"]: line for line in lines if line["share"]}
    dense = {line["phase"]: line for line in lines if not line["share"]}
    for phase, tokens in (("prefill", 512), ("decode", 128), ("steps", 128)):
        assert by_phase[phase]["tokens"] == tokens and 0.2 < by_phase[phase]["pairs"] < 0.3
        assert all(math.isfinite(nats) for nats in by_phase[phase]["nats"])
        assert by_phase[phase]["nats"] != dense[phase]["nats"]
    assert dense["steps"]["nats"] == pytest.approx(dense["decode"]["nats"], abs=2e-4)
    assert by_phase["steps"]["nats"] == pytest.approx(by_phase["decode"]["nats"], abs=2e-4)
    mean = sum(dense["prefill"]["nats"][-4:]) / 4  # the last 128 of its 512 tokens are those of decode
    assert sum(dense["decode"]["nats"]) / 16 == pytest.approx(mean, abs=2e-4)
    assert len(by_phase["needle"]["passed"]) == 8

    monkeypatch.setattr("sys.argv", ["quality.py", str(results), "--table"])
    capsys.readouterr()
    quality.main()
    more = [a - b for a, b in zip(by_phase["decode"]["nats"], dense["decode"]["nats"], strict=True)]
    change = math.expm1(sum(more) / 16)
    error = (sum((x - sum(more) / 16) ** 2 for x in more) / 15 / 16) ** 0.5
    assert f"| {change:+.2%} ± {error:.2%} |" in capsys.readouterr().out


def test_every_cell_has_a_name_of_its_own(quality):
    names = {}
    for phase, text, setting in quality.cells():
        assert names.setdefault(f"{phase}, {text}, {setting.name}", setting) == setting
        assert setting.scorer in ("", *quality.SCORERS) and phase.split()[0] in quality.CHUNKS
