"""`store`, `load`, `convert`, `merge` and `select_merge` on tensors of the emulated machine: the reference's bytes. The
tests that every backend must pass run on CPU tensors (``own_operations``)."""

from __future__ import annotations

from typing import Any

import npu
import pytest
import torch
from torch import Tensor

import sparse_attn
from sparse_attn import layout

SLOTS = [[5, 0, 19, 3], [-1, 7, -1, 2], [-1, -2, -3, -(1 << 40)], [0, -1, -1, -1], [20, 1, 1 << 40, -1]]


def planes(format: str, pool: int = 1) -> dict[str, Tensor | None]:
    """A plane of five pages of four entries and its scales, every ``pool``-th page of a larger one."""
    f = layout.FORMATS[format]
    heads, dim = (1, f.dim) if f.packed else (3, 8)
    shape = f.shape(5 * pool, 4, heads, dim)
    plane = torch.randint(0, 100, shape, dtype=torch.uint8).to(getattr(torch, f.dtype))
    scale = torch.rand(5 * pool, 4, heads).half() if f.scale_dtype else None
    return {"plane": plane[pool - 1 :: pool], "scale": None if scale is None else scale[pool - 1 :: pool]}


def options(format: str) -> dict[str, Any]:
    return {"format": format, "page_size": 4 if layout.FORMATS[format].planar else 0}


def move(given: dict[str, Any]) -> dict[str, Any]:
    return {name: npu.on_npu(value) for name, value in given.items()}


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("format", layout.FORMATS)
def test_store_and_load(whole_family, format: str, pool: int) -> None:
    for slots in SLOTS:
        test_store(whole_family, format, slots, pool)


@pytest.mark.parametrize("format", ["bf16", "fp4_v41_planar"])
@pytest.mark.parametrize("slots", SLOTS)
def test_store(whole_family, format: str, slots: list[int], pool: int = 1) -> None:
    given = planes(format, pool)
    plane = given["plane"]
    assert plane is not None
    f = layout.FORMATS[format]
    rows = torch.randn(4, *((1, f.dim) if f.packed else (3, 8)))
    slot = torch.tensor(slots)
    device = move(given)
    sparse_attn.store(npu.on_npu(rows), slots=npu.on_npu(slot), **device, **options(format), backend="ascend_npu")
    inside = slot < 20
    sparse_attn.store(rows[inside], slots=slot[inside], **given, **options(format), backend="reference")
    for name, tensor in given.items():
        assert tensor is None or torch.equal(
            device[name].cpu().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        )
    got = sparse_attn.load(slots=npu.on_npu(slot), **device, **options(format), backend="ascend_npu").cpu()
    want = sparse_attn.load(slots=slot[inside], **given, **options(format), backend="reference")
    assert torch.equal(got[inside], want) and got[~inside].isnan().all()


@pytest.mark.parametrize(("src", "dst"), [("fp4_v41", "fp4_v41_planar"), ("fp8_v32", "int8_v32"), ("int8", "bf16")])
@pytest.mark.parametrize("slots", [None, ([3, -1, 19, 2], [0, 4, 7, -1])])
def test_convert(whole_family, src: str, dst: str, slots: tuple[list[int], list[int]] | None) -> None:
    origin, target = planes(src), planes(dst, 3)
    if layout.FORMATS[src].packed:
        rows = torch.randn(20, 1, layout.FORMATS[src].dim)
        sparse_attn.store(rows, slots=torch.arange(20), **origin, **options(src), backend="reference")
    given = {"src": origin["plane"], "src_scale": origin["scale"], "dst": target["plane"], "dst_scale": target["scale"]}
    if slots is not None:
        given |= dict(zip(("src_slots", "dst_slots"), map(torch.tensor, slots), strict=True))
    names = {f"{side}_{name}": x for side, f in (("src", src), ("dst", dst)) for name, x in options(f).items()}
    device = move(given)
    sparse_attn.convert(**device, **names, backend="ascend_npu")
    sparse_attn.convert(**given, **names, backend="reference")
    assert torch.equal(device["dst"].cpu(), given["dst"])


def test_merge(whole_family) -> None:
    outs, lses = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4) * 9
    lses[:, 2], lses[1, 3], outs[1, 3] = float("-inf"), float("-inf"), float("nan")
    given = {"outs": outs, "lses": lses, "sinks": torch.tensor([0.0, float("inf"), float("-inf"), 3.0])}
    got = sparse_attn.merge(**move(given), backend="ascend_npu")
    for mine, want in zip(got, sparse_attn.merge(**given, backend="reference"), strict=True):
        torch.testing.assert_close(mine.cpu(), want, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("k", [3, 40])
def test_select_merge(whole_family, order: str, k: int) -> None:
    values = torch.randint(0, 5, (4, 6, 2, 7)).float()
    values[values == 4] = float("nan")
    given = {
        "shard_indices": torch.randint(-2, 50, (4, 6, 2, 7), dtype=torch.int32),
        "shard_values": values,
        "shard_offsets": torch.arange(0, 200, 50, dtype=torch.int32)[:, None].expand(4, 6),
        "row_k": torch.tensor([0, 1, 2, 50, 3, -1], dtype=torch.int32),
    }
    got = sparse_attn.select_merge(**move(given), k=k, run=2, stride=9, order=order, backend="ascend_npu")
    want = sparse_attn.select_merge(**given, k=k, run=2, stride=9, order=order, backend="reference")
    for mine, other in zip(got[:3], want[:3], strict=True):
        assert torch.equal(mine.cpu(), other)
