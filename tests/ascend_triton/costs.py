"""What a planned kernel costs, as its HIVM shows: `python tests/ascend_triton/costs.py` prints the table of
`docs/ascend-triton.md` (with PYTHONPATH=.:tests:tests/ascend_triton)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from launches import CALLS, kernels
from lowering import CHIPS, Specialised, hivm, linalg

BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64}

_TRANSFER = re.compile(r"call @(load_gm_to_ubuf|store_ubuf_to_gm|nd2nz|fixpipe)\w*?\w*\((%\w+), (%\w+)")
_FOR = re.compile(r"scf\.for %\w+ = (%\S+) to (%\S+) step (%\S+)")
_CONSTANT = re.compile(r"%c(-?\d+)(?:_i\d+)?$")


@dataclass
class Loop:
    """What one turn moves, in bytes, of a loop whose length is not known before: ``fetched`` and ``written`` between
    the chip and the call's tensors, ``exchanged`` with the workspace through which cube and vector units hand each
    other numbers. ``scalar`` counts numbers that scalar code reads from memory."""

    fetched: int = 0
    written: int = 0
    exchanged: int = 0
    scalar: int = 0


@dataclass
class Costs:
    """Of one kernel."""

    buffer: int
    flags: int
    handshakes: int
    vector_units: int
    loops: list[Loop]

    @property
    def busiest(self) -> Loop:
        return max(self.loops, key=lambda loop: (loop.fetched, loop.exchanged))


def costs(hivm: str) -> Costs:
    """Read the module. HIVM prints an operation a line, with the braces of its blocks at the ends of lines."""
    cube = "_mix_aic(" in hivm
    return Costs(
        buffer=_buffer(hivm),
        flags=hivm.count("hivm.hir.set_flag"),
        handshakes=hivm.count("hivm.hir.sync_block_set"),
        vector_units=1 if cube and "limit_sub_block_id0" in hivm else 2,
        loops=_loops(hivm),
    )


def _buffer(hivm: str) -> int:
    """Bytes of a vector unit's buffer in use."""
    values = dict(re.findall(r"(%c-?\d+_i64) = arith\.constant (-?\d+) : i64", hivm))
    ends = [0]
    for places, type in re.findall(r"pointer_cast\((.*?)\)[^:]*: (memref<[^>]*address_space<ub>>)", hivm):
        ends += [int(values[place.strip()]) + _size(type) for place in places.split(",")]
    return max(ends)


def _size(type: str) -> int:
    """Bytes of a memory of static shape; 0 for others."""
    *shape, element = re.match(r"memref<([\w?]+)", type)[1].split("x")
    return 0 if "?" in shape else prod(map(int, shape)) * BITS[element] // 8


def _loops(hivm: str) -> list[Loop]:
    loops: list[Loop] = []
    blocks: list[tuple[int, Loop | None]] = []  # turns of constant loops around, and the innermost other loop
    sources: dict[str, str] = {}
    types: dict[str, str] = {}
    workspace = ""
    for line in hivm.splitlines():
        text = line.strip()
        if text.startswith("}"):
            blocks.pop()
        turns, loop = blocks[-1] if blocks else (1, None)
        if text.startswith("func.func"):
            sources, types = {}, {}
            found = re.search(r"(%arg\d+): memref<[^{]*\{hacc.arg_type = #hacc.arg_type<workspace>", text)
            workspace = found[1] if found else ""
        if " = memref." in text or "pointer_cast" in text:
            name = text.split(" ", 1)[0]
            operand = re.search(r"memref\.\w+ (%\w+)", text)
            if operand:
                sources[name] = operand[1]
            types[name] = (
                re.findall(r"memref<(?:[^<>]|<[^<>]*(?:<[^<>]*>)?[^<>]*>)*>", text)[-1] if "memref<" in text else ""
            )
        if loop is not None:
            moved = _TRANSFER.search(text)
            if moved:
                kind, source, target = moved.groups()
                size = turns * max(_known(source, sources, types), _known(target, sources, types))
                inside = source if kind in ("load_gm_to_ubuf", "nd2nz") else target
                if _root(inside, sources) == workspace and workspace:
                    loop.exchanged += size
                elif kind in ("load_gm_to_ubuf", "nd2nz"):
                    loop.fetched += size
                else:
                    loop.written += size
            if "memref.load" in text and "address_space<gm>" in text:
                loop.scalar += turns
        if text.endswith("{"):
            header = _FOR.search(text)
            bounds = [_CONSTANT.match(bound) for bound in header.groups()] if header else []
            if header and all(bounds):
                low, high, step = (int(bound[1]) for bound in bounds if bound)
                blocks.append((turns * -(-(high - low) // step), loop))
            elif header:
                loops.append(Loop())
                blocks.append((1, loops[-1]))
            else:
                blocks.append((turns, loop))
    return loops


def _root(name: str, sources: dict[str, str]) -> str:
    while name in sources:
        name = sources[name]
    return name


def _known(name: str, sources: dict[str, str], types: dict[str, str]) -> int:
    """Bytes of the nearest memory of static shape that a view is of."""
    while name in sources or name in types:
        size = _size(types.get(name, "memref<?xi8>"))
        if size:
            return size
        if name not in sources:
            return 0
        name = sources[name]
    return 0


COUNTED = ("attend", "merge")
"""How the names of the calls begin that the table has."""

HEADER = """\
| call | kernel | heads x entries | buffer | fetched | exchanged | scalar reads | flags | handshakes | vector units |
|---|---|---|---|---|---|---|---|---|---|"""


def table() -> str:
    """A line for each kernel that a call launches on an A2. What is planned for the 950 has another form."""
    chip = CHIPS["910B3"]
    lines = [HEADER]
    for call in [name for name in CALLS if name.startswith(COUNTED)]:
        for kernel in kernels(call, chip):
            cells = _cells(kernel, costs(hivm(linalg(kernel, chip), chip)))
            lines.append(f"| {call} | `{kernel.function.__name__}` | {cells} |")
    return "\n".join(lines)


def _cells(kernel: Specialised, measured: Costs) -> str:
    heads, entries = _tile(kernel)
    loop = measured.busiest
    moved = (f"{loop.fetched / entries:g}", f"{loop.exchanged / entries:g}", f"{loop.scalar / entries:g}")
    shape = f"{heads} x {entries}"
    counted = (measured.buffer, *moved, measured.flags, measured.handshakes, measured.vector_units)
    return " | ".join(map(str, (shape, *counted)))


def _tile(kernel: Specialised) -> tuple[int, int]:
    """(heads, entries) that one turn of the busiest loop takes."""
    constants = kernel.constants
    plane = constants.get("MAIN") or constants.get("WINDOW")
    if isinstance(plane, tuple):
        return constants["BLOCK_H"], plane.tile
    return constants.get("BLOCK_H", 1), constants.get("ROWS", 1)


if __name__ == "__main__":
    print(table())
