"""Cases of `compress`: compressors of released models, with the same in eager torch as a peer.

The peer pools whole groups by one softmax and one sum, norms, rotates, quantises with torch's own casts, and scatters
into the plane. It keeps no state: steps end at whole groups.

Calls take turns with rows, states and planes that together exceed the caches several times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_attn import layout, resolve
from sparse_attn.ops.compress import Compress
from sparse_attn.registry import Impl

from .machine import mover
from .timing import CACHE_BYTES, MOVED, OURS, Case

PAGE = 64


@dataclass(frozen=True)
class Shape:
    name: str
    stride: int
    span: int
    dim: int
    format: str
    gated: bool = True


SHAPES = (
    Shape("V4.1 ratio 2", 2, 2, 512, "fp4_v41"),
    Shape("V4.1 ratio 1", 1, 1, 512, "fp4_v41", gated=False),
    Shape("V4 ratio 4", 4, 8, 512, "fp8_v4"),
    Shape("V4 ratio 128", 128, 128, 512, "fp8_v4"),
    Shape("V4.1 ratio 2, bf16", 2, 2, 512, "bf16"),
    Shape("V4 ratio 4, bf16", 4, 8, 512, "bf16"),
)
STEPS = {"prefill 4K": (1, 4096), "decode, batch 64": (64, 1)}


def make(shape: Shape, step: str) -> Case:
    torch.manual_seed(0)
    batch, new = STEPS[step]
    length = max(new, shape.stride)  # decode: the token that completes the first entry
    parts = shape.span // shape.stride
    width = shape.dim * parts
    format = layout.FORMATS[shape.format]
    pages = layout.pages_for(length, PAGE)
    state_page = min(PAGE, length)
    state_pages = layout.pages_for(length, state_page)
    per_token = 2 if shape.gated else 1
    angles = torch.rand(length + 1, 32)

    def table(pages: int) -> Tensor:
        return torch.randperm(batch * pages).int().view(batch, pages)

    def variant() -> Compress:
        rows = torch.randn(batch * new, 1, width).bfloat16()
        plane = torch.zeros(format.shape(batch * pages, PAGE, 1, shape.dim), dtype=getattr(torch, format.dtype))
        state = torch.randn(batch * state_pages, state_page, 1, width * per_token) if shape.span > 1 else None
        return Compress(
            rows,
            torch.randn_like(rows) if shape.gated else None,
            torch.arange(0, batch * new + 1, new, dtype=torch.int32),
            torch.full((batch,), length, dtype=torch.int32),
            plane,
            table(pages),
            shape.stride,
            new,
            length,
            span=shape.span if shape.span > shape.stride else 0,
            state=state,
            state_page_table=None if state is None else table(state_pages),
            norm=torch.rand(shape.dim),
            cos_sin=torch.cat([angles.cos(), angles.sin()], -1),
            dtype="bf16",
            format=shape.format,
        )

    # What is moved together: a sequence, or tokens of whole entries.
    tokens = min(max(shape.stride, PAGE), new)
    units, entries = batch * new // tokens, max(tokens // shape.stride, 1)
    read = tokens * width * per_token * 2 + entries * 64 * 4  # rows, and angles of entries
    written = entries * format.entry_bytes(shape.dim)
    if new == 1 and shape.span > 1:  # of the state an entry's channels are read, and all of a token written
        read += 4 * (length - 1) * shape.dim * per_token
        written += 4 * width * per_token
    count = max(4, -(-CACHE_BYTES // (units * (read + written))))
    variants = [variant() for _ in range(count)]
    impl = resolve("compress", **dict(variants[0]._asdict()))
    functions = {OURS: lambda i: run(impl, variants[i])}
    orders = torch.arange(count * units), torch.randperm(count * units)
    in_order, anywhere = (list(order.view(count, units)) for order in orders)
    functions[MOVED] = mover(read, in_order if new > 1 else anywhere, written, anywhere)
    if shape.format == "bf16" and new >= shape.span:
        functions["torch"] = lambda i: peer(shape, variants[i])
    case = Case(f"compress {shape.name}, {step}", functions, count)
    case.check = lambda: check(case)
    return case


def run(impl: Impl, a: Compress) -> Tensor:
    impl.run(a, None)
    return a.plane


def peer(shape: Shape, a: Compress) -> Tensor:
    groups = a.rows.unflatten(0, (-1, shape.stride)).float()  # [E, stride, 1, W]
    gates = torch.zeros_like(groups) if a.gates is None else a.gates.unflatten(0, (-1, shape.stride)).float()
    if shape.span > shape.stride:
        dim = shape.dim
        before = torch.cat([torch.zeros_like(groups[:1]), groups[:-1]])[..., :dim]
        gates_before = torch.cat([torch.full_like(gates[:1], -torch.inf), gates[:-1]])[..., :dim]
        groups, gates = torch.cat([before, groups[..., dim:]], 1), torch.cat([gates_before, gates[..., dim:]], 1)
    rows = (gates.softmax(1) * groups).sum(1).bfloat16().float()
    rows = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + a.eps) * a.norm).bfloat16().float()
    assert a.cos_sin is not None
    cos, sin = a.cos_sin[torch.arange(len(rows)) * shape.stride][:, None].chunk(2, -1)
    even, odd = rows[..., -64::2], rows[..., -63::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    rows = torch.cat([rows[..., :-64], turned], -1).bfloat16()
    entries = torch.arange(len(rows))
    a.plane[a.page_table[0, entries // PAGE].long(), entries % PAGE] = rows
    return a.plane


def check(case: Case) -> None:
    """Raise if the peer writes something else, but for rounding."""
    planes = [function(0).clone() for name, function in case.functions.items() if name != MOVED]
    for plane in planes[1:]:
        torch.testing.assert_close(plane.float(), planes[0].float(), atol=2e-2, rtol=2e-2)
