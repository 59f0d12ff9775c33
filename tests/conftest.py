"""Fixtures: every kernel of an op that this machine can run."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import registry


def runnable(op: str) -> list[registry.Impl]:
    return [impl for impl in registry.implementations(op) if registry.availability(impl) is None]


@pytest.fixture(params=runnable("attend"), ids=lambda impl: impl.backend)
def attend_impl(request) -> registry.Impl:
    return request.param


@pytest.fixture(params=runnable("select"), ids=lambda impl: impl.backend)
def select_impl(request) -> registry.Impl:
    return request.param


@pytest.fixture(params=runnable("select_merge"), ids=lambda impl: impl.backend)
def select_merge_impl(request) -> registry.Impl:
    return request.param


@pytest.fixture(params=runnable("store"), ids=lambda impl: impl.backend)
def store_impl(request) -> registry.Impl:
    return request.param


@pytest.fixture(autouse=True)
def _seed(request) -> None:
    torch.manual_seed(sum(map(ord, request.node.nodeid)))
