"""Kernels through the compilers of triton-ascend and AscendNPU IR, as far as they go without CANN: from Triton to
linalg, and from there to HIVM, the form in which every buffer has its place in the memories of a chip."""

from __future__ import annotations

import hashlib
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

CACHE = Path(__file__).parents[2] / "build" / "ascend_triton"
"""Results by a hash of what they were made from; nothing in it needs to be kept."""


class Chip(NamedTuple):
    """A chip as the compilers know it."""

    target: str
    family: str
    compiler: str
    options: tuple[str, ...]


_COMMON = (
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    # what triton-ascend passes unless told otherwise
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
)
_HIVM = "--enable-hivm-compile=true"
CHIPS = {
    "910B3": Chip("Ascend910B3", "A2", "bishengir-compile", (*_COMMON, _HIVM)),
    "910_9382": Chip("Ascend910_9382", "A3", "bishengir-compile", (*_COMMON, _HIVM)),
    "950": Chip("Ascend950PR_9589", "950", "bishengir-compile-a5", _COMMON),
}


class Overflow(Exception):
    """A kernel needs more of an on-chip memory than a chip has."""


class Specialised(NamedTuple):
    """A kernel for one kind of arguments: their types, and the values that are compiled in."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: Any
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    """Those that are left, in order."""


def specialise(function: Any, chip: Chip, args: tuple[Any, ...], keywords: dict[str, Any]) -> Specialised:
    """What a launch compiles, by Triton's own rules."""
    backend = _backend(chip)
    if function.binder is None:
        function.create_binder(backend)
    bound, kinds, _, _, options = function.binder(*args, **keywords, debug=False)
    values = tuple(bound.values())
    attributes = backend.get_attrs_descriptor(function.params, values)
    ones = attributes.get_constants()
    parameters = list(zip(function.params, values, strict=True))
    constants = {p.name: v for p, v in parameters if p.is_constexpr or p.num in ones or v is None}
    names = [p.name for p in function.params if not p.is_constexpr]
    signature = {n: "*i8" if kind == "none" else kind for n, kind in zip(names, kinds, strict=False)}
    arguments = tuple(v for p, v in parameters if p.name not in constants)
    return Specialised(function, signature, constants, attributes, options, arguments)


def linalg(kernel: Specialised, chip: Chip) -> str:
    """The kernel as the vendor's compiler lowers Triton."""
    backend = _backend(chip)
    stages: dict[str, Any] = {}
    options = backend.parse_options(dict(kernel.options, compile_on_910_95=chip.family == "950"))
    backend.add_stages(stages, options)
    source = ASTSource(kernel.function, kernel.signature, kernel.constants, kernel.attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": kernel.function.__name__, "target": backend.target, **vars(options)}
    ttir = stages["ttir"](module, metadata)
    try:
        return stages["ttadapter"](ttir, metadata)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{kernel.function.__name__} has no linalg form: {error.stderr.decode()[-2000:]}") from error


def _backend(chip: Chip) -> Any:
    return make_backend(GPUTarget("npu", chip.target, 0))


def hivm(text: str, chip: Chip) -> str:
    """The kernel planned for the memories of a chip. Raises ``Overflow`` if it does not fit."""
    folder = CACHE / f"{digest(text, chip.target, *chip.options)}.hivm"
    planned = folder / "module.hivm.opt.mlir"
    if not planned.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "kernel.mlir"
        source.write_text(re.sub(r', mix_mode = "\w*"', "", text))
        root = Path(next(iter(find_spec("ascendnpuir").submodule_search_locations)))
        command = [root / "bin" / chip.compiler, source, f"--target={chip.target}", *chip.options]
        command += [f"--save-temps={folder}", "-o", folder / "kernel"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        said = done.stdout + done.stderr
        (folder / "log").write_text(said)
        overflow = re.search(r"\w+ overflow, requires \d+ bits while \d+ bits available", said)
        if overflow:
            raise Overflow(overflow[0])
        # The last step, from HIVM to an object file, is part of CANN.
        if not planned.exists():
            raise RuntimeError(f"no HIVM for {chip.target}: {said[-2000:]}")
    return planned.read_text()


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((triton.__version__, *parts)).encode()).hexdigest()[:32]
