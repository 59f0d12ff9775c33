"""Cases of `store`, `load` and `convert`: many rows of released models' planes, with the same in eager torch as a peer.

Calls take turns with rows, entries and results of a pool several times the caches, so that all of it lies in memory.
The peer quantises with torch's own casts, and scatters or gathers parts of entries by index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparse_attn import layout, load, resolve
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.store import Store

from .machine import mover, pool
from .timing import MOVED, OURS, Case

ROWS, PAGE, DIM = 32768, 64, 512
VARIANTS = 4

Plane = tuple[Tensor, Tensor | None]
Peer = Callable[[int], Tensor]


def new_plane(format: str) -> Plane:
    """Of the rows of all variants."""
    f = layout.FORMATS[format]
    shape = f.shape(VARIANTS * ROWS // PAGE, PAGE, 1, DIM)
    plane = pool(*shape, dtype=getattr(torch, f.dtype))
    return plane, pool(*shape[:3], dtype=torch.half) if f.scale_dtype else None


def new_rows() -> Tensor:
    return pool(VARIANTS * ROWS, 1, DIM, dtype=torch.bfloat16)


def in_turn(count: int, order: Tensor | None = None) -> list[Tensor]:
    """What each variant uses of ``VARIANTS * count``, one after the other if in no other order."""
    every = torch.arange(VARIANTS * count) if order is None else order
    return list(every.view(VARIANTS, count))


def encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).half()
    return (rows / scale.float()).round().to(torch.int8), scale


def encode_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = rows.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    stored = (groups / scale).to(torch.float8_e4m3fn).flatten(-2)
    return stored.view(torch.uint8), scale.to(torch.float8_e8m0fnu).squeeze(-1).view(torch.uint8)


LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def encode_fp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = rows.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    stored = (groups / scale.float()).flatten(-2)
    codes = torch.bucketize(stored.abs(), (LEVELS[1:] + LEVELS[:-1]) / 2).to(torch.uint8) | (stored < 0).byte() << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale.squeeze(-1).view(torch.uint8)


def put_plain(plane: Plane, slots: Tensor, rows: Tensor) -> None:
    plane[0].view(-1, 1, DIM)[slots] = rows


def put_int8(plane: Plane, slots: Tensor, rows: Tensor) -> None:
    stored, scale = encode_int8(rows)
    assert plane[1] is not None
    plane[0].view(-1, 1, DIM)[slots] = stored
    plane[1].view(-1, 1)[slots] = scale.squeeze(-1)


def put_packed(encode: Callable[[Tensor], tuple[Tensor, Tensor]], plane: Plane, slots: Tensor, rows: Tensor) -> None:
    plane[0].flatten(0, 1)[slots] = torch.cat(encode(rows), -1)


ENCODE: dict[str, Callable[[Plane, Tensor, Tensor], None]] = {
    "bf16": put_plain,
    "int8": put_int8,
    "fp8_v41": partial(put_packed, encode_fp8),
    "fp4_v41": partial(put_packed, encode_fp4),
}


def get_plain(plane: Plane, slots: Tensor) -> Tensor:
    return plane[0].view(-1, 1, DIM)[slots]


def get_int8(plane: Plane, slots: Tensor) -> Tensor:
    assert plane[1] is not None
    return (plane[0].view(-1, 1, DIM)[slots].float() * plane[1].view(-1, 1)[slots].float()[..., None]).bfloat16()


def get_fp8(plane: Plane, slots: Tensor) -> Tensor:
    stored, scale = plane[0].flatten(0, 1)[slots].split([512, 16], -1)
    numbers = stored.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    return (numbers * scale.contiguous().view(torch.float8_e8m0fnu).float()[..., None]).flatten(-2).bfloat16()


def get_fp4(plane: Plane, slots: Tensor) -> Tensor:
    stored, scale = plane[0].flatten(0, 1)[slots].split([256, 32], -1)
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).int()
    numbers = torch.cat([LEVELS, -LEVELS])[codes].unflatten(-1, (-1, 16))
    return (numbers * scale.contiguous().view(torch.float8_e4m3fn).float()[..., None]).flatten(-2).bfloat16()


DECODE = {"bf16": get_plain, "int8": get_int8, "fp8_v41": get_fp8, "fp4_v41": get_fp4}


def read(format: str, plane: Plane, slots: Tensor) -> Tensor:
    return load(plane[0], slots, scale=plane[1], format=format, page_size=PAGE)


def row_bytes(format: str) -> int:
    return layout.FORMATS[format].entry_bytes(DIM)


def make_store(format: str) -> Case:
    torch.manual_seed(0)
    rows, ours, theirs = new_rows(), new_plane(format), new_plane(format)
    slots = in_turn(ROWS, torch.randperm(VARIANTS * ROWS))
    given = rows.split(ROWS)
    calls = [Store(r, ours[0], s, ours[1], format, 0) for r, s in zip(given, slots, strict=True)]
    impl = resolve("store", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        impl.run(calls[i])
        return ours[0]

    def peer(i: int) -> Tensor:
        ENCODE[format](theirs, slots[i], given[i])
        return theirs[0]

    moved = mover(row_bytes("bf16"), in_turn(ROWS), row_bytes(format), slots)
    return case(f"store {format}", run, peer, moved, lambda: [read(format, p, slots[0]) for p in (ours, theirs)])


def make_load(format: str) -> Case:
    torch.manual_seed(0)
    plane, out, slots = new_plane(format), new_rows().split(ROWS), in_turn(ROWS, torch.randperm(VARIANTS * ROWS))
    every = torch.arange(VARIANTS * ROWS)
    for part in every.split(ROWS):
        ENCODE[format](plane, part, torch.randn(ROWS, 1, DIM).bfloat16())
    calls = [Load(plane[0], s, plane[1], format, 0, torch.bfloat16) for s in slots]
    impl = resolve("load", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        impl.run(calls[i], out[i])
        return out[i]

    def peer(i: int) -> Tensor:
        return DECODE[format](plane, slots[i])

    moved = mover(row_bytes(format), slots, row_bytes("bf16"), in_turn(ROWS))
    return case(f"load {format}", run, peer, moved, lambda: [run(0), peer(0)])


def make_convert(src: str, dst: str) -> Case:
    """Whole pages, in another order."""
    torch.manual_seed(0)
    origin, ours, theirs = new_plane(src), new_plane(dst), new_plane(dst)
    rows, count = in_turn(ROWS), ROWS // PAGE
    for part in rows:
        ENCODE[src](origin, part, torch.randn(ROWS, 1, DIM).bfloat16())
    pages = in_turn(count, torch.randperm(VARIANTS * count))
    given = origin[0].split(count)
    targets = [(p[:, None] * PAGE + torch.arange(PAGE)).flatten() for p in pages]
    options = None, None, src, dst, PAGE, PAGE
    calls = [Convert(origin[0], ours[0], r, t, *options) for r, t in zip(rows, targets, strict=True)]
    impl = resolve("convert", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        impl.run(calls[i])
        return ours[0]

    def peer(i: int) -> Tensor:
        if src == dst:
            theirs[0][pages[i]] = given[i]
        elif dst == "fp8_v41_planar":
            values, scales = given[i].split([512, 16], -1)
            theirs[0][pages[i]] = torch.cat([values.flatten(1), scales.flatten(1)], -1)
        else:
            ENCODE[dst](theirs, targets[i], given[i].view(ROWS, 1, DIM))
        return theirs[0]

    def results() -> list[Tensor]:
        return [read(dst, p, targets[0]) for p in (ours, theirs)]

    moved = mover(PAGE * row_bytes(src), in_turn(count), PAGE * row_bytes(dst), pages)
    return case(f"convert {src} to {dst}", run, peer, moved, results)


def case(name: str, run: Peer, peer: Peer, moved: Peer, results: Callable[[], list[Tensor]]) -> Case:
    made = Case(name, {OURS: run, MOVED: moved, "torch": peer}, VARIANTS)

    def check() -> None:
        """Raise if the peer writes or reads other rows."""
        for function in made.functions.values():
            function(0)
        ours, theirs = results()
        differ = (theirs.float() - ours.float()).abs() > 0.05  # a step of int8, whose scale the peer rounds to nearest
        assert differ.float().mean() < 1e-2, name  # the peer of fp4 rounds ties down

    made.check = check
    return made
