"""Random calls of each op from the facts that its card names, so that a kernel's limits generate its tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_attn import layout, reference, registry
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.store import Store

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS, ROWS = (9, 1, 0, 21), (3, 1, 1, 2)

# options of `attend`: a decode step at released dimensions
ONE_ROW: dict[str, Any] = dict(dtype="bfloat16", lengths=(2500,), rows=(1,), padding=0, page_size=64, win_page_size=64)
V32 = dict(ONE_ROW, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1, selected=2048)
V4 = dict(ONE_ROW, planes="main+window", kv_heads=1, qk_dim=512, v_dim=512, index_heads=1, selected=512, sinks=True)
GQA = dict(ONE_ROW, q_heads=32, kv_heads=8, qk_dim=128, v_dim=128)


def plane(
    format: str, pages: int, page_size: int, heads: int, dim: int, g: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Random rows in ``format`` and their scales."""
    f = layout.FORMATS[format]
    rows = torch.randn(pages * page_size, heads, dim, generator=g)
    stored = torch.zeros(f.shape(pages, page_size, heads, dim), dtype=getattr(torch, f.dtype))
    scale = torch.zeros(pages, page_size, heads, dtype=torch.half) if f.scale_dtype else None
    reference.store(Store(rows, stored, torch.arange(len(rows)), scale, format, page_size))
    return stored, scale


def attend(
    *,
    dtype: str = "float32",
    planes: str = "main",
    format: str = "fp32",
    v_format: str = "",
    win_format: str = "fp32",
    q_heads: int = 4,
    kv_heads: int = 2,
    qk_dim: int = 16,
    rope_dim: int = 0,
    v_dim: int = 16,
    page_size: int = 4,
    win_page_size: int = 4,
    ratio: int = 1,
    index_heads: int = 0,
    selected: int = 6,
    select_block: int = 1,
    sinks: bool = False,
    lse: bool = True,
    causal: bool = True,
    batch_invariant: bool = False,
    window: int = 5,
    lengths: tuple[int, ...] = LENGTHS,
    rows: tuple[int, ...] = ROWS,
    padding: int = 2,
    seed: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leading and keyword arguments of one call of ``attend`` with these facts. ``v_format=""`` takes values from the
    rows."""
    g = torch.Generator().manual_seed(seed)
    tokens, batch, longest = sum(rows) + padding, len(lengths), max(lengths)
    starts = torch.tensor([sum(rows[:b]) for b in range(batch + 1)], dtype=torch.int32)
    q = torch.randn(tokens, q_heads, qk_dim, generator=g).to(DTYPES[dtype])
    leading = (q, starts, torch.tensor(lengths, dtype=torch.int32), qk_dim**-0.5, v_dim, max(rows, default=0), longest)
    kwargs: dict[str, Any] = {"causal": causal, "return_lse": lse, "batch_invariant": batch_invariant}

    def table(entries: int, size: int) -> Tensor:
        width = max(layout.pages_for(entries, size), 1)
        return torch.randperm(batch * width, generator=g).to(torch.int32).view(batch, width)

    if "main" in planes:
        pages = table(longest // ratio + 1, page_size)
        count = pages.numel() + 1
        kv, kv_scale = plane(format, count, page_size, kv_heads, qk_dim - rope_dim, g)
        kwargs |= {"kv": kv, "kv_scale": kv_scale, "format": format, "page_table": pages, "ratio": ratio}
        kwargs |= {"page_size": page_size} if layout.FORMATS[format].planar else {}
        if rope_dim:
            plain = format if format in layout.PLAIN_FORMATS else "bf16"
            kwargs["kv_rope"] = plane(plain, count, page_size, kv_heads, rope_dim, g)[0]
        if v_format:
            kwargs["v"], kwargs["v_scale"] = plane(v_format, count, page_size, kv_heads, v_dim, g)
            kwargs["v_format"] = v_format
        if index_heads:
            reach = max(longest // ratio // select_block + 2, 1)
            order = torch.rand(tokens, index_heads, reach, generator=g).argsort(-1)
            width = selected // select_block
            indices = torch.full((tokens, index_heads, width), -1, dtype=torch.int32)
            indices[..., : min(width, reach)] = order[..., :width].to(torch.int32)
            kwargs |= {"indices": indices, "select_block": select_block}
    if "window" in planes:
        win_pages = table(longest, win_page_size)
        win, _ = plane(win_format, win_pages.numel() + 1, win_page_size, kv_heads, qk_dim, g)
        kwargs |= {"win": win, "win_format": win_format, "win_page_table": win_pages, "window": window}
        kwargs |= {"win_page_size": win_page_size} if layout.FORMATS[win_format].planar else {}
        if not causal:
            ends = torch.tensor([n for n, m in zip(lengths, rows, strict=True) for _ in range(m)] + [0] * padding)
            kwargs["win_range"] = torch.stack([ends - window, ends], 1).to(torch.int32)
            kwargs["window"] = 0
    if sinks:
        kwargs["sinks"] = torch.randn(q_heads, generator=g)
    return leading, kwargs


def skip_unless(impl: registry.Impl, call: registry.Call) -> None:
    """Skip the test if the kernel's limits refuse the call."""
    refusals = impl.refusals(call)
    if refusals:
        pytest.skip(refusals[0])


def skip_where_values_stay_on_the_device(impl: registry.Impl) -> None:
    """Skip the test for a kernel that cannot refuse values, as it would have to wait for them. What it does instead is
    tested where it is at home."""
    if impl.backend in ("cuda_triton", "ascend_npu", "ascend_triton"):
        pytest.skip("values stay on the device")


def run(impl: registry.Impl, leading: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.ops.sparse_attn.attend(*leading, **dict(kwargs, backend=impl.backend))


def assert_agrees(impl: registry.Impl, leading: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The kernel against the reference on the same inputs in float64, within the kernel's declared tolerance."""
    q = leading[0]
    out, lse = run(impl, leading, kwargs)
    a = Attend(q.double(), *leading[1:], **kwargs)
    expected = torch.empty(out.shape, dtype=torch.float64)
    expected_lse = torch.empty(out.shape[:2], dtype=torch.float64)
    reference.attend(a, expected, expected_lse)
    atol, rtol = impl.tolerance[str(q.dtype).removeprefix("torch.")]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)
    if a.return_lse:
        torch.testing.assert_close(lse.double(), expected_lse, atol=atol, rtol=rtol)


def assert_same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...], message: str = "") -> None:
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        same = torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        assert same, f"{message}: bits differ, by up to {(x.double() - y.double()).abs().max()}"
