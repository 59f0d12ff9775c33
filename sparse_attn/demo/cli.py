"""The command line of the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from time import perf_counter

from .model import CannotRun, require_packages

PROG = "python -m sparse_attn demo"
MODELS = ("smollm2-135m-instruct", "deepseek-v4.1-flash")
INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended

QUICK = dict(context=2048, tail=128, new=16, repeats=3)
FULL = dict(context=8192, tail=512, new=64, repeats=9)


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0, 1 if a check failed, 2 if it cannot run, 130 if it was interrupted."""
    chooser = argparse.ArgumentParser(PROG, add_help=False, allow_abbrev=False)
    _add_model(chooser)
    chosen, rest = chooser.parse_known_args(argv)
    options = parse(rest) if chosen.model == MODELS[0] else None
    try:
        if options is None:
            from . import deepseek_v41_run

            return deepseek_v41_run.main(rest, f"{PROG} --model {chosen.model}")
        require_packages()
        return run(options)
    except KeyboardInterrupt:
        print("interrupted: no report was written", file=sys.stderr)
        return INTERRUPTED
    except (CannotRun, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _add_model(parser: argparse.ArgumentParser) -> None:
    text = f"what to run ({MODELS[0]}); with --help for its own options"
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help=text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="SmolLM2-135M-Instruct reads a long text and decodes through sparse_attn.attend, dense and sparse. "
        "Results go to stdout, progress to stderr, and a report with plots to a file. Uses no network.",
    )
    _add_model(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small run: {context} tokens, under a minute".format(**QUICK))
    add("--context", type=int, metavar="N", help="tokens of prompt and held-out text (8192, the model's limit)")
    add("--tail", type=int, metavar="N", help="held-out tokens at the end of the context (512)")
    add("--new", type=int, metavar="N", help="tokens to generate after the prompt (64)")
    add("--keep", type=Fraction, default=Fraction(1, 4), metavar="F", help="share of the KV pairs to attend (1/4)")
    add("--select", choices=("tokens", "blocks"), default="tokens", help="what is selected (tokens)")
    add("--block", type=int, default=16, metavar="N", help="entries in a block (16)")
    add(
        "--score",
        choices=("mean", "bounds"),
        default="mean",
        help="blocks: by mean key or by bounds of the keys (mean)",
    )
    add("--page-size", type=int, default=64, metavar="N", help="entries in a page (64)")
    add("--text", type=Path, metavar="PATH", help="a UTF-8 text (the reference manual that comes with Python)")
    add("--skip", type=int, default=0, metavar="N", help="tokens to leave out at the beginning of the text (0)")
    add("--report", type=Path, default=Path("sparse_attn_demo.html"), metavar="PATH", help="(sparse_attn_demo.html)")
    add("--threads", type=int, metavar="N", help="CPU threads (PyTorch's choice)")
    options = parser.parse_args(argv, argparse.Namespace())
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    for name, low in (("tail", 2), ("new", 2), ("block", 1), ("page_size", 1), ("skip", 0), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            parser.error(f"--{name.replace('_', '-')}: expected at least {low}, got {value}")
    if options.new > options.tail:
        parser.error(f"--new: expected at most the {options.tail} tokens of --tail, got {options.new}")
    if options.context < options.tail + options.page_size:
        parser.error(f"--context: expected at least a page and the tail, {options.tail + options.page_size} tokens")
    if not 0 < options.keep <= 1:
        parser.error(f"--keep: expected a share over 0 and up to 1, got {options.keep}")
    if options.page_size % options.block:
        parser.error(f"--block: expected a divisor of the page size {options.page_size}, got {options.block}")
    if not options.report.parent.is_dir():
        parser.error(f"--report: there is no folder {options.report.parent}")
    return options


def run(options: argparse.Namespace) -> int:
    # torch and transformers are imported only now, so that --help and a refusal are quick
    from . import report
    from .run import run

    begin = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    results = run(options, say)
    print(report.text(results))
    report.write(options.report, report.html(results))
    print(f"\nReport: {options.report}")
    return 0 if results.agreement.holds else 1
