"""``attend`` on triton-ascend: arguments of the op to launches of the kernels.

Planes whose pages hold whole tiles of plain rows, in the dtype of the products, are read in place. Of others, and of
entries that are chosen one by one, a first kernel copies what each row attends to a workspace. That is bounded: rows
are taken in groups, and long lists in segments whose results are merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparse_attn.layout import PLAIN_FORMATS

from . import planes, soc
from .merge import merge_parts
from .planes import ABSENT, Rows
from .schedule import ENTRIES, SMALLEST, Shape, chunk_of, heads_of, parts_of, shape_of

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend

COPIED = 32
"""Entries that a task of the gather copies; tiles of the workspace are a multiple of it."""

WORKSPACE = 64 << 20
"""Bytes of the workspace of one plane, unless a single tile of one row needs more: a third of an A2's second cache."""


class Plane(NamedTuple):
    """How kernels read a plane, at compile time. Modes: ``pages``, all of a range, in place; ``blocks``, chosen blocks,
    in place; ``workspace``. ``tile`` divides the page and the block."""

    mode: str
    window: bool
    page: int
    select_block: int
    tile: int
    k_dim: int


class Source(NamedTuple):
    """One plane of a call: what of it is attended, and where its rows are. ``most`` bounds the entries that a row lists
    there; ``columns`` is the width of a row in the workspace."""

    plane: Plane
    table: Tensor
    pages: int
    keys: Rows
    values: Rows | None
    ranges: Tensor | None
    indices: Tensor | None
    counts: Tensor | None
    most: int
    columns: int


class Space(NamedTuple):
    """The workspace of one plane: ``rows [rows, groups, room, columns]`` of the entries that each row of a launch
    lists, and ``live [rows, groups, room]``, what each of them is."""

    rows: Tensor
    live: Tensor


def attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    """Runs one call on the current stream, without waiting for it."""
    tokens, heads, dim = a.q.shape
    if a.seq_lens.shape[0] == 0:  # padding only
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    if tokens == 0:
        return
    shape = shape_of(dim, a.v_dim, a.v is not None)
    compute = torch.float32 if a.q.dtype == torch.float16 and not _all_half(a) else a.q.dtype
    sources = _main(a, shape, compute), _window(a, shape, compute)
    groups = max(a.kv_heads, 1 if a.indices is None else a.indices.shape[1])
    rooms = [_room(source, groups * compute.itemsize) for source in sources]
    rows, segments = tokens, 1
    for source, room in zip(sources, rooms, strict=True):
        if source is not None and room:
            segments = max(segments, -(-source.most // room))
            rows = min(rows, max(WORKSPACE // (room * source.columns * groups * compute.itemsize), 1))
    spaces = [
        Space(
            a.q.new_empty(rows, groups, room, source.columns, dtype=compute),
            a.q.new_empty(rows, groups, room, dtype=torch.float32),
        )
        if source is not None and room
        else None
        for source, room in zip(sources, rooms, strict=True)
    ]
    tasks = rows * groups * -(-heads // groups // heads_of(soc.current(), heads // groups, shape))
    tiles = sum(_tiles(source, room) for source, room in zip(sources, rooms, strict=True))
    parts, part_tiles = (1, tiles) if a.batch_invariant else parts_of(soc.current().cores, tasks, tiles)
    for first in range(0, tokens, rows):
        here = slice(first, min(first + rows, tokens))
        count = here.stop - first
        result = out[here], None if lse is None else lse[here]
        if segments * parts > 1:
            outs = a.q.new_empty(segments * parts, count, heads, a.v_dim, dtype=torch.float32)
            lses = a.q.new_empty(segments * parts, count, heads, dtype=torch.float32)
        for segment in range(segments):
            read = []
            for source, space in zip(sources, spaces, strict=True):
                if source is not None and space is not None:
                    _gather(a, source, space, shape, first, count, segment)
                # what is read in place is read whole, with the first segment
                read.append((source, space) if segment == 0 or space is not None else (None, None))
            if segments * parts > 1:
                some = slice(segment * parts, (segment + 1) * parts)
                _attend(a, read, shape, first, count, segment, parts, part_tiles, None, outs[some], lses[some])
            else:
                _attend(a, read, shape, first, count, segment, parts, part_tiles, a.sinks, *result)
        if segments * parts > 1:
            merge_parts(outs, lses, a.sinks, *result)


def _attend(
    a: Attend,
    read: list[tuple[Source | None, Space | None]],
    shape: Shape,
    first: int,
    count: int,
    segment: int,
    parts: int,
    part_tiles: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of ``count`` rows from ``first`` on over what is in place and one segment of what was copied."""
    from .kernels.attend import attend_kernel

    heads = a.q.shape[1]
    (main, main_space), (window, window_space) = read
    index_heads = 1 if a.indices is None else a.indices.shape[1]
    groups = max(a.kv_heads, index_heads)
    block_h = heads_of(soc.current(), heads // groups, shape)
    batch = a.seq_lens.shape[0]
    cores = soc.current().cores
    attend_kernel[(min(cores, count * groups * -(-heads // groups // block_h) * parts),)](
        a.q,
        a.q.stride(0),
        a.q.stride(1),
        a.cu_seqlens_q,
        a.seq_lens,
        batch,
        batch.bit_length(),
        a.scale,
        a.ratio,
        *_table(main),
        *_rows(main, main_space, shape),
        None if main is None else main.ranges,
        *_indices(None if main is None else main.indices),
        None if main is None else main.counts,
        *_table(window),
        *_rows(window, window_space, shape)[:4],
        None if window_space is None else window_space.live,
        a.window,
        None if window is None else window.ranges,
        None if window is None or window.indices is None else window.indices.shape[2],
        *(0 if space is None else space.live.shape[2] for _, space in read),
        sinks,
        out,
        lse,
        first,
        count,
        0 if main_space is None else segment * main_space.live.shape[2],
        0 if window_space is None else segment * window_space.live.shape[2],
        part_tiles,
        MAIN=None if main is None else main.plane,
        WINDOW=None if window is None else window.plane,
        APART=a.v is not None,
        SHAPE=shape,
        HEADS=heads,
        KV_HEADS=a.kv_heads,
        INDEX_HEADS=index_heads,
        CAUSAL=a.causal,
        PARTS=parts,
        BLOCK_H=block_h,
    )


def _gather(a: Attend, source: Source, space: Space, shape: Shape, first: int, count: int, segment: int) -> None:
    """Copy a segment of what ``count`` rows from ``first`` on list in one plane."""
    from .kernels.gather import gather_kernel

    _, groups, room = space.live.shape
    index_heads = 1 if source.indices is None else source.indices.shape[1]
    batch = a.seq_lens.shape[0]
    values = source.values
    paired = source.keys.codes.element == "e2m1"
    gather_kernel[(min(soc.current().vector_cores, count * groups * room // COPIED),)](
        a.cu_seqlens_q,
        a.seq_lens,
        batch,
        batch.bit_length(),
        a.ratio,
        a.window,
        *_table(source),
        *source.keys.values,
        *source.keys.rope,
        *source.keys.scales,
        *(ABSENT if values is None else values.values),
        *(ABSENT if values is None else values.scales),
        source.ranges,
        *_indices(source.indices),
        source.counts,
        space.rows,
        space.rows.view(torch.int64 if space.rows.itemsize == 4 else torch.int32) if paired else None,
        space.live,
        room,
        first,
        count,
        segment * room,
        WINDOW=source.plane.window,
        PAGE=source.plane.page,
        SELECT=source.plane.select_block,
        KEY=source.keys.codes,
        VALUE=None if values is None else values.codes,
        SHAPE=shape,
        KV_HEADS=a.kv_heads,
        INDEX_HEADS=index_heads,
        GROUPS=groups,
        CAUSAL=a.causal,
        TILE=source.plane.tile,
        CHUNK=chunk_of(source.keys.codes.stored, shape),
        ROWS=COPIED,
    )


def _main(a: Attend, shape: Shape, compute: torch.dtype) -> Source | None:
    if a.kv is None or a.page_table is None:
        return None
    pages, page, _ = a.main_paging
    dim = a.q.shape[2]
    stored = dim if a.kv_rope is None else dim - a.kv_rope.shape[3]
    keys = planes.rows("attend", "kv", a.kv, a.format, page, stored, a.kv_scale)
    if a.kv_rope is not None:
        keys = keys._replace(rope=planes.plain_part(a.kv_rope), codes=keys.codes._replace(dim=dim))
    values = None if a.v is None else planes.rows("attend", "v", a.v, a.value_format, 0, a.v_dim, a.v_scale)
    formats = [a.format] if a.v is None else [a.format, a.value_format]
    in_place = all(format in PLAIN_FORMATS for format in formats) and all(
        t is None or t.dtype == compute for t in (a.kv, a.kv_rope, a.v)
    )
    if a.kv_rope is not None:  # tiles of columns end where the rope part begins
        in_place = in_place and shape.leads * shape.lead == stored
    mode, block = ("pages", page) if a.indices is None else ("blocks", a.select_block)
    most = a.max_seq_len if a.kv_range is not None else a.max_seq_len // a.ratio
    if a.indices is not None:
        most = a.indices.shape[2] * a.select_block
    elif a.kv_range is not None:
        most = min(a.page_table.shape[1] * page + 1, 1 << 31)
    plane = _plane(mode, False, in_place, page, block, a.select_block, shape, stored)
    columns = shape.row + (0 if a.v is None else shape.v_row)
    return Source(plane, a.page_table, pages, keys, values, a.kv_range, a.indices, a.index_counts, most, columns)


def _window(a: Attend, shape: Shape, compute: torch.dtype) -> Source | None:
    if a.win is None or a.win_page_table is None:
        return None
    pages, page, _ = a.window_paging
    dim = a.q.shape[2]
    keys = planes.rows("attend", "win", a.win, a.win_format, page, dim)
    in_place = a.win_indices is None and a.win_format in PLAIN_FORMATS and a.win.dtype == compute
    if a.win_indices is not None:
        most = a.win_indices.shape[2]
    else:
        most = a.window if a.win_range is None and a.window else a.max_seq_len
    plane = _plane("pages", True, in_place, page, page, 1, shape, dim)
    return Source(plane, a.win_page_table, pages, keys, None, a.win_range, a.win_indices, None, most, shape.row)


def _plane(
    mode: str, window: bool, in_place: bool, page: int, block: int, select_block: int, shape: Shape, stored: int
) -> Plane:
    """The plane in place if tiles fit its pages and blocks, else copied."""
    tile = min(_power(page), _power(block), ENTRIES)
    if in_place and tile >= SMALLEST:
        return Plane(mode, window, page, select_block, tile, stored)
    return Plane("workspace", window, page, select_block, ENTRIES, shape.row)


def _power(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def _all_half(a: Attend) -> bool:
    """Whether float16 holds every number of the planes, so that products of float16 queries need no float32."""
    used = [a.format] if a.kv is not None else []
    used += [a.value_format] if a.v is not None else []
    used += [a.win_format] if a.win is not None else []
    rope = a.kv_rope is None or a.kv_rope.dtype == torch.float16
    return rope and all(format == "fp16" for format in used)


def _room(source: Source | None, item_bytes: int) -> int:
    """Entries of a segment of one row, whole tiles, where an element of every group takes ``item_bytes``; 0: in
    place."""
    if source is None or source.plane.mode != "workspace":
        return 0
    tile = source.plane.tile
    return min(-(-max(source.most, 1) // tile), max(WORKSPACE // (tile * source.columns * item_bytes), 1)) * tile


def _tiles(source: Source | None, room: int) -> int:
    """Bound of the tiles that a row attends at a time."""
    if source is None:
        return 0
    tiles = -(-(min(source.most, room) if room else source.most) // source.plane.tile)
    return tiles + 1 if source.plane.mode == "pages" else tiles  # a range may begin inside of a tile


def _table(source: Source | None) -> tuple[Tensor | None, int, int, int]:
    if source is None:
        return None, 0, 0, 0
    return source.table, source.table.stride(0), source.table.shape[1], source.pages


def _rows(source: Source | None, space: Space | None, shape: Shape) -> tuple[object, ...]:
    """Where the kernel finds rows: values, rope part, values apart, and what of a workspace is live."""
    if source is None:
        return (*ABSENT, *ABSENT, *ABSENT, None)
    if space is not None:
        step = source.columns
        apart = ABSENT if source.values is None else (space.rows.flatten()[shape.row :], 0, step, 0)
        return (space.rows, 0, step, 0, *ABSENT, *apart, space.live)
    return (*source.keys.values, *source.keys.rope, *(ABSENT if source.values is None else source.values.values), None)


def _indices(indices: Tensor | None) -> tuple[object, ...]:
    return (None, 0, 0, 0, None) if indices is None else (indices, *indices.stride(), indices.shape[2])
