"""What each kernel can do, as a table generated from its limits."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import doctor, registry
from .integrations import capabilities
from .registry import Impl, Limit, OneOf

TITLE = """# Support

What each kernel takes, generated from its limits by `python -m sparse_attn support --markdown`; do
not edit. The best kernel that takes a call runs it; `any` is no limit of the kernel, but of the op. Errors are
those on queries, keys and values of standard normal size; larger scores cost more of their last digits.
"""


def labels(impls: Sequence[Impl]) -> list[str]:
    """A name for each kernel of one op: its backend and variant; with the priority if several share them."""
    count = Counter(impl.label for impl in impls)
    return [impl.label if count[impl.label] == 1 else f"{impl.label} ({impl.priority})" for impl in impls]


def table(impls: Sequence[Impl]) -> list[list[str]]:
    """Rows of cells for the kernels of one op; the first row and column are headings."""
    names = list(dict.fromkeys(name for impl in impls for name in impl.limits))
    dtypes = list(dict.fromkeys(dtype for impl in impls for dtype in impl.tolerance))
    rows = [["", *labels(impls)]]
    rows += [[name, *(_limit(impl.limits.get(name)) for impl in impls)] for name in names]
    for dtype in dtypes:
        found = [impl.tolerance.get(dtype) for impl in impls]
        cells = [f"{pair[0]:g} + {pair[1]:g} of the value" if pair else "" for pair in found]
        rows.append([f"error in {dtype}", *cells])
    return rows


def _limit(limit: Limit | None) -> str:
    if limit is None:
        return "any"
    return ", ".join(map(_value, limit.values)) if isinstance(limit, OneOf) else str(limit)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"


def markdown(ops: dict[str, list[Impl]]) -> str:
    lines = [TITLE.rstrip()]
    for op, impls in ops.items():
        head, *rows = table(impls)
        lines += ["", f"## {op}", "", _bar(head), _bar(["---"] * len(head)), *map(_bar, rows)]
    return "\n".join(lines) + "\n"


def _bar(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def text(ops: dict[str, list[Impl]], here: dict[str, dict[str, str]]) -> str:
    lines: list[str] = []
    for op, impls in ops.items():
        rows = table(impls)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(op)
        lines += [("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip() for row in rows]
        lines += [f"  {label}, on this machine: {here[op][label]}" for label in labels(impls)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the table of all ops or of one."""
    parser = argparse.ArgumentParser(prog="python -m sparse_attn support", description=__doc__)
    known = sorted({impl.op for impl in registry.implementations()})
    parser.add_argument("op", nargs="?", choices=known, metavar="OP", help=", ".join(known))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print as JSON")
    form.add_argument("--markdown", action="store_true", help="print docs/support.md")
    form.add_argument("--engines", action="store_true", help="print what the integrations of engines run instead")
    options = parser.parse_args(argv)
    if options.engines:
        print(capabilities.markdown())
        return 0
    ops = {op: list(registry.implementations(op)) for op in known if options.op in (None, op)}
    if options.markdown:
        print(markdown(ops), end="")
        return 0
    # asked in a child process: a damaged native module must not end this one
    found = doctor.collect(["backends"])["backends"]
    here = {
        op: {label: found.get("ops", {}).get(op, {}).get(label) or found["error"] for label in labels(impls)}
        for op, impls in ops.items()
    }
    if options.json:
        report = {
            op: [
                {
                    "backend": impl.backend,
                    "priority": impl.priority,
                    "limits": {name: asdict(limit) for name, limit in impl.limits.items()},
                    "tolerance": dict(impl.tolerance),
                    "here": here[op][label],
                }
                for impl, label in zip(impls, labels(impls), strict=True)
            ]
            for op, impls in ops.items()
        }
        print(json.dumps({"ops": report, "broken": registry.broken_backends()}, indent=2))
        return 0
    print(text(ops, here))
    for name, reason in registry.broken_backends().items():
        print(f"{name}: {reason}")
    return 0
