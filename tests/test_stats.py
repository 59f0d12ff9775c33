"""Counts of pairs, FLOPs and bytes: against a count entry by entry, what the references do, and published figures."""

from __future__ import annotations

import doctest
import json
import random
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn.models import METHODS, PRESETS, Layer, Model, Plane, Selection, dense, gqa, shard, sparse
from sparse_attn.serving.stats import FOLD, RATIOS, Counter, Counts, Stats, StepStats

SMALL = {2048: 16, 1024: 9, 512: 12, 257: 9, 128: 8, 64: 16, 32: 8, 16: 4}
"""Numbers of entries and tokens, and those that bite in short sequences."""
COUNTS = {2048: 9, 1024: 7, 512: 6, 256: 5, 16: 5}
"""Likewise budgets."""

LLAMA = gqa("llama", 3, 8, 2, 16)
GLM53 = Model(
    "glm-5.3",
    tuple(
        Layer(
            number=n,
            q_heads=8,
            kv_heads=1,
            qk_dim=576,
            v_dim=512,
            planes=(Plane("main", (576,), "bf16"), Plane("index", (128,), "bf16", ratio=4)),
            selection=Selection(513, 32, 128, block=4, tail="reserved"),
            kv_owner=n,
            index_owner=n,
            selection_owner=n,
        )
        for n in range(2)
    ),
)
MODELS = {
    **PRESETS,
    "glm-5.3": GLM53,
    "glm-5.3, pairs of pools": replace(
        GLM53,
        layers=tuple(
            replace(layer, selection=Selection(65, 32, 128, block=8, tail="reserved")) for layer in GLM53.layers
        ),
    ),
    "tokens": sparse(LLAMA, METHODS["tokens"], 2048),
    "tokens, a share": sparse(LLAMA, METHODS["tokens"], 16, Fraction(2, 7)),
    "quest": sparse(gqa("llama", 4, 8, 2, 16), METHODS["quest"], 256),
    "quest, a share": sparse(gqa("llama", 4, 8, 2, 16), METHODS["quest"], 2, Fraction(1, 4)),
    "moba": sparse(LLAMA, METHODS["moba"], 3),
    "nsa": sparse(LLAMA, METHODS["nsa"], 16),
}


def small(model: Model) -> Model:
    """The plan with budgets, blocks, ratios and windows that bite in sequences of some dozens of tokens."""

    def plane(p: Plane) -> Plane:
        return replace(p, ratio=SMALL.get(p.ratio, p.ratio), entries=SMALL.get(p.entries, p.entries))

    def layer(old: Layer) -> Layer:
        chosen = old.selection
        if chosen:
            sizes = {name: getattr(chosen, name) for name in ("block", "span", "candidate_block")}
            blocks = {name: SMALL.get(size, size) for name, size in sizes.items()}
            counts = {"k": COUNTS.get(chosen.k, chosen.k), "candidate_k": 4 if chosen.candidate_k else 0}
            counts["k"] = {513: 6, 65: 4}.get(counts["k"], counts["k"])
            chosen = replace(chosen, **blocks, **counts)
        window = SMALL.get(old.window, old.window)
        return replace(old, window=window, selection=chosen, planes=tuple(map(plane, old.planes)))

    return Model(model.name, tuple(map(layer, model.layers)))


# --- The oracle: each query token by itself, entry by entry ------------------------------------------------------


def covered(plane: Plane, position: int, span: int = 0) -> list[range]:
    """Tokens of each entry that is complete at a position."""
    found: list[range] = []
    while (
        tokens := range(len(found) * plane.ratio, len(found) * plane.ratio + (span or plane.ratio))
    ).stop <= position + 1:
        found.append(tokens)
    return found


def row(model: Model, layer: Layer, position: int, draw: random.Random) -> dict[str, int]:
    """Pairs of one query token in one layer, selected by random scores."""
    pairs = {"dense": position + 1}
    if layer.window:
        pairs["window"] = len([t for t in range(position + 1) if position - t < layer.window])
    if layer.kv_owner is None:
        return pairs
    main = covered(model.plane("main", layer.number), position)
    if layer.selection_owner is None:
        return pairs | {"main": len(main)}
    owner = model.layers[layer.selection_owner]
    chosen = owner.selection
    assert chosen
    index_plane, main_plane = model.plane("index", owner.number), model.plane("main", layer.number)
    index = covered(index_plane, position, chosen.span)
    tokens_a_unit = chosen.block * main_plane.ratio

    def unit_of(entry: int) -> set[int]:
        strides = range(index[entry].start, index[entry].stop, index_plane.ratio)
        return {t // tokens_a_unit for t in strides}

    scorable = list(range(len(index)))
    if owner.candidate_owner not in (None, owner.number):
        blocks = sorted({e // chosen.candidate_block for e in scorable})
        taken = set(draw.sample(blocks[:-1], min(chosen.candidate_k - 1, len(blocks[:-1])))) | set(blocks[-1:])
        scorable = [e for e in scorable if e // chosen.candidate_block in taken]
    whole = {u for e in scorable for u in unit_of(e)}
    every = whole if chosen.tail == "none" else whole | {t // tokens_a_unit for t in range(position + 1)}
    tail = every - whole
    budget = chosen.k - (chosen.tail == "reserved" and not tail)
    if chosen.share is not None:
        budget = max(chosen.k, -(-len(every) * chosen.share.numerator // chosen.share.denominator))
    made = owner.candidate_owner == owner.number
    scores = made or len(every) > budget
    ascending = sorted(every)
    kept = ascending[::-1][: max(chosen.keep_last, len(tail))]
    kept = [*kept, *(u for u in ascending[: chosen.keep_first] if u not in kept)][:budget]
    rest = [u for u in ascending if u not in kept]
    units = {*kept, *draw.sample(rest, min(budget - len(kept), len(rest)))}
    pairs["main"] = len([e for e, tokens in enumerate(main) if e // chosen.block in units])
    if layer.index_owner is not None:
        pairs["scored"] = len(scorable) if scores else 0
    if layer.attends_index:
        pairs["index"] = len(index)
    return pairs


def counted(model: Model, layer: Layer, spans: list[tuple[int, int]], draw: random.Random) -> dict[str, int]:
    total: dict[str, int] = {}
    for before, after in spans:
        for position in range(before, after):
            for kind, pairs in row(model, layer, position, draw).items():
                total[kind] = total.get(kind, 0) + pairs
    return total


def kinds(model: Model) -> list[int]:
    """The first layer of each sort."""
    found: dict[object, int] = {}
    for layer in model.layers:
        owner = layer if layer.selection_owner is None else model.layers[layer.selection_owner]
        ratios = [(kind, model.plane(kind, layer.number).ratio) for kind in layer.reads]
        restricted = owner.candidate_owner is not None, owner.candidate_owner == owner.number
        found.setdefault((layer.kind, layer.window, layer.selection, *ratios, restricted), layer.number)
    return [*found.values()]


lengths = st.tuples(st.integers(0, 150), st.integers(1, 40) | st.just(1)).map(lambda s: (s[0], s[0] + s[1]))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10, deadline=None)
@given(spans=st.lists(lengths, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_pairs_are_those_of_a_count_entry_by_entry(name: str, spans: list[tuple[int, int]], seed: int) -> None:
    model = small(MODELS[name])
    layers = Counter(model).layers(spans)
    for number in kinds(model):
        layer, found = model.layers[number], dict(layers[number].pairs)
        expected = counted(model, layer, spans, random.Random(seed))
        chosen = layer.selection
        if chosen and name == "glm-5.3, pairs of pools":
            # an incomplete unit may be selected or not: at most the entries that it lacks
            over = found.pop("main") - expected.pop("main")
            assert 0 <= over < chosen.block * sum(after - before for before, after in spans)
        assert found == expected, layer
    total = Counter(model)(spans)
    assert sum(layers, Counts()).pairs == total.pairs and sum(layers, Counts()).flops == total.flops


@pytest.mark.parametrize("name", MODELS)
def test_sums_of_long_sequences(name: str) -> None:
    """The plans as they are: a look-up far beyond every budget against its own rule, token by token."""
    counter = Counter(MODELS[name])
    for start in (0, 16_300, 40_000):
        for rule, values in counter._tables.items():
            ns = range(start + 1, start + 100)
            assert values.between([(start, start + 99)]) == values.at([*ns]) == sum(map(rule, ns)), rule


# --- Published figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8 << 10, 100 << 10])
def test_flops_of_a_token_as_published(length: int) -> None:
    """InferenceX-app PR 849: FLOPs of a decoded token in V4-Pro and R1, by layer, with windows and indexer."""
    window = 128 * 2 * 1024 * 128  # 33.6M
    hca = 2048 * length + window
    csa = 4096 * length + 65_536 * min(length, 4096) + window
    layers = Counter("deepseek-v4-pro").layers([(length - 1, length)])
    assert sorted({found.flops["attend"] + found.flops.get("select", 0) for found in layers}) == sorted({hca, csa})
    assert [found.flops["attend"] for found in layers].count(hca) == 31
    r1 = Counter(dense(PRESETS["deepseek-v3.2"]))([(length - 1, length)])
    assert r1.flops["attend"] == r1.flops["dense"] == 61 * 278_528 * length
    assert r1.effective_kv_ratio == 1 and "select" not in r1.flops


def test_flops_of_v32_at_128k() -> None:
    """What vLLM's counter has as 655 GF of attention is 10.2 GF, with an indexer of 131 GF that it leaves out."""
    found = Counter("deepseek-v3.2")([(131_071, 131_072)])
    flops_a_pair = 2 * 128 * (192 + 128)  # of MHA, as vLLM counts it
    assert found.pairs["main"] == 61 * 2048 and found.pairs["scored"] == found.pairs["dense"] == 61 * 131_072
    assert found.pairs["dense"] * flops_a_pair == pytest.approx(655e9, rel=1e-3)
    assert found.pairs["main"] * flops_a_pair == pytest.approx(10.2e9, rel=4e-3)
    assert found.flops["select"] == pytest.approx(131e9, rel=1e-3)
    assert found.selection_flops_ratio == pytest.approx(131 / (131 + 10.2 * 1088 / 320), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "size"), [("deepseek-v4.1-flash", 890), ("deepseek-v4-flash", 3514), ("deepseek-v3.2", 48_068)]
)
def test_bytes_written_a_token(name: str, size: int) -> None:
    """As published, a token over many: windows and states apart, which do not grow."""
    found = Counter(name)([(0, 128_000)])
    assert round((found.written["main"] + found.written["index"]) / 128_000) == size
    steps = sum((Counter(name)([(n, n + 1)]) for n in range(256, 384)), Counts())
    assert round((steps.written["main"] + steps.written["index"]) / 128) == size


# --- Steps -------------------------------------------------------------------------------------------------------


def test_steps_and_requests_add_up() -> None:
    """Random steps with prefill in chunks, drafts that are rejected, and preemption: every count, exactly."""
    draw = random.Random(0)
    stats, counter = Stats("deepseek-v4.1-flash", drafts=3), Counter("deepseek-v4.1-flash")
    lengths: dict[str, int] = {}
    apart: dict[str, StepStats] = {}
    total = StepStats()
    for _ in range(2 * FOLD):
        batch = {}
        for name in ("a", "b", "c"):
            before = lengths.get(name, 0)
            if before and draw.random() < 0.02:
                before = 0  # preempted
            new = draw.randint(200, 900) if before < 700 else draw.choice((1, 4, 4))
            batch[name] = before, before + new
            lengths[name] = before + new - (draw.randint(0, 3) if new == 4 else 0)
        expected = StepStats()
        for name, span in batch.items():
            alone = counter([span])
            one = StepStats(decode=alone) if span[0] and span[1] - span[0] <= 4 else StepStats(prefill=alone)
            apart[name] = apart.get(name, StepStats()) + one
            expected += one
        assert stats.step(batch) == expected
        total += expected
    assert stats.total == total and total.decode.tokens and total.prefill.tokens
    for name in batch:
        assert stats.finish(name) == apart[name]
    with pytest.raises(KeyError, match="request 'a': expected one that was in a step"):
        stats.finish("a")


def test_one_query_token_reads_the_same_alone_or_shared() -> None:
    found = Counter("deepseek-v4-pro")([(5000, 5001), (90, 91)])
    assert found.read == found.least_read
    several = Counter("deepseek-v4-pro")([(4000, 5001)])
    assert several.least_read == {**found.least_read, **Counter("deepseek-v4-pro")([(5000, 5001)]).least_read} | {
        "state": several.least_read["state"]
    }
    assert all(several.least_read[kind] <= size for kind, size in several.read.items())


def test_lines_of_json() -> None:
    stats = Stats("minimax-m3")
    line = json.loads(json.dumps(stats.step({1: (0, 5000), 2: (5000, 5001)}).to_dict()))
    assert line["effective_kv_ratio"] == stats.total.effective_kv_ratio == stats.total.total.effective_kv_ratio
    assert line["decode"]["pairs"] == {"dense": 60 * 5001, "main": 3 * 5001 + 57 * (15 * 128 + 9), "scored": 57 * 5001}
    assert line["decode"]["attended_pairs"] == line["decode"]["pairs"]["main"]
    assert {*RATIOS, "bytes_read"} <= line["decode"].keys()
    assert line["prefill"]["tokens"] == 5000 and line["prefill"]["sequences"] == 1


def test_a_first_token_is_no_decode() -> None:
    stats = Stats("qwen3-8b", drafts=1)
    step = stats.step({"a": (0, 1), "b": (5, 7), "c": (5, 8)})
    assert (step.prefill.tokens, step.decode.tokens) == (1 + 3, 2)


def test_nothing_counts_as_nothing() -> None:
    assert Stats("qwen3-8b").step({}) == StepStats()
    assert Counts().effective_kv_ratio == Counts().selection_flops_ratio == 0


def test_a_rank_computes_its_share() -> None:
    span = [(5000, 5001)]
    whole, part = Counter("minimax-m3")(span), Counter(shard(PRESETS["minimax-m3"], 4))(span)
    assert part.pairs == whole.pairs
    assert {kind: whole.flops[kind] / part.flops[kind] for kind in part.flops} == dict.fromkeys(whole.flops, 4)
    assert (whole.read["main"] / part.read["main"], whole.read["index"] / part.read["index"]) == (4, 1)
    v32, rank = Counter("deepseek-v3.2")(span), Counter(shard(PRESETS["deepseek-v3.2"], 8))(span)
    assert rank.flops["select"] == v32.flops["select"] and rank.flops["attend"] == v32.flops["attend"] / 8
    assert rank.read == v32.read


def test_formats() -> None:
    own, bf16 = (Counter("deepseek-v3.2", formats)([(5000, 5001)]) for formats in ({}, {"main": "bf16"}))
    assert (own.read["main"], bf16.read["main"]) == (61 * 2048 * 656, 61 * 2048 * 1152)
    assert own.read["index"] == bf16.read["index"] == 61 * 5001 * 132
    assert own.read["dense"] == bf16.read["dense"] == 61 * 5001 * 1152
    assert bf16.written["main"] == 61 * 1152


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Counter("gpt"), "model: expected a plan or one of deepseek-v3.2, .*, got 'gpt'"),
        (lambda: Counter("qwen3-8b")([(3, 3)]), "lengths: expected 0 <= before < after, got 3 before and 3 after"),
        (lambda: Counter("qwen3-8b", {"main": "fp8"}), "got 'fp8'"),
        (lambda: Stats("qwen3-8b").step({"a": (-1, 4)}), "got -1 before"),
        (lambda: Stats("qwen3-8b").step({"a": 5}), "request 'a': expected its tokens before and after, got 5"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_drafts_are_not_below_0() -> None:
    with pytest.raises(ValueError, match="drafts: expected 0 or more, got -1"):
        Stats("deepseek-v3.2", drafts=-1)


def test_a_refused_step_counts_nothing() -> None:
    stats = Stats("qwen3-8b")
    with pytest.raises(ValueError):
        stats.step({"a": (0, 4), "b": (2, 1)})
    assert stats.total == StepStats()
    with pytest.raises(KeyError):
        stats.finish("a")


@pytest.mark.parametrize("name", PRESETS)
def test_a_large_step_is_quick(name: str) -> None:
    """Goal: 1 ms for 256 sequences. The bound here is generous, as machines are shared."""
    stats, times = Stats(name), []
    batch = {n: (1000 * n + 7, 1000 * n + 8) for n in range(1, 257)}
    for _ in range(5):
        start = time.process_time()
        stats.step(batch)
        times.append(time.process_time() - start)
        batch = {n: (after, after + 1) for n, (_, after) in batch.items()}
    assert min(times) < 0.005


def test_examples_of_the_page() -> None:
    result = doctest.testfile(str(Path(__file__).parents[1] / "docs" / "signals.md"), module_relative=False)
    assert result.attempted >= 15 and result.failed == 0
