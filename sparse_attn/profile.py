"""``python -m sparse_attn profile``: a selecting layer timed on this device, and where its promised speed-up goes.

Selected pairs over dense pairs promise a speed-up. What is measured falls short by the time of the selection, by what
scattered entries take more than adjacent ones, by calls that do nothing, and by the rest: what the kernel itself does
worse on short lists.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from . import attend, layout, select, store
from .checks import InvalidCall
from .models import METHODS, PRESETS, Model, shard, sparse
from .plan import tokens
from .serving.stats import Counter

PAGE = 64
FULL = 0.5
"""Share of a limit from which it is said to bind; below for both, neither does."""


@dataclass(frozen=True)
class Limits:
    """Of the device, measured in the same run: products of matrices in operations, copies in bytes, a second."""

    compute: float
    bandwidth: float


@dataclass(frozen=True)
class Part:
    """A call: median seconds, and the shares of the device's limits that it reaches."""

    seconds: float
    compute: float
    bandwidth: float

    @property
    def binds(self) -> str:
        share, name = max((self.compute, "compute"), (self.bandwidth, "bandwidth"))
        return name if share >= FULL else "neither"


@dataclass(frozen=True)
class Profile:
    """Of a length. ``ratio``: attended over dense pairs. Seconds of what a sparse step takes more than ``ratio`` of a
    dense one: ``selection``, ``scattered`` access, ``launches`` of two calls, and the ``rest``, which may be negative.
    """

    length: int
    ratio: float
    dense: Part
    select: Part
    attend: Part
    selection: float
    scattered: float
    launches: float
    rest: float

    @property
    def promised(self) -> float:
        return 1 / self.ratio

    @property
    def measured(self) -> float:
        return self.dense.seconds / (self.select.seconds + self.attend.seconds)


class Step:
    """Calls of one layer with random planes, on ``device``: ``batch`` sequences of ``length`` tokens, ``queries`` of
    which are the step's."""

    def __init__(self, model: Model, number: int, length: int, batch: int, queries: int, device: str) -> None:
        self.layer = layer = model.layers[number]
        chosen = layer.selection
        assert chosen is not None
        self.device, self.batch, self.queries, self.length = device, batch, queries, length
        self.pages = layout.pages_for(length, PAGE)
        main, index = model.plane("main", number), model.plane("index", number)
        rows = batch * queries
        self.q = torch.randn(rows, layer.q_heads, layer.qk_dim, device=device).bfloat16()
        self.index_q = torch.randn(rows, chosen.heads, chosen.dim, device=device).bfloat16()
        self.weights = torch.rand(rows, chosen.heads, device=device) if chosen.weighted else None
        self.planes: dict[str, Any] = {}
        for name, dim in zip(("kv", "v"), main.rows, strict=False):
            self.planes |= self._plane(name, main.format, main.heads, dim)
        if len(main.rows) == 2:
            self.planes["v_format"] = main.format
        if "window" in layer.reads:
            window = model.plane("window", number)
            self.planes |= self._plane("win", window.format, window.heads, window.rows[0])
            self.planes |= dict(win_page_table=self._table(), win_page_size=PAGE)
        if layer.sinks:
            self.planes["sinks"] = torch.zeros(layer.q_heads, device=device)
        self.index: dict[str, Any] = self._plane("keys", index.format, index.heads, index.rows[0], "key_scale")
        self.arguments: dict[str, Any] = dict(page_table=self._table(), page_size=PAGE)
        self.attend_arguments = model.attend_arguments(number)
        self.select_arguments = model.select_arguments(number)
        units = -(-length // main.ratio) // chosen.block
        k = min(chosen.k, max(units, 1))
        newest = torch.arange(max(units - k, 0), units, dtype=torch.int32, device=device)
        self.adjacent = newest.expand(rows, chosen.out_heads, len(newest)).contiguous()
        spread = torch.rand(rows, chosen.out_heads, units, device=device).topk(k).indices
        self.scattered = spread.sort(-1).values.int()
        self.nothing = torch.full_like(self.scattered, -1)

    def _table(self) -> Tensor:
        pages = torch.randperm(self.batch * self.pages, device=self.device)
        return pages.int().view(self.batch, self.pages)

    def _plane(self, name: str, format: str, heads: int, dim: int, scale_name: str = "") -> dict[str, Tensor]:
        spec = layout.FORMATS[format]
        count = self.batch * self.pages
        shape = spec.shape(count, PAGE, heads, dim)
        plane = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)
        scale = torch.zeros(shape[:3], dtype=torch.float16, device=self.device) if spec.scale_dtype else None
        for page in range(0, count, 64):  # rows of all pages at once would take many times the plane's memory
            slots = torch.arange(page * PAGE, min(page + 64, count) * PAGE, device=self.device)
            rows = torch.randn(len(slots), heads, dim, device=self.device).bfloat16()
            store(rows, plane, slots, scale=scale, format=format, page_size=PAGE)
        return {name: plane} | ({} if scale is None else {scale_name or f"{name}_scale": scale})

    def _lengths(self, length: int) -> dict[str, Any]:
        rows = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.queries
        lengths = torch.full((self.batch,), length, dtype=torch.int32, device=self.device)
        return dict(cu_seqlens_q=rows, seq_lens=lengths, max_seqlen_q=self.queries, max_seq_len=max(length, 1))

    def attend(self, indices: Tensor | None, length: int) -> None:
        dim = self.layer.qk_dim
        common = self.planes | self.arguments | self.attend_arguments | self._lengths(length)
        if indices is None:
            common.pop("select_block", None)
        attend(self.q, scale=dim**-0.5, indices=indices, **common)

    def select(self, length: int) -> None:
        dim = self.index_q.shape[-1]
        common = self.index | self.arguments | self.select_arguments | self._lengths(length)
        select(self.index_q, self.weights, scale=dim**-0.5, **common)

    def calls(self) -> dict[str, Callable[[], None]]:
        """What is timed, by name."""
        return {
            "dense": lambda: self.attend(None, self.length),
            "select": lambda: self.select(self.length),
            "attend": lambda: self.attend(self.scattered, self.length),
            "adjacent": lambda: self.attend(self.adjacent, self.length),
            "empty select": lambda: self.select(0),
            "empty attend": lambda: self.attend(self.nothing, 0),
        }


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each call; they take turns, after a first round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            found[name].append(perf_counter() - start)
    return {name: median(times[1:]) for name, times in found.items()}


def limits(device: str, rounds: int) -> Limits:
    """Measured on a product of bf16 matrices, and on a copy that no cache holds."""
    size, count = (1024, 2**25) if device == "cpu" else (8192, 2**28)
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    source = torch.zeros(count, device=device)
    target = torch.zeros_like(source)
    times = timed({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, device, rounds)
    return Limits(2 * size**3 / times["product"], 2 * source.nbytes / times["copy"])


def profile(
    model: Model, number: int, length: int, batch: int, queries: int, device: str, limit: Limits, rounds: int
) -> Profile:
    """Layer ``number`` of ``model``, timed."""
    step = Step(model, number, length, batch, queries, device)
    times = timed(step.calls(), device, rounds)
    counts = Counter(model.excerpt((number,)))([(length - queries, length)] * batch)
    dense_flops, dense_read = counts.flops["dense"], counts.least_read["dense"]
    attended = sum(size for kind, size in counts.read.items() if kind in ("main", "window"))

    def part(name: str, flops: float, size: float) -> Part:
        seconds = times[name]
        return Part(seconds, flops / seconds / limit.compute, size / seconds / limit.bandwidth)

    ratio = counts.effective_kv_ratio
    launches = times["empty select"] + times["empty attend"]
    scattered = times["attend"] - times["adjacent"]
    return Profile(
        length,
        ratio,
        part("dense", dense_flops, dense_read),
        part("select", counts.flops["select"], counts.least_read["index"]),
        part("attend", counts.flops["attend"], attended),
        selection=times["select"] - times["empty select"],
        scattered=scattered,
        launches=launches,
        rest=times["adjacent"] - times["empty attend"] - ratio * times["dense"],
    )


def layer_of(model: Model) -> int:
    """The first layer that selects by its own index plane, as all others of its kind do."""
    for layer in model.layers:
        if layer.kind == "full" and layer.selection and not layer.selection.span and not layer.selection.bounds:
            return layer.number
    raise ValueError(f"--model: expected one whose layers select, got {model.name}; a dense one takes --select N")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn profile", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    add("--select", type=int, metavar="N", help="tokens that a dense model selects")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, of which this is one")
    add("--lengths", type=lambda text: [*map(tokens, text.split(","))], default=[8192, 32768], metavar="LIST")
    add("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    add("--queries", type=int, default=1, metavar="N", help="query tokens of each (1: decode)")
    add("--device", default="cpu", metavar="NAME", help="(cpu)")
    add("--rounds", type=int, default=9, metavar="N", help="timed calls of each kind (9)")
    add("--json", action="store_true", help="print as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 if it cannot run."""
    parser = arguments()
    options = parser.parse_args(argv)
    for name in ("batch", "queries", "rounds", "tp"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    try:
        if options.device != "cpu" and not torch.accelerator.is_available():
            raise ValueError(f"--device: expected cpu, as torch finds no accelerator here, got {options.device}")
        model = PRESETS[options.model]
        if options.select:
            model = sparse(model, METHODS["tokens"], options.select)
        model = shard(model, options.tp)
        number = layer_of(model)
        torch.manual_seed(0)
        limit = limits(options.device, options.rounds)
        shape = options.batch, options.queries, options.device, limit, options.rounds
        found = [profile(model, number, length, *shape) for length in options.lengths]
    except (InvalidCall, RuntimeError, ValueError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    if options.json:
        rows = [{**asdict(p), "promised": p.promised, "measured": p.measured} for p in found]
        print(json.dumps({"model": model.name, "layer": number, "limits": asdict(limit), "lengths": rows}, indent=2))
    else:
        print(report(options, number, limit, found))
    return 0


def report(options: argparse.Namespace, number: int, limit: Limits, found: Sequence[Profile]) -> str:
    """As text with two tables in Markdown."""
    lines = [
        f"{options.model}, layer {number}, {options.batch} sequences, {options.queries} query tokens each, "
        f"{options.device}; limits measured now: {limit.compute / 1e12:.3g} TFLOPS, {limit.bandwidth / 1e9:.3g} GB/s",
        "",
        "| length | call | ms | of compute | of bandwidth | binds |",
        "|---|---|---|---|---|---|",
    ]
    for p in found:
        for name, part in (("dense attend", p.dense), ("select", p.select), ("attend", p.attend)):
            shares = f"{part.compute:.0%} | {part.bandwidth:.0%} | {part.binds}"
            lines.append(f"| {p.length} | {name} | {1e3 * part.seconds:.4g} | {shares} |")
    names = ("selection", "scattered", "launches", "rest")
    lines += ["", "| length | pairs | speed-up promised | measured | " + " | ".join(f"{n} ms" for n in names) + " |"]
    lines.append("|---" * (4 + len(names)) + "|")
    for p in found:
        lost = " | ".join(f"{1e3 * getattr(p, name):.4g}" for name in names)
        lines.append(f"| {p.length} | {p.ratio:.3f} | {p.promised:.2f} | {p.measured:.2f} | {lost} |")
    return "\n".join(lines)
