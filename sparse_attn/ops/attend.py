"""``attend``: sparse attention over paged KV planes, for every layer kind and phase. ``docs/calls.md`` lists the
calls."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import layout, library
from ..checks import (
    dtype_name,
    expect,
    expect_batch,
    expect_format,
    expect_lengths,
    expect_plane,
    expect_tensor,
    expect_unique,
    refuse,
)
from ..library import Output, Return
from ..planes import reach_of, strides_of
from ..registry import Call

QUERY_DTYPES = ("float32", "bfloat16", "float16")
MAX_HEADS = 128
PLAN_WORDS = 1024
"""int32 numbers of a plan that belong to the kernel."""
WINDOW_FORMATS = tuple(name for name in layout.names("kv") if layout.FORMATS[name].scale_dtype is None)

SCHEMA = (
    "Tensor q, Tensor cu_seqlens_q, Tensor seq_lens, float scale, int v_dim, SymInt max_seqlen_q, "
    "SymInt max_seq_len, *, "
    "Tensor? kv=None, Tensor? kv_rope=None, Tensor? kv_scale=None, Tensor? v=None, Tensor? v_scale=None, "
    'Tensor? page_table=None, str format="bf16", str v_format="", int page_size=0, int ratio=1, Tensor? kv_range=None, '
    "Tensor? indices=None, Tensor? index_counts=None, int select_block=1, "
    'Tensor? win=None, Tensor? win_page_table=None, str win_format="bf16", int win_page_size=0, int window=0, '
    "Tensor? win_range=None, Tensor? win_indices=None, Tensor? sinks=None, Tensor? plan=None, bool causal=True, "
    'bool return_lse=False, bool batch_invariant=False, str backend="auto"'
)


class Planned(NamedTuple):
    """The parts of a plan."""

    words: Tensor
    """What the kernel wrote, int32 ``[PLAN_WORDS]``."""
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    """The lengths that it was made for."""


class Attend(NamedTuple):
    """The arguments of one call, under the schema's names."""

    q: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    v_dim: int
    max_seqlen_q: int
    max_seq_len: int
    kv: Tensor | None = None
    kv_rope: Tensor | None = None
    kv_scale: Tensor | None = None
    v: Tensor | None = None
    v_scale: Tensor | None = None
    page_table: Tensor | None = None
    format: str = "bf16"
    v_format: str = ""
    page_size: int = 0
    ratio: int = 1
    kv_range: Tensor | None = None
    indices: Tensor | None = None
    index_counts: Tensor | None = None
    select_block: int = 1
    win: Tensor | None = None
    win_page_table: Tensor | None = None
    win_format: str = "bf16"
    win_page_size: int = 0
    window: int = 0
    win_range: Tensor | None = None
    win_indices: Tensor | None = None
    sinks: Tensor | None = None
    plan: Tensor | None = None
    causal: bool = True
    return_lse: bool = False
    batch_invariant: bool = False
    backend: str = "auto"

    @property
    def planned(self) -> Planned | None:
        """The plan, for kernels that use one. Raises ``InvalidCall`` if it was made for another kind of call."""
        if self.plan is None:
            return None
        plan, made_for = _made.get(self.plan.data_ptr(), (None, None))
        if plan is None or plan() is None:  # the memory belongs to another tensor by now
            made_for = None
        expect(
            made_for == _kind(self),
            "attend",
            "plan",
            "the plan of a layer of this kind and the same bounds",
            "one of another" if made_for else "one that no kernel made",
            "call attend_plan with the arguments of this layer",
        )
        return _parts(self.plan, len(self.seq_lens))

    @property
    def kv_heads(self) -> int:
        return self.main_paging[2] or self.window_paging[2]

    @property
    def main_paging(self) -> tuple[int, int, int]:
        """Pages, entries a page and heads of the main plane; zeros without it."""
        return (0, 0, 0) if self.kv is None else layout.FORMATS[self.format].paging(self.kv.shape, self.page_size)

    @property
    def window_paging(self) -> tuple[int, int, int]:
        """The same of the window plane."""
        return (
            (0, 0, 0)
            if self.win is None
            else layout.FORMATS[self.win_format].paging(self.win.shape, self.win_page_size)
        )

    @property
    def value_format(self) -> str:
        return self.v_format or self.format


_made: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...]]] = {}
"""Address of a plan to the plan, and the kind of call that it was made for."""
_MOST_MADE = 4096


def _kind(a: Attend) -> tuple[Any, ...]:
    """What a plan depends on beside the values of lengths: the same for all layers of a kind."""
    shapes = [None if t is None else t.shape for t in (a.page_table, a.win_page_table, a.indices, a.win_indices)]
    ranges = (a.kv_range is None, a.win_range is None, a.causal)
    bounds = (a.max_seqlen_q, a.max_seq_len)
    return (a.q.shape, a.v_dim, a.kv_heads, a.ratio, a.select_block, a.window, *shapes, *ranges, *bounds)


def _parts(plan: Tensor, batch: int) -> Planned:
    return Planned(*plan.split([PLAN_WORDS, batch + 1, batch]))


def check(a: Attend) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    expect_tensor("attend", "q", a.q, "T, Hq, D", (None, None, None), QUERY_DTYPES, a.q.device)
    q_heads = a.q.shape[1]
    expect(1 <= q_heads <= MAX_HEADS, "attend", "q", f"1 to {MAX_HEADS} heads (axis 1)", q_heads)
    batch = expect_batch("attend", a.q, a.cu_seqlens_q, a.seq_lens)
    expect(a.v_dim >= 1, "attend", "v_dim", "at least 1", a.v_dim)
    expect(abs(a.scale) <= torch.finfo(torch.float32).max, "attend", "scale", "a finite float32 number", a.scale)
    expect(
        a.kv is not None or a.win is not None, "attend", "kv", "a main plane, a window plane (win), or both", "neither"
    )
    _check_main(a, batch)
    _check_window(a, batch)
    expect(a.kv_heads >= 1, "attend", "kv", "planes of at least 1 head", a.kv_heads)
    expect(q_heads % a.kv_heads == 0, "attend", "q", f"a multiple of the planes' {a.kv_heads} heads", q_heads)
    if a.sinks is not None:
        expect_tensor("attend", "sinks", a.sinks, "Hq", (q_heads,), ("float32",), a.q.device, "all")
    if a.plan is not None:
        _check_plan("plan", a.plan, batch, a.q.device)


def _check_plan(name: str, plan: Tensor, batch: int, device: torch.device) -> None:
    axes = f"{PLAN_WORDS} + 2 B + 1"
    expect_tensor("attend", name, plan, axes, (PLAN_WORDS + 2 * batch + 1,), ("int32",), device, "all")


def _int32(
    name: str, t: Tensor, axes: str, shape: tuple[int | None, ...], device: torch.device, strides: str = "all"
) -> None:
    expect_tensor("attend", name, t, axes, shape, ("int32",), device, strides)


def _check_main(a: Attend, batch: int) -> None:
    if a.kv is None:
        given = {
            "kv_rope": a.kv_rope,
            "kv_scale": a.kv_scale,
            "v": a.v,
            "v_scale": a.v_scale,
            "page_table": a.page_table,
            "kv_range": a.kv_range,
            "indices": a.indices,
            "index_counts": a.index_counts,
        }
        for name, t in given.items():
            expect(t is None, "attend", name, "None without a main plane", "a tensor", "pass kv")
        return
    device, (tokens, q_heads, qk_dim) = a.q.device, a.q.shape
    kv_format = expect_format("attend", "format", a.format, layout.names("kv"))
    rope_dim = 0
    if a.kv_rope is not None:
        expect(not kv_format.packed, "attend", "kv_rope", f"None, as rows of format {a.format!r} are whole", "a tensor")
        plain = tuple(layout.FORMATS[f].dtype for f in layout.PLAIN_FORMATS)
        axes = "pages, page_size, heads, rope"
        expect_tensor("attend", "kv_rope", a.kv_rope, axes, (*a.kv.shape[:3], None), plain, device)
        rope_dim = a.kv_rope.shape[3]
    row_dim = qk_dim - rope_dim
    page_size = ("page_size", a.page_size)
    expect_plane("attend", "kv", a.kv, kv_format, None, row_dim, device, page_size, ("kv_scale", a.kv_scale))
    if a.v is None:
        expect(not a.v_format, "attend", "v_format", "'' without v", repr(a.v_format))
        expect(a.v_scale is None, "attend", "v_scale", "None without v", "a tensor")
        expect(a.v_dim <= row_dim, "attend", "v_dim", f"at most the {row_dim} elements of a kv row", a.v_dim)
    else:
        expect(not kv_format.packed, "attend", "v", f"None, as rows of format {a.format!r} hold the values", "a tensor")
        v_format = expect_format("attend", "v_format", a.value_format, layout.names("kv", packed=False))
        expect_plane("attend", "v", a.v, v_format, None, a.v_dim, device, page_size, ("v_scale", a.v_scale))
        axes, shape = "pages, page_size, heads, row", (*a.kv.shape[:3], None)
        expect_tensor("attend", "v", a.v, axes, shape, (v_format.dtype,), device)
    if a.page_table is None:
        raise refuse("attend", "page_table", "int32 [B, max_pages] for the main plane", "None")
    _int32("page_table", a.page_table, "B, max_pages", (batch, None), device, "row")
    expect(a.ratio >= 1, "attend", "ratio", "at least 1 token an entry", a.ratio)
    expect(1 <= a.select_block < 1 << 31, "attend", "select_block", "1 to 2**31 - 1 entries a block", a.select_block)
    if a.kv_range is not None:
        _int32("kv_range", a.kv_range, "T, 2", (tokens, 2), device)
    if a.indices is None:
        expect(a.index_counts is None, "attend", "index_counts", "None without indices", "a tensor")
        expect(a.select_block == 1, "attend", "select_block", "1 without indices", a.select_block)
        return
    _int32("indices", a.indices, "T, Hi, K", (tokens, None, None), device, "any")
    heads = a.indices.shape[1]
    kv_heads = a.kv_heads
    expect(
        heads == 1 or heads in (kv_heads, q_heads),
        "attend",
        "indices",
        f"Hi = 1 (shared), {kv_heads} (per KV head) or {q_heads} (per query head)",
        heads,
    )
    if a.index_counts is not None:
        _int32("index_counts", a.index_counts, "T, Hi", (tokens, heads), device)


def _check_window(a: Attend, batch: int) -> None:
    if a.win is None:
        given = {"win_page_table": a.win_page_table, "win_range": a.win_range, "win_indices": a.win_indices}
        for name, t in given.items():
            expect(t is None, "attend", name, "None without a window plane", "a tensor", "pass win")
        expect(a.window == 0, "attend", "window", "0 without a window plane", a.window, "pass win, or kv_range for kv")
        return
    device, (tokens, _, qk_dim) = a.q.device, a.q.shape
    win_format = expect_format("attend", "win_format", a.win_format, WINDOW_FORMATS)
    heads = None if a.kv is None else a.main_paging[2]
    page_size = ("win_page_size", a.win_page_size)
    expect_plane("attend", "win", a.win, win_format, heads, qk_dim, device, page_size, ("win_scale", None))
    expect(a.v_dim <= qk_dim, "attend", "v_dim", f"at most the {qk_dim} elements of a win row", a.v_dim)
    if a.win_page_table is None:
        raise refuse("attend", "win_page_table", "int32 [B, max_pages] for the window plane", "None")
    _int32("win_page_table", a.win_page_table, "B, max_pages", (batch, None), device, "row")
    bounded = a.window > 0 or a.win_range is not None or a.win_indices is not None
    expect(
        bounded and a.window >= 0,
        "attend",
        "window",
        "a window of at least 1 token, win_range or win_indices",
        a.window,
    )
    if a.win_range is not None:
        _int32("win_range", a.win_range, "T, 2", (tokens, 2), device)
    else:
        expect(
            a.causal,
            "attend",
            "win_range",
            "explicit ranges, as a window ends at its query's position",
            "None",
            "pass win_range with causal=False",
        )
    if a.win_indices is not None:
        _int32("win_indices", a.win_indices, "T, 1, K", (tokens, 1, None), device, "any")


def check_values(a: Attend) -> None:
    """Raise ``InvalidCall`` if values break the contract. Reads lengths, tables and indices back to the host."""
    expect_lengths("attend", a.q, a.cu_seqlens_q, a.seq_lens, a.max_seqlen_q, a.max_seq_len)
    for name, indices, counts in (("indices", a.indices, a.index_counts), ("win_indices", a.win_indices, None)):
        if indices is not None:
            expect_unique("attend", name, indices, counts, "it would count twice")
    if a.plan is not None:
        planned = _parts(a.plan, len(a.seq_lens))
        same = torch.equal(planned.cu_seqlens_q, a.cu_seqlens_q) and torch.equal(planned.seq_lens, a.seq_lens)
        expect(same, "attend", "plan", "one for the lengths of this step", "a plan of others", "call attend_plan anew")


def facts(a: Attend) -> Call:
    """What the choice of a kernel depends on."""
    planes = "main" if a.win is None else "window" if a.kv is None else "main+window"
    return Call(
        "attend",
        a.q.device.type,
        (
            ("dtype", dtype_name(a.q.dtype)),
            ("planes", planes),
            ("format", "" if a.kv is None else a.format),
            ("v_format", "" if a.v is None else a.value_format),
            ("win_format", "" if a.win is None else a.win_format),
            ("q_heads", a.q.shape[1]),
            ("kv_heads", a.kv_heads),
            ("qk_dim", a.q.shape[2]),
            ("rope_dim", 0 if a.kv_rope is None else a.kv_rope.shape[3]),
            ("v_dim", a.v_dim),
            ("page_size", a.main_paging[1]),
            ("win_page_size", a.window_paging[1]),
            ("ratio", a.ratio),
            ("index_heads", 0 if a.indices is None else a.indices.shape[1]),
            ("selected", 0 if a.indices is None else a.indices.shape[2] * a.select_block),
            ("select_block", a.select_block),
            ("kv_range", a.kv_range is not None),
            ("kv_strides", strides_of(a.kv, a.kv_rope, a.v)),
            ("kv_reach", reach_of(a.kv, a.kv_rope, a.v)),
            ("window", a.window),
            ("win_range", a.win_range is not None),
            ("win_indices", 0 if a.win_indices is None else a.win_indices.shape[2]),
            ("win_strides", strides_of(a.win)),
            ("win_reach", reach_of(a.win)),
            ("sinks", a.sinks is not None),
            ("lse", a.return_lse),
            ("causal", a.causal),
            ("batch_invariant", a.batch_invariant),
        ),
    )


def outputs(a: Attend) -> tuple[Output, ...]:
    """What the call returns."""
    tokens, heads, _ = a.q.shape
    return Output((tokens, heads, a.v_dim), a.q.dtype), Output((tokens, heads), torch.float32, a.return_lse)


library.define(
    library.Op(
        "attend",
        Attend,
        SCHEMA,
        check,
        check_values,
        facts,
        returns=(Return("out", "T, Hq, v_dim"), Return("lse", "T, Hq", when="return_lse is True")),
        outputs=outputs,
        host_bounds=(5, 7),  # max_seqlen_q, max_seq_len
    )
)


def attend(
    q: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    v_dim: int,
    max_seqlen_q: int,
    max_seq_len: int,
    *,
    kv: Tensor | None = None,
    kv_rope: Tensor | None = None,
    kv_scale: Tensor | None = None,
    v: Tensor | None = None,
    v_scale: Tensor | None = None,
    page_table: Tensor | None = None,
    format: str = "bf16",
    v_format: str = "",
    page_size: int = 0,
    ratio: int = 1,
    kv_range: Tensor | None = None,
    indices: Tensor | None = None,
    index_counts: Tensor | None = None,
    select_block: int = 1,
    win: Tensor | None = None,
    win_page_table: Tensor | None = None,
    win_format: str = "bf16",
    win_page_size: int = 0,
    window: int = 0,
    win_range: Tensor | None = None,
    win_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    plan: Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of packed queries over selected entries of paged KV planes, in one softmax.

    For query row ``t`` and head ``h``, over the entries ``n`` that the row attends in the main plane and in the window
    plane: ``out = sum_n exp(s_n) v_n / (exp(sink_h) + sum_n exp(s_n))`` and ``lse = ln sum_n exp(s_n)`` with
    ``s_n = scale * q . k_n``. The sink is in the denominator of ``out`` only. An entry that both planes hold counts
    twice.

    Prefill, chunked prefill, decode and draft verification are one call. Sequence ``b`` has the query rows
    ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``; the last of them stands at token position ``p = seq_lens[b] - 1``.

    Args (T query rows, B sequences, Hq query heads, Hkv KV heads; every tensor on one device):
        q: float32, bfloat16 or float16 ``[T, Hq, D]``, 1 to 128 heads, a multiple of Hkv.
        cu_seqlens_q: int32 ``[B + 1]``, first row of each sequence, starting at 0. Rows from ``cu_seqlens_q[B]`` on are
            padding.
        seq_lens: int32 ``[B]``, tokens of each sequence, this step included.
        scale: factor of the scores; never derived.
        v_dim: elements of an output row.
        max_seqlen_q, max_seq_len: host bounds of query rows a sequence and of ``seq_lens``.
        kv: main plane ``[pages, page_size, Hkv, D - Dr]`` in ``format``, or uint8 in the shape of a packed format
            (``docs/formats.md``), whose rows hold all of the key. Any strides but in the last axis: a view into a
            larger pool is read in place.
        kv_rope: the last ``Dr`` elements of each key where they are stored apart, ``[pages, page_size, Hkv, Dr]``.
        v: values ``[pages, page_size, Hkv, v_dim]`` in ``v_format`` (default: ``format``), which is no packed one.
            None: the first ``v_dim`` elements of each kv row.
        kv_scale, v_scale: float16 ``[pages, page_size, Hkv]`` for format ``int8``.
        page_table: int32 ``[B, max_pages]``, physical page of each logical page of the main plane.
        format, v_format, win_format: names in ``sparse_attn.layout.FORMATS``.
        page_size, win_page_size: entries of a page of a planar plane, which does not show them. Else 0, or the plane's
            own as a check.
        ratio: tokens an entry of the main plane stands for.
        kv_range: int32 ``[T, 2]``, visible entries ``[lo, hi)`` of each row. None: ``[0, (p + 1) // ratio)``, or every
            entry of the sequence if not causal.
        indices: int32 ``[T, Hi, K]``, Hi in {1, Hkv, Hq}, any strides: logical entries (or blocks of ``select_block``
            entries) to attend. Invisible, negative and out-of-range ones are masked wherever they stand. None: all
            visible entries.
        index_counts: int32 ``[T, Hi]``, how many leading indices of a row count. None: K.
        select_block: entries an index stands for. Block ``b`` is clipped to the visible range.
        win: window plane ``[pages, page_size, Hkv, D]`` in ``win_format``, plain or packed, one entry a token, values
            in the first ``v_dim`` elements.
        win_page_table: int32 ``[B, max_pages]`` of the window plane; columns outside the ranges are never read.
        window: tokens ``[p - window + 1, p]`` are attended in the window plane.
        win_range: int32 ``[T, 2]``, explicit range of token positions instead of ``window``.
        win_indices: int32 ``[T, 1, K]``, token positions to attend inside that range.
        sinks: float32 ``[Hq]``, unscaled logits, any value including infinities.
        plan: what ``attend_plan`` made of this step's lengths, for all layers of this kind. Where lengths have changed
            since, the result is NaN on a kernel that uses plans, and ``SPARSE_ATTN_CHECKS=debug`` refuses the call.
        causal: False lifts causality of the main plane.
        return_lse: also return the log-sum-exp.
        batch_invariant: a row's bits do not depend on its neighbours or on how a sequence was cut into steps.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``out [T, Hq, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse`` float32 ``[T, Hq]`` (natural
        logarithm, without the sink). A row that attends nothing, padding, rows of sequences of length 0 or less, and
        rows before a sequence's first token (more query rows than tokens) have ``out = 0`` and ``lse = -inf``.

    Raises:
        InvalidCall: an argument breaks the contract.
        NoBackend: no kernel can run the call; every reason is in the message.
    """
    out, lse = torch.ops.sparse_attn.attend(
        q,
        cu_seqlens_q,
        seq_lens,
        scale,
        v_dim,
        max_seqlen_q,
        max_seq_len,
        kv=kv,
        kv_rope=kv_rope,
        kv_scale=kv_scale,
        v=v,
        v_scale=v_scale,
        page_table=page_table,
        format=format,
        v_format=v_format,
        page_size=page_size,
        ratio=ratio,
        kv_range=kv_range,
        indices=indices,
        index_counts=index_counts,
        select_block=select_block,
        win=win,
        win_page_table=win_page_table,
        win_format=win_format,
        win_page_size=win_page_size,
        window=window,
        win_range=win_range,
        win_indices=win_indices,
        sinks=sinks,
        plan=plan,
        causal=causal,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return (out, lse) if return_lse else out


def attend_plan(*args: Any, plan: Tensor | None = None, **kwargs: Any) -> Tensor:
    """What ``attend`` needs to know of a step's lengths, made once and used by all layers of a kind.

    Some operators of vendors want a schedule, which takes long to make. Kernels that want none ignore their plan. Call
    it before the first layer of a step, with the arguments of its ``attend``: of tensors but the lengths, shapes and
    strides alone matter. Nothing waits for the device.

    Args (B sequences):
        args, kwargs: the arguments of one call of ``attend``.
        plan: int32 ``[1024 + 2 B + 1]``, filled; None for a new one.

    Returns:
        The plan, to be passed to ``attend`` with the same shapes, bounds and options, while this tensor lives.

    Raises:
        InvalidCall: an argument breaks the contract.
        NoBackend: no kernel can run the call.
    """
    impl = library.resolve("attend", *args, **kwargs)
    a = Attend(*args, **kwargs)
    batch = len(a.seq_lens)
    if plan is None:
        plan = a.seq_lens.new_empty(PLAN_WORDS + 2 * batch + 1)
    _check_plan("plan", plan, batch, a.q.device)
    words, starts, lengths = _parts(plan, batch)
    starts.copy_(a.cu_seqlens_q)
    lengths.copy_(a.seq_lens)
    _made.pop(plan.data_ptr(), None)
    if impl.plan is not None:
        impl.plan(a, words)
        while len(_made) >= _MOST_MADE:
            _made.pop(next(iter(_made)))
        _made[plan.data_ptr()] = weakref.ref(plan), _kind(a)
    return plan
