"""``attend`` on Triton: arguments of the op to launches of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

from . import planes
from .device import device_of
from .kernels.attend import attend_kernel
from .kernels.combine import combine_kernel
from .planes import Codes, Pages, Rows
from .schedule import parts_of, power_of_two, shape_of, tile_of, tokens_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

COMBINE_COLUMNS = 128


class Indices(NamedTuple):
    """Lists of chosen entries."""

    data: Tensor
    row_step: int
    head_step: int
    step: int
    heads: int
    width: int


class Partial(NamedTuple):
    """What programs leave of a row and head: the weighted rows, the largest score and the sum of weights under it."""

    acc: Tensor
    largest: Tensor
    total: Tensor


def attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Runs one call on the current stream, without waiting for it."""
    tokens, heads, dim = a.q.shape
    if tokens == 0:
        return
    device = device_of(a.q)
    index_heads = 1 if a.indices is None else a.indices.shape[1]
    groups = max(a.kv_heads, index_heads)
    wide = a.q.dtype == torch.float16 and not _all_half(a)
    shape = shape_of(dim, a.v_dim, None if a.v is None else a.v_dim)
    compute_bytes = 4 if wide else a.q.element_size()
    two = a.kv is not None and a.win is not None
    size = heads // groups
    together = 1
    if _ranges(a) and not a.batch_invariant:
        together = tokens_of(device, size, tokens * groups, a.max_seqlen_q, shape, compute_bytes)
    tile = tile_of(device, size * together, shape, compute_bytes, _decoded(a), 2 if two else 1)
    programs = -(-tokens // together) * groups * -(-size * together // tile.heads)
    parts, part_blocks = (
        (1, 1) if a.batch_invariant or together > 1 else parts_of(device, programs, _blocks(a, tile.entries))
    )
    partial = None
    if parts > 1:
        # the only memory that a call allocates; of a capture torch keeps it in the graph's pool
        cells = tokens * heads * parts
        memory = a.q.new_empty(cells * (2 + a.v_dim), dtype=torch.float32)
        partial = Partial(*memory.split([cells * a.v_dim, cells, cells]))
    keys, values, key, value = _main(a)
    win, win_key = _window(a)
    attend_kernel[programs, parts](
        a.q,
        a.q.stride(0),
        a.q.stride(1),
        tokens,
        a.cu_seqlens_q,
        a.seq_lens,
        a.seq_lens.shape[0],
        a.scale,
        a.ratio,
        _pages(a.page_table, a.main_paging[0]),
        *keys,
        values.values,
        values.scales,
        a.kv_range,
        _indices(a.indices),
        a.index_counts,
        a.select_block,
        _pages(a.win_page_table, a.window_paging[0]),
        *win,
        a.window,
        a.win_range,
        _indices(a.win_indices),
        a.sinks,
        out,
        lse,
        partial,
        part_blocks,
        SHAPE=shape,
        HEADS=heads,
        KV_HEADS=a.kv_heads,
        INDEX_HEADS=index_heads,
        PAGE=a.main_paging[1],
        WIN_PAGE=a.window_paging[1],
        KEY=key,
        VALUE=value,
        WIN_KEY=win_key,
        WIN_VALUE=None if a.v is None else win_key,
        CAUSAL=a.causal,
        PARTS=parts,
        TOKENS=together,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.entries,
        HARDWARE_FP8=device.hardware_fp8,
        WIDE=wide,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if partial is not None:
        columns = -(-a.v_dim // COMBINE_COLUMNS)
        combine_kernel[tokens * heads, columns](
            partial,
            a.sinks,
            out,
            lse,
            HEADS=heads,
            V_DIM=a.v_dim,
            PARTS=parts,
            PARTS_POWER=power_of_two(parts),
            BLOCK_D=COMBINE_COLUMNS,
            num_warps=4,
        )


def _all_half(a: Attend) -> bool:
    """Whether float16 holds every number of the planes, so that products of float16 queries need no float32."""
    used = [a.format] if a.kv is not None else []
    used += [a.value_format] if a.v is not None else []
    used += [a.win_format] if a.win is not None else []
    rope = a.kv_rope is None or a.kv_rope.dtype == torch.float16
    return rope and all(format == "fp16" for format in used)


def _ranges(a: Attend) -> bool:
    """Whether what rows attend follows from their positions, and changes little from one to the next."""
    return all(t is None for t in (a.indices, a.win_indices, a.kv_range, a.win_range))


def _decoded(a: Attend) -> str:
    """The type of the numbers of a plane that are not as they are read; "" if no plane holds such."""
    codecs = (FORMATS[name].codec for name in (a.format, a.value_format, a.win_format))
    return next((codec.element for codec in codecs if codec.scale), "")


def _blocks(a: Attend, block: int) -> int:
    """Bound of the blocks that a row attends, from what the host knows."""
    blocks = 0
    if a.win is not None:
        if a.win_indices is not None:
            entries = a.win_indices.shape[2]
        else:
            entries = a.window if a.win_range is None and a.window else a.max_seq_len
        blocks += -(-entries // block)
    if a.kv is not None:
        entries = a.max_seq_len // a.ratio if a.indices is None else a.indices.shape[2] * a.select_block
        blocks += -(-entries // block)
    return blocks


def _main(a: Attend) -> tuple[Rows, Rows, Codes | None, Codes | None]:
    """Keys and values of the main plane, and how to read them. None for how to read values: they are the first columns
    of the keys."""
    if a.kv is None:
        return planes.ABSENT, planes.ABSENT, None, None
    dim = a.q.shape[2]
    keys, key = planes.rows("attend", "kv", a.kv, a.format, a.page_size, a.kv_scale), planes.codes(a.format, dim)
    if a.kv_rope is not None:
        keys = keys._replace(rope=planes.plain_part(a.kv_rope))
        key = key._replace(stored=dim - a.kv_rope.shape[3])
    if a.v is None:
        return keys, planes.ABSENT, key, None
    values = planes.rows("attend", "v", a.v, a.value_format, 0, a.v_scale)
    return keys, values, key, planes.codes(a.value_format, a.v_dim)


def _window(a: Attend) -> tuple[Rows, Codes | None]:
    """Rows of the window plane, and how to read them."""
    if a.win is None:
        return planes.ABSENT, None
    rows = planes.rows("attend", "win", a.win, a.win_format, a.win_page_size)
    return rows, planes.codes(a.win_format, a.q.shape[2])


def _pages(table: Tensor | None, count: int) -> Pages | None:
    return None if table is None else planes.pages(table, count)


def _indices(indices: Tensor | None) -> Indices | None:
    return None if indices is None else Indices(indices, *indices.stride(), *indices.shape[1:])
