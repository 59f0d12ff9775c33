"""A plug-in of pytest: the kernels of ascend_npu that are torch's own operations also run on CPU tensors, so that they
take the tests that every backend must pass. ``pytest -p own_operations -k ascend_npu tests/test_attend.py``
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from sparse_attn import registry
from sparse_attn.backends.ascend_npu.kernels import OWN
from sparse_attn.registry import Impl, OneOf

_found = registry._found


def _on_the_cpu(impl: Impl) -> Impl:
    return replace(impl, limits={**impl.limits, "device": OneOf(("cpu",))}, available=lambda: None)


@cache
def _with_ours() -> tuple[tuple[Impl, ...], dict[str, str]]:
    impls, broken = _found()
    ours = tuple(_on_the_cpu(kernel.impl()) for kernel in OWN)
    kernels = tuple(impl for impl in impls if impl.backend != "reference")
    return (*kernels, *ours, *(impl for impl in impls if impl.backend == "reference")), broken


registry._found = _with_ours


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """What the limits refuse is no fault."""
    try:
        return (yield)
    except registry.NoBackend as refusal:
        pytest.skip(str(refusal).splitlines()[-2])
