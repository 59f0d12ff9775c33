"""``compress``: join the projected values of tokens into the entries that stand for them, and store these."""

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
    refuse,
)
from ..library import Output, Return
from ..registry import Call

ROW_DTYPES = ("float32", "bfloat16", "float16")
MAX_SPAN = 1 << 16
"""Tokens of an entry, by which kernels size their memory."""
MODEL_DTYPES = {name: getattr(torch, layout.FORMATS[name].dtype) for name in layout.PLAIN_FORMATS}

SCHEMA = (
    "Tensor rows, Tensor? gates, Tensor cu_seqlens_q, Tensor seq_lens, Tensor(a!) plane, Tensor page_table, "
    "int stride, SymInt max_seqlen_q, SymInt max_seq_len, *, int span=0, Tensor? bias=None, Tensor(b!)? state=None, "
    "Tensor? state_page_table=None, int max_rewind=0, Tensor? norm=None, float eps=1e-6, Tensor? cos_sin=None, "
    'int rope_stride=0, str dtype="fp32", Tensor(c!)? scale=None, str format="bf16", int page_size=0, '
    'SymInt entries=0, str backend="auto"'
)


class Compress(NamedTuple):
    """The arguments of one call, under the schema's names."""

    rows: Tensor
    gates: Tensor | None
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    plane: Tensor
    page_table: Tensor
    stride: int
    max_seqlen_q: int
    max_seq_len: int
    span: int = 0
    bias: Tensor | None = None
    state: Tensor | None = None
    state_page_table: Tensor | None = None
    max_rewind: int = 0
    norm: Tensor | None = None
    eps: float = 1e-6
    cos_sin: Tensor | None = None
    rope_stride: int = 0
    dtype: str = "fp32"
    scale: Tensor | None = None
    format: str = "bf16"
    page_size: int = 0
    entries: int = 0
    backend: str = "auto"

    @property
    def covered(self) -> int:
        """Tokens that an entry is made of."""
        return self.span or self.stride

    @property
    def rope_step(self) -> int:
        """Positions from one entry to the next."""
        return self.rope_stride or self.stride

    @property
    def dim(self) -> int:
        """Elements of an entry."""
        return layout.FORMATS[self.format].row_dim(self.plane.shape[-1])

    @property
    def kept(self) -> int:
        """The last tokens of a sequence whose rows ``state`` holds after a step."""
        return self.covered - 1 + self.max_rewind if self.state is not None else 0

    @property
    def paging(self) -> tuple[int, int, int]:
        """Pages, entries a page and heads of the plane."""
        return layout.FORMATS[self.format].paging(self.plane.shape, self.page_size)


def check(a: Compress) -> None:
    """Raise ``InvalidCall`` if shapes, dtypes, devices or options break the contract."""
    device = a.rows.device
    expect_tensor("compress", "rows", a.rows, "T, H, W", (None, None, None), ROW_DTYPES, device)
    heads, width = a.rows.shape[1:]
    if a.gates is not None:
        expect_tensor("compress", "gates", a.gates, "T, H, W", a.rows.shape, ROW_DTYPES, device)
    batch = expect_batch("compress", a.rows, a.cu_seqlens_q, a.seq_lens)
    expect(1 <= a.stride <= MAX_SPAN, "compress", "stride", f"1 to {MAX_SPAN} tokens", a.stride)
    expect(
        a.span >= 0 and a.span % a.stride == 0, "compress", "span", f"0 or a multiple of stride = {a.stride}", a.span
    )
    expect(a.span <= MAX_SPAN, "compress", "span", f"at most {MAX_SPAN} tokens", a.span)
    _check_plane(a, batch, heads)
    parts = a.covered // a.stride
    apart = f" or {parts} * {a.dim}" if parts > 1 else ""
    expected = f"rows of the plane's {a.dim} elements{apart}"
    expect(width in (a.dim, parts * a.dim), "compress", "rows", expected, f"W = {width}")
    if a.bias is not None:
        expect(a.gates is not None, "compress", "bias", "None without gates", "a tensor")
        expect_tensor("compress", "bias", a.bias, "stride, W", (a.stride, width), ("float32",), device)
    _check_state(a, batch, heads, width)
    if a.norm is not None:
        expect_tensor("compress", "norm", a.norm, "D", (a.dim,), ("float32",), device)
        expect(0 <= a.eps < float("inf"), "compress", "eps", "a finite number of 0 or more", a.eps)
    if a.cos_sin is not None:
        expect_tensor("compress", "cos_sin", a.cos_sin, "positions, R", (None, None), ("float32",), device)
        rotated = a.cos_sin.shape[1]
        ok = rotated % 2 == 0 and rotated <= a.dim
        expect(ok, "compress", "cos_sin", f"an even number of at most {a.dim} columns", rotated)
    ok = 0 <= a.rope_stride < 1 << 31
    expect(ok, "compress", "rope_stride", "0 (stride) to 2**31 - 1 positions", a.rope_stride)
    expect_one_of("compress", "dtype", a.dtype, tuple(MODEL_DTYPES))
    expect(a.entries >= 0, "compress", "entries", "0 or more rows of latent", a.entries)


def _check_plane(a: Compress, batch: int, heads: int) -> None:
    format = expect_format("compress", "format", a.format, tuple(layout.FORMATS))
    page_size, scale = ("page_size", a.page_size), ("scale", a.scale)
    expect_plane("compress", "plane", a.plane, format, heads, None, a.rows.device, page_size, scale)
    shape = (batch, None)
    expect_tensor("compress", "page_table", a.page_table, "B, max_pages", shape, ("int32",), a.rows.device)


def _check_state(a: Compress, batch: int, heads: int, width: int) -> None:
    expect(0 <= a.max_rewind < 1 << 31, "compress", "max_rewind", "0 to 2**31 - 1 tokens", a.max_rewind)
    if a.covered == 1:
        for name, t in {"state": a.state, "state_page_table": a.state_page_table}.items():
            expect(t is None, "compress", name, "None where an entry covers 1 token", "a tensor")
        return
    columns = width if a.gates is None else 2 * width
    if a.state is None or a.state_page_table is None:
        name, axes = ("state", f"H, {columns}") if a.state is None else ("state_page_table", "")
        kind = f"float32 [pages, page_size, {axes}]" if axes else "int32 [B, max_pages]"
        raise refuse("compress", name, f"{kind} where an entry covers {a.covered} tokens", "None")
    device, axes = a.rows.device, "pages, page_size, heads, columns"
    expect_tensor("compress", "state", a.state, axes, (None, None, heads, columns), ("float32",), device)
    expect(a.state.shape[1] >= 1, "compress", "state", "pages of at least 1 row (axis 1)", a.state.shape[1])
    table, axes = a.state_page_table, "B, max_pages"
    expect_tensor("compress", "state_page_table", table, axes, (batch, None), ("int32",), device)


def check_values(a: Compress) -> None:
    """Raise ``InvalidCall`` where lengths break their bounds, or the state has no room for the rows it must hold."""
    expect_lengths("compress", a.rows, a.cu_seqlens_q, a.seq_lens, a.max_seqlen_q, a.max_seq_len)
    if a.state is None or a.state_page_table is None:
        return
    for b, length in enumerate(a.seq_lens.tolist()):
        held = torch.arange(max(length - a.kept, 0), max(length, 0), device=a.rows.device)
        held = held[held < a.state_page_table.shape[1] * a.state.shape[1]]  # where pages lack, the kernel says so
        page, offset = layout.locate(a.state_page_table[b].long(), held, a.state.shape[1])
        distinct = layout.slot(page, offset, a.state.shape[1]).unique().numel() == held.numel()
        expected = f"room for the last {held.numel()} tokens of sequence {b} (span - 1 + max_rewind)"
        expect(distinct, "compress", "state_page_table", expected, "a page twice among them")


def facts(a: Compress) -> Call:
    """What the choice of a kernel depends on."""
    return Call(
        "compress",
        a.rows.device.type,
        (
            ("dtype", dtype_name(a.rows.dtype)),
            ("gate_dtype", "none" if a.gates is None else dtype_name(a.gates.dtype)),
            ("model_dtype", a.dtype),
            ("format", a.format),
            ("kv_heads", a.rows.shape[1]),
            ("dim", a.dim),
            ("page_size", a.paging[1]),
            ("stride", a.stride),
            ("span", a.covered),
            ("norm", a.norm is not None),
            ("rope", 0 if a.cos_sin is None else a.cos_sin.shape[1]),
        ),
    )


def outputs(a: Compress) -> tuple[Output, ...]:
    """What the call returns."""
    return (Output((a.entries, a.rows.shape[1], a.dim), MODEL_DTYPES[a.dtype], wanted=a.entries > 0),)


library.define(
    library.Op(
        "compress",
        Compress,
        SCHEMA,
        check,
        check_values,
        facts,
        returns=(Return("latent", "entries, H, D", "entries > 0"),),
        outputs=outputs,
        writes=("plane", "state", "scale"),
        host_bounds=(7, 9),
    )
)


def compress(
    rows: Tensor,
    gates: Tensor | None,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    plane: Tensor,
    page_table: Tensor,
    stride: int,
    max_seqlen_q: int,
    max_seq_len: int,
    *,
    span: int = 0,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    state_page_table: Tensor | None = None,
    max_rewind: int = 0,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    cos_sin: Tensor | None = None,
    rope_stride: int = 0,
    dtype: str = "fp32",
    scale: Tensor | None = None,
    format: str = "bf16",
    page_size: int = 0,
    entries: int = 0,
    backend: str = "auto",
) -> Tensor:
    r"""Write the entries that this step's tokens complete: pooled, normed, rotated and quantised in one op.

    Entry ``j`` stands for tokens ``j * stride`` to ``(j + 1) * stride - 1``, and is made of the ``span`` tokens that
    end there; tokens before 0 do not exist. A step that takes a sequence from ``n0`` to ``n1`` tokens writes entries
    ``n0 // stride`` to ``n1 // stride - 1``, at their places in ``page_table``. For each channel::

        pooled = sum_i softmax_i(gates_i + bias[i % stride]) * rows_i       (the mean, without gates)
        latent = rms_norm(pooled, norm, eps)
        entry  = the last R elements of latent rotated, in adjacent pairs, to position j * rope_stride

    in float32, each of the three rounded to ``dtype``. With rows of ``span / stride`` times D channels, a token uses
    D of them: the first as one of the oldest ``stride`` tokens of the span, the last as one of the newest. Bits of an
    entry do not depend on how its tokens were cut into steps.

    ``state`` holds the rows of the last tokens between steps, so that they survive a step's end, a preemption, a fork
    (share or copy its pages) and the rejection of drafts. It is paged as every plane is, an entry for each token; a
    step reads the ``span - 1`` tokens before it and writes its last ``span - 1 + max_rewind``. A page with older tokens
    may go; a table whose columns repeat makes a ring. To reject drafts, pass the shorter ``seq_lens`` at the next step.

    With ``stride=1`` and no gates the op norms, rotates, quantises and stores rows: the writer of a window plane, and
    of index keys that a model derives from ``latent``.

    Source of the maths: DeepSeek V4 (span 8, stride 4 with two sets of channels; span and stride 128), V4.1 (2, 1);
    ``docs/compressions.md`` has the call of every model.

    Args (T tokens, B sequences, H heads; every tensor on one device):
        rows: float32, bfloat16 or float16 ``[T, H, W]``, projected values; W is D or ``span / stride * D``.
        gates: the same shape, any of the dtypes, logits; None for the mean.
        cu_seqlens_q: int32 ``[B + 1]``, where each sequence begins in ``rows``; the rest of the T rows is padding.
        seq_lens: int32 ``[B]``, tokens of each sequence, this step included.
        plane: ``[pages, page_size, H, D]`` in ``format``, written in place; packed formats as ``store`` takes them.
        page_table: int32 ``[B, max_pages]`` of ``plane``.
        stride: tokens from one entry to the next (``ratio`` in ``attend`` and ``select``).
        max_seqlen_q, max_seq_len: bounds, known to the host, of this step's tokens and of the lengths.
        span: tokens that an entry covers, a multiple of ``stride``, 65536 at most; 0 for ``stride``.
        bias: float32 ``[stride, W]``, added to the gates by position.
        state: float32 ``[pages, page_size, H, W]``, twice W with gates, written in place; None if ``span`` is 1.
        state_page_table: int32 ``[B, max_pages]`` of ``state``.
        max_rewind: how many tokens the next step may take back, 0 or more.
        norm: float32 ``[D]``, the weight of the RMS norm; None for no norm.
        eps: added to the mean square.
        cos_sin: float32 ``[positions, R]``, cosines of R / 2 angles and then their sines, by position; None for no
            rotation.
        rope_stride: positions from one entry to the next; 0 for ``stride``.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``, the model's.
        scale: float16 ``[pages, page_size, H]`` for formats with a scale plane.
        format: a name in ``sparse_attn.layout.FORMATS``.
        page_size: entries of a page of a planar plane. Else 0, or the plane's own as a check.
        entries: rows of ``latent`` to return, at least as many as the step completes (``T // stride + B`` is always
            enough); 0 for none.
        backend: ``"auto"``, or a name, which then runs or refuses.

    Returns:
        ``latent [entries, H, D]`` in ``dtype``: of every entry written, sequence by sequence, the row before rotation,
        and zeros after them. With ``entries=0`` an empty tensor.

    Raises:
        InvalidCall: an argument breaks the contract, or a page, row or position that is needed does not exist.
        NoBackend: no kernel can run the call.
    """
    return torch.ops.sparse_attn.compress(
        rows,
        gates,
        cu_seqlens_q,
        seq_lens,
        plane,
        page_table,
        stride,
        max_seqlen_q,
        max_seq_len,
        span=span,
        bias=bias,
        state=state,
        state_page_table=state_page_table,
        max_rewind=max_rewind,
        norm=norm,
        eps=eps,
        cos_sin=cos_sin,
        rope_stride=rope_stride,
        dtype=dtype,
        scale=scale,
        format=format,
        page_size=page_size,
        entries=entries,
        backend=backend,
    )
