"""Tiny random models, whole, over paged planes and the ops alone, beside the same models in transformers.

transformers runs each sequence by itself and in one pass. Here they run together, in chunks, with drafts, preempted and
forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from engine import Alter, Answer, Engine, Judge, Layers, Ops, Pool, Step
from hf import VOCABULARY, build
from layers import BlockGqa, Compressed, Mla
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparse_attn import registry
from sparse_attn.ops import Selected

v32 = pytest.importorskip("transformers.models.deepseek_v32")
glm = pytest.importorskip("transformers.models.glm_moe_dsa")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl")
v4 = pytest.importorskip("transformers.models.deepseek_v4")

TOLERANCE = 1e-4
TIE = 1e-5
"""Scores that differ by less are equal up to rounding."""
SEEN = 0.1
"""What a fault must move some logit by."""

TOKENS = {0: 264, 1: 160, 2: 71}
"""Tokens of each sequence."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
}
DENSE = ["dense"] * 4
"""MLPs: rounding cannot send a token to another expert."""


def mla(**more: Any) -> dict[str, Any]:
    return COMMON | {
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "mlp_layer_types": DENSE,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        # with few index heads many scores are exactly 0 after the relu
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 24,
        **more,
    }


def compressed() -> dict[str, Any]:
    layers = [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ]
    return COMMON | {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "mlp_layer_types": ["hash_moe"] * len(layers),  # experts by token, not by score
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "head_dim": 512,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 16,
        "sliding_window": 128,
        "hc_mult": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    }


@cache
def model(name: str) -> nn.Module:
    if name == "DeepSeek V3.2":
        yarn = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        return build(v32.DeepseekV32ForCausalLM, v32.DeepseekV32Config(**mla(rope_parameters=yarn)))
    if name == "GLM-5":
        sizes = mla(indexer_types=["full", "shared", "full", "shared"])
        return build(glm.GlmMoeDsaForCausalLM, glm.GlmMoeDsaConfig(**sizes))
    if name == "DeepSeek V4":
        return build(v4.DeepseekV4ForCausalLM, v4.DeepseekV4Config(**compressed()))
    assert name == "MiniMax-M3"
    config = m3.MiniMaxM3VLTextConfig(
        **COMMON,
        dense_intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * 3,
        mlp_layer_types=DENSE,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        rotary_dim=64,
        index_n_heads=2,
        index_head_dim=64,
        index_block_size=16,
        index_topk_blocks=4,
        index_local_blocks=1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return build(m3.MiniMaxM3VLForCausalLM, config)


LAYERS: dict[str, Callable[..., Layers]] = {
    "DeepSeek V3.2": Mla,
    "GLM-5": Mla,
    "MiniMax-M3": BlockGqa,
    "DeepSeek V4": Compressed,
}


class Ranked(TorchFunctionMode):
    """Keeps what each top-k ranks and picks. Only indexers rank in these models."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk:
            self.seen.append((args[0][0], result.indices[0]))
        return result


@cache
def tokens(sequence: int) -> Tensor:
    return torch.randint(VOCABULARY, (TOKENS[sequence],), generator=torch.Generator().manual_seed(sequence))


@cache
def answer(name: str, sequence: int) -> Answer:
    """The oracle: the untouched model, one sequence, one pass, no cache."""
    with torch.no_grad(), Ranked() as ranked:
        answer = Answer(model(name)(input_ids=tokens(sequence)[None], use_cache=False).logits[0])
    modules = [layer.self_attn for layer in model(name).model.layers]
    indexed = [n for n, m in enumerate(modules) if getattr(getattr(m, "compressor", m), "indexer", None) is not None]
    for layer, (scores, picks) in zip(indexed, ranked.seen, strict=True):
        # [S, units], or [lists, S, units]
        answer.ranked[layer] = scores[:, None] if scores.dim() == 2 else scores.transpose(0, 1)
        answer.picks[layer] = picks[:, None] if picks.dim() == 2 else picks.transpose(0, 1)
    return answer


Work = tuple[dict[int, int], dict[int, int]]
"""New tokens of each sequence in a step, and drafts after them that will be rejected."""


def prefill() -> Iterator[Work]:
    yield dict(TOKENS), {}


def chunks() -> Iterator[Work]:
    """Uneven, alone and together, down to a single token at the start; some prefill while others decode."""
    yield {0: 61, 1: 1}, {}
    yield {1: 2}, {}
    yield {1: 37, 0: 1}, {}
    yield {2: 5, 0: 70, 1: 1}, {}
    yield {0: 1, 1: 117, 2: 1}, {}
    yield {2: 64, 0: 3}, {}
    yield {1: 2, 0: 128, 2: 1}, {}


def decode() -> Iterator[Work]:
    """70 steps; the third sequence comes in the middle, and decodes 40."""
    yield {0: TOKENS[0] - 70, 1: TOKENS[1] - 70}, {}
    for i in range(70):
        late = {2: TOKENS[2] - 40 if i == 29 else 1} if 29 <= i < 70 else {}
        yield {0: 1, 1: 1} | late, {}


def drafts() -> Iterator[Work]:
    """Several tokens of a sequence in a step, up to all of the drafts rejected, beside one that decodes."""
    yield {0: 195, 1: 127}, {0: 3, 1: 3}
    for i in range(26):
        accepted = (3, 1, 4, 1, 2, 4)[i % 6]
        yield {0: accepted, 1: 1}, {0: 4 - accepted, 1: i % 2}


SCHEDULES: dict[str, tuple[Callable[[], Iterator[Work]], int]] = {
    "prefill": (prefill, 53),
    "chunks": (chunks, 5),
    "decode": (decode, 16),
    "drafts": (drafts, 4),
}
"""And the entries of a page."""


def engine(name: str, backend: str, page_size: int, judge: Judge | None = None, alter: Alter | None = None) -> Engine:
    return Engine(model(name), LAYERS[name](model(name).config, Ops(backend, alter), judge, page_size))


def run(engine: Engine, schedule: Iterator[Work]) -> dict[int, Tensor]:
    """Logits of every token of each sequence."""
    logits: dict[int, list[Tensor]] = {sequence: [] for sequence in TOKENS}
    for rows, guesses in schedule:
        new = {}
        for sequence, count in rows.items():
            start = engine.tokens.get(sequence, 0)
            guessed = (tokens(sequence)[: guesses.get(sequence, 0)] + 1) % VOCABULARY
            new[sequence] = torch.cat([tokens(sequence)[start : start + count], guessed])
        for sequence, part in engine.step(new, guesses).items():
            logits[sequence].append(part)
    return {sequence: torch.cat(parts) for sequence, parts in logits.items() if parts}


def difference(name: str, logits: dict[int, Tensor], start: int = 0) -> float:
    """Largest difference of any logit from the oracle's, from position ``start`` on."""
    return max(
        float((ours - answer(name, sequence).logits[: len(ours)])[start:].abs().nan_to_num(torch.inf).max())
        for sequence, ours in logits.items()
    )


def runs_here(impl: registry.Impl) -> bool:
    device = impl.limits.get("device")
    return registry.availability(impl) is None and (device is None or device.admits("cpu"))


BACKENDS = [impl.backend for impl in registry.implementations("attend") if runs_here(impl)]


def case(backend: str, *more: str, slow: bool) -> Any:
    """A case of a test, which the reference may leave to the slow tests."""
    return pytest.param(backend, *more, marks=pytest.mark.slow if slow and backend == "reference" else ())


def judge(name: str) -> Judge:
    return Judge({sequence: answer(name, sequence) for sequence in TOKENS}, TIE)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [case(backend, schedule, slow=schedule in ("prefill", "decode")) for backend in BACKENDS for schedule in SCHEDULES],
)
def test_logits(backend: str, name: str, schedule: str) -> None:
    steps, page_size = SCHEDULES[schedule]
    judged = judge(name)
    logits = run(engine(name, backend, page_size, judged), steps())
    assert judged.wrong == []
    assert judged.ties < 0.01 * judged.rows
    assert difference(name, logits) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYERS)
def test_logits_of_random_steps(name: str, seed: int) -> None:
    """Any sequences, any number of tokens and drafts."""
    random = Random(seed)

    def steps() -> Iterator[Work]:
        left = dict(TOKENS)
        while left:
            chosen = random.sample(sorted(left), random.randint(1, len(left)))
            rows = {s: min(random.choice((1, 1, 2, 7, 40)), left[s]) for s in chosen}
            left = {s: n for s, more in left.items() if (n := more - rows.get(s, 0))}
            yield rows, {s: random.randint(0, Compressed.MAX_REWIND) for s in rows}

    judged = judge(name)
    logits = run(engine(name, "auto", random.choice((5, 16, 64)), judged), steps())
    assert judged.wrong == []
    assert {s: len(part) for s, part in logits.items()} == TOKENS
    assert difference(name, logits) < TOLERANCE


Change = Callable[[dict[str, Any]], dict[str, Any]]


def change(op: str, new: Change) -> Callable[[], Alter]:
    """Other arguments for each call of ``op``."""

    def alter(called: str, arguments: dict[str, Any]) -> None:
        if called == op:
            arguments.update(new(arguments))

    return lambda: alter


class StaleSelection:
    """Each layer attends what it chose a step ago."""

    def __init__(self) -> None:
        self.last: dict[int, dict[str, Tensor]] = {}

    def __call__(self, op: str, arguments: dict[str, Any]) -> None:
        if op == "attend" and "indices" in arguments:
            chosen = {name: arguments[name] for name in ("indices", "index_counts")}
            stale = self.last.get(arguments["kv"].data_ptr(), chosen)
            self.last[arguments["kv"].data_ptr()] = chosen
            if stale["indices"].shape == chosen["indices"].shape:
                arguments.update(stale)


class SharedLayersDense:
    """Layers that select nothing attend every token."""

    def __init__(self) -> None:
        self.fresh = False

    def __call__(self, op: str, arguments: dict[str, Any]) -> None:
        if op == "select":
            self.fresh = True
        elif op == "attend":
            if not self.fresh:
                del arguments["indices"], arguments["index_counts"]
            self.fresh = False


def one_token_less(a: dict[str, Any]) -> dict[str, Any]:
    return {"seq_lens": a["seq_lens"] - 1}


def one_slot_late(a: dict[str, Any]) -> dict[str, Any]:
    return {"slots": a["slots"].roll(1)}


def last_token(a: dict[str, Any]) -> dict[str, Any]:
    return {"cos_sin": a["cos_sin"].roll(1 - a["stride"], 0)}


def state_lost(a: dict[str, Any]) -> dict[str, Any]:
    return {"state": torch.zeros_like(a["state"])} if "state" in a else {}


def lists_swapped(a: dict[str, Any]) -> dict[str, Any]:
    return {"indices": a["indices"].flip(1)} if "indices" in a else {}


FAULTS: dict[str, dict[str, tuple[str, Callable[[], Alter]]]] = {
    "DeepSeek V3.2": {
        "own token not attended": ("prefill", change("attend", one_token_less)),
        "own token not selectable": ("prefill", change("select", one_token_less)),
        "selection of the step before": ("decode", StaleSelection),
        "rows stored one late": ("chunks", change("store", one_slot_late)),
        "no relu": ("prefill", change("select", lambda a: {"weights": a["weights"].abs()})),
        "YaRN's factor left out of the scale": ("prefill", change("attend", lambda a: {"scale": 96**-0.5})),
    },
    "GLM-5": {
        "own token not attended": ("prefill", change("attend", one_token_less)),
        "selection of the step before": ("decode", StaleSelection),
        "shared layers dense": ("prefill", SharedLayersDense),
        "half of the budget": ("prefill", change("select", lambda a: {"k": a["k"] // 2})),
    },
    "MiniMax-M3": {
        "own token not attended": ("prefill", change("attend", one_token_less)),
        "selection of the step before": ("decode", StaleSelection),
        "own block not kept": ("prefill", change("select", lambda a: {"keep_last": 0})),
        "mean instead of maximum": ("prefill", change("select", lambda a: {"pool": "mean"})),
        "list of another KV head": ("prefill", change("attend", lists_swapped)),
    },
    "DeepSeek V4": {
        "no sinks": ("prefill", change("attend", lambda a: {"sinks": None})),
        "window one token short": ("prefill", change("attend", lambda a: {"window": a["window"] - 1})),
        "window one token long": ("prefill", change("attend", lambda a: {"window": a["window"] + 1})),
        "entries selectable one token late": ("prefill", change("select", one_token_less)),
        "selection of the step before": ("decode", StaleSelection),
        "rotated to the last token of the group": ("prefill", change("compress", last_token)),
        "no bias": ("prefill", change("compress", lambda a: {"bias": None})),
        "no norm": ("prefill", change("compress", lambda a: {"norm": None})),
        "state lost between steps": ("chunks", change("compress", state_lost)),
        "state does not reach behind rejected drafts": ("drafts", change("compress", lambda a: {"max_rewind": 0})),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAULTS for fault in FAULTS[name]])
def test_faults_are_seen(name: str, fault: str) -> None:
    schedule, alter = FAULTS[name][fault]
    steps, page_size = SCHEDULES[schedule]
    logits = run(engine(name, "auto", page_size, alter=alter()), steps())
    assert difference(name, logits, start=40) > SEEN  # the first rows have few tokens: there any fault is seen


@pytest.mark.parametrize("name", LAYERS)
def test_judge_sees_other_picks(name: str) -> None:
    """It lets nothing pass but ties."""
    judged = judge(name)
    alter = change("select", one_token_less)()
    run(engine(name, "auto", 16, judged, alter), prefill())
    assert len(judged.wrong) > 0.05 * judged.rows


def test_judge_settles_ties() -> None:
    """Rows whose picks differ by equal scores get the oracle's picks; any other row is wrong."""
    scores = torch.tensor([[[0.5, 0.2, 0.2, 0.1]]]).expand(2, 1, 4)
    judged = Judge({7: Answer(scores, {3: scores}, {3: torch.tensor([[[0, 2]], [[0, 1]]])})}, TIE)
    selected = Selected(torch.tensor([[[0, 1]], [[0, 3]]]).int(), torch.tensor([[2], [2]]).int())
    judged.settle(3, Step([7], [0], [2], [0]), selected)
    assert selected.indices.tolist() == [[[0, 2]], [[0, 3]]]
    assert (judged.rows, judged.ties, len(judged.wrong)) == (2, 1, 1)


def interrupted(name: str, backend: str, interrupt: bool) -> list[Tensor]:
    """Logits of steps between which sequence 1 may lose its pages, to others, and come back in others."""
    served = engine(name, backend, 5)
    logits: list[Tensor] = []

    def step(rows: dict[int, int]) -> None:
        logits.extend(run(served, iter([(rows, {})])).values())

    step({0: 121, 1: 99})
    for _ in range(3):
        step({1: 1, 0: 1})
    if interrupt:
        before = [list(pool.owned[1]) for pool in served.layers.pools]
        saved = served.preempt(1)
    step({0: 1, 2: 40})
    for _ in range(4):
        step({2: 1, 0: 1})
    if interrupt:
        served.resume(1, saved)
        assert all(pool.owned[1] != pages for pool, pages in zip(served.layers.pools, before, strict=True) if pages)
    for rows in ({1: 1, 0: 1}, {0: 1, 1: 30, 2: 1}, {2: 1, 1: 1}, {1: 1, 0: 1, 2: 1}):
        step(rows)
    return logits


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", [case(backend, slow=True) for backend in BACKENDS])
def test_preempted_and_resumed(backend: str, name: str) -> None:
    """Bitwise as if it had stayed."""
    pairs = zip(interrupted(name, backend, True), interrupted(name, backend, False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


PREFIX = 101  # ends inside of a page, and of an entry


def forked(name: str, backend: str, share: bool) -> tuple[list[Tensor], Engine]:
    """Logits of two sequences after a common prefix, which the second computes or takes from the first."""
    served = engine(name, backend, 5)
    text = {0: tokens(0), 1: torch.cat([tokens(0)[:PREFIX], tokens(1)[PREFIX:]])}
    logits: list[Tensor] = []

    def step(rows: dict[int, int]) -> None:
        new = {}
        for sequence, count in rows.items():
            start = served.tokens.get(sequence, 0)
            new[sequence] = text[sequence][start : start + count]
        logits.extend(served.step(new).values())

    for sequence in (0, 1):
        if sequence and share:
            served.fork(0, 1)
        else:
            for count in (PREFIX - 30, 30):
                step({sequence: count})
    del logits[:]
    for _ in range(6):  # the first goes on while the second waits
        step({0: 1})
    for rows in ({1: 3, 0: 1}, {0: 25, 1: 1}, *[{0: 1, 1: 1}] * 8, {1: 33, 0: 2}, {1: 1, 0: 1}):
        step(rows)
    return logits, served


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", [case(backend, slow=True) for backend in BACKENDS])
def test_forked(backend: str, name: str) -> None:
    """Bitwise as if each had its own prefix."""
    shared, served = forked(name, backend, True)
    assert any(2 in pool.users for pool in served.layers.pools)
    assert all(torch.equal(a, b) for a, b in zip(shared, forked(name, backend, False)[0], strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_fork_must_copy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two sequences that write into one page are seen."""

    def keep(pool: Pool, page: int) -> int:
        pool.users[page] += 1
        return page

    apart, _ = forked(name, "auto", False)
    monkeypatch.setattr(Pool, "_copy", keep)
    shared, _ = forked(name, "auto", True)
    assert not all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))
