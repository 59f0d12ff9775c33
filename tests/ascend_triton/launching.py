"""A plug-in of pytest (``-p launching``): launches of Triton kernels on CPU tensors run the kernels' lowered form, and
`ascend_triton` takes CPU tensors. ``CHIP`` in the environment names the chip that is lowered for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import native
from lowering import CHIPS, Chip, Specialised, linalg, specialise
from triton.runtime.jit import JITFunction

from sparse_attn.backends import ascend_triton
from sparse_attn.registry import OneOf

_chip = CHIPS[os.environ.get("CHIP", "910B3")]
_record: list[Specialised] | None = None
_texts: dict[Any, str] = {}


@contextmanager
def recorded(chip: Chip) -> Iterator[list[Specialised]]:
    """Launches are those of another chip, and only written down."""
    global _chip, _record
    before = _chip, _record
    _chip, _record = chip, []
    try:
        yield _record
    finally:
        _chip, _record = before


@cache
def _built(text: str) -> Any:
    return native.build(text)


def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    kernel = specialise(self, _chip, args, keywords)
    if _record is not None:
        _record.append(kernel)
        return
    key = self, str((kernel.signature, kernel.constants, kernel.attributes.hash(), kernel.options))
    if key not in _texts:
        _texts[key] = linalg(kernel, _chip)
    kinds = [kind for name, kind in kernel.signature.items() if name not in kernel.constants]
    native.run(_built(_texts[key]), tuple(grid), kernel.arguments, kinds)


JITFunction.run = launch
ascend_triton.soc.current = lambda: ascend_triton.soc.SOCS[_chip.family]
ascend_triton.IMPLS = tuple(
    replace(impl, limits={**impl.limits, "device": OneOf(("cpu",))}, available=lambda: None)
    for impl in ascend_triton.IMPLS
)
