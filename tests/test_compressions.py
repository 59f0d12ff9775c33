"""Every line of `docs/compressions.md`: entries against ones computed one by one, in one step and in many, and what a
step must leave alone."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from cases import skip_unless, skip_where_values_stay_on_the_device
from compressions import PAGE, REWIND, Line, Sequences, lines
from test_formats import refused

import sparse_attn
from sparse_attn import layout
from sparse_attn.ops.compress import Compress, facts

LINES = pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.of}")


def sequences(line: Line, impl, **options) -> Sequences:
    stride = line.stride if line.stride < 64 else 8
    s = Sequences(line, [5 * stride + stride // 2, 0, 9 * stride + 1, max(stride - 1, 1)], **options)
    args, kwargs = s.step(s.lengths, s.lengths)
    skip_unless(impl, facts(Compress(*args, **kwargs)))
    return s


def test_the_page_lists_every_compression() -> None:
    text = " ".join(line.of for line in lines())
    for kind in ("V4, ratio 4", "V4, ratio 128", "V4.1 Full, ratio 2", "V4.1 Full, ratio 1", "index keys", "window"):
        assert kind in text
    assert {line.parts for line in lines()} == {1, 2} and {line.gated for line in lines()} == {True, False}


@LINES
def test_line(line: Line, compress_impl) -> None:
    """In one step, into a plane that adds no rounding of its own."""
    s = sequences(line, compress_impl, format="fp32")
    most = sum(s.lengths) // s.stride + len(s.lengths)
    latent = s.run(compress_impl, s.lengths, s.lengths, entries=most, padding=2)
    atol, rtol = compress_impl.tolerance["float32"]
    packed = iter(latent)
    for b, entries in enumerate(s.entries()):
        assert len(entries) == s.lengths[b] // s.stride
        for j, entry in enumerate(entries):
            expected_latent, expected = s.expected(b, j)
            assert s.close(next(packed), expected_latent, atol, rtol)
            assert s.close(entry, expected, 2 * atol, 2 * rtol)
    assert latent.dtype == s.dtype and all((row == 0).all() for row in packed)


def test_eps(compress_impl) -> None:
    line = next(x for x in lines() if "eps" in x.arguments)
    s = sequences(line, compress_impl, format="fp32")
    s.eps, s.dtype = 0.5, torch.float32
    s.values = [v.float() for v in s.values]
    s.run(compress_impl, s.lengths, s.lengths)
    assert s.close(s.entries()[0][0], s.expected(0, 0)[1], 8e-6, 8e-6)


@LINES
def test_line_is_stored_as_store_stores(line: Line, compress_impl) -> None:
    """The bytes of the line's format are those of `store` for the same rows."""
    s = sequences(line, compress_impl)
    s.run(compress_impl, s.lengths, s.lengths)
    plain = Sequences(line, s.lengths, format="fp32")
    plain.dim, plain.width, plain.heads = s.dim, s.width, s.heads
    plain.values, plain.gates, plain.bias, plain.norm, plain.cos_sin = s.values, s.gates, s.bias, s.norm, s.cos_sin
    plain.table, plain.plane, plain.scale = plain.new_plane()
    plain.state_table, plain.state = plain.new_state()
    plain.run(compress_impl, s.lengths, s.lengths)
    expected, scale = torch.full_like(s.plane, 113 if s.format.packed else 0), None
    if s.scale is not None:
        scale = torch.zeros_like(s.scale)
    for b, rows in enumerate(plain.entries()):
        slots = torch.arange(len(rows))
        slots = layout.slot(*layout.locate(s.table[b].long(), slots, PAGE), PAGE)
        kwargs = dict(scale=scale, format=s.format.name, page_size=PAGE)
        sparse_attn.store(rows, expected, slots, **kwargs, backend="reference")
    assert torch.equal(s.plane, expected), "also what lies outside the entries"
    assert scale is None or torch.equal(s.scale, scale)


@LINES
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_into_steps_gives_the_same_bits(line: Line, seed: int, compress_impl) -> None:
    """With drafts that are rejected on the way, and state in the smallest ring that holds it."""
    whole = sequences(line, compress_impl)
    whole.run(compress_impl, whole.lengths, whole.lengths)
    s = sequences(line, compress_impl)
    chance = random.Random(seed)
    done = [0] * len(s.lengths)
    while done != s.lengths:
        counts = [min(chance.choice((0, 1, 1, 2, 7, 40)), n - d) for d, n in zip(done, s.lengths, strict=True)]
        rejected = [chance.randint(0, min(REWIND, count)) for count in counts]
        drafted = [v.clone() for v in s.values]
        done = [d + count for d, count in zip(done, counts, strict=True)]
        for draft, d, r in zip(drafted, done, rejected, strict=True):
            draft[d - r : d] = 77  # what a draft token gives
        s.run(compress_impl, done, counts, values=drafted, padding=chance.randint(0, 2))
        done = [d - r for d, r in zip(done, rejected, strict=True)]
    for entries, expected in zip(s.entries(), whole.entries(), strict=True):
        assert torch.equal(entries, expected)


@LINES
def test_latents_do_not_depend_on_the_cut(line: Line, compress_impl) -> None:
    s = sequences(line, compress_impl)
    n = min(s.lengths[2] // s.stride, 9)
    most = n * s.stride
    whole = s.run(compress_impl, [0, 0, most, 0], [0, 0, most, 0], entries=n)
    t, parts = sequences(line, compress_impl), []
    cut = most // 2 + (1 if s.stride > 1 else 0)
    for end, count in ((cut, cut), (most, most - cut)):
        entries = end // s.stride - (end - count) // s.stride
        parts.append(t.run(compress_impl, [0, 0, end, 0], [0, 0, count, 0], entries=entries))
    assert torch.equal(torch.cat(parts), whole)


@LINES
def test_preempted_and_forked(line: Line, compress_impl) -> None:
    """Pages of the state are copied to other places in the middle of a group; two sequences go on from them."""
    whole = sequences(line, compress_impl)
    whole.run(compress_impl, whole.lengths, whole.lengths)
    s = sequences(line, compress_impl)
    end = s.lengths[2]
    half = end // 2 + 1
    s.run(compress_impl, [0, 0, half, 0], [0, 0, half, 0])
    if s.state is not None:
        order = torch.randperm(len(s.state))
        moved = torch.full_like(s.state, torch.nan)
        moved[order] = s.state
        s.state, table = moved, s.state_table.long()
        s.state_table = torch.where(table < len(order), order[table.clamp(max=len(order) - 1)], table).int()
    s.values[0] = s.values[2]
    s.run(compress_impl, [0, 0, end, 0], [0, 0, end - half, 0])
    assert torch.equal(s.entries()[2], whole.entries()[2])


def test_rows_that_count_for_nothing(compress_impl) -> None:
    """Lengths of 0 or less, and rows before token 0, write nothing and read no page."""
    line = lines()[0]
    s = sequences(line, compress_impl)
    before = s.plane.clone(), s.state.clone()
    s.table[:], s.state_table[:] = 1 << 30, 1 << 30
    s.run(compress_impl, [0, -5, 0, -1], [0, 0, 0, 0], padding=4)
    assert torch.equal(s.plane, before[0]) and torch.equal(s.state.nan_to_num(), before[1].nan_to_num())
    s = sequences(line, compress_impl)
    args, kwargs = s.step([0, 0, 6, 0], [0, 0, 6, 0])
    starts = torch.tensor([0, 0, 3, 11, 11], dtype=torch.int32)  # sequence 1 has 3 rows and no token; 2 has 2 too many
    pad = lambda x: torch.cat([torch.full_like(x[:5], torch.nan), x])  # noqa: E731
    args = (pad(args[0]), pad(args[1]), starts, *args[3:7], 8, 6)
    sparse_attn.compress(*args, **kwargs, backend=compress_impl.backend)
    t = sequences(line, compress_impl)
    t.run(compress_impl, [0, 0, 6, 0], [0, 0, 6, 0])
    assert torch.equal(s.plane, t.plane)


def test_nobody_elses_numbers_count(compress_impl) -> None:
    """NaN in every slot of the state that holds no needed token changes no bit."""
    line = next(x for x in lines() if x.of == "DeepSeek V4, ratio 4")
    s, t = sequences(line, compress_impl), sequences(line, compress_impl)
    ends = [0, 0, 21, 0]
    for x in (s, t):
        x.run(compress_impl, ends, ends)
    slots = layout.slot(*layout.locate(t.state_table[2].long(), torch.arange(21 - 7, 21), 5), 5)
    dirty = t.state.flatten(0, 1)
    dirty[[i for i in range(len(dirty)) if i not in slots.tolist()]] = torch.nan
    assert torch.equal(s.state.flatten(0, 1)[slots], dirty[slots])
    for x in (s, t):
        x.run(compress_impl, [0, 0, 33, 0], [0, 0, 12, 0])
    assert torch.equal(s.plane, t.plane)
    dirty[slots[0]] += 1
    t.run(compress_impl, [0, 0, 22, 0], [0, 0, 1, 0])
    assert torch.equal(s.plane, t.plane), "token 14 is in no entry past 21"


def test_strided_pages(compress_impl) -> None:
    line = lines()[3]
    s, t = sequences(line, compress_impl), sequences(line, compress_impl)
    pool = torch.zeros(len(t.plane), 2, *t.plane.shape[1:], dtype=t.plane.dtype)
    pool[:, 0] = t.plane
    t.plane = pool[:, 0]
    for x in (s, t):
        x.run(compress_impl, x.lengths, x.lengths)
    assert torch.equal(s.plane, t.plane) and not pool[:, 1].any()


def test_faults_show(compress_impl) -> None:
    """A NaN among an entry's tokens makes the entry NaN, and no other."""
    line = next(x for x in lines() if x.of.startswith("InfLLM"))
    s = sequences(line, compress_impl, format="fp32")
    s.values[2][20, 0, 3] = torch.nan
    s.run(compress_impl, s.lengths, s.lengths)
    entries = s.entries()[2]
    wrong = entries.isnan()
    assert wrong[1:3, 0, 3].all() and wrong.sum() == 2


def refuses(impl, sentence: str, **changes) -> None:
    """A call of a line, with such changes, is refused."""
    s = sequences(next(x for x in lines() if x.of == "DeepSeek V4, ratio 4"), impl)
    args, kwargs = s.step(s.lengths, s.lengths)
    a = Compress(*args, **kwargs)._replace(backend=impl.backend, **changes)
    refused(lambda: torch.ops.sparse_attn.compress(*a[:9], **dict(list(a._asdict().items())[9:])), sentence)


def test_refusals(compress_impl) -> None:
    call = partial(refuses, compress_impl)
    s = sequences(next(x for x in lines() if x.of == "DeepSeek V4, ratio 4"), compress_impl)
    T = sum(s.lengths)
    call("compress: stride: expected 1 to 65536 tokens, got 0", stride=0)
    call("compress: stride: expected 1 to 65536 tokens, got 4611686018427387904", stride=1 << 62)
    call("compress: span: expected at most 65536 tokens, got 4611686018427387904", span=1 << 62)
    call(
        "compress: rope_stride: expected 0 (stride) to 2**31 - 1 positions, got 4611686018427387904",
        rope_stride=1 << 62,
    )
    call("compress: max_rewind: expected 0 to 2**31 - 1 tokens, got 9223372036854775807", max_rewind=(1 << 63) - 1)
    call("compress: eps: expected a finite number of 0 or more, got inf", eps=float("inf"))
    call("compress: span: expected 0 or a multiple of stride = 4, got 6", span=6)
    call("compress: rows: expected rows of the plane's 512 elements or 3 * 512, got W = 1024", span=12)
    call("compress: bias: expected None without gates, got a tensor", gates=None)
    call(
        f"compress: gates: expected float32 or bfloat16 or float16 [T, H, W] with T = {T}, got float32 [2, 1, 1024]",
        gates=torch.zeros(2, 1, 1024),
    )
    call(
        "compress: state: expected float32 [pages, page_size, H, 2048] where an entry covers 8 tokens, got None",
        state=None,
    )
    call(
        "compress: state_page_table: expected int32 [B, max_pages] where an entry covers 8 tokens, got None",
        state_page_table=None,
    )
    call("compress: cos_sin: expected an even number of at most 512 columns, got 3", cos_sin=torch.zeros(99, 3))
    call("compress: dtype: expected one of fp32, bf16, fp16, got 'bfloat16'", dtype="bfloat16")
    call("compress: max_rewind: expected 0 to 2**31 - 1 tokens, got -1", max_rewind=-1)
    call(
        "compress: plane: expected memory that no other argument uses, got overlapping tensors; "
        "pass a tensor of its own",
        plane=s.state.view(torch.uint8).flatten()[: 9 * 3 * 584].view(9, 3, 1, 584),
        state=s.state,
    )


def test_values_that_are_refused(compress_impl) -> None:
    skip_where_values_stay_on_the_device(compress_impl)
    call = partial(refuses, compress_impl)
    s = sequences(next(x for x in lines() if x.of == "DeepSeek V4, ratio 4"), compress_impl)
    call("compress: cos_sin: expected a row for position 32, got 32 positions", cos_sin=s.cos_sin[:32])
    call("compress: cos_sin: expected a row for position 16, got 0 positions", cos_sin=s.cos_sin[:0])
    call(
        f"compress: state_page_table: expected pages from 0 to -1 in sequence 0, got {s.state_table[0, 0]}",
        state=s.state[:0],
    )
    call("compress: entries: expected at least 14, which the step completes, got 13", entries=13)
    call("compress: max_seqlen_q: expected at least 37, got 36", max_seqlen_q=36)
    call("compress: max_seq_len: expected at least 37, got 36", max_seq_len=36)
    call(
        "compress: page_table: expected a page for entry 4 of sequence 0, got 1 pages of 3 entries",
        page_table=s.table[:, :1],
    )
    call(
        f"compress: page_table: expected pages from 0 to {len(s.plane) - 1} in sequence 0, got {len(s.plane)}",
        page_table=torch.full_like(s.table, len(s.plane)),
    )


def test_debug_checks_find_a_ring_that_is_too_small(debug_checks) -> None:
    s = Sequences(lines()[0], [20])
    args, kwargs = s.step([20], [20])
    sparse_attn.compress(*args, **kwargs)
    kwargs["state_page_table"] = s.state_table[:, :1].repeat(1, 4)
    refused(
        lambda: sparse_attn.compress(*args, **kwargs),
        "compress: state_page_table: expected room for the last 10 tokens of sequence 0 (span - 1 + max_rewind), "
        "got a page twice among them",
    )
    kwargs["state_page_table"] = s.state_table[:, :2]  # too short: the kernel refuses
    refused(
        lambda: sparse_attn.compress(*args, **kwargs),
        "compress: state_page_table: expected a page for entry 19 of sequence 0, "
        f"got 2 pages of {s.state.shape[1]} entries",
    )
