"""DeepSeek-V4.1's attention on packed planes, by the ops alone, against NeMo AutoModel's; and every fault is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

HOW = "the oracle needs NeMo AutoModel: pip install --no-deps nemo_automodel==0.7.0"
pytest.importorskip("transformers", minversion="5.24.0", reason=HOW)
pytest.importorskip("nemo_automodel.components.models.deepseek_v41.attention", reason=HOW)
from sparse_attn import attend, codecs, load  # noqa: E402
from sparse_attn.demo import automodel, deepseek_v41  # noqa: E402
from sparse_attn.demo.deepseek_v41 import Cache, Config, Layers  # noqa: E402
from sparse_attn.demo.deepseek_v41_run import random_inputs, random_layers  # noqa: E402
from sparse_attn.layout import locate, slot  # noqa: E402
from sparse_attn.models import Model, Selection  # noqa: E402
from sparse_attn.models import deepseek_v41 as plan_of  # noqa: E402
from sparse_attn.ops import Selected  # noqa: E402
from sparse_attn.ops.attend import Attend  # noqa: E402
from sparse_attn.ops.compress import Compress  # noqa: E402
from sparse_attn.ops.select import Select  # noqa: E402

SELECTION = Selection(8, 12, 128, candidate_k=3, candidate_block=4, weighted=True, score_dtype="bf16")
CONFIG = Config(hidden=64, q_lora=48, o_groups=2, o_lora=32, positions=128)
TINY = plan_of("tiny", (0, 2, 2, 2, 1, 1, 1, 1), (1, 4), (1, 3, 4, 6), 4, 4, 16, SELECTION)
WINDOW, FULL_R2, REUSE_R2, REINDEX_R2, FULL, REUSE, REINDEX, REUSE_REINDEX = range(8)
COMPRESSED = {FULL_R2, REUSE_R2, REINDEX_R2, FULL, REUSE, REINDEX, REUSE_REINDEX}
EVERY = {WINDOW} | COMPRESSED
R2 = {FULL_R2, REUSE_R2, REINDEX_R2}
RESTRICTED = {REINDEX, REUSE_REINDEX}
TOKENS = 75

CANDIDATES_R2 = plan_of("candidates of two tokens", (2, 2, 2), (0,), (0, 1), 0, 4, 16, SELECTION)

RELEASED_CONFIG = Config(hidden=512, positions=1024)
RELEASED = plan_of(
    "released dimensions",
    (0, 2, 1, 1),
    kv_sources=(1, 2),
    index_sources=(1, 2, 3),
    candidate_source=2,
    # 66 candidate blocks instead of 2048, so that they bite
    selection=Selection(512, 32, 128, candidate_k=66, candidate_block=8, weighted=True, score_dtype="bf16"),
)

STEPS: dict[str, list[int]] = {
    "prefill": [TOKENS],
    "uneven chunks": [7, 1, 20, 3, 44],
    "decode": [11] + [1] * 64,
}


@dataclass
class Case:
    """Layers with random weights, inputs ``[S, hidden]`` for each, and what is expected of them."""

    plan: Model
    layers: Layers
    inputs: list[Tensor]
    expected: list[automodel.Expected]


@cache
def case(plan: Model, seed: int = 0, config: Config = CONFIG, tokens: int = TOKENS) -> Case:
    layers, inputs = random_layers(config, plan, seed), random_inputs(config, plan, tokens, seed)
    return Case(plan, layers, inputs, automodel.run(config, plan, layers, inputs))


def mistakes(found: Case, steps: Sequence[int], page_size: int = 8) -> dict[int, str]:
    """By layer, what is wrong if the sequence goes in by ``steps``."""
    return automodel.mistakes(found.plan, found.expected, *attended(found, steps, page_size))


def attended(case: Case, steps: Sequence[int], page_size: int = 8) -> tuple[list[Tensor], list[Selected | None]]:
    """Outputs and selections of a whole sequence that goes in by ``steps``."""
    _, parts = filled(case, steps, page_size)
    outputs = [torch.cat([part[0][n] for part in parts]) for n in range(len(case.inputs))]
    return outputs, [joined([part[1][n] for part in parts]) for n in range(len(case.inputs))]


def filled(case: Case, steps: Sequence[int], page_size: int = 8) -> tuple[Cache, list[Any]]:
    """The cache after ``steps``, another sequence beside this one in its planes, and what the layers gave each time."""
    cache = Cache(case.plan, sum(steps) + 4 * page_size, 2, page_size, max(steps))
    cache.add("other")
    cache.add("sequence")
    cache.step({"other": min(5, max(steps))})
    parts, begin = [], 0
    for count in steps:
        inputs = [x[begin : begin + count] for x in case.inputs]
        parts.append(case.layers(inputs, cache, cache.step({"sequence": count})))
        begin += count
    return cache, parts


def joined(parts: Sequence[Selected | None]) -> Selected | None:
    some = [part for part in parts if part is not None]
    if not some:
        return None
    blocks = [part.candidate_blocks for part in some if part.candidate_blocks is not None]
    return Selected(
        torch.cat([part.indices for part in some]),
        torch.cat([part.counts for part in some]),
        None,
        torch.cat(blocks) if blocks else None,
    )


@pytest.mark.parametrize("steps", STEPS)
def test_layers_of_every_kind(steps: str) -> None:
    assert mistakes(case(TINY), STEPS[steps]) == {}


@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights(seed: int) -> None:
    assert mistakes(case(TINY, seed), [TOKENS]) == {}


def test_candidates_of_entries_of_two_tokens() -> None:
    assert mistakes(case(CANDIDATES_R2, tokens=90), [31, 1, 58]) == {}


@pytest.mark.slow
def test_released_dimensions() -> None:
    found = case(RELEASED, config=RELEASED_CONFIG, tokens=545)
    assert mistakes(found, [512, 1, 32], page_size=64) == {}


@pytest.mark.parametrize("steps", ["prefill", "uneven chunks"])
def test_planes_hold_the_same_numbers(steps: str) -> None:
    cache, _ = filled(case(TINY), STEPS[steps])
    for layer, expected in zip(TINY.layers, case(TINY).expected, strict=True):
        for kind, rows in expected.planes.items():
            plane = TINY.plane(kind, layer.number)
            entry, page_size = torch.arange(len(rows)), cache.pages.page_size // plane.ratio
            page, offset = locate(torch.tensor(cache.pages.page_table("sequence")), entry, page_size)
            held = load(cache.read(layer.number)[kind], slot(page, offset, page_size), format=plane.format)
            assert torch.equal(held[:, 0], rows.float())


def test_most_rows_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops round where the model does. Kernels may round the probabilities too, to bfloat16."""
    monkeypatch.setattr(deepseek_v41, "attend", partial(attend, backend="reference"))
    outputs, _ = attended(case(TINY), [TOKENS])
    for output, expected in zip(outputs, case(TINY).expected, strict=True):
        assert (output == expected.output).all(1).float().mean() > 0.9


# --- Faults ----------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def changed(name: str, change: Change) -> Any:
    """Lets ``change`` alter the arguments of every call of an op that the layers make."""

    def install(patch: pytest.MonkeyPatch) -> None:
        op = getattr(deepseek_v41, name)
        names = type_of(name)._fields

        def altered(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            change(given)
            return op(**given)

        patch.setattr(deepseek_v41, name, altered)

    return install


def type_of(name: str) -> Any:
    return {"attend": Attend, "compress": Compress, "select": Select}[name]


def given(**values: Any) -> Change:
    """Other values for some arguments; a function makes one of the old value."""

    def change(call: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in call:
                call[name] = value(call[name]) if callable(value) else value

    return change


def attending(**values: Any) -> Any:
    return changed("attend", given(**values))


def selecting(**values: Any) -> Any:
    return changed("select", given(**values))


def compressing(when: Callable[[dict[str, Any]], bool], change: Change) -> Any:
    return changed("compress", lambda call: change(call) if when(call) else None)


def of_main(call: dict[str, Any]) -> bool:
    return call.get("format") == "fp4_v41"


def of_keys(call: dict[str, Any]) -> bool:
    return call.get("format") == "fp4_index"


def of_window(call: dict[str, Any]) -> bool:
    return call.get("format") == "fp8_v41"


def at_group_end(call: dict[str, Any]) -> None:
    call["cos_sin"] = call["cos_sin"][(call.get("rope_stride") or call["stride"]) - 1 :]


def visible_too_late(call: dict[str, Any]) -> None:
    rows = torch.arange(len(call["q"])) + call["max_seq_len"] - call["max_seqlen_q"]
    call["kv_range"] = torch.stack([torch.zeros_like(rows), rows // call["ratio"]], 1).int()


def rows_of_selector(change: Callable[[Callable[..., Selected], dict[str, Any]], Selected]) -> Any:
    """Another selection in the place of the op's, made with calls of the op."""

    def install(patch: pytest.MonkeyPatch) -> None:
        op, names = deepseek_v41.select, type_of("select")._fields
        patch.setattr(
            deepseek_v41,
            "select",
            lambda *args, **kwargs: change(op, dict(zip(names, args, strict=False)) | kwargs),
        )

    return install


def all_scores(op: Callable[..., Selected], call: dict[str, Any]) -> Tensor:
    """Scores ``[T, entries]`` of every entry that may be selected, -inf elsewhere."""
    entries = call["max_seq_len"] // call["ratio"]
    every = op(**call | dict(k=entries, return_values=True))
    assert every.values is not None
    scores = torch.full((len(call["q"]), entries + 1), -torch.inf)
    places = every.indices[:, 0].long().masked_fill(every.indices[:, 0] < 0, entries)
    return scores.scatter(1, places, every.values[:, 0])[:, :entries]


def candidates_by(reduce: Callable[[Tensor], Tensor], pinned: bool) -> Any:
    """Candidate blocks by another score, or without the newest one."""

    def change(op: Callable[..., Selected], call: dict[str, Any]) -> Selected:
        selected = op(**call)
        if not call.get("candidate_k"):
            return selected
        scores, size = all_scores(op, call), call["candidate_block"]
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        blocks = reduce(padded.unflatten(1, (-1, size)))
        newest = (scores.isfinite().sum(1) - 1).clamp(min=0) // size
        if pinned:
            blocks.scatter_(1, newest[:, None], torch.inf)
        best = blocks.topk(min(call["candidate_k"], blocks.shape[1]))
        found = best.indices.masked_fill(best.values == -torch.inf, -1)
        return selected._replace(candidate_blocks=found[:, None].int())

    return rows_of_selector(change)


def mean_of_visible(blocks: Tensor) -> Tensor:
    there = blocks.isfinite()
    mean = blocks.where(there, 0.0).sum(-1) / there.sum(-1).clamp(min=1)
    return mean.masked_fill(~there.any(-1), -torch.inf)


def own_candidates(op: Callable[..., Selected], call: dict[str, Any]) -> Selected:
    selected = op(**call)
    if not call.get("candidate_k"):
        return selected
    again = op(**call | dict(candidate_k=0, candidates=selected.candidate_blocks))
    return again._replace(candidate_blocks=selected.candidate_blocks)


def rounded_once(op: Callable[..., Selected], call: dict[str, Any]) -> Selected:
    """Scores in float32, with one rounding at the end."""
    scores = all_scores(op, call | dict(score_dtype="fp32")).bfloat16().float()
    best = scores.sort(dim=1, descending=True, stable=True)
    found = best.indices[:, : call["k"]].masked_fill(best.values[:, : call["k"]] == -torch.inf, -1)
    found = torch.nn.functional.pad(found, (0, call["k"] - found.shape[1]), value=-1)
    return op(**call)._replace(indices=found[:, None].int(), counts=(found >= 0).sum(1, keepdim=True).int())


def no_inverse_rotation(patch: pytest.MonkeyPatch) -> None:
    rotate = deepseek_v41.rotate
    patch.setattr(deepseek_v41, "rotate", lambda x, turns: x if turns.is_conj() else rotate(x, turns))


def norm_of_each_head(call: dict[str, Any]) -> None:
    q = call["q"].float()
    call["q"] = (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)).to(call["q"].dtype)


def scales_that_are_powers_of_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(codecs, "e4m3_scale", lambda amax, largest: codecs.power_of_two_scale(amax, largest, 2.0**-6))
    compressing(of_main, lambda call: call.update(backend="reference"))(patch)


def rotations_of_a_window_layer(patch: pytest.MonkeyPatch) -> None:
    turns = deepseek_v41.rotations(CONFIG, compressed=False)
    for layer in case(TINY).layers.layers:
        patch.setitem(layer._buffers, "turns", turns)
        patch.setitem(layer._buffers, "cos_sin", torch.cat([turns.real, turns.imag], -1))


def queries_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deepseek_v41, "as_stored", lambda rows, format: rows)


def keys_of_rotated_entries(patch: pytest.MonkeyPatch) -> None:
    compress = deepseek_v41.compress

    def altered(*args: Any, **kwargs: Any) -> Tensor:
        latent = compress(*args, **kwargs)
        if kwargs["format"] != "fp4_v41" or not len(latent):
            return latent
        entries = torch.arange(len(latent)) * args[6]
        cos, sin = kwargs["cos_sin"][entries].chunk(2, -1)
        return deepseek_v41.rotate(latent, torch.complex(cos, sin))

    patch.setattr(deepseek_v41, "compress", altered)


def no_gates(call: dict[str, Any]) -> None:
    if call["gates"] is not None:
        call["gates"] = torch.zeros_like(call["gates"])


def state_lost(call: dict[str, Any]) -> None:
    if call.get("state") is not None:
        call["state"].zero_()


def overlapping(call: dict[str, Any]) -> None:
    """Entries of four tokens, two apart, as V4's are."""
    if call["stride"] == 2:
        state = call["state"]
        call |= dict(span=4, state=state.new_zeros(state.shape[0], 64, *state.shape[2:]))


def swapped(field: str, number: int, owner: int) -> Any:
    """A layer that reads or attends by the wrong layer."""

    def install(patch: pytest.MonkeyPatch) -> None:
        layer = case(TINY).layers.layers[number]
        patch.setattr(layer, "plan", replace(layer.plan, **{field: owner}))

    return install


FAULTS: dict[str, tuple[Any, set[int]]] = {
    "rotation at the end of a group": (compressing(lambda c: True, at_group_end), R2),
    "keys rotated at the end of a group": (compressing(of_keys, at_group_end), R2),
    "an entry visible too late": (changed("select", visible_too_late), COMPRESSED),
    "newest block not pinned": (candidates_by(lambda b: b.amax(-1), pinned=False), {FULL} | RESTRICTED),
    "mean for the maximum of a block": (candidates_by(mean_of_visible, pinned=True), {FULL} | RESTRICTED),
    "candidates ignored": (selecting(candidates=None), RESTRICTED),
    "one candidate block fewer": (selecting(candidate_k=lambda k: k and k - 1), {FULL} | RESTRICTED),
    "candidate blocks of another size": (
        changed("select", lambda c: c.update(candidate_block=3) if c.get("candidates") is not None else None),
        RESTRICTED,
    ),
    "source restricted by its own candidates": (rows_of_selector(own_candidates), {FULL, REUSE}),
    "no inverse rotation": (no_inverse_rotation, EVERY),
    "no sink": (attending(sinks=None), EVERY),
    "window one short": (attending(window=lambda w: w - 1), EVERY),
    "window one long": (attending(window=lambda w: w + 1), EVERY),
    "norm of each query head": (changed("attend", norm_of_each_head), EVERY),
    "scale of the index heads": (attending(scale=128**-0.5), EVERY),
    "a scale that is a power of two": (scales_that_are_powers_of_two, COMPRESSED),
    "rotations of a window layer": (rotations_of_a_window_layer, COMPRESSED),
    "no relu": (selecting(score="dot"), COMPRESSED),
    "weights of either sign taken as positive": (selecting(weights=torch.Tensor.abs), COMPRESSED),
    "index queries not quantised": (queries_as_they_are, COMPRESSED),
    "keys of rotated entries": (keys_of_rotated_entries, COMPRESSED),
    "entries not normed": (compressing(of_main, given(norm=torch.ones_like)), COMPRESSED),
    "window rows not normed": (compressing(of_window, given(norm=torch.ones_like)), EVERY),
    "mean for the gated sum": (changed("compress", no_gates), R2),
    "overlapping entries": (changed("compress", overlapping), R2),
    "pair lost between steps": (changed("compress", state_lost), R2),
    "selection ignored": (attending(indices=None, index_counts=None, select_block=1), COMPRESSED),
    "selection one short": (selecting(k=lambda k: k - 1), COMPRESSED),
    "-1 read as the first entry": (
        changed(
            "attend", lambda c: c.update(indices=c["indices"].clamp(min=0), index_counts=None) if "kv" in c else None
        ),
        COMPRESSED,
    ),
    "entries ignored": (attending(kv=None, page_table=None, indices=None, index_counts=None), COMPRESSED),
    "selection of another layer": (swapped("selection_owner", REUSE_REINDEX, FULL), {REUSE_REINDEX}),
}


ROUNDINGS = {
    "index scores in float32": selecting(score_dtype="fp32"),
    "index scores rounded once": rows_of_selector(rounded_once),
    # a factor that no product or sum depends on, but for their rounding
    "index weights without their scale": selecting(weights=lambda w: w * (128 * 12) ** 0.5),
}
"""Seen in few rows, in layers that depend on the weights."""


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault: str, patch: pytest.MonkeyPatch) -> None:
    install, where = FAULTS[fault]
    install(patch)
    steps = STEPS["uneven chunks" if fault == "pair lost between steps" else "prefill"]
    assert set(mistakes(case(TINY), steps)) == where


@pytest.mark.parametrize("fault", ROUNDINGS)
def test_rounding_is_seen(fault: str, patch: pytest.MonkeyPatch) -> None:
    ROUNDINGS[fault](patch)
    seen = [set(mistakes(case(TINY, seed), [TOKENS])) for seed in range(3)]
    assert any(seen) and set().union(*seen) <= COMPRESSED
