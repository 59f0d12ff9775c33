"""``compress``: the entries that a step completes, one sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import expect
from ..codecs import DTYPES
from ..planes import Plane
from .rows import sequences, where

if TYPE_CHECKING:
    from ..ops.compress import Compress


def compress(a: Compress, latent: Tensor | None) -> None:
    """Pool, norm, rotate, store; then keep the rows that later steps need."""
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    if latent is not None:
        latent.zero_()
    packed = 0
    for b, start, end, length in sequences("compress", a, a.rows.shape[0]):
        before, after = max(length - (end - start), 0), max(length, 0)
        new = torch.arange(before, after, device=a.rows.device)
        tokens = step_rows(a, slice(end - len(new), end))
        first, done = before // a.stride, after // a.stride
        if done > first:
            entries = torch.arange(first, done, device=a.rows.device)
            at = where("compress", a.page_table[b], entries, plane, "page_table", b)
            pooled = round_to(a.dtype, pool(a, b, entries, before, tokens))
            normed = round_to(a.dtype, norm(a, pooled))
            plane.put_rows(at, round_to(a.dtype, rotate(a, entries, normed)).float())
            if latent is not None:
                given, needed = latent.shape[0], packed + len(entries)
                expect(needed <= given, "compress", "entries", f"at least {needed}, which the step completes", given)
                latent[packed:needed] = normed
            packed += len(entries)
        if a.state is not None:
            kept = new[max(len(new) - a.kept, 0) :]
            state_plane(a).put_rows(state_places(a, b, kept), tokens[len(new) - len(kept) :].float())


def step_rows(a: Compress, rows: slice) -> Tensor:
    """Values of new tokens, and their gates after them, as the state holds them: float64 ``[N, H, W or 2W]``."""
    values = a.rows[rows].double()
    return values if a.gates is None else torch.cat([values, a.gates[rows].double()], -1)


def state_plane(a: Compress) -> Plane:
    assert a.state is not None
    return Plane(a.state, "fp32")


def state_places(a: Compress, b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    assert a.state_page_table is not None
    return where("compress", a.state_page_table[b], positions, state_plane(a), "state_page_table", b)


def pool(a: Compress, b: int, entries: Tensor, first_new: int, tokens: Tensor) -> Tensor:
    """Each entry from its tokens, channel by channel: float64 ``[E, H, D]``."""
    end = (entries + 1) * a.stride
    positions = end[:, None] - a.covered + torch.arange(a.covered, device=entries.device)
    earliest = max(int(positions[0, 0]), 0)
    if earliest < first_new:
        before = torch.arange(earliest, first_new, device=entries.device)
        tokens = torch.cat([state_plane(a).rows(state_places(a, b, before)).double(), tokens])
    else:
        earliest = first_new
    rows = tokens[(positions - earliest).clamp(min=0)]  # [E, span, H, W or 2W]
    width = a.rows.shape[-1]
    values, logits = rows[..., :width], rows[..., width:]
    exists = (positions >= 0)[..., None, None]
    if a.gates is None:
        weights = exists / exists.sum(1, keepdim=True)
    else:
        if a.bias is not None:
            # in float32, as in the models
            logits = (logits.float() + a.bias[positions % a.stride][:, :, None]).double()
        weights = torch.softmax(own_channels(a, logits).where(exists, -torch.inf), 1)
    return (weights * own_channels(a, values).where(exists, 0.0)).sum(1)


def own_channels(a: Compress, x: Tensor) -> Tensor:
    """Of ``[E, span, H, W]`` the D channels that each token uses."""
    if x.shape[-1] == a.dim:
        return x
    sets = x.unflatten(-1, (-1, a.dim))  # [E, span, H, sets, D]
    own = torch.arange(a.covered, device=x.device) // a.stride
    return sets[:, torch.arange(a.covered, device=x.device), :, own].transpose(0, 1)


def norm(a: Compress, x: Tensor) -> Tensor:
    if a.norm is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.eps) * a.norm.double()


def rotate(a: Compress, entries: Tensor, x: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last R elements."""
    if a.cos_sin is None:
        return x
    positions = entries * a.rope_step
    rows = a.cos_sin.shape[0]
    last = int(positions[-1])
    expect(last < rows, "compress", "cos_sin", f"a row for position {last}", f"{rows} positions")
    cos, sin = a.cos_sin[positions][:, None].double().chunk(2, -1)
    rotated = a.cos_sin.shape[1]
    still, turned = x.split([x.shape[-1] - rotated, rotated], -1)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([still, pairs.flatten(-2)], -1)


def round_to(dtype: str, x: Tensor) -> Tensor:
    """``x`` in float64, rounded to the model's dtype."""
    return x.to(DTYPES[dtype]).double()
