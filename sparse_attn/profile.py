"""``python -m sparse_attn profile``: what limits a selecting layer on this device, or a service that runs.

With ``--model``, a layer is timed here, and what its selection wins is compared with what its pairs promise. With
``--records``, the requests that a service recorded are told by length and phase.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .models import METHODS, PRESETS, Model, shard, sparse
from .plan import counts
from .serving import breakdown, calibration
from .serving.cost import TERMS, Profile

if TYPE_CHECKING:
    from . import timings


def layer_of(model: Model) -> int:
    """The first layer that selects by its own index plane, as all others of its kind do."""
    for layer in model.layers:
        if layer.kind == "full" and layer.selection and not layer.selection.span and not layer.selection.bounds:
            return layer.number
    raise ValueError(f"--model: expected one whose layers select, got {model.name}; a dense one takes --select N")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn profile", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    which.add_argument("--records", metavar="FILE", help="JSON lines of steps and requests, as a service wrote them")
    add = parser.add_argument_group("with --model").add_argument
    add("--select", type=int, metavar="N", help="tokens that a dense model selects")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, of which this is one")
    add("--lengths", type=counts, default=[8192, 32768], metavar="LIST", help="tokens of a sequence (8k,32k)")
    add("--queries", type=counts, default=[1], metavar="LIST", help="of them in the step: 1 decodes, more prefill (1)")
    add("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    add("--device", default="cpu", metavar="NAME", help="(cpu)")
    add("--rounds", type=int, default=9, metavar="N", help="timed calls of each kind (9)")
    add = parser.add_argument_group("with --records").add_argument
    add("--cost", metavar="FILE", help="coefficients of a step's time, from calibrate; without, fitted to the records")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 if it cannot run."""
    parser = arguments()
    options = parser.parse_args(argv)
    for name in ("batch", "rounds", "tp"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.model and not find_spec("torch"):
        print("profile --model needs torch 2.9 or newer, which is not installed: pip install torch", file=sys.stderr)
        return 2
    try:
        print(_recorded(options) if options.records else _timed(options))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    return 0


# --- A layer, timed here


def _timed(options: argparse.Namespace) -> str:
    import torch

    from .timings import Yardsticks, profile

    if options.device != "cpu" and not torch.accelerator.is_available():
        raise ValueError(f"--device: expected cpu, as torch finds no accelerator here, got {options.device}")
    model = PRESETS[options.model]
    if options.select:
        model = sparse(model, METHODS["tokens"], options.select)
    model = shard(model, options.tp)
    number = layer_of(model)
    torch.manual_seed(0)
    yardsticks = Yardsticks(options.device)
    found = [
        profile(model, number, length, options.batch, queries, options.device, yardsticks, options.rounds)
        for queries in options.queries
        for length in options.lengths
    ]
    if not options.json:
        return report(options, number, found)
    rows = [{**asdict(p), "promised": p.promised, "measured": p.measured} for p in found]
    return json.dumps({"model": model.name, "layer": number, "calls": rows}, indent=2)


def report(options: argparse.Namespace, number: int, found: Sequence[timings.LayerProfile]) -> str:
    """As text with two tables in Markdown."""
    lines = [
        f"{options.model}, layer {number}, {options.batch} sequences, {options.device}",
        "",
        "| length | queries | TFLOPS | GB/s | call | ms | of compute | of bandwidth | binds |",
        "|---" * 9 + "|",
    ]
    for p in found:
        for name, part in (("dense attend", p.dense), ("select", p.select), ("attend", p.attend)):
            shares = f"{part.compute:.0%} | {part.bandwidth:.0%} | {part.binds}"
            limits = f"{p.limits.compute / 1e12:.3g} | {p.limits.bandwidth / 1e9:.3g}"
            lines.append(f"| {p.length} | {p.queries} | {limits} | {name} | {1e3 * part.seconds:.4g} | {shares} |")
    names = ("selection", "scattered", "launches", "rest")
    lines += ["", "| length | queries | effective ratio | pairs | speed-up promised | measured | "]
    lines[-1] += " | ".join(f"{n} ms" for n in names) + " |"
    lines.append("|---" * (6 + len(names)) + "|")
    for p in found:
        lost = " | ".join(f"{1e3 * getattr(p, name):.4g}" for name in names)
        ratios = f"{p.effective_kv_ratio:.3f} | {p.pairs:.3f} | {p.promised:.2f} | {p.measured:.2f}"
        lines.append(f"| {p.length} | {p.queries} | {ratios} | {lost} |")
    return "\n".join(lines)


# --- A service's records


def _recorded(options: argparse.Namespace) -> str:
    requests, together = breakdown.read(options.records)
    profile, said = None, ""
    if options.cost:
        profile = Profile.load(options.cost)
    else:
        try:
            profile = calibration.profile(calibration.fits(calibration.read(options.records))[0])
        except ValueError as error:
            said = f"times are unknown: {error}"
    found = breakdown.buckets(requests, profile, together)
    if options.json:
        rows = [{**asdict(bucket), "bottleneck": bucket.bottleneck} for bucket in found]
        return json.dumps({"profile": asdict(profile) if profile else None, "said": said, "buckets": rows}, indent=2)
    names = [breakdown.LIMITS[term] for term in TERMS]
    lines = ["| length | phase | requests | tokens | effective ratio | ms a token | " + " | ".join(names)]
    lines[0] += " | bottleneck |"
    lines.append("|---" * (7 + len(names)) + "|")
    for bucket in found:
        length = f"{bucket.above} to {bucket.upto}" if bucket.above else f"up to {bucket.upto}"
        shown = f"{bucket.requests} | {bucket.tokens} | {bucket.effective_kv_ratio:.3f}"
        lines.append(f"| {length} | {bucket.phase} | {shown} | {_times(bucket)} | {bucket.bottleneck} |")
    return "\n".join([*lines, *([said] if said else [])])


def _times(bucket: breakdown.Bucket) -> str:
    """Milliseconds a token, and the share of each term in it."""
    if bucket.seconds is None:
        return " | ".join("-" * (1 + len(TERMS)))
    total = sum(bucket.seconds.values())
    shares = [f"{bucket.seconds[term] / total if total else 0:.0%}" for term in TERMS]
    return " | ".join([f"{1e3 * total / bucket.tokens:.3g}", *shares])
