"""What is in `examples` runs, and gives what it should."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import sparse_attn

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


engine = load("engine")


def requests(new: int = 9) -> list:
    prompts = [torch.randint(engine.VOCABULARY, (n,)).tolist() for n in (3, 40, 17, 1, 60, 5, 29, 16)]
    return [engine.Request(prompt, len(prompt) + new) for prompt in prompts]


def greedy(model, prompt: list[int], end: int) -> list[int]:
    """The whole sequence again for every token, with PyTorch's attention over all of it."""
    tokens = list(prompt)
    while len(tokens) < end:
        positions = torch.arange(len(tokens))
        x = model.embedding[torch.tensor(tokens)]
        for layer in range(engine.LAYERS):
            q, k, v = (y.transpose(0, 1)[None] for y in model.project(layer, x, positions))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = model.finish(layer, x, out[0].transpose(0, 1))
        tokens.append(int((rms_norm(x[-1:], (engine.WIDTH,)) @ model.head).argmax()))
    return tokens


@pytest.fixture(scope="module")
def model():
    return engine.Model()


def test_the_engine_is_exact_where_all_is_attended(model, monkeypatch) -> None:
    monkeypatch.setattr(engine, "BUDGET", engine.LENGTH)
    some = requests()
    expected = [greedy(model, r.tokens, r.end) for r in some]
    engine.Engine(model).run(some)
    assert [r.tokens for r in some] == expected


def test_requests_do_not_depend_on_others(model) -> None:
    """More requests than seats, and pages, in chunks; the sparse budget is in force."""
    some = requests()
    alone = [engine.Request(list(r.tokens), r.end) for r in some]
    dense = [greedy(model, r.tokens, r.end) for r in some]
    used = engine.Engine(model)
    used.run(some)
    for request in alone:
        engine.Engine(model).run([request])
    assert [r.tokens for r in some] == [r.tokens for r in alone]
    assert [r.tokens for r in some] != dense
    assert used.pages.free_pages == engine.PAGES and not any(used.seats)


def test_few_pages(model, monkeypatch) -> None:
    some = requests()
    expected = [engine.Request(list(r.tokens), r.end) for r in some]
    engine.Engine(model).run(expected)
    monkeypatch.setattr(engine, "PAGES", 9)
    engine.Engine(model).run(some)
    assert [r.tokens for r in some] == [r.tokens for r in expected]
    with pytest.raises(ValueError, match="run: expected a prompt and an end of at most 96 tokens"):
        engine.Engine(model).run([engine.Request([1] * 70, 73)])


def test_a_step_reads_nothing_back_and_moves_no_buffer(model) -> None:
    """On the device ``meta`` there are no values to read."""
    used = engine.Engine(engine.Model("meta"))
    used.step()
    used = engine.Engine(model)
    buffers = [x for x in vars(used).values() if isinstance(x, Tensor)]
    before = [x.data_ptr() for x in buffers]
    used.run(requests())
    assert len(buffers) == 11
    assert [x.data_ptr() for x in vars(used).values() if isinstance(x, Tensor)] == before


def test_the_engine_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "engine.py"], capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert [len(line.split()) for line in done.stdout.splitlines()] == [12] * 6


def code_of_the_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "examples.md").read_text(), re.DOTALL)


def test_the_code_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(code_of_the_page()[0], names)  # `load` has put the module where it is imported from
    assert [len(r.tokens) for r in names["requests"]] == [12, 45]


@pytest.mark.slow
def test_decoding_from_cpp(tmp_path, monkeypatch) -> None:
    """As the page builds and calls it; errors keep their type."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    q, keys, values = torch.randn(3, 4, 8), torch.randn(9, 4, 2, 8), torch.randn(9, 4, 2, 8)
    table = torch.randperm(9, dtype=torch.int32).view(3, 3)
    seq_lens = torch.tensor([12, 1, 7], dtype=torch.int32)
    options = dict(page_table=table, scale=0.3, max_seqlen_q=1, max_seq_len=12, format="fp32", seq_lens=seq_lens)
    options |= dict(cu_seqlens_q=torch.arange(4, dtype=torch.int32))
    chosen = sparse_attn.select(q, None, keys=keys, k=5, score="softmax_sum", out_heads=2, **options)
    lists = dict(indices=chosen.indices, index_counts=chosen.counts)
    expected = sparse_attn.attend(q, kv=keys, v=values, v_dim=8, **lists, **options)
    names: dict[str, Any] = dict(torch=torch, q=q, keys=keys, values=values, page_table=table, seq_lens=seq_lens)
    exec(code_of_the_page()[1], names)
    assert torch.equal(names["out"], expected)
    decode = torch.ops.sparse_attn_example.decode
    with pytest.raises(sparse_attn.InvalidCall, match="select: scale: expected a finite float32 number above 0, got 0"):
        decode(q, keys, values, table, seq_lens, 0.0, 5, 12)
