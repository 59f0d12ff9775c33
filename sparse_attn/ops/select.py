"""``select``: which entries, or blocks of entries, each query attends. ``docs/selections.md`` lists the calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import layout, library
from ..checks import (
    dtype_name,
    expect,
    expect_batch,
    expect_format,
    expect_lengths,
    expect_one_of,
    expect_plane,
    expect_tensor,
    expect_unique,
    refuse,
)
from ..library import Output, Return
from ..planes import reach_of, strides_of
from ..registry import Call
from .attend import MAX_HEADS, QUERY_DTYPES

SCORES = ("relu_sum", "dot", "max", "softmax_sum")
SCORE_DTYPES = ("fp32", "bf16")
POOLS = ("none", "mean", "max", "sum")
TAILS = ("none", "counted", "reserved")
TIES = ("lowest", "any")
ORDERS = ("any", "index", "score")

SCHEMA = (
    "Tensor q, Tensor? weights, Tensor cu_seqlens_q, Tensor seq_lens, Tensor keys, Tensor page_table, int k, "
    "float scale, SymInt max_seqlen_q, SymInt max_seq_len, *, "
    'Tensor? q_scale=None, Tensor? key_scale=None, str format="bf16", int page_size=0, int ratio=1, int span=0, '
    "bool bounds=False, Tensor? kv_range=None, Tensor? row_k=None, "
    'str score="relu_sum", str score_dtype="fp32", int out_heads=1, '
    'int block=1, str pool="none", int keep_first=0, int keep_last=0, str tail="none", '
    "Tensor? candidates=None, int candidate_block=8, int candidate_k=0, "
    'str ties="lowest", str order="any", bool causal=True, bool return_values=False, str backend="auto"'
)


class Select(NamedTuple):
    """The arguments of one call, under the schema's names."""

    q: Tensor
    weights: Tensor | None
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    keys: Tensor
    page_table: Tensor
    k: int
    scale: float
    max_seqlen_q: int
    max_seq_len: int
    q_scale: Tensor | None = None
    key_scale: Tensor | None = None
    format: str = "bf16"
    page_size: int = 0
    ratio: int = 1
    span: int = 0
    bounds: bool = False
    kv_range: Tensor | None = None
    row_k: Tensor | None = None
    score: str = "relu_sum"
    score_dtype: str = "fp32"
    out_heads: int = 1
    block: int = 1
    pool: str = "none"
    keep_first: int = 0
    keep_last: int = 0
    tail: str = "none"
    candidates: Tensor | None = None
    candidate_block: int = 8
    candidate_k: int = 0
    ties: str = "lowest"
    order: str = "any"
    causal: bool = True
    return_values: bool = False
    backend: str = "auto"

    @property
    def paging(self) -> tuple[int, int, int]:
        """Pages, entries a page and heads of the index plane."""
        return layout.FORMATS[self.format].paging(self.keys.shape, self.page_size)

    @property
    def with_float_queries(self) -> Select:
        """The same call with queries in float32 where they are int8 with scales."""
        if self.q_scale is None:
            return self
        return self._replace(q=self.q.float() * self.q_scale.float()[..., None], q_scale=None)

    @property
    def strides(self) -> int:
        """Strides of ``ratio`` tokens that an entry covers."""
        return (self.span or self.ratio) // self.ratio

    @property
    def candidate_role(self) -> str:
        """Whether the call has no candidate blocks, makes them or takes them."""
        return "made" if self.candidate_k else "none" if self.candidates is None else "taken"

    @property
    def scores_all(self) -> bool:
        """Whether rows that fit their budget are scored too."""
        return self.return_values or self.candidate_role == "made" or self.order == "score"


class Selected(NamedTuple):
    """What ``select`` returns: ``attend`` takes the first two as ``indices`` and ``index_counts``."""

    indices: Tensor
    counts: Tensor
    values: Tensor | None = None
    candidate_blocks: Tensor | None = None


def check(a: Select) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    expect_tensor("select", "q", a.q, "T, Hi, D", (None, None, None), (*QUERY_DTYPES, "int8"), a.q.device)
    device, (tokens, heads, dim) = a.q.device, a.q.shape
    if a.q.dtype != torch.int8:
        expect(a.q_scale is None, "select", "q_scale", "None with queries that are not int8", "a tensor")
    elif a.q_scale is None:
        raise refuse("select", "q_scale", "a scale for each head of int8 queries", "None")
    else:
        expect_tensor("select", "q_scale", a.q_scale, "T, Hi", (tokens, heads), QUERY_DTYPES, device)
    expect(1 <= heads <= MAX_HEADS, "select", "q", f"1 to {MAX_HEADS} heads (axis 1)", heads)
    if a.weights is not None:
        expect_tensor("select", "weights", a.weights, "T, Hi", (tokens, heads), QUERY_DTYPES, device)
    batch = expect_batch("select", a.q, a.cu_seqlens_q, a.seq_lens)
    key_format = expect_format("select", "format", a.format, tuple(layout.FORMATS))
    key_dim = 2 * dim if a.bounds else dim
    page_size, scale = ("page_size", a.page_size), ("key_scale", a.key_scale)
    expect_plane("select", "keys", a.keys, key_format, None, key_dim, device, page_size, scale)
    key_heads = a.paging[2]
    expect(key_heads >= 1 and heads % key_heads == 0, "select", "q", f"a multiple of the {key_heads} key heads", heads)
    ok = a.out_heads >= 1 and heads % a.out_heads == 0
    expect(ok, "select", "out_heads", f"a divisor of the {heads} query heads", a.out_heads)
    expect_tensor("select", "page_table", a.page_table, "B, max_pages", (batch, None), ("int32",), device)
    ok = 0 < a.scale <= torch.finfo(torch.float32).max
    expect(ok, "select", "scale", "a finite float32 number above 0", a.scale)
    if a.kv_range is not None:
        expect_tensor("select", "kv_range", a.kv_range, "T, 2", (tokens, 2), ("int32",), device, "all")
    _check_scores(a)
    _check_units(a)
    _check_candidates(a)


def _check_scores(a: Select) -> None:
    expect_one_of("select", "score", a.score, SCORES)
    expect_one_of("select", "score_dtype", a.score_dtype, SCORE_DTYPES)
    if a.score_dtype == "bf16":
        expected = "'relu_sum' or 'dot' with score_dtype='bf16'"
        expect(a.score in ("relu_sum", "dot"), "select", "score", expected, repr(a.score))
    expect_one_of("select", "ties", a.ties, TIES)
    expect_one_of("select", "order", a.order, ORDERS)


def _check_units(a: Select) -> None:
    expect(a.k >= 0, "select", "k", "at least 0", a.k)
    if a.row_k is not None:
        expect_tensor("select", "row_k", a.row_k, "T", (a.q.shape[0],), ("int32",), a.q.device, "all")
    expect(a.ratio >= 1, "select", "ratio", "at least 1 token an entry", a.ratio)
    ok = a.span == 0 or (a.span >= a.ratio and a.span % a.ratio == 0)
    expect(ok, "select", "span", f"0 or a multiple of the ratio {a.ratio}", a.span)
    expect(1 <= a.block < 1 << 31, "select", "block", "1 to 2**31 - 1", a.block)
    expect_one_of("select", "pool", a.pool, POOLS)
    if a.block > 1 or a.strides > 1:
        expected = "mean, max or sum where a block takes in several entries (block > 1 or span > ratio)"
        expect(a.pool != "none", "select", "pool", expected, "'none'")
    if a.pool == "mean":
        plain = a.strides == 1 and not a.bounds
        expect(plain, "select", "pool", "max or sum with bounds or span > ratio", "'mean'")
    expect(a.keep_first >= 0, "select", "keep_first", "at least 0", a.keep_first)
    expect(a.keep_last >= 0, "select", "keep_last", "at least 0", a.keep_last)
    expect_one_of("select", "tail", a.tail, TAILS)
    if a.tail != "none":
        expect(a.ratio > 1, "select", "tail", "'none' with ratio 1, which leaves no incomplete entry", repr(a.tail))
        expect(a.kv_range is None, "select", "tail", "'none' with kv_range", repr(a.tail), "let kv_range include it")
    kept = a.keep_first + a.keep_last + (a.tail == "reserved")
    expect(kept <= a.k, "select", "k", f"at least the {kept} that are always kept, as they count in it", a.k)


def _check_candidates(a: Select) -> None:
    expect(a.candidate_k >= 0, "select", "candidate_k", "at least 0", a.candidate_k)
    ok = 1 <= a.candidate_block < 1 << 31
    expect(ok, "select", "candidate_block", "1 to 2**31 - 1 entries a block", a.candidate_block)
    if a.candidate_role == "none":
        return
    single = a.block == 1 and a.strides == 1
    expect(single, "select", "block", "1, and span = ratio, with candidates or candidate_k", a.block)
    if a.candidates is None:
        return
    expect(a.candidate_k == 0, "select", "candidate_k", "0 in a call that takes candidates", a.candidate_k)
    shape = (a.q.shape[0], None, None)
    expect_tensor("select", "candidates", a.candidates, "T, Hc, C", shape, ("int32",), a.q.device, "any")
    heads = a.candidates.shape[1]
    expected = f"Hc = 1 (shared) or {a.out_heads} (one for each list)"
    expect(heads in (1, a.out_heads), "select", "candidates", expected, heads)


def check_values(a: Select) -> None:
    """Raise ``InvalidCall`` if values break the contract. Reads lengths and candidates back to the host."""
    expect_lengths("select", a.q, a.cu_seqlens_q, a.seq_lens, a.max_seqlen_q, a.max_seq_len)
    if a.candidates is not None:
        expect_unique("select", "candidates", a.candidates, None, "its entries would be listed twice")


def facts(a: Select) -> Call:
    """What the choice of a kernel depends on."""
    _, page_size, key_heads = a.paging
    return Call(
        "select",
        a.q.device.type,
        (
            ("dtype", dtype_name(a.q.dtype)),
            ("format", a.format),
            ("q_heads", a.q.shape[1]),
            ("key_heads", key_heads),
            ("out_heads", a.out_heads),
            ("dim", a.q.shape[2]),
            ("page_size", page_size),
            ("key_strides", strides_of(a.keys, a.key_scale)),
            ("key_reach", reach_of(a.keys)),
            ("kv_range", a.kv_range is not None),
            ("ratio", a.ratio),
            ("strides", a.strides),
            ("bounds", a.bounds),
            ("weights", "" if a.weights is None else dtype_name(a.weights.dtype)),
            ("score", a.score),
            ("score_dtype", a.score_dtype),
            ("block", a.block),
            ("pool", a.pool),
            ("k", a.k),
            ("row_k", a.row_k is not None),
            ("kept", a.keep_first + a.keep_last),
            ("tail", a.tail),
            ("candidates", a.candidate_role),
            ("candidate_block", a.candidate_block),
            ("candidate_k", a.candidate_k),
            ("ties", a.ties),
            ("order", a.order),
            ("values", a.return_values),
            ("causal", a.causal),
        ),
    )


def outputs(a: Select) -> tuple[Output, ...]:
    """What the call returns."""
    lists = (a.q.shape[0], a.out_heads)
    return (
        Output((*lists, a.k), torch.int32),
        Output(lists, torch.int32),
        Output((*lists, a.k), torch.float32, a.return_values),
        Output((*lists, a.candidate_k), torch.int32, a.candidate_k > 0),
    )


library.define(
    library.Op(
        "select",
        Select,
        SCHEMA,
        check,
        check_values,
        facts,
        returns=(
            Return("indices", "T, out_heads, k"),
            Return("counts", "T, out_heads"),
            Return("values", "T, out_heads, places", when="return_values is True"),
            Return("candidate_blocks", "T, out_heads, places", when="candidate_k > 0"),
        ),
        outputs=outputs,
        host_bounds=(8, 10),  # max_seqlen_q, max_seq_len
    )
)


def select(
    q: Tensor,
    weights: Tensor | None,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    keys: Tensor,
    page_table: Tensor,
    k: int,
    scale: float,
    max_seqlen_q: int,
    max_seq_len: int,
    *,
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    format: str = "bf16",
    page_size: int = 0,
    ratio: int = 1,
    span: int = 0,
    bounds: bool = False,
    kv_range: Tensor | None = None,
    row_k: Tensor | None = None,
    score: str = "relu_sum",
    score_dtype: str = "fp32",
    out_heads: int = 1,
    block: int = 1,
    pool: str = "none",
    keep_first: int = 0,
    keep_last: int = 0,
    tail: str = "none",
    candidates: Tensor | None = None,
    candidate_block: int = 8,
    candidate_k: int = 0,
    ties: str = "lowest",
    order: str = "any",
    causal: bool = True,
    return_values: bool = False,
    backend: str = "auto",
) -> Selected:
    r"""The ``k`` best entries (or blocks of entries) of a paged index plane, for each query row and each list.

    Rows are packed as for ``attend``: sequence ``b`` has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, the
    last of them at token position ``p = seq_lens[b] - 1``. A *unit* is what an index stands for: an entry, or ``block``
    strides of ``ratio`` tokens.

    **Scores.** With ``x_h = q_h . key``, where query head ``h`` reads key head ``h * Hk // Hi``, and list ``o`` belongs
    to the heads ``h`` with ``h * out_heads // Hi = o``:

    * ``relu_sum``: ``scale * sum_h w_h max(x_h, 0)``. The lightning indexer of DeepSeek V3.2, V4, V4.1, GLM-5; Qwen4.
    * ``dot``: ``scale * sum_h w_h x_h``. MiniMax-M3 and MoBA with a head a list; with several, the cheapest scorer.
    * ``max``: ``scale * max_h w_h x_h``.
    * ``softmax_sum``: ``sum_h w_h exp(scale * x_h) / Z_h``: the probabilities of attention. ``Z_h`` is the sum over all
      that is scored: every visible entry (of the candidates, if given), or every unit's mean key; what is always kept
      included. NSA, InfLLM-v2, and dense models.

    ``weights`` may have either sign; None is 1. Scores are rounded to float32 and then compared. With
    ``score_dtype="bf16"`` the score is ``bf16(scale * sum_h bf16(w_h max(bf16(x_h), 0)))``, as V4.1 rounds it (``dot``:
    without the maximum); equal scores are then common. A NaN, from whichever head, counts as -inf.

    **Units.** Entry ``e`` covers the tokens ``[e * ratio, e * ratio + span)``, and is visible once the last of them is.
    With ``block > 1`` or ``span > ratio`` a unit pools the visible entries that share strides with it: ``mean`` of
    their keys, which is then scored; or ``max`` of their scores, or their ``sum``, each entry as often as it shares a
    stride. Units without a visible entry are not selected, but see ``tail``.

    **Always kept.** The first ``keep_first`` and the last ``keep_last`` units of a row are selected whatever they
    score, and count in ``k``. If the budget is smaller, the newest come first, then the first ones. ``tail`` says what
    becomes of the newest tokens that no visible entry covers:

    * ``none``: their unit is not selectable (V4: the window attends them).
    * ``counted``: their unit is kept as if by ``keep_last``, which counts it as the newest (Quest, MoBA, NSA).
    * ``reserved``: as ``counted``, and one of the ``k`` places is left empty in rows without a tail (GLM-5.3, Qwen4).

    **Candidates.** ``candidate_k > 0`` also returns blocks of ``candidate_block`` entries: the block of the newest
    visible unit, and those with the largest maximum score. ``candidates`` restricts the selection to the entries of
    such blocks, and to what is always kept.

    **Rows that fit.** If all that a row may select fits its budget, it is selected without being scored, unless values,
    candidate blocks or the order of scores are asked for. Otherwise units with score -inf are never selected.

    Args (T query rows, B sequences, Hi query heads, Hk key heads; every tensor on one device):
        q: float32, bfloat16, float16, or int8 with ``q_scale``, ``[T, Hi, D]``, 1 to 128 heads, a multiple of Hk and of
            ``out_heads``.
        weights: float32, bfloat16 or float16 ``[T, Hi]``, or None.
        cu_seqlens_q: int32 ``[B + 1]``, first row of each sequence, starting at 0. Rows from ``cu_seqlens_q[B]`` on are
            padding.
        seq_lens: int32 ``[B]``, tokens of each sequence, this step included.
        keys: index plane ``[pages, page_size, Hk, D]`` in ``format``, or uint8 in the shape of a packed format
            (``docs/formats.md``), which has one head. Any strides but in the last axis.
        page_table: int32 ``[B, max_pages]``, physical page of each logical page of ``keys``.
        k: places in a list.
        scale: factor of the scores, above 0.
        max_seqlen_q, max_seq_len: host bounds of query rows a sequence and of ``seq_lens``.
        q_scale: float32, bfloat16 or float16 ``[T, Hi]``: int8 queries are ``q * q_scale``.
        key_scale: float16 ``[pages, page_size, Hk]`` for formats with a scale plane.
        format: a name in ``sparse_attn.layout.FORMATS``.
        page_size: entries of a page of a planar plane. Else 0, or the plane's own as a check.
        ratio: tokens from one entry to the next.
        span: tokens an entry covers, a multiple of ``ratio``; 0: ``ratio``.
        bounds: a key row holds lower and upper bounds side by side, ``[pages, page_size, Hk, 2 * D]``, and ``x_h`` is
            ``sum_d max(q_d lower_d, q_d upper_d)`` (Quest).
        kv_range: int32 ``[T, 2]``, visible entries ``[lo, hi)`` of each row. None: those whose tokens are all up to
            ``p``, or all of the sequence's if not causal.
        row_k: int32 ``[T]``, budget of each row; None or more than ``k``: ``k``.
        score, score_dtype: see above.
        out_heads: lists of a row, one for each ``Hi / out_heads`` consecutive heads: 1, the KV heads, or Hi.
        block, pool, keep_first, keep_last, tail: see above.
        candidates: int32 ``[T, Hc, C]``, Hc in {1, ``out_heads``}, any strides: blocks in any order; negative and
            invisible ones are ignored.
        candidate_block, candidate_k: entries of a candidate block, and how many blocks to return.
        ties: ``lowest``: of equal scores the lower index is taken. ``any``: whichever, for kernels that do not say.
        order: of a list: ``index`` (ascending), ``score`` (descending, then by index), or ``any`` of a kernel's own.
        causal: False lifts causality.
        return_values: also return scores.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``Selected`` with ``indices`` int32 ``[T, out_heads, k]``, logical numbers of units, -1 after the ``counts``
        int32 ``[T, out_heads]`` that were selected; ``values`` float32 ``[T, out_heads, k]``, the score of each
        (+inf: always kept; -inf: no index), or None; and ``candidate_blocks`` int32 ``[T, out_heads, candidate_k]``,
        ascending, then -1, or None. Padding, rows of sequences of length 0 or less, and rows before a sequence's first
        token have no index. ``torch.ops.sparse_attn.select`` returns tensors of shape ``[0]`` in the place of None.

    Raises:
        InvalidCall: an argument breaks the contract.
        NoBackend: no kernel can run the call; every reason is in the message.
    """
    indices, counts, values, blocks = torch.ops.sparse_attn.select(
        q,
        weights,
        cu_seqlens_q,
        seq_lens,
        keys,
        page_table,
        k,
        scale,
        max_seqlen_q,
        max_seq_len,
        q_scale=q_scale,
        key_scale=key_scale,
        format=format,
        page_size=page_size,
        ratio=ratio,
        span=span,
        bounds=bounds,
        kv_range=kv_range,
        row_k=row_k,
        score=score,
        score_dtype=score_dtype,
        out_heads=out_heads,
        block=block,
        pool=pool,
        keep_first=keep_first,
        keep_last=keep_last,
        tail=tail,
        candidates=candidates,
        candidate_block=candidate_block,
        candidate_k=candidate_k,
        ties=ties,
        order=order,
        causal=causal,
        return_values=return_values,
        backend=backend,
    )
    return Selected(indices, counts, values if return_values else None, blocks if candidate_k else None)
