"""Fixtures: every kernel of an op that this machine can run."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import env, library, registry

if env.TRITON_INTERPRET.get() == "1":
    import triton_interpreter  # noqa: F401

# Shapes are small: a second thread of torch waits for the first, and on a busy machine far longer than it works.
torch.set_num_threads(1)


def runnable(op: str) -> list[registry.Impl]:
    return [impl for impl in registry.implementations(op) if registry.availability(impl) is None]


def kernels_of(op: str):
    """A fixture that gives each of them in turn."""

    @pytest.fixture(name=f"{op}_impl", params=runnable(op), ids=lambda impl: impl.backend)
    def fixture(request) -> registry.Impl:
        return request.param

    return fixture


attend_impl = kernels_of("attend")
compress_impl = kernels_of("compress")
convert_impl = kernels_of("convert")
load_impl = kernels_of("load")
merge_impl = kernels_of("merge")
select_impl = kernels_of("select")
select_merge_impl = kernels_of("select_merge")
store_impl = kernels_of("store")


@pytest.fixture(autouse=True)
def _seed(request) -> None:
    torch.manual_seed(sum(map(ord, request.node.nodeid)))


@pytest.fixture
def debug_checks(monkeypatch):
    """Values are checked too."""
    monkeypatch.setenv("SPARSE_ATTN_CHECKS", "debug")
    library.forget()
    yield
    monkeypatch.undo()
    library.forget()
