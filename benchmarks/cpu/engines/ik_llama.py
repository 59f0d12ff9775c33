"""ik_llama.cpp's kernels, through the C interface of its ggml library: rows are fetched by index, then attended.

Its caches are not paged. A plane is brought along as one cache of all slots, the last elements of a row first, as this
engine keeps DeepSeek's rows; keys of an indexer lie in order.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache

import torch
from torch import Tensor

from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

from ..machine import huge

NAME = "ik_llama.cpp"
LIBRARY = "IK_LLAMA_GGML"
"""The environment variable with the path of libggml.so."""
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "i32": 26}
RELU = 6
"""Numbers of ggml.h."""
MASK_ROWS = 16
"""Rows of a mask are a multiple."""
CACHES = ("f16", "q8_0")


class Memory(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


class Work(ctypes.Structure):
    """``ggml_cplan``."""

    _fields_ = (
        ("size", c_size_t),
        ("data", c_void_p),
        ("threads", c_int),
        ("abort_callback", c_void_p),
        ("abort_data", c_void_p),
        ("prefetch_experts", c_bool),
    )


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ggml_init": (c_void_p, [Memory]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_get_rows_ext": (c_void_p, [c_void_p, c_void_p, c_void_p, c_bool, c_bool]),
    "ggml_view_2d": (c_void_p, [c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t]),
    "ggml_flash_attn_ext": (c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_indexer_topk": (c_void_p, [c_void_p] * 5 + [c_int, c_int]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_plan": (Work, [c_void_p, c_int]),
    "ggml_graph_compute": (c_int, [c_void_p, POINTER(Work)]),
}


@cache
def library() -> ctypes.CDLL | None:
    if not os.environ.get(LIBRARY):
        return None
    loaded = ctypes.CDLL(os.environ[LIBRARY])
    for name, (returns, takes) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = returns, takes
    return loaded


class Graph:
    """Tensors of ggml in memory of their own, and what is computed from them."""

    def __init__(self, ggml: ctypes.CDLL, size: int) -> None:
        self.ggml = ggml
        self.memory = huge(size + (1 << 20))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.context = ggml.ggml_init(Memory(size + (1 << 20), start, False))

    def tensor(self, kind: str, *shape: int) -> int:
        """Of ``shape`` in ggml's order: the length of a row comes first."""
        made = self.ggml.ggml_new_tensor(self.context, TYPES[kind], len(shape), (c_int64 * len(shape))(*shape))
        assert made
        return int(made)

    def put(self, tensor: int, values: Tensor) -> None:
        ctypes.memmove(self.ggml.ggml_get_data(tensor), values.data_ptr(), values.nbytes)

    def cache(self, kind: str, rows: Tensor) -> int:
        """A cache of rows ``[N, D]``."""
        count, dim = rows.shape
        tensor = self.tensor(kind, dim, count)
        data, size = self.ggml.ggml_get_data(tensor), self.ggml.ggml_row_size(TYPES[kind], dim)
        for first in range(0, count, 4096):
            at, part = data + first * size, rows[first : first + 4096].to(torch.half if kind == "f16" else torch.float)
            if kind == "f16":
                ctypes.memmove(at, part.data_ptr(), part.nbytes)
            else:
                self.ggml.ggml_quantize_chunk(TYPES[kind], part.data_ptr(), at, 0, len(part), dim, None)
        return tensor

    def ready(self, result: int, dtype: torch.dtype, *shape: int) -> Callable[[], Tensor]:
        """A function that computes `result` and copies it."""
        graph = self.ggml.ggml_new_graph(self.context)
        self.ggml.ggml_build_forward_expand(graph, result)
        threads = torch.get_num_threads()
        work = self.ggml.ggml_graph_plan(graph, threads)
        room = ctypes.create_string_buffer(max(work.size, 1))
        work.data = ctypes.addressof(room)
        data = self.ggml.ggml_get_data(result)

        def compute() -> Tensor:
            assert room and self.ggml.ggml_graph_compute(graph, ctypes.byref(work)) == 0
            out = torch.empty(shape, dtype=dtype)
            ctypes.memmove(out.data_ptr(), data, out.nbytes)
            return out

        return compute


def rope_first(rows: Tensor, v_dim: int) -> Tensor:
    return torch.cat([rows[..., v_dim:], rows[..., :v_dim]], -1)


def attend_peers(calls: list[Attend], slots: list[Tensor]) -> dict[str, Callable[[int], Tensor]]:
    """One row of one sequence, without a window."""
    a, ggml = calls[0], library()
    if ggml is None or len(a.q) > 1 or a.win is not None or a.format != "bf16":
        return {}
    assert a.kv is not None
    plane = a.kv.flatten(0, 2)
    (_, heads, dim), count = a.q.shape, slots[0].shape[-1]
    queries = [rope_first(call.q[0].float(), a.v_dim).contiguous() for call in calls]
    lists = [s.flatten().int() for s in slots]

    def peer(kind: str) -> Callable[[int], Tensor]:
        graph = Graph(ggml, 2 * plane.nbytes)
        cache = graph.cache(kind, rope_first(plane, a.v_dim))
        q, indices = graph.tensor("f32", dim, 1, heads), graph.tensor("i32", count)
        mask = graph.tensor("f16", count, MASK_ROWS)
        graph.put(mask, torch.zeros(MASK_ROWS, count, dtype=torch.half))
        keys = ggml.ggml_get_rows_ext(graph.context, cache, indices, True, False)
        row, start = (ggml.ggml_row_size(TYPES[kind], n) for n in (dim, dim - a.v_dim))
        values = ggml.ggml_view_2d(graph.context, keys, a.v_dim, count, row, start)
        out = ggml.ggml_flash_attn_ext(graph.context, q, keys, values, mask, a.scale, 0.0, 0.0)
        compute = graph.ready(out, torch.float32, 1, heads, a.v_dim)

        def run(i: int) -> Tensor:
            graph.put(q, queries[i])
            graph.put(indices, lists[i])
            return compute()

        return run

    return {f"{NAME} {kind}": peer(kind) for kind in CACHES}


def select_peers(calls: list[Select], keys: Callable[[Select], Tensor]) -> dict[str, Callable[[int], Tensor]]:
    a, ggml = calls[0], library()
    if ggml is None or a.format != "bf16":
        return {}
    (_, heads, dim), length = a.q.shape, a.max_seq_len

    def peer(kind: str) -> Callable[[int], Tensor]:
        graph = Graph(ggml, len(calls) * (3 * length * dim + (1 << 20)))
        mask = graph.tensor("f32", length, 1)
        graph.put(mask, torch.zeros(length))

        def of(call: Select) -> Callable[[], Tensor]:
            assert call.weights is not None
            q, weights = graph.tensor("f32", dim, heads, 1), graph.tensor("f32", heads, 1)
            graph.put(q, call.q.float())
            graph.put(weights, call.weights.float())
            cache = graph.cache(kind, keys(call).flatten(0, 1))
            found = ggml.ggml_indexer_topk(graph.context, cache, q, weights, mask, RELU, call.k)
            return graph.ready(found, torch.int32, 1, 1, call.k)

        computes = [of(call) for call in calls]
        return lambda i: computes[i]()

    return {f"{NAME} {kind}": peer(kind) for kind in CACHES}
