"""``python -m sparse_attn bench --suite NAME``: runs ``benchmarks/NAME.py`` of a checkout, which has the options."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SUITES = {
    "cpu": "the ops beside the machine's limits and what else computes the same: docs/benchmarks.md",
    "serving": "admission by memory and compute against a static limit, on a real model: docs/serving.md",
}
FOLDER = Path(__file__).parents[1] / "benchmarks"


def main(argv: list[str]) -> int:
    """Run a suite. Returns its code, or 2 outside of a checkout."""
    about = "\n".join(f"{name}: {what}" for name, what in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m sparse_attn bench",
        description=f"Benchmarks; --suite NAME --help shows the options of one.\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help="--suite" not in argv,
        allow_abbrev=False,
    )
    parser.add_argument("--suite", choices=SUITES, required=True)
    options, rest = parser.parse_known_args(argv)
    if not FOLDER.is_dir():
        print("bench: expected a checkout with the folder benchmarks, got an installed package", file=sys.stderr)
        return 2
    code: int = load(options.suite).main(rest)
    return code


def load(suite: str) -> Any:
    """The module of a suite. Its folder stands in front while it is imported, as its files import each other."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(suite)
    finally:
        sys.path.remove(str(FOLDER))
