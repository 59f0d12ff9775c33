"""The tables of ``docs/ascend.md``. ``python -m sparse_attn.backends.ascend_npu.page docs/ascend.md`` renews them."""

from __future__ import annotations

import sys
from pathlib import Path

from .kernels import KERNELS, REFUSED, UNUSED, Kernel
from .soc import FAMILIES

BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"


def operators() -> list[str]:
    """A line for each op and form: the operator of each family of chips, or why there is none."""
    lines = [f"| op | calls | {' | '.join(FAMILIES)} |", f"| --- | --- | {'--- | ' * len(FAMILIES)}".rstrip()]
    for op, form in dict.fromkeys((kernel.op, kernel.form) for kernel in KERNELS):
        having = [kernel for kernel in KERNELS if (kernel.op, kernel.form) == (op, form)]
        cells = [next((_name(k) for k in having if f in k.families), _instead(op, form, f)) for f in FAMILIES]
        lines.append(f"| `{op}` | {form} | {' | '.join(cells)} |")
    return lines


def _instead(op: str, form: str, family: str) -> str:
    """What serves the calls of a form that a family of chips lacks: the same form without one of its restrictions."""
    words = form.split(", ")
    wider = {", ".join(words[:i] + words[i + 1 :]) for i in range(1, len(words))}
    found = (k.form for k in KERNELS if k.op == op and k.form in wider and family in k.families)
    return next((f'as "{form}"' for form in found), "refused")


def _name(kernel: Kernel) -> str:
    return f"`{kernel.operators[0]}`" if kernel.operators else "torch's own operations"


def unused() -> list[str]:
    """Operators that no kernel here calls, and why."""
    return ["| operator | why |", "| --- | --- |", *(f"| {' | '.join(row)} |" for row in UNUSED)]


def refused() -> list[str]:
    """What no kernel here takes on any chip, and why."""
    return ["| op | calls | why |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in REFUSED)]


def limits() -> list[str]:
    """Every limit of every kernel, and where it comes from."""
    lines: list[str] = []
    for kernel in KERNELS:
        if not kernel.limits:
            continue
        lines += [f"### `{kernel.op}`: {kernel.variant}", "", "| fact | supported | source |", "| --- | --- | --- |"]
        for fact, (limit, source) in kernel.limits.items():
            lines.append(f"| `{fact}` | {str(limit).replace('one of ', '') or 'none'} | {source} |")
        lines.append("")
    return lines[:-1]


TABLES = {"operators": operators, "refused": refused, "unused": unused, "limits": limits}


def renewed(page: str) -> str:
    """The page with its tables renewed."""
    for name, table in TABLES.items():
        before, _, rest = page.partition(BEGIN.format(name))
        _, _, after = rest.partition(END)
        page = "\n".join([f"{before}{BEGIN.format(name)}", "", *table(), "", f"{END}{after}"])
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
