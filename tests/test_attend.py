"""`attend` on every kernel: agreement with the reference inside its limits, refusal outside, and hostile input."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from torch import Tensor

import sparse_attn
from sparse_attn import layout, registry
from sparse_attn.ops.attend import Attend, facts

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
DTYPE_FORMATS = [
    ("float32", "fp32"),
    ("bfloat16", "bf16"),
    ("float16", "fp16"),
    ("float32", "bf16"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
    ("float16", "int8"),
    ("bfloat16", "fp32"),
]

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": dict(v_format="same"),
    "gqa 9 over 3": dict(q_heads=9, kv_heads=3, v_format="same"),
    "gqa, uneven dims": dict(qk_dim=21, v_dim=13, v_format="same"),
    "gqa selected": dict(v_format="same", index_heads=2),
    "gqa selected per query head": dict(v_format="same", index_heads=4),
    "gqa shared selection": dict(v_format="same", index_heads=1),
    "gqa blocks": dict(v_format="same", index_heads=2, selected=12, select_block=4),
    "one head": dict(q_heads=1, kv_heads=1),
    "8 heads": dict(q_heads=8, kv_heads=1, index_heads=1),
    "128 heads": dict(q_heads=128, kv_heads=1, index_heads=1),
    "128 heads of their own": dict(q_heads=128, kv_heads=128, lengths=(7,), rows=(2,), padding=0),
    "rope apart": dict(kv_heads=1, qk_dim=24, rope_dim=8, index_heads=1),
    "window": dict(planes="window", kv_heads=1, sinks=True),
    "both planes": dict(planes="main+window", kv_heads=1, ratio=4, index_heads=1, sinks=True),
    "both planes, all entries": dict(planes="main+window", kv_heads=1, ratio=2, sinks=True),
    "both planes, two kv heads": dict(planes="main+window", ratio=2, index_heads=2),
    "not causal": dict(causal=False, v_format="same"),
    "not causal, both planes": dict(planes="main+window", causal=False, kv_heads=1),
    "pages of 1": dict(page_size=1, index_heads=2),
    "pages of 53": dict(page_size=53, lengths=(160, 53, 0, 1), rows=(2, 3, 1, 1)),
    "long": dict(lengths=(700, 1300), rows=(5, 1), page_size=16),
    "long selected": dict(lengths=(700, 1300), rows=(2, 1), page_size=16, index_heads=1, selected=1200),
    "gqa, long selected": dict(v_format="same", lengths=(700, 1300), rows=(2, 1), index_heads=2, selected=1200),
    "gqa 14 over 2, long blocks": dict(
        q_heads=14,
        v_format="same",
        lengths=(700, 1300),
        rows=(2, 1),
        page_size=16,
        index_heads=2,
        selected=400,
        select_block=4,
    ),
}


def options_of(shape: str, dtype: str, format: str) -> dict[str, Any]:
    """Of ``cases.attend``, with every plane in the format, but windows, which are not quantised to int8."""
    options = dict(SHAPES[shape], dtype=dtype, format=format)
    options["win_format"] = "bf16" if format == "int8" else format
    if options.get("v_format"):
        options["v_format"] = format
    return options


@pytest.mark.parametrize(("dtype", "format"), DTYPE_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(attend_impl, shape: str, dtype: str, format: str) -> None:
    cases.assert_agrees(attend_impl, *cases.attend(**options_of(shape, dtype, format)))


@pytest.mark.parametrize(
    "dims",
    [
        dict(q_heads=128, kv_heads=1, qk_dim=576, v_dim=512, index_heads=1, selected=2048, lengths=(2500,), rows=(1,)),
        dict(
            q_heads=16,
            kv_heads=1,
            qk_dim=576,
            rope_dim=64,
            v_dim=512,
            index_heads=1,
            selected=2048,
            lengths=(2500,),
            rows=(1,),
        ),
        dict(
            planes="main+window",
            q_heads=64,
            kv_heads=1,
            qk_dim=512,
            v_dim=512,
            window=128,
            ratio=4,
            index_heads=1,
            selected=512,
            lengths=(4000,),
            rows=(2,),
            sinks=True,
        ),
        dict(
            q_heads=32,
            kv_heads=8,
            qk_dim=128,
            v_dim=128,
            v_format="same",
            index_heads=8,
            selected=2048,
            select_block=64,
            lengths=(4000,),
            rows=(1,),
        ),
        dict(
            q_heads=64,
            kv_heads=4,
            qk_dim=128,
            v_dim=128,
            v_format="same",
            index_heads=4,
            selected=2048,
            select_block=128,
            lengths=(4000,),
            rows=(1,),
        ),
    ],
    ids=["v3.2", "v3.2 tp8, rope apart", "v4", "gqa blocks", "minimax-m3"],
)
@pytest.mark.parametrize(("dtype", "format"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_released_dimensions(attend_impl, dims: dict[str, Any], dtype: str, format: str) -> None:
    options = dict(dims, dtype=dtype, format=format, win_format=format, page_size=64, padding=0)
    if options.get("v_format"):
        options["v_format"] = format
    cases.assert_agrees(attend_impl, *cases.attend(**options))


# limits


def edges(limit: registry.Limit) -> tuple[list[Any], list[Any]]:
    """Values just inside and just outside a limit."""
    if isinstance(limit, registry.OneOf):
        return list(limit.values), []
    outside = [limit.high + limit.step] + ([limit.low - limit.step] if limit.low >= limit.step else [])
    return [limit.low, limit.high], outside


FREE = {"device", "dtype", "planes", "format", "v_format", "win_format"}  # covered by the agreement test


def numeric_limits() -> list[Any]:
    return [
        pytest.param(impl, name, limit, id=f"{impl.backend}-{name}")
        for impl in registry.implementations("attend")
        if registry.availability(impl) is None
        for name, limit in impl.limits.items()
        if name not in FREE and isinstance(limit, registry.Between)
    ]


def with_fact(name: str, value: int) -> dict[str, Any]:
    """Options of a call whose fact ``name`` is ``value``, small in everything else."""
    options: dict[str, Any] = dict(lengths=(6,), rows=(2,), padding=0, **{name: value})
    if name == "q_heads":
        options["kv_heads"] = 1
    elif name == "kv_heads":
        options["q_heads"] = value
    elif name == "qk_dim":
        options |= dict(v_dim=1, v_format="fp32")
    elif name == "rope_dim":
        options |= dict(qk_dim=value + 16)
    elif name == "v_dim":
        options |= dict(v_format="fp32")
    elif name == "ratio":
        options |= dict(lengths=(value + 1,), rows=(1,))
    elif name == "win_page_size":
        options |= dict(planes="window")
    elif name in ("selected", "select_block"):
        options |= dict(index_heads=1, selected=max(value, 1))
    return options


@pytest.mark.parametrize(("impl", "name", "limit"), numeric_limits())
def test_edges_of_limits(impl: registry.Impl, name: str, limit: registry.Between) -> None:
    inside, outside = edges(limit)
    for value in inside:
        if value == 0 or value > 1 << 20:
            continue  # "absent", or a bound of the address arithmetic that no memory holds
        cases.assert_agrees(impl, *cases.attend(**with_fact(name, value)))
    for value in outside:
        call = facts(Attend(*cases.attend()[0], **cases.attend()[1]))
        changed = call._replace(facts=tuple((n, value if n == name else v) for n, v in call.facts))
        assert impl.refusals(changed) == [f"{name} is {value}, supported: {limit}"]
        with pytest.raises(sparse_attn.NoBackend, match=f"{impl.backend}: {name} is {value}, supported: {limit}"):
            registry.choose(changed, impl.backend)


# what is read


def poison_unread(leading: tuple[Any, ...], kwargs: dict[str, Any], keep: Tensor, plane: str) -> dict[str, Any]:
    """The same call with NaN (or the largest integer and a NaN scale) in every slot of ``plane`` outside ``keep``."""
    changed = dict(kwargs)
    names = {"kv": ("kv", "kv_rope", "v"), "win": ("win",)}[plane]
    for name in names:
        rows = kwargs.get(name)
        if rows is None:
            continue
        fill = float("nan") if rows.is_floating_point() else 127
        changed[name] = torch.where(keep[..., None, None], rows, torch.tensor(fill, dtype=rows.dtype))
        scale = kwargs.get(f"{name}_scale")
        if scale is not None:
            changed[f"{name}_scale"] = torch.where(
                keep[..., None], scale, torch.tensor(float("nan"), dtype=scale.dtype)
            )
    return changed


def read_slots(leading: tuple[Any, ...], kwargs: dict[str, Any], plane: str) -> Tensor:
    """Which slots of a plane some row attends, by the contract's words."""
    a = Attend(*leading, **kwargs)
    rows, table = (a.kv, a.page_table) if plane == "kv" else (a.win, a.win_page_table)
    assert rows is not None and table is not None
    keep = torch.zeros(rows.shape[:2], dtype=torch.bool)
    for b, (start, end) in enumerate(zip(a.cu_seqlens_q.tolist(), a.cu_seqlens_q.tolist()[1:], strict=False)):
        for t in range(start, end):
            position = int(a.seq_lens[b]) - (end - t)
            if position < 0:
                continue
            if plane == "win":
                entries = set(range(max(position - a.window + 1, 0), position + 1))
            else:
                visible = set(range(((position + 1) if a.causal else int(a.seq_lens[b])) // a.ratio))
                entries = visible
                if a.indices is not None:
                    blocks = a.indices[t].flatten().tolist()
                    entries = {i * a.select_block + o for i in blocks for o in range(a.select_block)} & visible
            for e in entries:
                keep[int(table[b, e // rows.shape[1]]), e % rows.shape[1]] = True
    return keep


READ_SHAPES = [
    "gqa",
    "gqa selected",
    "gqa blocks",
    "8 heads",
    "rope apart",
    "both planes",
    "both planes, all entries",
    "window",
    "128 heads",
    "pages of 1",
]


@pytest.mark.parametrize(
    ("dtype", "format"), [("float32", "fp32"), ("bfloat16", "bf16"), ("bfloat16", "int8"), ("float32", "int8")]
)
@pytest.mark.parametrize("shape", READ_SHAPES)
def test_what_is_not_attended_changes_no_bit(attend_impl, shape: str, dtype: str, format: str) -> None:
    options = dict(SHAPES[shape], dtype=dtype, format=format, win_format=format if format != "int8" else "bf16")
    if options.get("v_format"):
        options["v_format"] = format
    leading, kwargs = cases.attend(**options)
    clean = cases.run(attend_impl, leading, kwargs)
    changed = kwargs
    for plane in ("kv", "win"):
        if kwargs.get(plane) is not None:
            keep = read_slots(leading, kwargs, plane)
            assert keep.any() and not keep.all()
            changed = poison_unread(leading, changed, keep, plane)
    q = leading[0].clone()
    q[int(leading[1][-1]) :] = float("nan")  # padding rows
    cases.assert_same_bits(cases.run(attend_impl, (q, *leading[1:]), changed), clean)
    assert all(x.isfinite().any() and not x.isnan().any() for x in clean)


@pytest.mark.parametrize("shape", READ_SHAPES)
def test_every_attended_entry_changes_the_result(attend_impl, shape: str) -> None:
    """So "pairs attended" is a fact: each slot, changed alone, changes the rows that attend it."""
    options = dict(SHAPES[shape], lengths=(9, 6), rows=(2, 1), padding=0)
    if options.get("v_format"):
        options["v_format"] = "fp32"
    leading, kwargs = cases.attend(**options)
    clean = cases.run(attend_impl, leading, kwargs)
    for plane in ("kv", "win"):
        if kwargs.get(plane) is None:
            continue
        for page, offset in read_slots(leading, kwargs, plane).nonzero().tolist():
            changed = dict(kwargs)
            changed[plane] = kwargs[plane].clone()
            changed[plane][page, offset] += 3.0
            assert not torch.equal(cases.run(attend_impl, leading, changed)[1], clean[1]), (plane, page, offset)


def test_neighbours_of_one_tile_do_not_leak(attend_impl) -> None:
    """A NaN row that only the last query row may attend reaches that row alone."""
    for dtype, format in (("float32", "fp32"), ("bfloat16", "bf16"), ("bfloat16", "int8")):
        leading, kwargs = cases.attend(
            dtype=dtype, format=format, v_format=format, lengths=(40,), rows=(12,), padding=0
        )
        clean = cases.run(attend_impl, leading, kwargs)
        page, offset = int(kwargs["page_table"][0, 39 // 4]), 39 % 4
        for name in ("kv", "v"):
            target = f"{name}_scale" if format == "int8" else name
            changed = dict(kwargs)
            changed[target] = kwargs[target].clone()
            changed[target][page, offset] = float("nan")
            out, lse = cases.run(attend_impl, leading, changed)
            cases.assert_same_bits((out[:-1], lse[:-1]), (clean[0][:-1], clean[1][:-1]), f"{format} {name}")
            assert out[-1].isnan().all()


@pytest.mark.parametrize("block", [1, 4])
def test_hostile_indices_are_masked(attend_impl, block: int) -> None:
    options = dict(index_heads=2, selected=3 * block, select_block=block, v_format="fp32")
    leading, kwargs = cases.attend(**options)
    clean = cases.run(attend_impl, leading, kwargs)
    hostile = torch.tensor([-1, -7, INT_MIN, INT_MAX, 10**6, -2, 1 << 30], dtype=torch.int32)
    tokens, heads, width = kwargs["indices"].shape
    indices = torch.empty(tokens, heads, width + 7, dtype=torch.int32)
    for t in range(tokens):
        for h in range(heads):
            mixed = torch.cat([kwargs["indices"][t, h], hostile])
            # the good ones keep their order, so that every kernel sums in the same one
            at = torch.randperm(width + 7)[:width].sort().values
            rest = torch.tensor([i for i in range(width + 7) if i not in at.tolist()])
            indices[t, h, at], indices[t, h, rest] = mixed[:width], mixed[width:]
    out, lse = cases.run(attend_impl, leading, dict(kwargs, indices=indices))
    torch.testing.assert_close(out, clean[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, clean[1], atol=1e-6, rtol=1e-6)
    for counts, meaning in ((width, "all"), (0, "none"), (-5, "none"), (INT_MAX, "all")):
        given = torch.full((tokens, heads), counts, dtype=torch.int32)
        result = cases.run(attend_impl, leading, dict(kwargs, index_counts=given))
        if meaning == "all":
            cases.assert_same_bits(result, clean)
        else:
            assert (result[0] == 0).all() and (result[1] == float("-inf")).all()


def test_strided_indices(attend_impl) -> None:
    leading, kwargs = cases.attend(index_heads=2, v_format="fp32")
    clean = cases.run(attend_impl, leading, kwargs)
    for strided in (
        kwargs["indices"].permute(2, 1, 0).contiguous().permute(2, 1, 0),
        torch.stack([kwargs["indices"]] * 3, -1)[..., 1],
        torch.cat([kwargs["indices"]] * 2, 1)[:, :2],
    ):
        assert not strided.is_contiguous()
        cases.assert_same_bits(cases.run(attend_impl, leading, dict(kwargs, indices=strided)), clean)


def test_empty_rows(attend_impl) -> None:
    leading, kwargs = cases.attend(lengths=(2, 0, -3, 5), rows=(4, 2, 1, 2), sinks=True)
    out, lse = cases.run(attend_impl, leading, kwargs)
    empty = [0, 1, 4, 5, 6, 9, 10]  # before the first token, length 0, negative length, padding
    live = [t for t in range(11) if t not in empty]
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    assert out[live].abs().amax(-1).gt(0).all() and lse[live].isfinite().all()


@pytest.mark.parametrize("sink", [float("inf"), float("-inf"), 1e30, -1e30])
def test_extreme_sinks(attend_impl, sink: float) -> None:
    leading, kwargs = cases.attend(planes="main+window", kv_heads=1, index_heads=1)
    plain = cases.run(attend_impl, leading, kwargs)
    out, lse = cases.run(attend_impl, leading, dict(kwargs, sinks=torch.full((4,), sink)))
    assert torch.equal(lse, plain[1]), "the sink is not in the lse"
    assert torch.equal(out, torch.zeros_like(out) if sink > 0 else plain[0])
    mixed = torch.tensor([sink, 0.3, sink, -0.5])
    cases.assert_agrees(attend_impl, leading, dict(kwargs, sinks=mixed))


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_do(attend_impl, tokens: int) -> None:
    leading, kwargs = cases.attend(lengths=(4,), rows=(3,), padding=0)
    none = torch.empty(0, dtype=torch.int32)
    batchless = (leading[0][:tokens], torch.zeros(1, dtype=torch.int32), none, *leading[3:])
    out, lse = cases.run(attend_impl, batchless, dict(kwargs, page_table=kwargs["page_table"][:0]))
    assert out.shape == (tokens, 4, 16) and (out == 0).all() and (lse == float("-inf")).all()
    no_rows = (leading[0][:0], torch.zeros(2, dtype=torch.int32), *leading[2:])
    out, lse = cases.run(attend_impl, no_rows, kwargs)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    nothing_selected = dict(kwargs, indices=torch.empty(3, 1, 0, dtype=torch.int32))
    out, lse = cases.run(attend_impl, leading, nothing_selected)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_explicit_ranges(attend_impl) -> None:
    leading, kwargs = cases.attend(planes="main+window", kv_heads=1, lengths=(20, 20), rows=(3, 3), padding=1)
    extremes = [(0, 5), (3, 3), (7, 2), (-4, 6), (19, 20), (INT_MIN, 1), (0, INT_MAX)]  # the last row is padding
    ranges = torch.tensor(extremes, dtype=torch.int32)
    cases.assert_agrees(
        attend_impl, leading, dict(kwargs, kv_range=ranges, win_range=ranges.flip(0).roll(-1, 0).contiguous())
    )


@pytest.mark.parametrize("plane", ["kv", "win"])
def test_pages_at_the_end_of_a_large_strided_pool(attend_impl, plane: str) -> None:
    """Over 4 GiB and over 2**31 elements into the pool: 32-bit arithmetic would read elsewhere. Untouched pages cost
    nothing."""
    options = dict(
        planes="window" if plane == "win" else "main", dtype="bfloat16", format="bf16", win_format="bf16", kv_heads=1
    )
    leading, kwargs = cases.attend(**options)
    small, table_name = kwargs[plane], "win_page_table" if plane == "win" else "page_table"
    pages, page, heads, dim = small.shape
    page_stride = (5 << 30) // 2 // pages
    pool = torch.empty(page_stride * pages, dtype=torch.bfloat16)
    large = pool.as_strided((pages, page, heads, dim), (page_stride, heads * dim, dim, 1))
    large.copy_(small)
    assert kwargs[table_name].max() >= pages - 2 and page_stride * (pages - 2) > 1 << 31
    cases.assert_same_bits(
        cases.run(attend_impl, leading, dict(kwargs, **{plane: large})), cases.run(attend_impl, leading, kwargs)
    )


def test_strided_planes_and_queries(attend_impl) -> None:
    leading, kwargs = cases.attend(v_format="fp32", index_heads=2)
    clean = cases.run(attend_impl, leading, kwargs)
    side_by_side = torch.cat([kwargs["kv"], kwargs["v"]], -1)
    head_major = side_by_side.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    for pool in (side_by_side, head_major):
        changed = dict(kwargs, kv=pool[..., :16], v=pool[..., 16:])
        wide = torch.cat([leading[0]] * 2, 1)[:, :4]
        cases.assert_same_bits(cases.run(attend_impl, (wide, *leading[1:]), changed), clean)


# repeatability


@pytest.mark.parametrize(
    "shape", ["gqa", "gqa selected", "8 heads", "128 heads", "both planes", "long", "long selected"]
)
@pytest.mark.parametrize(("dtype", "format"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_same_bits_over_runs_and_threads(attend_impl, shape: str, dtype: str, format: str) -> None:
    options = dict(SHAPES[shape], dtype=dtype, format=format, win_format=format)
    if options.get("v_format"):
        options["v_format"] = format
    leading, kwargs = cases.attend(**options)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(cases.run(attend_impl, leading, kwargs))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        cases.assert_same_bits(result, results[0])


@pytest.mark.parametrize(
    "shape", ["gqa", "gqa 9 over 3", "gqa selected", "8 heads", "both planes", "both planes, all entries"]
)
@pytest.mark.parametrize(("dtype", "format"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_batch_invariance(attend_impl, shape: str, dtype: str, format: str) -> None:
    """A row's bits depend neither on its neighbours nor on how its sequence was cut into steps."""
    length = 611
    options = dict(SHAPES[shape], dtype=dtype, format=format, win_format=format, batch_invariant=True, page_size=16)
    if options.get("v_format"):
        options["v_format"] = format
    whole, kwargs = cases.attend(**dict(options, lengths=(length,), rows=(40,), padding=0))
    expected = cases.run(attend_impl, whole, kwargs)
    q, starts, lens = whole[:3]
    per_row = [name for name in ("indices",) if name in kwargs]
    start = 0
    for rows in (1, 7, 16, 3, 13):
        first, last = length - 40 + start, length - 40 + start + rows
        part = (
            q[start : start + rows],
            torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([last], dtype=torch.int32),
            *whole[3:5],
            rows,
            last,
        )
        cut = dict(kwargs, **{name: kwargs[name][start : start + rows] for name in per_row})
        out, lse = cases.run(attend_impl, part, cut)
        cases.assert_same_bits(
            (out, lse), (expected[0][start : start + rows], expected[1][start : start + rows]), f"from {first}"
        )
        start += rows
    # the same rows as one sequence each of a larger batch, in another order
    order = torch.randperm(40)
    batch = (q[order], torch.arange(41, dtype=torch.int32), (length - 39 + order).int(), *whole[3:5], 1, length)
    tables = {
        name: kwargs[name].expand(40, -1).contiguous() for name in ("page_table", "win_page_table") if name in kwargs
    }
    spread = dict(kwargs, **tables, **{name: kwargs[name][order] for name in per_row})
    cases.assert_same_bits(cases.run(attend_impl, batch, spread), (expected[0][order], expected[1][order]))


# refusals


KV_FORMATS = ", ".join(layout.names("kv"))
PACKED = dict(q=torch.zeros(9, 4, 512), kv=torch.zeros(25, 4, 1, 528, dtype=torch.uint8), format="fp8_v41")
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "q rank": (
        dict(q=torch.zeros(7, 16)),
        "attend: q: expected float32 or bfloat16 or float16 [T, Hq, D], got float32 [7, 16]",
    ),
    "q dtype": (
        dict(q=torch.zeros(9, 4, 16, dtype=torch.float64)),
        "attend: q: expected float32 or bfloat16 or float16 [T, Hq, D]",
    ),
    "129 heads": (dict(q=torch.zeros(9, 129, 16)), "attend: q: expected 1 to 128 heads (axis 1), got 129"),
    "heads": (dict(q=torch.zeros(9, 3, 16)), "attend: q: expected a multiple of the planes' 2 heads, got 3"),
    "lengths": (
        dict(seq_lens=torch.zeros(3, dtype=torch.int32)),
        "attend: seq_lens: expected int32 [B] with B = 4, got int32 [3]",
    ),
    "long lengths": (
        dict(seq_lens=torch.zeros(4, dtype=torch.int64)),
        "attend: seq_lens: expected int32 [B], got int64 [4]; convert it",
    ),
    "wrong tag": (dict(format="bf16"), "attend: kv: expected bfloat16 elements for format 'bf16', got float32"),
    "unknown tag": (dict(format="fp8"), f"attend: format: expected one of {KV_FORMATS}, got 'fp8'"),
    "index format": (
        dict(format="int8_index_h"),
        f"attend: format: expected one of {KV_FORMATS}, got 'int8_index_h'",
    ),
    "value format": (
        dict(v=torch.zeros(25, 4, 2, 16), v_format="fp8_v41"),
        "attend: v_format: expected one of fp32, bf16, fp16, int8, got 'fp8_v41'",
    ),
    "window format": (
        dict(win=torch.zeros(25, 4, 2, 16, dtype=torch.int8), win_format="int8"),
        "attend: win_format: expected one of fp32, bf16, fp16, fp8_v32,",
    ),
    "packed dims": (
        dict(kv=torch.zeros(25, 4, 1, 528, dtype=torch.uint8), format="fp8_v41"),
        "attend: kv: expected rows of 512 elements for format 'fp8_v41', got 16",
    ),
    "values beside packed rows": (
        dict(PACKED, v=torch.zeros(25, 4, 1, 16)),
        "attend: v: expected None, as rows of format 'fp8_v41' hold the values, got a tensor",
    ),
    "rope beside packed rows": (
        dict(PACKED, kv_rope=torch.zeros(25, 4, 1, 16)),
        "attend: kv_rope: expected None, as rows of format 'fp8_v41' are whole, got a tensor",
    ),
    "planar without page size": (
        dict(PACKED, kv=torch.zeros(25, 2560, dtype=torch.uint8), format="fp8_v41_planar"),
        "attend: page_size: expected the entries of a page, as planar format 'fp8_v41_planar' does not show them",
    ),
    "planar page bytes": (
        dict(PACKED, kv=torch.zeros(25, 4 * 528, dtype=torch.uint8), format="fp8_v41_planar", page_size=4),
        "attend: kv: expected uint8 [pages, page_bytes] with page_bytes = 2560, got uint8 [25, 2112]",
    ),
    "packed window beside two heads": (
        dict(
            q=torch.zeros(9, 4, 512),
            kv=torch.zeros(25, 4, 2, 512),
            win=torch.zeros(25, 4, 1, 528, dtype=torch.uint8),
            win_format="fp8_v41",
        ),
        "attend: win: expected 1 head for format 'fp8_v41', got 2",
    ),
    "no scale": (
        dict(kv=torch.zeros(25, 4, 2, 16, dtype=torch.int8), format="int8"),
        "attend: kv_scale: expected a scale plane for format 'int8', got None",
    ),
    "page size": (dict(page_size=16), "attend: page_size: expected 0 or the plane's 4, got 16"),
    "v_dim": (dict(v_dim=17), "attend: v_dim: expected at most the 16 elements of a kv row, got 17"),
    "nan scale": (dict(scale=float("nan")), "attend: scale: expected a finite float32 number, got nan"),
    "huge scale": (dict(scale=1e39), "attend: scale: expected a finite float32 number, got 1e+39"),
    "no heads": (dict(kv=torch.zeros(25, 4, 0, 16)), "attend: kv: expected planes of at least 1 head, got 0"),
    "no plane": (
        dict(kv=None, page_table=None),
        "attend: kv: expected a main plane, a window plane (win), or both, got neither",
    ),
    "no table": (
        dict(page_table=None),
        "attend: page_table: expected int32 [B, max_pages] for the main plane, got None",
    ),
    "window of kv": (
        dict(window=5),
        "attend: window: expected 0 without a window plane, got 5; pass win, or kv_range for kv",
    ),
    "index heads": (
        dict(indices=torch.zeros(9, 3, 2, dtype=torch.int32)),
        "attend: indices: expected Hi = 1 (shared), 2 (per KV head) or 4 (per query head), got 3",
    ),
    "index dtype": (
        dict(indices=torch.zeros(9, 1, 2, dtype=torch.int64)),
        "attend: indices: expected int32 [T, Hi, K], got int64",
    ),
    "counts alone": (
        dict(index_counts=torch.zeros(9, 1, dtype=torch.int32)),
        "attend: index_counts: expected None without indices",
    ),
    "block alone": (dict(select_block=16), "attend: select_block: expected 1 without indices, got 16"),
    "sinks": (dict(sinks=torch.zeros(2)), "attend: sinks: expected float32 [Hq] with Hq = 4, got float32 [2]"),
    "strided row": (dict(kv=torch.zeros(25, 4, 2, 32)[..., ::2]), "attend: kv: expected last axis with stride 1"),
    "ratio": (dict(ratio=0), "attend: ratio: expected at least 1 token an entry, got 0"),
    "win without window": (
        dict(win=torch.zeros(25, 4, 2, 16), win_format="fp32", win_page_table=torch.zeros(4, 6, dtype=torch.int32)),
        "attend: window: expected a window of at least 1 token, win_range or win_indices, got 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refusals_say_what_to_do(name: str) -> None:
    changes, sentence = BROKEN[name]
    leading, kwargs = cases.attend()
    arguments = dict(zip(Attend._fields, leading, strict=False), **kwargs) | changes
    with pytest.raises(sparse_attn.InvalidCall) as refused:
        torch.ops.sparse_attn.attend(**arguments)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(max_seqlen_q=2), "attend: max_seqlen_q: expected at least 3, got 2"),
        (dict(max_seq_len=20), "attend: max_seq_len: expected at least 21, got 20"),
        (dict(cu_seqlens_q=[0, 3, 2, 5, 7]), "attend: cu_seqlens_q: expected ascending values"),
        (dict(cu_seqlens_q=[1, 3, 4, 5, 7]), "attend: cu_seqlens_q: expected a first value of 0, got 1"),
        (dict(cu_seqlens_q=[0, 3, 4, 5, 99]), "attend: cu_seqlens_q: expected a last value of at most T = 9, got 99"),
        (
            dict(page_table="short"),
            "attend: page_table: expected a page for entry 20 of sequence 3, got 5 pages of 4 entries",
        ),
        (dict(page_table="far"), "attend: page_table: expected pages from 0 to 24 in sequence 3, got 25"),
        (dict(page_table="negative"), "attend: page_table: expected pages from 0 to 24 in sequence 3, got -1"),
    ],
)
def test_values_that_would_read_elsewhere_are_refused(attend_impl, changes: dict[str, Any], sentence: str) -> None:
    cases.skip_where_values_stay_on_the_device(attend_impl)
    leading, kwargs = cases.attend()
    arguments = dict(zip(Attend._fields, leading, strict=False), **kwargs, backend=attend_impl.backend)
    table = kwargs["page_table"].clone()
    for name, value in changes.items():
        if name == "page_table":
            table[3, 5] = {"far": 25, "negative": -1, "short": 0}[value]
            arguments[name] = table[:, :5].contiguous() if value == "short" else table
        else:
            arguments[name] = torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
    with pytest.raises(sparse_attn.InvalidCall) as refused:
        torch.ops.sparse_attn.attend(**arguments)
    assert str(refused.value).startswith(sentence)


def test_outputs_over_inputs_are_refused(attend_impl) -> None:
    leading, kwargs = cases.attend()
    q = leading[0]
    lse = torch.empty(q.shape[:2])
    pool = torch.zeros(2, *q.shape)
    sentence = "attend: out: expected memory that no other argument uses, got overlapping tensors"
    for out, changes in (
        (q, {}),
        (pool.flatten()[4 : 4 + q.numel()].view(q.shape), dict(q=pool[0])),
        (kwargs["kv"].flatten()[: q.numel()].view(q.shape), {}),
    ):
        arguments = dict(zip(Attend._fields, leading, strict=False), **kwargs, backend=attend_impl.backend) | changes
        with pytest.raises(sparse_attn.InvalidCall, match=sentence):
            torch.ops.sparse_attn.attend.out(**arguments, out=out, lse=lse)
    out = torch.empty(q.shape)
    arguments = dict(zip(Attend._fields, leading, strict=False), **kwargs, backend=attend_impl.backend)
    with pytest.raises(sparse_attn.InvalidCall, match="attend: out: expected memory that no other argument uses"):
        torch.ops.sparse_attn.attend.out(**arguments, out=out, lse=out.flatten()[: lse.numel()].view(lse.shape))
    beside = torch.zeros(2, *q.shape)  # one storage, apart
    torch.ops.sparse_attn.attend.out(**(arguments | dict(q=beside[0])), out=beside[1], lse=lse)


def test_a_block_larger_than_any_sequence(attend_impl) -> None:
    leading, kwargs = cases.attend(index_heads=1, selected=1)
    kwargs["indices"] = torch.zeros_like(kwargs["indices"])
    largest = dict(kwargs, select_block=2**31 - 1)
    cases.skip_unless(attend_impl, facts(Attend(*leading, **largest)))
    dense = cases.run(attend_impl, leading, dict(kwargs, indices=None))
    blocks = cases.run(attend_impl, leading, largest)
    torch.testing.assert_close(blocks, dense)


def test_keys_of_minus_infinity(attend_impl) -> None:
    """A row whose every score is -inf attends nothing."""
    leading, kwargs = cases.attend(v_format="fp32", sinks=True)
    leading = (leading[0].abs() + 0.1, *leading[1:])
    for changes in ({}, dict(sinks=None)):
        out, lse = cases.run(attend_impl, leading, dict(kwargs, kv=torch.full_like(kwargs["kv"], -torch.inf)) | changes)
        assert (out == 0).all() and (lse == -torch.inf).all()
