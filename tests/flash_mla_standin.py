"""FlashMLA as its sources describe it, on host memory: what it takes, what it computes, and what it does with what a
caller must not give it.

Written from commit 9241ae3, not from the backend. A rule that a call breaks is an error. What a device would read past
the end of a tensor is one too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCES = {
    "interface": "flash_mla/flash_mla_interface.py",
    "decode": "csrc/api/sparse_decode.h",
    "prefill": "csrc/api/sparse_fwd.h",
    "common": "csrc/api/common.h",
    "decode sm_90": "csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh",
    "decode sm_100": "csrc/sm100/decode/head64/kernel.cuh",
    "small decode sm_100": "csrc/sm100/prefill/sparse/fwd_for_small_topk/head128/phase1.cuh",
    "prefill sm_90": "csrc/sm90/prefill/sparse/phase1.cuh",
    "prefill sm_100": "csrc/sm100/prefill/sparse/fwd/head128/phase1.cuh",
    "block copies": "CUDA: a tensor map wants addresses and strides that are multiples of 16 bytes",
}
INT32 = (1 << 31) - 1
SM90, SM100 = (9, 0), (10, 0)
EVERY = (SM90, SM100)
LOG2E = math.log2(math.e)
FLOOR = -1e30  # where running maxima begin
BYTES = {576: 656, 512: 584}  # of a row, by its numbers
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


class RuleBroken(RuntimeError):
    """A call that FlashMLA does not take."""


class ReadsElsewhere(RuntimeError):
    """A row outside the tensor of rows would be read."""


@dataclass
class Machine:
    """The emulated device, and what it was asked."""

    capability: tuple[int, int] = SM90
    calls: list[tuple[str, Any]] = field(default_factory=list)


machine = Machine()


@dataclass(frozen=True)
class Rule:
    """One condition of the sources. ``holds`` takes the arguments by name."""

    function: str
    name: str
    source: str
    holds: Callable[[Any], bool]
    devices: tuple[tuple[int, int], ...] = EVERY


class FlashMLASchedMeta:
    """What the first call with it decides from shapes and lengths."""

    def __init__(self) -> None:
        self.shapes: tuple[Any, ...] | None = None
        self.lengths: list[Any] = []


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def _copyable(t: Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and all(step * t.element_size() % 16 == 0 for step in t.stride()[:-1])


def _last_axis(t: Tensor | None) -> bool:
    return t is None or t.shape[-1] == 1 or t.stride(-1) == 1


def _whole(t: Tensor | None, dtype: torch.dtype, *shape: int) -> bool:
    return t is None or (t.dtype == dtype and t.is_contiguous() and tuple(t.shape) == shape)


def _rows(t: Tensor | None, dim: int) -> bool:
    return t is None or (t.dim() == 4 and t.shape[2] == 1 and t.shape[3] == BYTES.get(dim))


def _lists(t: Tensor | None, q: Tensor) -> bool:
    return t is None or (t.dim() == 3 and t.dtype == torch.int32 and t.shape[:2] == q.shape[:2] and _last_axis(t))


def _pages(a: Any, holds: Callable[[Tensor], bool]) -> bool:
    return all(holds(t) for t in (a.k_cache, a.extra_k_cache) if t is not None)


def _bytes_type(t: Tensor) -> bool:
    return t.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)


def _multiple(t: Tensor | None, n: int) -> bool:
    return t is None or (t.shape[-1] > 0 and t.shape[-1] % n == 0)


def _small(*tensors: Tensor | None) -> bool:
    return all(step <= INT32 for t in tensors if t is not None for step in t.stride())


def _prefill_block(a: Any) -> int:
    return 64 if machine.capability == SM100 and a.q.shape[1] == 64 else 128


I32, F32, BF16 = torch.int32, torch.float32, torch.bfloat16
_TABLE: tuple[tuple[str, str, str, Callable[[Any], bool], tuple[tuple[int, int], ...]], ...] = (
    (DECODE, "metadata is its own object", "interface", lambda a: isinstance(a.metadata, FlashMLASchedMeta), EVERY),
    (DECODE, "no num_splits", "interface", lambda a: a.num_splits is None, EVERY),
    (DECODE, "not causal", "interface", lambda a: not a.causal, EVERY),
    (DECODE, "rows of 8-bit floats are announced", "interface", lambda a: a.is_fp8_kvcache, EVERY),
    (DECODE, "queries have four axes", "decode", lambda a: a.q.dim() == 4 and min(a.q.shape) > 0, EVERY),
    (DECODE, "query type", "decode", lambda a: a.q.dtype == BF16 and _last_axis(a.q), EVERY),
    (DECODE, "row of 576 or 512", "decode", lambda a: a.q.shape[3] in BYTES, EVERY),
    (DECODE, "512 values", "decode", lambda a: a.head_dim_v == 512, EVERY),
    (DECODE, "heads", "decode", lambda a: a.q.shape[2] in (64, 128), EVERY),
    (DECODE, "cache of rows", "decode", lambda a: _pages(a, lambda t: _rows(t, a.q.shape[3])), EVERY),
    (DECODE, "cache type", "decode", lambda a: _pages(a, _bytes_type), EVERY),
    (DECODE, "whole pages", "decode", lambda a: _pages(a, lambda t: t.stride()[1::2] == (t.shape[3], 1)), EVERY),
    (DECODE, "lists", "decode", lambda a: _lists(a.indices, a.q), EVERY),
    (DECODE, "extra lists", "decode", lambda a: _lists(a.extra_indices_in_kvcache, a.q), EVERY),
    (
        DECODE,
        "extra rows have lists",
        "decode",
        lambda a: (a.extra_k_cache is None) == (a.extra_indices_in_kvcache is None),
        EVERY,
    ),
    (DECODE, "width of lists", "decode sm_90", lambda a: _multiple(a.indices, 64), EVERY),
    (DECODE, "width of extra lists", "decode sm_90", lambda a: _multiple(a.extra_indices_in_kvcache, 64), EVERY),
    (DECODE, "sinks", "decode", lambda a: _whole(a.attn_sink, F32, a.q.shape[2]), EVERY),
    (DECODE, "lengths", "decode", lambda a: _whole(a.topk_length, I32, a.q.shape[0]), EVERY),
    (
        DECODE,
        "small strides",
        "common",
        lambda a: _small(a.q, a.k_cache, a.indices, a.extra_k_cache, a.extra_indices_in_kvcache),
        EVERY,
    ),
    (DECODE, "copies of queries", "block copies", lambda a: _copyable(a.q), EVERY),
    (
        DECODE,
        "no extra rows of V3.2",
        "decode sm_90",
        lambda a: a.q.shape[3] == 512 or a.extra_k_cache is None,
        (SM90,),
    ),
    (DECODE, "no lengths of V3.2", "decode sm_90", lambda a: a.q.shape[3] == 512 or a.topk_length is None, (SM90,)),
    (
        DECODE,
        "loads of 16 bytes",
        "decode sm_90",
        lambda a: _pages(a, lambda t: t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0),
        (SM90,),
    ),
    (DECODE, "address of rows", "decode sm_100", lambda a: _pages(a, lambda t: t.data_ptr() % 16 == 0), (SM100,)),
    (
        DECODE,
        "pages in rows",
        "decode sm_100",
        lambda a: _pages(a, lambda t: t.stride(0) % {656: 656, 584: 576}[t.shape[3]] == 0),
        (SM100,),
    ),
    (DECODE, "steps of queries", "small decode sm_100", lambda a: a.q.stride(0) % a.q.stride(1) == 0, (SM100,)),
    (DECODE, "metadata of the same shapes", "interface", lambda a: a.metadata.shapes in (None, _shapes(a)), EVERY),
    (PREFILL, "queries have three axes", "prefill", lambda a: a.q.dim() == 3, EVERY),
    (PREFILL, "query type", "prefill", lambda a: a.q.dtype == BF16 and _last_axis(a.q), EVERY),
    (PREFILL, "row of 576 or 512", "prefill", lambda a: a.q.shape[2] in BYTES, EVERY),
    (PREFILL, "512 values", "prefill", lambda a: a.d_v == 512, EVERY),
    (PREFILL, "heads", "prefill", lambda a: a.q.shape[1] in (64, 128), EVERY),
    (PREFILL, "rows", "prefill", lambda a: a.kv.dim() == 3 and a.kv.shape[1:] == (1, a.q.shape[2]), EVERY),
    (PREFILL, "row type", "prefill", lambda a: a.kv.dtype == BF16 and _last_axis(a.kv), EVERY),
    (
        PREFILL,
        "lists",
        "prefill",
        lambda a: a.indices.dim() == 3 and a.indices.dtype == I32 and a.indices.shape[:2] == (a.q.shape[0], 1),
        EVERY,
    ),
    (PREFILL, "width of lists", "prefill sm_90", lambda a: _multiple(a.indices, _prefill_block(a)), EVERY),
    (PREFILL, "sinks", "prefill", lambda a: _whole(a.attn_sink, F32, a.q.shape[1]), EVERY),
    (PREFILL, "lengths", "prefill", lambda a: _whole(a.topk_length, I32, a.q.shape[0]), EVERY),
    (PREFILL, "small strides", "common", lambda a: _small(a.q, a.kv, a.indices), EVERY),
    (PREFILL, "copies", "block copies", lambda a: _copyable(a.q) and _copyable(a.kv), EVERY),
)
RULES = tuple(Rule(function, name, SOURCES[source], *rest) for function, name, source, *rest in _TABLE)


def _check(function: str, arguments: dict[str, Any]) -> Any:
    a = SimpleNamespace(**arguments)
    for rule in RULES:
        if rule.function == function and machine.capability in rule.devices and not rule.holds(a):
            raise RuleBroken(f"{function}: {rule.name}: {rule.source}")
    machine.calls.append((function, a))
    return a


def _shapes(a: Any) -> tuple[Any, ...]:
    extra = None if a.extra_k_cache is None else (a.extra_k_cache.shape[1], a.extra_indices_in_kvcache.shape[2])
    return (*a.q.shape[:3], a.k_cache.shape[1], a.indices.shape[2], extra)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decoding; without ``indices`` it is another kernel, which is not emulated."""
    assert indices is not None
    a = _check(DECODE, dict(locals(), metadata=tile_scheduler_metadata))
    lengths = [None if t is None else t.clone() for t in (topk_length, extra_topk_length)]
    stale = a.metadata.shapes is not None and not all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a.metadata.lengths, lengths, strict=True)
    )
    if a.metadata.shapes is None:
        a.metadata.shapes, a.metadata.lengths = _shapes(a), lengths
    b, s, h, dim = q.shape
    rows, valid = _read(k_cache, indices, topk_length, dim)
    if extra_k_cache is not None:
        more, also = _read(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, dim)
        rows, valid = torch.cat([rows, more], 2), torch.cat([valid, also], 2)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out, _, lse = _attention(q.flatten(0, 1), rows.flatten(0, 1), valid.flatten(0, 1), scale, attn_sink)
    out, lse = out.view(b, s, h, 512), lse.view(b, s, h)
    return (out.fill_(math.nan) if stale else out), lse.transpose(1, 2)


def _read(cache: Tensor, indices: Tensor, length: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Rows that lists name, and which of them count. Only -1 is known to name none."""
    pages, page = cache.shape[:2]
    place = torch.arange(indices.shape[2])
    within = torch.ones_like(indices, dtype=torch.bool) if length is None else place < length[:, None, None]
    valid = within & (indices != -1)
    unsigned = torch.where(within, indices.long() % 2**32, 2**32 - 1)
    number = torch.where(valid, unsigned // page, 0)
    if bool((number >= pages).any()):
        raise ReadsElsewhere(f"page {int(number.max())} of {pages}")
    start = number * cache.stride(0)
    offset = unsigned % page
    begin = cache.storage_offset()
    memory = cache.as_strided((cache.untyped_storage().nbytes() - begin,), (1,), begin).view(torch.uint8)

    def part(first: Tensor, size: int) -> Tensor:
        return memory[first[..., None] + torch.arange(size)]

    if dim == 576:
        first = start + offset * 656
        values = part(first, 512).contiguous().view(torch.float8_e4m3fn)
        scales = part(first + 512, 16).contiguous().view(F32)
        rope = part(first + 528, 128).contiguous().view(BF16)
        scales = scales.to(BF16) if machine.capability == SM90 else _power_below(scales)
    else:
        first = start + offset * 576
        values = part(first, 448).contiguous().view(torch.float8_e4m3fn)
        rope = part(first + 448, 128).contiguous().view(BF16)
        codes = part(start + page * 576 + offset * 8, 7)
        scales = torch.where(codes == 255, math.nan, torch.exp2(codes.double() - 127)).to(BF16)
    numbers = values.to(BF16) * scales.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)
    numbers[~valid] = 0
    if dim == 512:
        rope[~valid] = 0  # of V3.2 it takes no part in the output
    return torch.cat([numbers, rope], -1), valid


def _power_below(scales: Tensor) -> Tensor:
    """As sm_100 reads them: the power of two at or below."""
    return torch.exp2(torch.floor(torch.log2(scales.double()))).to(BF16)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(PREFILL, dict(locals()))
    chosen = indices[:, 0].long()
    inside = (chosen >= 0) & (chosen < len(kv))
    valid = inside
    if topk_length is not None:
        valid = inside & (torch.arange(chosen.shape[1]) < topk_length[:, None])
    rows = torch.where(inside[..., None], kv[torch.where(inside, chosen, 0), 0], 0)
    leak = (rows.isnan().any(-1) & inside & ~valid).any(-1)
    rows = torch.where(valid[..., None], rows, 0)
    out, largest, lse = _attention(q, rows, valid, sm_scale, attn_sink)
    out[leak] = math.nan
    return out, largest, lse


def _attention(q: Tensor, rows: Tensor, valid: Tensor, scale: float, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Of queries ``[N, H, D]`` and rows ``[N, K, D]``: bf16 products, float32 sums, exponents of 2."""
    factor = torch.tensor(scale * LOG2E).float()
    products = (q.float() @ rows.float().transpose(1, 2)).masked_fill(~valid[:, None], -math.inf)
    top = (products.amax(-1, keepdim=True) * factor).nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    top = torch.fmax(top, torch.tensor(FLOOR))
    weights = torch.exp2(products * factor - top)
    total = weights.sum(-1)
    if sinks is None:
        sinks = torch.full(q.shape[1:2], -math.inf)
    share = torch.where(total == 0, 0, 1 / (total + torch.exp2(sinks * LOG2E - top[..., 0])))
    out = (weights.to(BF16).float() @ rows[..., :512].float()) * share[..., None]
    lse = torch.where(total == 0, math.inf, total.log() + top[..., 0] / LOG2E)
    return out.to(BF16), top[..., 0] / LOG2E, lse


def as_module() -> ModuleType:
    """What ``import flash_mla`` would find."""
    module = ModuleType("flash_mla")
    module.__spec__ = ModuleSpec("flash_mla", None)
    for function in (get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd):
        setattr(module, function.__name__, function)
    return module
