"""Kernels of engines as peers, where they are built beside this package. None is needed, none is brought along.

vLLM and SGLang are found where their packages are installed, ik_llama.cpp through the variable that names its library
(``ik_llama.LIBRARY``). Each peer reads the same numbers as we do, in the layout of its engine.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

from . import ik_llama, sglang, vllm

NAMES = (vllm.NAME, sglang.NAME, ik_llama.NAME)
"""How names of their peers begin."""

Peers = dict[str, Callable[[int], Tensor]]


def attend_peers(calls: list[Attend], slots: list[Tensor], window_slots: list[Tensor]) -> Peers:
    """Peers of calls with index lists. Of each call, the entries' slots ``[T, 1, K]``, and those of its window."""
    a = calls[0]
    if a.kv is None or a.v is not None:
        return {}  # their kernels are those of latent rows
    found = vllm.attend_peers(calls, slots, window_slots) | sglang.attend_peers(calls, slots, window_slots)
    return found | ik_llama.attend_peers(calls, slots)


def select_peers(calls: list[Select], keys: Callable[[Select], Tensor]) -> Peers:
    """Peers of an indexer on one row of one sequence. `keys`: what a call scores, ``[L, 1, D]``."""
    if len(calls[0].q) > 1 or calls[0].weights is None:
        return {}
    return vllm.select_peers(calls) | sglang.select_peers(calls) | ik_llama.select_peers(calls, keys)
