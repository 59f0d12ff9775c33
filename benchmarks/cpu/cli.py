"""``python -m sparse_attn bench --suite cpu``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
"""What the OpenMP runtime must read before torch starts it: threads that move count each other's work."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m sparse_attn bench --suite cpu", description=__doc__)
    made.add_argument("--only", default="", metavar="TEXT", help="groups whose name contains this text")
    made.add_argument("--quick", action="store_true", help="one case of each kind, without peers that torch compiles")
    made.add_argument("--no-compile", action="store_true", help="without peers that torch compiles, which take minutes")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    made.add_argument("--seconds", type=float, default=0.0, metavar="S", help="about so long for each case")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="rows as JSON")
    form.add_argument("--markdown", action="store_true", help="rows as a page")
    made.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to a file")
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw the rows (needs matplotlib)")
    made.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: show the rows of such a file")
    made.add_argument("--against", type=Path, metavar="FILE", help="fail if a ratio is worse than in such a file")
    made.add_argument("--slack", type=float, default=0.1, metavar="PART", help="how much worse it may be (0.1)")
    return made


def check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, what would fail after minutes or say nothing."""
    if options.threads < 1:
        made.error(f"--threads: expected at least 1, got {options.threads}")
    for name in ("seconds", "slack"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):  # nothing is worse by more than nan
            made.error(f"--{name}: expected a number from 0 on, got {value}")
    if options.output and not options.output.parent.is_dir():
        made.error(f"--output: there is no folder {options.output.parent}")
    if options.plots and not find_spec("matplotlib"):
        made.error("--plots needs matplotlib: pip install matplotlib")
    for name in ("read", "against"):
        file = getattr(options, name)
        if file and not file.is_file():
            made.error(f"--{name}: there is no file {file}")


def main(argv: Sequence[str]) -> int:
    made = parser()
    options = made.parse_args(argv)
    check(made, options)
    if options.read is None and any(name not in os.environ for name in PINNED):
        os.environ.update(PINNED | {"OMP_NUM_THREADS": str(options.threads)})
        os.execv(
            sys.executable,
            [sys.executable, "-m", "sparse_attn", "bench", "--suite", "cpu", *argv, f"--threads={options.threads}"],
        )
    from . import report

    try:
        before = report.load(options.against) if options.against else None
        result = report.load(options.read) if options.read else measured(options)
    except ValueError as error:
        made.error(str(error))
    if options.output:
        options.output.write_text(report.as_json(result) + "\n")
    if options.plots:
        report.draw(result, options.plots)
    form = report.as_json if options.json else report.markdown if options.markdown else report.table
    print(form(result))
    if before is None:
        return 0
    if not report.compared(result, before):
        print(f"bench: no ratio or share of this run, on as many threads, is in {options.against}", file=sys.stderr)
        return 1
    for name in ("processor", "instruction set"):
        there, here = (found["machine"].get(name) for found in (before, result))
        if there != here:
            print(f"bench: {options.against} has another {name}, {there} instead of {here}", file=sys.stderr)
    worse = report.worse(result, before, options.slack)
    for line in worse:
        print(line, file=sys.stderr)
    return 1 if worse else 0


def measured(options: argparse.Namespace) -> dict:
    from . import machine, report, suite

    budget = options.seconds or (0.5 if options.quick else 1.0)
    limits, rows = suite.run(
        options.only,
        options.quick,
        not options.no_compile,
        options.threads,
        budget,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    return report.result(machine.described(), limits, rows)
