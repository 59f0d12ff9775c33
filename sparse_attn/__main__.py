"""``python -m sparse_attn``: doctor, plan, metrics, calibrate, crossover, support, demo, version."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    # each command reads its own options, so its module is imported only when it is asked for
    if argv[:1] == ["doctor"]:
        from .doctor import main as doctor

        return doctor(argv[1:])
    if argv[:1] == ["plan"]:
        from .plan import main as plan

        return plan(argv[1:])
    if argv[:1] == ["metrics"]:
        from .metrics import main as metrics

        return metrics(argv[1:])
    if argv[:1] in (["support"], ["demo"]) and not find_spec("torch"):
        print(f"{argv[0]} needs torch 2.9 or newer, which is not installed: pip install torch", file=sys.stderr)
        return 1
    if argv[:1] == ["calibrate"]:
        from .calibrate import main as calibrate

        return calibrate(argv[1:])
    if argv[:1] == ["crossover"]:
        from .calibrate import main_crossover

        return main_crossover(argv[1:])
    if argv[:1] == ["support"]:
        from .support import main as support

        return support(argv[1:])
    if argv[:1] == ["demo"]:
        from .demo import main as demo

        return demo(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m sparse_attn", description="Sparse attention.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("doctor", help="what this machine has and runs, or how an engine runs a model, and what binds")
    commands.add_parser("plan", help="what a model's cache costs and buys on a device, and what binds")
    commands.add_parser("metrics", help="what is exported to Prometheus: [--dashboard | --alerts] [--model NAME]")
    commands.add_parser("calibrate", help="coefficients of a step's time from measured steps, and the knee: FILE")
    commands.add_parser("crossover", help="dense against sparse over length, from measured calls: FILE --k N")
    commands.add_parser("support", help="what each kernel can do: [OP] [--json | --markdown]")
    commands.add_parser("demo", help="a language model on sparse attention, and a report")
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
