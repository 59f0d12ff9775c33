"""``python -m sparse_attn``: doctor, plan, metrics, calibrate, crossover, profile, quality, support, demo, serve,
bench, version."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec

COMMANDS = {
    # name: module, function, help
    "doctor": ("doctor", "main", "what this machine has and runs, or how an engine runs a model, and what binds"),
    "plan": ("plan", "main", "what a model's cache costs and buys on a device, and what binds"),
    "metrics": ("metrics", "main", "what is exported to Prometheus: [--dashboard | --alerts] [--model NAME]"),
    "calibrate": ("calibrate", "main", "coefficients of a step's time from measured steps, and the knee: FILE"),
    "crossover": ("crossover", "main", "dense against sparse over length, from measured calls, or measured here: FILE"),
    "profile": ("profile", "main", "what limits a selecting layer here, or a service: --model NAME or --records FILE"),
    "quality": ("quality.cli", "main", "what a selection costs a model, and the share to take: [MODEL]"),
    "support": ("support", "main", "what each kernel can do: [OP] [--json | --markdown], or --engines"),
    "demo": ("demo", "main", "a language model on sparse attention, and a report"),
    "serve": ("serve", "main", "a model behind an OpenAI-compatible endpoint, small on purpose"),
    "bench": ("bench", "main", "benchmarks of a checkout: --suite NAME"),
}
NEED_TORCH = ("quality", "support", "demo", "serve", "bench")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    if name in NEED_TORCH and not find_spec("torch"):
        print(f"{name} needs torch 2.9 or newer, which is not installed: pip install torch", file=sys.stderr)
        return 2
    if name in COMMANDS:
        # each command reads its own options, so its module is imported only when it is asked for
        module, function, _ = COMMANDS[name]
        code: int = getattr(import_module(f".{module}", __package__), function)(argv[1:])
        return code
    parser = argparse.ArgumentParser(prog="python -m sparse_attn", description="Sparse attention.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for known, (_, _, what) in COMMANDS.items():
        commands.add_parser(known, help=what)
    commands.add_parser("version", help="print the version")
    parser.parse_args(argv)
    from .doctor import package

    print(package()["version"])
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
