"""Cases of `store`, `load` and `convert`: many rows of released models' planes, with the same in eager torch as a peer.

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

from .timing import OURS, Case

ROWS, PAGE, DIM = 16384, 64, 512
VARIANTS = 4

Plane = tuple[Tensor, Tensor | None]
Peer = Callable[[int], Tensor]


def new_plane(format: str) -> Plane:
    f = layout.FORMATS[format]
    shape = f.shape(ROWS // PAGE, PAGE, 1, DIM)
    plane = torch.zeros(shape, dtype=getattr(torch, f.dtype))
    return plane, torch.zeros(shape[:3], dtype=torch.half) if f.scale_dtype else None


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


def traffic(*formats: str) -> float:
    return float(ROWS * sum(layout.FORMATS[format].entry_bytes(DIM) for format in formats))


def make_store(format: str) -> Case:
    torch.manual_seed(0)
    rows, ours, theirs = torch.randn(ROWS, 1, DIM).bfloat16(), new_plane(format), new_plane(format)
    slots = [torch.randperm(ROWS) for _ in range(VARIANTS)]
    calls = [Store(rows, ours[0], s, ours[1], format, 0) for s in slots]
    impl = resolve("store", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        impl.run(calls[i])
        return ours[0]

    def peer(i: int) -> Tensor:
        ENCODE[format](theirs, slots[i], rows)
        return theirs[0]

    return case(
        f"store {format}", run, peer, ("bf16", format), lambda: [read(format, p, slots[0]) for p in (ours, theirs)]
    )


def make_load(format: str) -> Case:
    torch.manual_seed(0)
    plane, slots = new_plane(format), [torch.randperm(ROWS) for _ in range(VARIANTS)]
    ENCODE[format](plane, torch.arange(ROWS), torch.randn(ROWS, 1, DIM).bfloat16())
    calls = [Load(plane[0], s, plane[1], format, 0, torch.bfloat16) for s in slots]
    impl = resolve("load", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        out = torch.empty(ROWS, 1, DIM, dtype=torch.bfloat16)
        impl.run(calls[i], out)
        return out

    def peer(i: int) -> Tensor:
        return DECODE[format](plane, slots[i])

    return case(f"load {format}", run, peer, (format, "bf16"), lambda: [run(0), peer(0)])


def make_convert(src: str, dst: str) -> Case:
    """Whole pages, in another order."""
    torch.manual_seed(0)
    origin, ours, theirs = new_plane(src), new_plane(dst), new_plane(dst)
    ENCODE[src](origin, torch.arange(ROWS), torch.randn(ROWS, 1, DIM).bfloat16())
    pages = [torch.randperm(ROWS // PAGE) for _ in range(VARIANTS)]
    targets = [(p[:, None] * PAGE + torch.arange(PAGE)).flatten() for p in pages]
    every, sizes = torch.arange(ROWS), (PAGE, PAGE)
    calls = [Convert(origin[0], ours[0], every, t, None, None, src, dst, *sizes) for t in targets]
    impl = resolve("convert", **dict(calls[0]._asdict()))

    def run(i: int) -> Tensor:
        impl.run(calls[i])
        return ours[0]

    def peer(i: int) -> Tensor:
        if src == dst:
            theirs[0][pages[i]] = origin[0]
        elif dst == "fp8_v41_planar":
            values, scales = origin[0].split([512, 16], -1)
            theirs[0][pages[i]] = torch.cat([values.flatten(1), scales.flatten(1)], -1)
        else:
            ENCODE[dst](theirs, targets[i], origin[0].view(ROWS, 1, DIM))
        return theirs[0]

    def results() -> list[Tensor]:
        return [read(dst, p, targets[0]) for p in (ours, theirs)]

    return case(f"convert {src} to {dst}", run, peer, (src, dst), results)


def case(name: str, run: Peer, peer: Peer, formats: tuple[str, str], results: Callable[[], list[Tensor]]) -> Case:
    made = Case(name, {OURS: run, "torch": peer}, VARIANTS, bytes=traffic(*formats), limit="copy")

    def check() -> None:
        """Raise if the peer writes or reads other rows."""
        for function in made.functions.values():
            function(0)
        ours, theirs = results()
        differ = (theirs.float() - ours.float()).abs() > 0.05  # a step of int8, whose scale the peer rounds to nearest
        assert differ.float().mean() < 1e-2, name  # the peer of fp4 rounds ties down

    made.check = check
    return made
