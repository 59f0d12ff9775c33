"""``python -m sparse_attn demo --model deepseek-v4.1-flash``: the attention of every kind of layer, on packed planes.

Weights and inputs are random: there is nothing to read in them. What is measured is what the planes hold, what is
scored and attended, where the time goes, and that it is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import doctor, resolve
from ..models import PRESETS, Layer, Model
from ..ops import Selected
from .deepseek_v41 import Cache, Config, Layers, Step

NAME = "deepseek-v4.1-flash"
MODEL = PRESETS[NAME]
SHOWN = (0, 2, 3, 20, 21, 24)
"""One layer of every kind, each with those that own what it reads."""
HIDDEN = 512  # released: 5120. Attention sees nothing of it, the projections are a tenth as large

FULL = dict(context=8192, new=32, compared=640)
QUICK = dict(context=1024, new=8, compared=160)
CHUNK = 512
PAGE_SIZE = 64
DRAFTS = 3


def main(argv: Sequence[str], prog: str) -> int:
    """Run the demo. Returns 0, or 1 if it disagrees with the oracle."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="The attention of DeepSeek V4.1-Flash with random weights: a layer of every kind reads a prompt "
        "and decodes on packed planes, by the ops alone. Results go to stdout, progress to stderr.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small run: {context} tokens".format(**QUICK))
    add("--context", type=int, metavar="N", help="tokens of the prompt (8192)")
    add("--new", type=int, metavar="N", help="tokens to decode after it (32)")
    add("--compared", type=int, metavar="N", help="tokens to compare with the oracle (640)")
    add("--threads", type=int, metavar="N", help="CPU threads (PyTorch's choice)")
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("context", "new", "compared", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    results = run(options)
    print(report(results))
    return 1 if results.mistakes else 0


# --- Random weights and inputs ---------------------------------------------------------------------------------------


@torch.no_grad()
def random_layers(config: Config, plan: Model, seed: int = 0) -> Layers:
    """Layers with weights that keep the size of what they are given."""
    generator = torch.Generator().manual_seed(seed)
    layers = Layers(config, plan)
    for name, parameter in layers.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.copy_(noise * parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(noise if name.endswith("sinks") else 1 + 0.3 * noise)
    return layers


def random_inputs(config: Config, plan: Model, tokens: int, seed: int = 0) -> list[Tensor]:
    """``[tokens, hidden]`` for each layer."""
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(tokens, config.hidden, generator=generator).bfloat16() for _ in plan.layers]


# --- Measuring -------------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """While it is entered: seconds and calls of each op of the package, and the backends that ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.backends: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "sparse_attn":
            return func(*args, **kwargs)
        op = func._opname
        self.backends.setdefault(op, set()).add(resolve(op, *args, **kwargs).backend)
        begin = perf_counter()
        result = func(*args, **kwargs)
        self.seconds[op] += perf_counter() - begin
        self.calls[op] += 1
        return result


@dataclass
class Phase:
    """What one phase did. A pair is (token, entry), for all heads."""

    name: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    ops: Ops = field(default_factory=Ops)
    dense: Counter[int] = field(default_factory=Counter)
    """Pairs of causal attention without window or selection, by layer."""
    scored: Counter[int] = field(default_factory=Counter)
    attended: Counter[int] = field(default_factory=Counter)

    def count(self, plan: Model, step: Step, selections: Sequence[Selected | None]) -> None:
        """Add the pairs of a step."""
        seen = step.positions + 1
        for layer, selected in zip(plan.layers, selections, strict=True):
            number = layer.number
            self.dense[number] += int(seen.sum())
            self.attended[number] += int(seen.clamp(max=layer.window).sum())
            if selected is not None:
                self.attended[number] += int(selected.counts.sum())
            if layer.index_owner is not None:
                self.scored[number] += scored(plan, layer, seen, selections)


def scored(plan: Model, layer: Layer, seen: Tensor, selections: Sequence[Selected | None]) -> int:
    """Pairs that a layer scores: rows in which all fits the budget are selected without being scored."""
    selection = layer.selection
    assert selection is not None
    visible = seen // plan.plane("index", layer.number).ratio
    if layer.candidate_owner == layer.number:
        return int(visible.sum())
    if layer.candidate_owner is not None:
        source = selections[layer.candidate_owner]
        assert source is not None and source.candidate_blocks is not None
        blocks, size = source.candidate_blocks[:, 0].long(), selection.candidate_block
        entries = (visible[:, None] - blocks * size).clamp(0, size).where(blocks >= 0, 0)
        visible = entries.sum(1)
    return int(visible.where(visible > selection.k, 0).sum())


@dataclass
class Results:
    options: argparse.Namespace
    config: Config
    plan: Model
    cache: Cache
    phases: list[Phase]
    compared: str
    mistakes: dict[int, str]


def run(options: argparse.Namespace) -> Results:
    if options.threads:
        torch.set_num_threads(options.threads)
    begin = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    total = options.context + options.new + DRAFTS
    config = Config(hidden=HIDDEN, positions=max(total, options.compared))
    plan = MODEL.excerpt(SHOWN)
    say("random weights")
    layers, inputs = random_layers(config, plan), random_inputs(config, plan, total)
    cache = Cache(plan, total, 1, PAGE_SIZE, CHUNK, DRAFTS)
    cache.add("sequence")
    prefill, decode, draft = Phase("prefill"), Phase("decode"), Phase("draft")
    done = 0
    steps = [*((prefill, len(part)) for part in torch.arange(options.context).split(CHUNK))]
    for phase, tokens in [*steps, *[(decode, 1)] * options.new, (draft, DRAFTS)]:
        parts = [x[done : done + tokens] for x in inputs]
        start = perf_counter()
        step = cache.step({"sequence": tokens})
        with phase.ops:
            _, selections = layers(parts, cache, step)
        phase.seconds += perf_counter() - start
        phase.count(plan, step, selections)
        phase.steps, phase.tokens, done = phase.steps + 1, phase.tokens + tokens, done + tokens
        if phase is prefill or phase.steps == 1:
            say(f"{phase.name}: {done} of {total} tokens")
    cache.rewind("sequence", DRAFTS)
    compared, wrong = compare(options.compared, config, plan, layers, say)
    return Results(options, config, plan, cache, [prefill, decode, draft], compared, wrong)


def compare(tokens: int, config: Config, plan: Model, layers: Layers, say: Any) -> tuple[str, dict[int, str]]:
    """What was compared with the oracle, and by layer what is wrong."""
    if importlib.util.find_spec("nemo_automodel") is None:
        return "not compared: NeMo AutoModel is not installed (pip install --no-deps nemo_automodel==0.7.0)", {}
    from . import automodel

    say(f"NeMo AutoModel: {tokens} tokens")
    inputs = random_inputs(config, plan, tokens, seed=7)
    expected = automodel.run(config, plan, layers, inputs)
    say("the same tokens through the ops")
    cache = Cache(plan, tokens, 1, PAGE_SIZE, max_step=tokens)
    cache.add("sequence")
    wrong = automodel.mistakes(plan, expected, *layers(inputs, cache, cache.step({"sequence": tokens})))
    return f"{tokens} tokens against NeMo AutoModel, every layer, outputs and selections", wrong


# --- Report ----------------------------------------------------------------------------------------------------------


def report(results: Results) -> str:
    options, config, plan = results.options, results.config, results.plan
    layers = ", ".join(f"{number} {_kind(MODEL, number)}" for number in SHOWN)
    first, some = plan.layers[0], next(layer.selection for layer in plan.layers[::-1] if layer.selection)
    parts = [
        f"Machine    {doctor.cpu()['model']}, threads: {torch.get_num_threads()}; sparse_attn "
        f"{doctor.package()['version']}, PyTorch {torch.__version__}, Python {platform.python_version()}",
        f"Model      attention of {NAME}: {first.q_heads} heads of {first.qk_dim}, q_lora {config.q_lora}, "
        f"{config.o_groups} output groups, {some.heads} index heads of {some.dim}, top {some.k}, "
        f"window {first.window}; random weights and inputs",
        f"Layers     {layers}",
        f"Cut        {len(SHOWN)} of {len(MODEL.layers)} layers; hidden size {config.hidden} of {Config().hidden}; "
        f"{options.context:,} tokens of 1,048,576; no experts, no hyper-connections: each layer has inputs of its own",
        f"Run        {options.context:,} tokens in steps of {CHUNK}, {options.new} tokens decoded one by one, then "
        f"{DRAFTS} drafts in one step, rejected",
        "",
        _bytes(results),
        "",
        _pairs(results),
        "",
        _times(results),
        "",
        "A pair is a token and an entry, for all heads. Dense: attention to every token before it. Rows in which all "
        "that is visible fits the budget are not scored.",
        f"Candidates restrict a layer once {some.candidate_k * some.candidate_block:,} entries are visible.",
        "",
        f"{'FAILED' if results.mistakes else 'PASSED' if 'against' in results.compared else 'AGREEMENT'}: "
        f"{results.compared}",
        *(f"  layer {SHOWN[number]}: {what}" for number, what in results.mistakes.items()),
    ]
    return "\n".join(parts)


def _kind(model: Model, number: int) -> str:
    layer = model.layers[number]
    if "main" not in layer.reads:
        return layer.kind
    made = ", makes candidates" if layer.candidate_owner == number else ""
    return f"{layer.kind} r{model.plane('main', number).ratio}{made}"


def _bytes(results: Results) -> str:
    """Bytes by plane: of an entry, of a token in these layers as allocated, and in the whole model by its plan."""
    plan, cache = results.plan, results.cache
    grown, fixed = MODEL.bytes_per_token(), MODEL.fixed_bytes()
    rows = [("Bytes by plane", "format", "an entry", "here", f"all {len(MODEL.layers)} layers")]
    for kind in ("main", "index", "window", "state"):
        planes = [(n, p) for n, layer in enumerate(plan.layers) for p in layer.planes if p.kind == kind]
        size = sum(cache.planes[n][kind].nbytes for n, _ in planes)
        if kind in grown:
            here = f"{size / (cache.pages.pages * cache.pages.page_size):,.0f} a token"
            whole = f"{grown[kind]:,.0f} a token"
        else:
            here, whole = f"{size:,} a sequence", f"{fixed[kind]:,} a sequence"
        rows.append((kind, planes[0][1].format, f"{planes[0][1].entry_bytes()}", here, whole))
    rows.append(("together", "", "", "", f"{sum(grown.values()):,.0f} a token"))
    note = f"Windows and states here have room for steps of {CHUNK} tokens and for {DRAFTS} rejected drafts as well."
    return _table(rows) + "\n" + note


def _pairs(results: Results) -> str:
    rows = [
        (
            "Pairs by layer",
            *(f"{p.name}: {what}" for p in results.phases[:2] for what in ("dense", "scored", "attended")),
        )
    ]
    for place, number in enumerate(SHOWN):
        cells = [f"{pairs[place]:,}" for p in results.phases[:2] for pairs in (p.dense, p.scored, p.attended)]
        rows.append((f"{number} {_kind(MODEL, number).split(',')[0]}", *cells))
    return _table(rows)


def _times(results: Results) -> str:
    head = ("Time by op", "backend", *(f"{phase.name}, ms a step" for phase in results.phases))
    rows = [head]
    ops = sorted({op for phase in results.phases for op in phase.ops.calls})
    for op in ops:
        backends = sorted(set().union(*(phase.ops.backends.get(op, set()) for phase in results.phases)))
        rows.append((op, ", ".join(backends), *(f"{1e3 * p.ops.seconds[op] / p.steps:,.1f}" for p in results.phases)))
    rest = [1e3 * (p.seconds - sum(p.ops.seconds.values())) / p.steps for p in results.phases]
    rows.append(("the rest", "PyTorch", *(f"{ms:,.1f}" for ms in rest)))
    rows.append(("together", "", *(f"{1e3 * p.seconds / p.steps:,.1f}" for p in results.phases)))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for n, row in enumerate(rows):
        first = row[0].ljust(widths[0]) if n == 0 else f"  {row[0]}".ljust(widths[0] + 2)
        lines.append(first + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True)))
    return "\n".join(lines)
