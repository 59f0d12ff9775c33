"""``python -m sparse_attn crossover``: dense against sparse over length, ratio and batch, from measured calls.

FILE has JSON lines: docs/serving.md. With ``--measure``, they are those of the bundled engine, which is timed here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from .plan import counts, shares
from .serving.crossover import Crossover, Switches, Timing, crossovers, read, switches


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn crossover", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="measured calls")
    add("--json", action="store_true", help="print as JSON")
    add("--k", type=int, metavar="N", help="entries that are selected at least; with --measure, the engine's own")
    add("--save", type=Path, metavar="FILE", help="write up to which lengths to attend densely, for serve --crossover")
    add("--device", default="", metavar="NAME", help="fingerprint, to save with it; with --measure, found here")
    engine = parser.add_argument_group("of the bundled engine").add_argument
    engine("--measure", action="store_true", help="write FILE first: decode of the model's layers on this device")
    engine(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint of transformers; without, the demo's SmolLM2-135M"
    )
    engine("--share", type=shares, default="1/4", metavar="LIST", help="of the visible tokens, such as 1/4,1/8 (1/4)")
    engine("--lengths", type=counts, default="128,256,512,1k,2k,4k,8k", metavar="LIST", help="of the sequences")
    engine("--sequences", type=counts, default="1,4,16", metavar="LIST", help="in a step (1,4,16)")
    engine("--rounds", type=int, default=9, metavar="N", help="timed calls of each kind (9)")
    engine("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights (bfloat16)")
    engine("--threads", type=int, metavar="N", help="CPU threads; without, PyTorch's choice")
    return parser


def main(argv: list[str]) -> int:
    """Returns 0, or 2 if it cannot run."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.measure and not find_spec("torch"):
        print("crossover --measure needs torch 2.9 or newer: pip install torch", file=sys.stderr)
        return 2
    try:
        if options.measure:
            options.k, options.device = _measure(options)
        if options.k is None or options.k < 1:
            raise ValueError(f"--k: expected the entries that are selected at least, 1 or more, got {options.k}")
        found = crossovers(read(options.file), options.k)
        if options.save:
            Switches(options.device, options.k, switches(found, options.k)).save(options.save)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"crossover: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(each) for each in found], indent=2) if options.json else report(found))
    return 0


def _measure(options: argparse.Namespace) -> tuple[int, str]:
    """Write the file. Returns the engine's k, and the fingerprint."""
    import torch

    from .serve import fingerprint, load
    from .serving.paths import measure
    from .serving.runner import FLOOR

    if options.threads:
        torch.set_num_threads(options.threads)
    model, _, name = load(options.model)
    torch.manual_seed(0)
    timings: Iterator[Timing] = measure(
        model.config,
        options.share,
        options.lengths,
        options.sequences,
        options.rounds,
        dtype=getattr(torch, options.dtype),
    )
    with options.file.open("x") as file:  # what was measured before is not lost
        for timing in timings:
            print(json.dumps(asdict(timing)), file=file)
    return FLOOR, options.device or fingerprint(name, options.dtype)


def report(found: list[Crossover]) -> str:
    """A table in Markdown, and where each batch and ratio changes over."""
    lines = [
        "| batch | ratio | length | dense ms | sparse ms | dense / sparse | faster | results |",
        "|---" * 8 + "|",
    ]
    for each in found:
        for cell in each.cells:
            times = f"{1e3 * cell.dense:.4g} | {1e3 * cell.sparse:.4g} | {cell.speedup:.2f}"
            results = "same" if cell.exact else "differ"
            faster = cell.faster or "neither"
            lines.append(f"| {each.batch} | {each.ratio:g} | {cell.length} | {times} | {faster} | {results} |")
    for each in found:
        where = "not in what was measured"
        if each.length:
            where = f"between {each.length[0]} and {each.length[1]}" if each.length[0] else "from the shortest on"
        lines.append(f"batch {each.batch}, ratio {each.ratio:g}: sparse becomes faster for good {where}")
    return "\n".join(lines)
