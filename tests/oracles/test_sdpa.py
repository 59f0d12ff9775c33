"""``attend`` against torch's scaled_dot_product_attention under masks, in float64 and float32.

Each test states what a row attends as one boolean mask over the entries of its sequence. A sink is
one more key column: a zero key and a zero value under an additive mask that holds the logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged import Pages, attend
from torch import Tensor

from sparse_attn.registry import Impl

PAGE_SIZES = (1, 4, 53)
PLAIN_FORMAT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NO_INDEX = torch.tensor([-1, -7, -(2**31), 2**31 - 1])
"""Indices that name nothing, whatever the lengths."""

# query rows and tokens of each sequence
DENSE = {
    "prefill": ([37, 5], [37, 5]),
    "chunked prefill": ([16, 9], [70, 41]),
    "decode": ([1, 1, 1], [70, 5, 1]),
    "several query tokens": ([4, 3, 2], [60, 33, 2]),
    # no rows, no tokens, a negative length, more rows than tokens
    "mixed": ([12, 0, 1, 3, 2, 6, 5], [12, 9, 64, 0, -4, 150, 3]),
}
MIXED = DENSE["mixed"]


@dataclass
class Batch:
    """Packed queries, and for each sequence its rows in ``q`` and their token positions."""

    rows: Sequence[int]
    lengths: Sequence[int]
    heads: int
    dim: int
    dtype: torch.dtype = torch.float32
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [sum(self.rows[:b]) for b in range(len(self.rows) + 1)]
        padding = 2
        self.q = torch.randn(self.starts[-1] + padding, self.heads, self.dim).to(self.dtype)
        self.q[self.starts[-1] :] = float("nan")

    def positions(self, b: int) -> Tensor:
        return torch.arange(self.lengths[b] - self.rows[b], self.lengths[b])

    def tokens(self, ratio: int = 1) -> list[int]:
        """Entries of each sequence in a plane of this ratio."""
        return [max(n, 0) // ratio for n in self.lengths]

    def per_row(self, values: Callable[[int, int], Sequence[int]]) -> Tensor:
        """int32 ``[T, n]`` of ``values(sequence, position)``; padding rows hold rubbish."""
        rows = [values(b, p) for b in range(len(self.rows)) for p in self.positions(b).tolist()]
        rubbish = [[-9] * len(rows[0]), [10**6] * len(rows[0])]
        return torch.tensor([*rows, *rubbish], dtype=torch.int32)

    def arguments(self, scale: float, v_dim: int) -> tuple[Any, ...]:
        cu = torch.tensor(self.starts, dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return self.q, cu, lengths, scale, v_dim, max(self.rows), max(self.lengths)


@dataclass
class Seen:
    """What the rows of each sequence see in one plane.

    Keys and values are ``[n, Hkv, D]``, masks ``[1 or Hq, rows, n]``.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    masks: Sequence[Tensor]


def sdpa(
    batch: Batch, seen: Sequence[Seen], scale: float, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of every row."""
    v_dim = seen[0].values[0].shape[-1]
    out = torch.zeros(len(batch.q), batch.heads, v_dim, dtype=dtype)
    lse = torch.full((len(batch.q), batch.heads), float("-inf"), dtype=dtype)
    for b in range(len(batch.rows)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        q = batch.q[rows].to(dtype).transpose(0, 1)

        def heads_first(planes: Sequence[Tensor]) -> Tensor:
            entries = torch.cat(list(planes)).to(dtype)
            return entries.repeat_interleave(batch.heads // entries.shape[1], dim=1).transpose(0, 1)

        k = heads_first([s.keys[b] for s in seen])
        v = heads_first([s.values[b] for s in seen])
        mask = torch.cat([s.masks[b].expand(batch.heads, -1, -1) for s in seen], dim=-1)
        if mask.numel() == 0:
            continue
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
        lse[rows] = (scale * q @ k.transpose(1, 2) + bias).logsumexp(-1).T
        if sinks is not None:
            k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
            column = sinks.to(dtype)[:, None, None].expand(-1, mask.shape[1], 1)
            bias = torch.cat([column, bias], dim=-1)
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        # a row without any key is 0 / 0 in a plain softmax
        out[rows] = result.where(mask.any(-1, keepdim=True), 0.0).transpose(0, 1)
    return out, lse


def compare(
    impl: Impl,
    batch: Batch,
    seen: Sequence[Seen],
    scale: float = 0.3,
    sinks: Tensor | None = None,
    **arguments: Any,
) -> None:
    v_dim = seen[0].values[0].shape[-1]
    out, lse = attend(impl, *batch.arguments(scale, v_dim), sinks=sinks, **arguments)
    atol, rtol = impl.tolerance[str(batch.dtype).removeprefix("torch.")]
    assert out.dtype == batch.dtype
    for dtype, slack in ((torch.float64, 0.0), (torch.float32, 4e-6)):
        expected_out, expected_lse = sdpa(batch, seen, scale, sinks, dtype)
        bound = {"atol": atol + slack, "rtol": rtol + slack}
        torch.testing.assert_close(out.to(dtype), expected_out, **bound)
        torch.testing.assert_close(lse.to(dtype), expected_lse, **bound)


def randn(counts: Sequence[int], heads: int, dim: int) -> list[Tensor]:
    return [torch.randn(n, heads, dim) for n in counts]


def causal(batch: Batch, counts: Sequence[int], ratio: int = 1) -> list[Tensor]:
    """Entry ``i`` is visible from its last token, ``(i + 1) * ratio - 1``, on."""
    return [((torch.arange(n) + 1) * ratio - 1 <= batch.positions(b)[:, None])[None] for b, n in enumerate(counts)]


def whole(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, n) for n in counts]


def stored(rows: Sequence[Tensor], format: str) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor]]:
    """Rows in a format: the stored elements, their scales, and the numbers they stand for."""
    if format == "int8":
        scales = [r.abs().amax(-1).div(120).half() for r in rows]
        whole_numbers = [(r / s[..., None].float()).round().to(torch.int8) for r, s in zip(rows, scales, strict=True)]
        numbers = [w.double() * s[..., None].double() for w, s in zip(whole_numbers, scales, strict=True)]
        return whole_numbers, scales, numbers
    dtype = next(dtype for dtype, name in PLAIN_FORMAT.items() if name == format)
    elements = [r.to(dtype) for r in rows]
    return elements, None, [e.double() for e in elements]


@dataclass
class Gqa:
    """Separate keys and values of every token, and the op's arguments for them."""

    counts: Sequence[int]
    kv_heads: int
    dim: int
    v_dim: int
    page_size: int

    def __post_init__(self) -> None:
        self.keys = randn(self.counts, self.kv_heads, self.dim)
        self.values = randn(self.counts, self.kv_heads, self.v_dim)
        pages = Pages(whole(self.counts), self.page_size)
        self.arguments: dict[str, Any] = {
            "kv": pages.lay(self.keys),
            "v": pages.lay(self.values),
            "page_table": pages.table,
            "format": "fp32",
        }

    def seen(self, masks: Sequence[Tensor]) -> list[Seen]:
        return [Seen(self.keys, self.values, masks)]


def choose(batch: Batch, choices: Sequence[int], index_heads: int, count: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Random indices ``[T, Hi, count]``, how many of a row count, and masks of what they name.

    Rows are full of what must be masked: negative numbers at any place, indices past the end, and
    good ones after the count. The masks are ``[Hi, rows, choices[b]]``.
    """
    indices = torch.full((len(batch.q), index_heads, count), 3, dtype=torch.int32)
    counts = torch.randint(0, count + 1, (len(batch.q), index_heads), dtype=torch.int32)
    counts[::4] = count
    masks = []
    for b, n in enumerate(choices):
        mask = torch.zeros(index_heads, batch.rows[b], n, dtype=torch.bool)
        for i in range(batch.rows[b]):
            for h in range(index_heads):
                t = batch.starts[b] + i
                row = torch.cat([torch.randperm(n + 4), torch.arange(n + 4, n + 4 + count)])[:count]
                holes = torch.randperm(count)[: count // 3]
                row[holes] = NO_INDEX[torch.arange(len(holes)) % len(NO_INDEX)]
                indices[t, h] = row
                live = row[: counts[t, h]]
                mask[h, i, live[(live >= 0) & (live < n)]] = True
        masks.append(mask)
    return indices, counts, masks


def per_query_head(masks: Sequence[Tensor], heads: int) -> list[Tensor]:
    return [mask.repeat_interleave(heads // mask.shape[0], dim=0) for mask in masks]


def both(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [a & b for a, b in zip(first, second, strict=True)]


@pytest.fixture(params=PAGE_SIZES, ids=lambda n: f"page{n}")
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("phase", DENSE)
@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (5, 5), (4, 1)], ids=lambda h: f"{h[0]}over{h[1]}")
def test_dense_causal(attend_impl: Impl, page_size: int, heads: tuple[int, int], phase: str) -> None:
    batch = Batch(*DENSE[phase], heads[0], 16)
    main = Gqa(batch.tokens(), heads[1], 16, 24, page_size)
    compare(attend_impl, batch, main.seen(causal(batch, main.counts)), **main.arguments)


def test_not_causal(attend_impl: Impl, page_size: int) -> None:
    batch = Batch([12, 1, 3], [12, 64, 30], 6, 16)
    main = Gqa(batch.tokens(), 2, 16, 16, page_size)
    every = [torch.ones(1, r, n, dtype=torch.bool) for r, n in zip(batch.rows, main.counts, strict=True)]
    compare(attend_impl, batch, main.seen(every), causal=False, **main.arguments)


@pytest.mark.parametrize(
    ("dim", "v_dim", "rope_dim"),
    [(576, 512, 0), (576, 512, 64), (512, 512, 0)],
    ids=["576 to 512", "rope apart", "512 to 512"],
)
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_mla(attend_impl: Impl, page_size: int, dim: int, v_dim: int, rope_dim: int, format: str) -> None:
    """One KV head; the values are the first elements of each key."""
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    batch = Batch(*MIXED, 16, dim, dtype)
    counts = batch.tokens()
    rows, scales, numbers = stored(randn(counts, 1, dim - rope_dim), format)
    rope = [r.to(dtype) for r in randn(counts, 1, rope_dim)]
    keys = [torch.cat([n, r.double()], dim=-1) for n, r in zip(numbers, rope, strict=True)]
    values = [n[..., :v_dim] for n in numbers]
    pages = Pages(whole(counts), page_size)
    indices, index_counts, chosen = choose(batch, counts, 1, 24)
    compare(
        attend_impl,
        batch,
        [Seen(keys, values, both(chosen, causal(batch, counts)))],
        scale=0.05,
        kv=pages.lay(rows),
        kv_scale=None if scales is None else pages.lay(scales),
        kv_rope=pages.lay(rope) if rope_dim else None,
        page_table=pages.table,
        format=format,
        indices=indices,
        index_counts=index_counts,
    )


@pytest.mark.parametrize("index_heads", [1, 2, 6], ids=["shared", "per KV head", "per query head"])
def test_selected_entries(attend_impl: Impl, page_size: int, index_heads: int) -> None:
    batch = Batch(*MIXED, 6, 16)
    main = Gqa(batch.tokens(), 2, 16, 16, page_size)
    indices, counts, chosen = choose(batch, main.counts, index_heads, 13)
    masks = both(per_query_head(chosen, 6), causal(batch, main.counts))
    strided = indices.transpose(1, 2).contiguous().transpose(1, 2)
    compare(attend_impl, batch, main.seen(masks), indices=strided, index_counts=counts, **main.arguments)


@pytest.mark.parametrize("select_block", [4, 16, 128])
@pytest.mark.parametrize("index_heads", [1, 2, 6], ids=["shared", "per KV head", "per query head"])
def test_selected_blocks(attend_impl: Impl, page_size: int, index_heads: int, select_block: int) -> None:
    """Lengths are no multiples of the block, and rows end inside blocks."""
    batch = Batch(*MIXED, 6, 16)
    main = Gqa(batch.tokens(), 2, 16, 16, page_size)
    blocks = [-(-n // select_block) for n in main.counts]
    indices, counts, chosen = choose(batch, blocks, index_heads, 5)
    entries = [
        mask.repeat_interleave(select_block, dim=-1)[..., :n] for mask, n in zip(chosen, main.counts, strict=True)
    ]
    masks = both(per_query_head(entries, 6), causal(batch, main.counts))
    compare(
        attend_impl,
        batch,
        main.seen(masks),
        indices=indices,
        index_counts=counts,
        select_block=select_block,
        **main.arguments,
    )


def random_ranges(batch: Batch, counts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Ranges that start before 0 or after their end, and the masks they stand for."""

    def draw(b: int, _: int) -> list[int]:
        return [
            int(torch.randint(-3, counts[b] + 1, ())),
            int(torch.randint(-2, counts[b] + 1, ())),
        ]

    ranges = batch.per_row(draw)
    masks = []
    for b, n in enumerate(counts):
        low, high = ranges[batch.starts[b] : batch.starts[b + 1], :, None].unbind(1)
        positions = batch.positions(b)[:, None]
        # rows before the first token attend nothing, whatever their range
        masks.append(((torch.arange(n) >= low) & (torch.arange(n) < high) & (positions >= 0))[None])
    return ranges, masks


@pytest.mark.parametrize("select_block", [0, 1, 16], ids=["all", "entries", "blocks"])
def test_explicit_ranges(attend_impl: Impl, page_size: int, select_block: int) -> None:
    """Ranges replace causality, and clip what is selected."""
    batch = Batch(*MIXED, 6, 16)
    main = Gqa(batch.tokens(), 2, 16, 16, page_size)
    ranges, masks = random_ranges(batch, main.counts)
    arguments: dict[str, Any] = {"kv_range": ranges, **main.arguments}
    if select_block:
        units = [-(-n // select_block) for n in main.counts]
        indices, counts, chosen = choose(batch, units, 2, 12)
        entries = [
            mask.repeat_interleave(select_block, dim=-1)[..., :n] for mask, n in zip(chosen, main.counts, strict=True)
        ]
        masks = both(per_query_head(entries, 6), masks)
        arguments |= {"indices": indices, "index_counts": counts, "select_block": select_block}
    compare(attend_impl, batch, main.seen(masks), **arguments)


@pytest.mark.parametrize("causality", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("ratio", [2, 4, 128])
def test_entries_of_several_tokens(attend_impl: Impl, page_size: int, ratio: int, causality: bool) -> None:
    rows, lengths = [12, 0, 1, 3, 20, 5], [12, 9, 64, 0, 390, 3]
    batch = Batch(rows, lengths, 6, 16)
    counts = batch.tokens(ratio)
    main = Gqa(counts, 2, 16, 16, page_size)
    masks = causal(batch, counts, ratio)
    if not causality:
        masks = [m | (batch.positions(b) >= 0)[:, None] for b, m in enumerate(masks)]
    compare(attend_impl, batch, main.seen(masks), ratio=ratio, causal=causality, **main.arguments)


def last(batch: Batch, window: int) -> list[Tensor]:
    """The last ``window`` tokens of each row, its own included."""
    masks = []
    for b, n in enumerate(batch.tokens()):
        age = batch.positions(b)[:, None] - torch.arange(n)
        masks.append(((age >= 0) & (age < window))[None])
    return masks


@dataclass
class Window:
    """A window plane that holds the rows from ``first[b]`` on, and the op's arguments for it."""

    batch: Batch
    kv_heads: int
    dim: int
    v_dim: int
    page_size: int
    first: Sequence[int]

    def __post_init__(self) -> None:
        counts = self.batch.tokens()
        self.rows = [r.to(self.batch.dtype) for r in randn(counts, self.kv_heads, self.dim)]
        spans = [(min(low, n), n) for low, n in zip(self.first, counts, strict=True)]
        pages = Pages(spans, self.page_size, seed=1)
        self.arguments: dict[str, Any] = {
            "win": pages.lay([r[low:] for r, (low, _) in zip(self.rows, spans, strict=True)]),
            "win_page_table": pages.table,
            "win_format": PLAIN_FORMAT[self.batch.dtype],
        }

    def seen(self, masks: Sequence[Tensor]) -> Seen:
        return Seen(self.rows, [r[..., : self.v_dim] for r in self.rows], masks)


def window_starts(batch: Batch, window: int) -> list[int]:
    return [max(n - r - window + 1, 0) for r, n in zip(batch.rows, batch.lengths, strict=True)]


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_window(attend_impl: Impl, page_size: int, window: int) -> None:
    """The rows before every window are in no page."""
    batch = Batch(*MIXED, 6, 16)
    plane = Window(batch, 2, 16, 12, page_size, window_starts(batch, window))
    compare(attend_impl, batch, [plane.seen(last(batch, window))], window=window, **plane.arguments)


@pytest.mark.parametrize("window", [0, 7])
def test_window_ranges(attend_impl: Impl, page_size: int, window: int) -> None:
    """Ranges replace the window, and are not causal."""
    batch = Batch(*MIXED, 6, 16)
    plane = Window(batch, 2, 16, 16, page_size, [0] * len(batch.rows))
    ranges, masks = random_ranges(batch, batch.tokens())
    compare(
        attend_impl,
        batch,
        [plane.seen(masks)],
        window=window,
        win_range=ranges,
        causal=False,
        **plane.arguments,
    )


@pytest.mark.parametrize("bound", ["causality", "window", "range"])
def test_window_indices(attend_impl: Impl, page_size: int, bound: str) -> None:
    batch = Batch(*MIXED, 6, 16)
    plane = Window(batch, 2, 16, 16, page_size, [0] * len(batch.rows))
    indices, _, _ = choose(batch, batch.tokens(), 1, 15)
    chosen = []
    for b, n in enumerate(batch.tokens()):
        rows = indices[batch.starts[b] : batch.starts[b + 1], 0]
        chosen.append((rows[:, :, None] == torch.arange(n)).any(1)[None])
    arguments: dict[str, Any] = {"win_indices": indices, **plane.arguments}
    if bound == "causality":
        bounds = causal(batch, batch.tokens())
    elif bound == "window":
        bounds = last(batch, 9)
        arguments["window"] = 9
    else:
        arguments["win_range"], bounds = random_ranges(batch, batch.tokens())
    compare(attend_impl, batch, [plane.seen(both(chosen, bounds))], **arguments)


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all visible"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_planes_one_softmax(
    attend_impl: Impl, page_size: int, dtype: torch.dtype, ratio: int, selected: bool
) -> None:
    """Raw tokens and compressed entries under their own tables; what both hold counts twice."""
    rows, lengths = [12, 0, 1, 3, 20, 5], [12, 9, 64, 0, 390, 3]
    batch = Batch(rows, lengths, 8, 32, dtype)
    window = Window(batch, 1, 32, 32, page_size + 2, window_starts(batch, 32))
    counts = batch.tokens(ratio)
    entries = [e.to(dtype) for e in randn(counts, 1, 32)]
    pages = Pages(whole(counts), page_size)
    masks = causal(batch, counts, ratio)
    arguments: dict[str, Any] = {
        "kv": pages.lay(entries),
        "page_table": pages.table,
        "format": PLAIN_FORMAT[dtype],
        "ratio": ratio,
        "window": 32,
        **window.arguments,
    }
    if selected:
        indices, index_counts, chosen = choose(batch, counts, 1, 20)
        masks = both(chosen, masks)
        arguments |= {"indices": indices, "index_counts": index_counts}
    seen = [window.seen(last(batch, 32)), Seen(entries, entries, masks)]
    compare(attend_impl, batch, seen, sinks=2 * torch.randn(8), **arguments)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e30, float("-inf")])
def test_sinks(attend_impl: Impl, page_size: int, size: float) -> None:
    """The LSE leaves the sink out."""
    batch = Batch(*MIXED, 6, 16)
    main = Gqa(batch.tokens(), 2, 16, 16, page_size)
    sinks = torch.tensor([-2.0, -1.0, 0.1, 1.0, 2.0, -0.5]) * abs(size)
    if size == float("-inf"):
        sinks[:] = size
    compare(attend_impl, batch, main.seen(causal(batch, main.counts)), sinks=sinks, **main.arguments)


@pytest.mark.parametrize("v_format", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats(attend_impl: Impl, dtype: torch.dtype, format: str, v_format: str) -> None:
    batch = Batch(*MIXED, 6, 64, dtype)
    counts = batch.tokens()
    pages = Pages(whole(counts), 16)
    keys, key_scales, key_numbers = stored(randn(counts, 2, 64), format)
    values, value_scales, value_numbers = stored(randn(counts, 2, 64), v_format)
    indices, index_counts, chosen = choose(batch, counts, 2, 20)
    masks = both(per_query_head(chosen, 6), causal(batch, counts))
    compare(
        attend_impl,
        batch,
        [Seen(key_numbers, value_numbers, masks)],
        scale=0.125,
        sinks=torch.randn(6),
        kv=pages.lay(keys),
        kv_scale=None if key_scales is None else pages.lay(key_scales),
        v=pages.lay(values),
        v_scale=None if value_scales is None else pages.lay(value_scales),
        page_table=pages.table,
        format=format,
        v_format=v_format,
        indices=indices,
        index_counts=index_counts,
    )
