"""Engines whose kernels are operators of torch, in a library of the engine's package."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_attn.ops.select import Select


@cache
def load(package: str, library: str, namespace: str) -> Any:
    """The namespace of an engine's operators. Loads its library, but not the engine. None: not installed."""
    spec = find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec else ()
    files = [file for place in places for file in Path(place).glob(library)]
    if not files:
        return None
    try:
        torch.ops.load_library(str(files[0]))
    except OSError:  # built for another torch
        return None
    return getattr(torch.ops, namespace)


def in_fp8(calls: list[Select]) -> list[tuple[Tensor, Tensor]]:
    """Queries of an indexer in fp8, and weights ``[T, H]`` that hold their scales."""
    found = []
    for a in calls:
        assert a.weights is not None
        scale = a.q.float().abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
        found.append(((a.q.float() / scale[..., None]).to(torch.float8_e4m3fn), a.weights.float() * scale))
    return found


def chosen(scores: Tensor, a: Select) -> Tensor:
    """The list ``[1, 1, k]`` of a row's scores ``[1, L]``, by torch: these engines have no kernel for any k."""
    return scores.topk(a.k, sorted=False).indices.int()[:, None]
