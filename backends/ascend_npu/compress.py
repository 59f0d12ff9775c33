"""``compress`` by torch's own operations.

Bits of an entry must not depend on how its tokens were cut into steps, and nothing says in which order a device adds up
the elements of a reduction. So sums are taken by halves, element by element: their order is that of the span alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import codecs
from .memory import Plane
from .rows import place, rows_of

if TYPE_CHECKING:
    from sparse_attn.ops.compress import Compress

WORKSPACE = 1 << 28
"""Bytes of the tokens of entries in float32 at a time."""


class Entries(NamedTuple):
    """Some of the entries that a step may complete, one behind the other, int64 ``[N]``."""

    live: Tensor
    """Whether the step completes it; bool."""
    sequence: Tensor
    number: Tensor
    """Its place in its sequence."""
    before: Tensor
    """Tokens of its sequence before this step."""
    length: Tensor
    """Tokens of its sequence with this step."""
    end: Tensor
    """One more than its sequence's last row in the step."""


def compress(a: Compress, latent: Tensor | None) -> None:
    """Pool, norm, rotate, store; then keep the rows that later steps need.

    An entry without a page is left out. One whose earlier rows or rotation have no memory is NaN.
    """
    if latent is not None:
        latent.zero_()
    tokens, heads, width = a.rows.shape
    if not a.rows.numel() or len(a.seq_lens) == 0:
        return
    plane = Plane(a.plane, a.format, a.scale, a.page_size)
    count = tokens // a.stride + len(a.seq_lens)  # what is known without waiting for the device
    most = max(WORKSPACE // (4 * 2 * a.covered * heads * width), 1)
    for first in range(0, count, most):
        entries = entries_of(a, torch.arange(first, min(first + most, count), device=a.rows.device))
        normed = rounded(a, norm(a, rounded(a, pool(a, entries))))
        if latent is not None:
            given = latent[first : first + len(normed)]
            given.copy_(torch.where(entries.live[:, None, None], normed, 0.0)[: len(given)])
        put(plane, a.page_table, entries.sequence, entries.number, entries.live, rounded(a, rotate(a, entries, normed)))
    if a.state is None or a.state_page_table is None:
        return
    rows = rows_of(tokens, a.cu_seqlens_q, a.seq_lens)
    kept = rows.tokens > (rows.length - a.kept).clamp(min=0)
    position = (rows.tokens - 1).clamp(min=0)
    for part, of_step in ((a.state[..., :width], a.rows), (a.state[..., width:], a.gates)):
        if of_step is not None:
            put(Plane(part, "fp32"), a.state_page_table, rows.sequence, position, kept, of_step.float())


def entries_of(a: Compress, n: Tensor) -> Entries:
    """The ``n``-th entries of the step."""
    after = a.seq_lens.long().clamp(min=0)
    before = (a.seq_lens.long() - a.cu_seqlens_q.diff()).clamp(min=0)
    done = after // a.stride
    ends = (done - before // a.stride).clamp(min=0).cumsum(0)
    sequence = torch.searchsorted(ends, n, right=True).clamp(max=len(ends) - 1)
    number = done[sequence] - (ends[sequence] - n)
    live = n < ends[-1]
    return Entries(
        live,
        sequence,
        torch.where(live, number, 0),
        before[sequence],
        after[sequence],
        a.cu_seqlens_q[1:].long()[sequence],
    )


def pool(a: Compress, entries: Entries) -> Tensor:
    """Each entry from its tokens, channel by channel: float32 ``[N, H, D]``."""
    width = a.rows.shape[-1]
    positions = (entries.number[:, None] + 1) * a.stride - a.covered  # [N, span], from before the first token on
    positions = positions + torch.arange(a.covered, device=a.rows.device)
    exists = entries.live[:, None] & (positions >= 0)
    kept = None if a.state is None else a.state[..., :width]
    values = tokens_of(a, entries, positions, exists, a.rows, kept)
    if a.gates is None:
        return total(values) / exists.sum(1).clamp(min=1)[:, None, None]
    kept = None if a.state is None else a.state[..., width:]
    gates = tokens_of(a, entries, positions, exists, a.gates, kept)
    if a.bias is not None:
        order = torch.arange(a.covered, device=a.rows.device)  # an entry begins at a multiple of the stride
        gates = gates + own_channels(a, a.bias[order % a.stride][None, :, None])
    gates = torch.where(exists[..., None, None], gates, float("-inf"))
    top = torch.where(entries.live[:, None, None], gates.amax(1), 0.0)
    weights = torch.exp(gates - top[:, None])
    return total(weights * values) / total(weights)


def tokens_of(
    a: Compress, entries: Entries, positions: Tensor, exists: Tensor, new: Tensor, kept: Tensor | None
) -> Tensor:
    """Rows of tokens as float32 ``[N, span, H, D]``: of the step, or kept by the state; 0 of what does not exist."""
    fresh = exists & (positions >= entries.before[:, None])
    row = entries.end[:, None] - (entries.length[:, None] - positions)
    rows = new[torch.where(fresh, row, 0).clamp(0, len(new) - 1)].float()
    if kept is None:
        return torch.where(fresh[..., None, None], own_channels(a, rows), 0.0)
    assert a.state_page_table is not None
    state, old = Plane(kept, "fp32"), exists & ~fresh
    sequence = entries.sequence[:, None]
    page, offset, lost = place(a.state_page_table, sequence, positions, old, state.pages, state.page_size)
    heads = torch.arange(state.heads, device=rows.device)
    earlier = state.rows(page[..., None], offset[..., None], heads)
    earlier = torch.where(lost[..., None, None], torch.nan, earlier)
    rows = torch.where(fresh[..., None, None], rows, earlier)
    return torch.where(exists[..., None, None], own_channels(a, rows), 0.0)


def own_channels(a: Compress, x: Tensor) -> Tensor:
    """Of ``[N, span, H, W]`` the D channels that each token uses."""
    if x.shape[-1] == a.dim:
        return x
    token = torch.arange(a.covered, device=x.device)
    sets = x.unflatten(-1, (-1, a.dim)).movedim(1, 0)  # [span, N, H, sets, D]
    own = (token // a.stride)[:, None, None, None, None].expand(*sets.shape[:3], 1, a.dim)
    return sets.gather(3, own).squeeze(3).movedim(0, 1)


def total(x: Tensor) -> Tensor:
    """The sum over axis 1, by halves."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = torch.cat([x[:, :half] + x[:, half : 2 * half], x[:, 2 * half :]], 1)
    return x.squeeze(1)


def norm(a: Compress, x: Tensor) -> Tensor:
    if a.norm is None:
        return x
    squares = total((x * x).movedim(-1, 1)) / a.dim
    return x / torch.sqrt(squares + a.eps)[..., None] * a.norm


def rotate(a: Compress, entries: Entries, x: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last R elements."""
    if a.cos_sin is None or not a.cos_sin.shape[1]:
        return x
    position = entries.number * a.rope_step
    known = position < len(a.cos_sin)
    turned = a.cos_sin.shape[1]
    if len(a.cos_sin):
        angles = torch.where(known[:, None], a.cos_sin[torch.where(known, position, 0)], torch.nan)
    else:
        angles = a.cos_sin.new_full((len(position), turned), torch.nan)
    cos, sin = angles[:, None].chunk(2, -1)
    even, odd = x[..., -turned::2], x[..., 1 - turned :: 2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([x[..., :-turned], pairs.flatten(-2)], -1)


def rounded(a: Compress, x: Tensor) -> Tensor:
    return x.to(codecs.DTYPES[a.dtype]).float()


def put(plane: Plane, table: Tensor, sequence: Tensor, entries: Tensor, wanted: Tensor, rows: Tensor) -> None:
    """Write ``rows [N, H, D]`` at the places of those ``entries [N]`` that are ``wanted`` and have a page."""
    if not plane.pages:
        return
    page, offset, lost = place(table, sequence, entries, wanted, plane.pages, plane.page_size)
    head = torch.arange(plane.heads, device=rows.device)
    kept = (wanted & ~lost)[:, None].expand(-1, plane.heads)
    plane.write(page[:, None], offset[:, None], head, codecs.encode(plane.format.codec, rows), kept)
