"""CANN's operators as their documents describe them, on host memory: what they take, what they compute, and what they
are known to do where a caller breaks their rules.

Written from the documents that ``SOURCES`` names, not from the backend. A rule that a call breaks is an error. Rows
that an operator does not promise to write hold NaN, as memory of earlier calls would. What the documents leave open is
a switch (``Readings``), and the tests run under both positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SOURCES = {
    "sfa": "op-plugin 0511bb2c, docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md",
    "kv_quant": "op-plugin 09fca6f6, docs/zh/custom_APIs/torch_npu/torch_npu-npu_kv_quant_sparse_flash_attention.md",
    "sfa kernel": "vllm-ascend 182b75ea, csrc/attention/sparse_flash_attention, service_vector_mla.h",
    "li": "op-plugin 09dca1a5, docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md",
    "qli": "op-plugin 09dca1a5, docs/zh/custom_APIs/torch_npu/torch_npu-npu_quant_lightning_indexer.md",
    "smla": "ops-transformer, attention/sparse_flash_mla, aclnnSparseFlashMla.md (a stored copy)",
    "smla ratios": "ops-transformer, attention/sparse_flash_mla, note on cmp_ratio 1 and 2 for A2 and A3",
    "smla stride": "vllm-ascend, attention/dsa_v41.py: page stride from the tensor",
    "smla pair": "vllm-ascend, mixed_quant_sparse_flash_mla: both calls must get identical arguments",
    "smla kernel": "vllm-ascend, csrc/attention/sparse_flash_mla/op_kernel/arch22, and a user's notes on it",
    "issue 9616": "vllm-ascend pull request 9818: a stale block table reads out of bounds",
    "issue 12833": "vllm-ascend pull request 12833: rows without a valid index are not written",
}

ARCH22, ARCH35 = ("A2", "A3"), ("950",)
EVERY = ARCH22 + ARCH35
NAN = float("nan")


class RuleBroken(RuntimeError):
    """A call that the operator's document does not allow."""


@dataclass
class Readings:
    """Positions of what the documents leave open."""

    kv_quant_width: int = 512
    """Elements of an output row: the text says as many as the query's 576, its example prints 512."""
    quant_weights: str = "fp32"
    """In what the quantised indexer multiplies weights and scales of queries: ``fp32`` or ``fp16``. The text asks that
    the product fits fp16."""
    last_of_equals: bool = False
    """Which of equal scores the indexer takes, and the order of its lists: not documented."""
    smla_knows_v41: bool = True
    """Whether the operator of A2 and A3 is the later one: ratios 1 and 2 with a selection, and 0 without rows."""
    smla_counts: str = "each row"
    """For what it counts the valid indices: ``each row``, ``first row of a tile`` (of which the sources speak), or
    ``never`` (versions that have no such code)."""


@dataclass
class Machine:
    """The emulated device."""

    family: str = "A2"
    readings: Readings = field(default_factory=Readings)


machine = Machine()


@dataclass(frozen=True)
class Rule:
    """One sentence of a document. ``holds`` takes the arguments by name."""

    operator: str
    name: str
    source: str
    holds: Callable[[Any], bool]
    families: tuple[str, ...] = EVERY


def _rule(
    operator: str, name: str, source: str, holds: Callable[[Any], bool], families: tuple[str, ...] = EVERY
) -> Rule:
    return Rule(operator, name, SOURCES[source], holds, families)


def _power_of_two(n: int, low: int, high: int) -> bool:
    return low <= n <= high and n & (n - 1) == 0


def _ascending(t: Tensor) -> bool:
    return bool((t.diff() >= 0).all()) and bool((t >= 0).all())


HALF = (torch.bfloat16, torch.float16)
SFA, KV_QUANT = "npu_sparse_flash_attention", "npu_kv_quant_sparse_flash_attention"

_BOTH = (
    ("queries are TND", lambda a: a.layout_query == "TND" and a.query.dim() == 3),
    ("queries are contiguous", lambda a: a.query.is_contiguous()),
    ("query type", lambda a: a.query.dtype in HALF),
    ("pages", lambda a: a.layout_kv == "PA_BSND" and a.key.dim() == 4),
    ("one kv head", lambda a: a.key.shape[2] == 1),
    ("page size", lambda a: 16 <= a.key.shape[1] <= 1024 and a.key.shape[1] % 16 == 0),
    ("indices shape", lambda a: a.sparse_indices.shape[:2] == (a.query.shape[0], 1) and a.sparse_indices.shape[2] > 0),
    ("indices type", lambda a: a.sparse_indices.dtype == torch.int32),
    ("indices are contiguous", lambda a: a.sparse_indices.is_contiguous()),
    ("query lengths", lambda a: a.actual_seq_lengths_query is not None and _int32(a.actual_seq_lengths_query)),
    ("query lengths ascend", lambda a: _ascending(a.actual_seq_lengths_query)),
    ("query lengths end in T", lambda a: _last(a.actual_seq_lengths_query) <= a.query.shape[0]),
    ("kv lengths", lambda a: a.actual_seq_lengths_kv is not None and _int32(a.actual_seq_lengths_kv)),
    ("kv lengths, one each", lambda a: a.actual_seq_lengths_kv.shape == a.actual_seq_lengths_query.shape),
    ("kv lengths from 0 on", lambda a: bool((a.actual_seq_lengths_kv >= 0).all())),
    ("block table", lambda a: a.block_table is not None and a.block_table.dtype == torch.int32),
    ("block table, a row each", lambda a: a.block_table.shape[0] == len(a.actual_seq_lengths_kv)),
    ("block table width", lambda a: _wide_enough(a.block_table, a.actual_seq_lengths_kv, a.key.shape[1])),
    ("sparse mode", lambda a: a.sparse_mode in (0, 3)),
    ("attention mode", lambda a: a.attention_mode == 2),
    ("tokens before and after", lambda a: a.pre_tokens == a.next_tokens == 2**63 - 1),
)


def _int32(t: Tensor) -> bool:
    return t.dim() == 1 and t.dtype == torch.int32


def _last(t: Tensor) -> int:
    return int(t[-1]) if len(t) else 0


def _wide_enough(table: Tensor, lengths: Tensor, page: int) -> bool:
    longest = int(lengths.max()) if len(lengths) else 0
    return table.dim() == 2 and table.shape[1] >= -(-longest // page)


RULES: tuple[Rule, ...] = (
    *(_rule(SFA, name, "sfa", holds) for name, holds in _BOTH),
    _rule(SFA, "query heads", "sfa", lambda a: _power_of_two(a.query.shape[1], 1, 128), ARCH22),
    _rule(SFA, "512 and 64", "sfa", lambda a: a.query.shape[2] == a.key.shape[3] == 512 and _ropes(a)),
    _rule(SFA, "one type", "sfa", lambda a: a.query.dtype == a.key.dtype == a.value.dtype == a.key_rope.dtype),
    _rule(SFA, "rows are contiguous", "sfa", lambda a: a.key.is_contiguous() and a.value.is_contiguous()),
    _rule(SFA, "ropes are contiguous", "sfa", lambda a: a.query_rope.is_contiguous() and a.key_rope.is_contiguous()),
    _rule(SFA, "values are the rows", "sfa", lambda a: a.value.data_ptr() == a.key.data_ptr()),
    _rule(SFA, "block", "sfa", lambda a: _power_of_two(a.sparse_block_size, 1, 128), ARCH22),
    _rule(SFA, "block divides a page", "sfa", lambda a: a.key.shape[1] % a.sparse_block_size == 0, ARCH22),
    _rule(SFA, "block of 1", "sfa kernel", lambda a: a.sparse_block_size == 1, ARCH35),
    _rule(SFA, "no LSE with pages", "sfa", lambda a: not a.return_softmax_lse),
    _rule(SFA, "no sinks", "sfa", lambda a: a.sinks is None, ARCH22),
    *(_rule(KV_QUANT, name, "kv_quant", holds) for name, holds in _BOTH),
    _rule(KV_QUANT, "query heads", "kv_quant", lambda a: _power_of_two(a.query.shape[1], 1, 128), ARCH22),
    _rule(
        KV_QUANT,
        "query heads of 950",
        "kv_quant",
        lambda a: _power_of_two(a.query.shape[1], 1, 128) or a.query.shape[1] == 48,
        ARCH35,
    ),
    _rule(KV_QUANT, "576 and 656", "kv_quant", lambda a: (a.query.shape[2], a.key.shape[3]) == (576, 656)),
    _rule(KV_QUANT, "int8 rows", "kv_quant", lambda a: a.key.dtype == a.value.dtype == torch.int8, ARCH22),
    _rule(KV_QUANT, "rows are contiguous", "kv_quant", lambda a: a.key.is_contiguous(), ARCH22),
    _rule(KV_QUANT, "only pages may lie apart", "kv_quant", lambda a: a.key[:1].is_contiguous(), ARCH35),
    _rule(KV_QUANT, "quant mode", "kv_quant", lambda a: a.key_quant_mode == a.value_quant_mode == 2),
    _rule(KV_QUANT, "scales in the row", "kv_quant", lambda a: a.quant_scale_repo_mode == 1),
    _rule(KV_QUANT, "no scales apart", "kv_quant", lambda a: a.key_dequant_scale is a.value_dequant_scale is None),
    _rule(KV_QUANT, "tile", "kv_quant", lambda a: a.tile_size == 128),
    _rule(KV_QUANT, "rope", "kv_quant", lambda a: a.rope_head_dim == 64),
    _rule(KV_QUANT, "block", "kv_quant", lambda a: _power_of_two(a.sparse_block_size, 1, 16), ARCH22),
    _rule(KV_QUANT, "block of 1", "kv_quant", lambda a: a.sparse_block_size == 1, ARCH35),
)


SMLA, SMLA_METADATA = "npu_sparse_flash_mla", "npu_sparse_flash_mla_metadata"


def _allowed_ratio(a: Any) -> bool:
    """On A2 and A3, before and since V4.1."""
    if a.cmp_kv is None:
        return a.cmp_ratio == (0 if machine.readings.smla_knows_v41 else 1)
    if a.cmp_sparse_indices is None:
        return a.cmp_ratio == 128
    return a.cmp_ratio in ((1, 2, 4) if machine.readings.smla_knows_v41 else (4,))


def _planes(a: Any) -> list[Tensor]:
    return [plane for plane in (a.ori_kv, a.cmp_kv) if plane is not None]


def _tables(a: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(table, lengths, plane) of each plane."""
    found = [(a.ori_block_table, a.seqused_ori_kv, a.ori_kv)]
    if a.cmp_kv is not None:
        found.append((a.cmp_block_table, a.seqused_cmp_kv, a.cmp_kv))
    return found


def _a_length_each(a: Any) -> bool:
    lengths = [a.seqused_ori_kv, *([a.seqused_cmp_kv, a.cmp_residual_kv] if a.cmp_kv is not None else [])]
    return all(t is None or (_int32(t) and len(t) == len(a.cu_seqlens_q) - 1) for t in lengths)


MLA_RULES: tuple[tuple[str, str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("queries are TND", "smla", lambda a: a.layout_q == "TND" and a.q.dim() == 3, EVERY),
    ("pages", "smla", lambda a: a.layout_kv == "PA_BBND" and all(p.dim() == 4 for p in _planes(a)), EVERY),
    ("a window", "smla", lambda a: a.ori_kv is not None, EVERY),
    ("type", "smla", lambda a: a.q.dtype in HALF and all(p.dtype == a.q.dtype for p in _planes(a)), EVERY),
    ("dimension", "smla", lambda a: all(t.shape[-1] == 512 for t in (a.q, *_planes(a))), EVERY),
    ("one kv head", "smla", lambda a: all(p.shape[2] == 1 for p in _planes(a)), EVERY),
    ("query heads", "smla", lambda a: _power_of_two(a.q.shape[1], 1, 128), ARCH22),
    ("query heads of 950", "smla", lambda a: _power_of_two(a.q.shape[1], 2, 128), ARCH35),
    ("page size", "smla", lambda a: all(p.shape[1] <= 1024 and p.shape[1] % 16 == 0 for p in _planes(a)), ARCH22),
    ("page size of 950", "smla", lambda a: all(1 <= p.shape[1] <= 1024 for p in _planes(a)), ARCH35),
    ("only pages may lie apart", "smla stride", lambda a: all(p[:1].is_contiguous() for p in _planes(a)), EVERY),
    ("no window indices", "smla", lambda a: a.ori_sparse_indices is None, EVERY),
    ("no counts", "smla", lambda a: a.ori_topk_length is None and a.cmp_topk_length is None, EVERY),
    ("query starts", "smla", lambda a: a.cu_seqlens_q is not None and _int32(a.cu_seqlens_q), EVERY),
    ("query starts ascend", "smla", lambda a: a.cu_seqlens_q[0] == 0 and _ascending(a.cu_seqlens_q), EVERY),
    ("query starts end in T", "smla", lambda a: _last(a.cu_seqlens_q) <= a.q.shape[0], EVERY),
    ("no query lengths", "smla", lambda a: a.seqused_q is None, EVERY),
    ("kv lengths", "smla", lambda a: a.seqused_ori_kv is not None, EVERY),
    ("lengths, one each", "smla", _a_length_each, EVERY),
    (
        "lengths from 0 on",
        "smla",
        lambda a: all(bool((n >= 0).all()) for _, n, _ in _tables(a) if n is not None),
        EVERY,
    ),
    ("block tables", "smla", lambda a: all(t is not None and t.dtype == torch.int32 for t, _, _ in _tables(a)), EVERY),
    (
        "block tables, a row each",
        "smla",
        lambda a: all(t.shape[0] == len(a.cu_seqlens_q) - 1 for t, _, _ in _tables(a)),
        EVERY,
    ),
    (
        "block table width",
        "smla",
        lambda a: all(n is None or _wide_enough(t, n, p.shape[1]) for t, n, p in _tables(a)),
        EVERY,
    ),
    ("a selection needs rows", "smla", lambda a: a.cmp_sparse_indices is None or a.cmp_kv is not None, EVERY),
    (
        "selection",
        "smla",
        lambda a: (
            a.cmp_sparse_indices is None
            or (a.cmp_sparse_indices.shape[:2] == (a.q.shape[0], 1) and a.cmp_sparse_indices.dtype == torch.int32)
        ),
        EVERY,
    ),
    (
        "selection width",
        "smla",
        lambda a: a.cmp_sparse_indices is None or a.cmp_sparse_indices.shape[2] in (512, 1024),
        ARCH22,
    ),
    ("ratio", "smla ratios", _allowed_ratio, ARCH22),
    ("ratio of 950", "smla", lambda a: a.cmp_kv is None or 1 <= a.cmp_ratio <= 128, ARCH35),
    ("residual", "smla", lambda a: a.cmp_kv is None or a.cmp_ratio == 1 or a.cmp_residual_kv is not None, EVERY),
    ("mask of the window", "smla", lambda a: a.ori_mask_mode == 4, ARCH22),
    ("mask of compressed rows", "smla", lambda a: a.cmp_mask_mode == 3, ARCH22),
    ("window", "smla", lambda a: (a.ori_win_left, a.ori_win_right) == (127, 0), ARCH22),
    ("window of 950", "smla", lambda a: a.ori_win_left >= -1 and a.ori_win_right >= -1, ARCH35),
    ("sinks", "smla", lambda a: a.sinks is not None, ARCH22),
    ("sinks, one a head", "smla", lambda a: a.sinks is None or a.sinks.shape == (a.q.shape[1],), EVERY),
    ("top-k mode", "smla", lambda a: a.topk_value_mode == 1, EVERY),
    ("metadata", "smla", lambda a: a.metadata is not None and a.metadata.shape == (1024,), EVERY),
    ("metadata of this call", "smla pair", lambda a: int(a.metadata[0]) == _mark(a, a.q.shape[1]), EVERY),
)
RULES += tuple(_rule(SMLA, name, source, holds, families) for name, source, holds, families in MLA_RULES)

MARKED = ("cu_seqlens_q", "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv", "cmp_ratio", "ori_mask_mode")
MARKED += ("cmp_mask_mode", "ori_win_left", "ori_win_right", "layout_q", "layout_kv")


def _mark(a: Any, heads: int) -> int:
    """A number that the arguments that both calls get determine."""
    values = [getattr(a, name) for name in MARKED]
    return hash((heads, *(tuple(v.tolist()) if isinstance(v, Tensor) else v for v in values))) & 0x7FFFFFFF


def npu_sparse_flash_mla_metadata(a: Any) -> Tensor:
    if (a.num_heads_kv, a.head_dim, a.has_ori_kv) != (1, 512, True):
        raise RuleBroken(f"{SMLA_METADATA}: one kv head of 512 and a window ({SOURCES['smla']})")
    if a.batch_size != len(a.cu_seqlens_q) - 1 or a.has_cmp_kv != (a.seqused_cmp_kv is not None):
        raise RuleBroken(f"{SMLA_METADATA}: batch size, or rows without lengths ({SOURCES['smla pair']})")
    bounds = [(a.max_seqlen_q, a.cu_seqlens_q.diff()), (a.max_seqlen_ori_kv, a.seqused_ori_kv)]
    if a.has_cmp_kv:
        bounds.append((a.max_seqlen_cmp_kv, a.seqused_cmp_kv))
    if any(len(lengths) and int(lengths.max()) > bound for bound, lengths in bounds):
        raise RuleBroken(f"{SMLA_METADATA}: a length past its bound ({SOURCES['smla']})")
    schedule = torch.zeros(1024, dtype=torch.int32)
    schedule[0] = _mark(a, a.num_heads_q)
    return schedule


def npu_sparse_flash_mla(a: Any) -> tuple[Tensor, Tensor]:
    out = torch.full(a.q.shape, NAN)
    starts = a.cu_seqlens_q.tolist()
    sinks = torch.full((a.q.shape[1],), -1e30) if a.sinks is None else a.sinks.float()
    for b, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        tile = max(1, 128 // a.q.shape[1])
        for i in range(end - start):
            threshold = int(a.seqused_ori_kv[b]) - (end - start) + i + 1
            low, high = max(threshold - a.ori_win_left - 1, 0), threshold + a.ori_win_right
            entries = range(low, min(high, int(a.seqused_ori_kv[b])))
            rows = [row_at(a.ori_kv, a.ori_block_table[b], e, SMLA) for e in entries]
            first = start + i - i % tile
            chosen = [] if a.cmp_kv is None else _compressed_entries(a, b, start + i, first, end - start, i)
            if chosen is None:
                continue
            rows += [row_at(a.cmp_kv, a.cmp_block_table[b], e, SMLA) for e in chosen]
            if rows:
                keys = torch.stack(rows).float()
                scores = torch.cat([a.q[start + i].float() @ keys.T * a.softmax_scale, sinks[:, None]], -1)
                out[start + i] = torch.softmax(scores, -1)[:, :-1] @ keys
            else:
                out[start + i] = 0
    return out.to(a.q.dtype), torch.full((0,), NAN)


def _compressed_entries(a: Any, b: int, t: int, first: int, queries: int, i: int) -> list[int] | None:
    """Compressed rows of query row ``t``; None where columns are attended that were never written
    (``SOURCES["smla kernel"]``)."""
    residual = 0 if a.cmp_residual_kv is None else int(a.cmp_residual_kv[b])
    length = int(a.seqused_cmp_kv[b])
    limit = min(max((length * a.cmp_ratio + residual - queries + i + 1) // a.cmp_ratio, 0), length)
    if a.cmp_sparse_indices is None:
        return list(range(limit))
    valid = packed(a.cmp_sparse_indices[t, 0].tolist())
    counted = packed(a.cmp_sparse_indices[first, 0].tolist())
    if valid is None or counted is None:
        return None
    columns = min(limit, a.cmp_sparse_indices.shape[2])
    if machine.readings.smla_counts != "never":
        own = machine.readings.smla_counts == "each row"
        columns = min(columns, len(valid) if own else len(counted))
    read = valid[:columns]
    return None if len(read) < columns or any(e >= limit for e in read) else read


LI = "npu_lightning_indexer"

RULES += tuple(
    _rule(LI, name, "li", holds, families)
    for name, holds, families in (
        ("queries are TND", lambda a: a.layout_query == "TND" and a.query.dim() == 3, EVERY),
        ("contiguous", lambda a: all(t.is_contiguous() for t in (a.query, a.key, a.weights)), EVERY),
        ("type", lambda a: a.query.dtype in HALF and a.key.dtype == a.query.dtype, EVERY),
        ("weights", lambda a: a.weights.shape == a.query.shape[:2], EVERY),
        ("weights' type", lambda a: a.weights.dtype in (a.query.dtype, torch.float32), ARCH22),
        ("weights' type on 950", lambda a: a.weights.dtype == a.query.dtype, ARCH35),
        ("pages", lambda a: a.layout_key == "PA_BSND" and a.key.dim() == 4, EVERY),
        ("one key head", lambda a: a.key.shape[2] == 1, EVERY),
        ("dimension", lambda a: a.query.shape[2] == a.key.shape[3] == 128, EVERY),
        ("page size", lambda a: 16 <= a.key.shape[1] <= 1024 and a.key.shape[1] % 16 == 0, EVERY),
        ("query heads", lambda a: 1 <= a.query.shape[1] <= 64, ARCH22),
        ("query heads of 950", lambda a: a.query.shape[1] in (8, 16, 24, 32, 64), ARCH35),
        ("query lengths", lambda a: a.actual_seq_lengths_query is not None, EVERY),
        ("query lengths ascend", lambda a: _ascending(a.actual_seq_lengths_query), EVERY),
        ("query lengths end in T", lambda a: _last(a.actual_seq_lengths_query) <= a.query.shape[0], EVERY),
        ("key lengths", lambda a: a.actual_seq_lengths_key is not None and _int32(a.actual_seq_lengths_key), EVERY),
        ("key lengths, one each", lambda a: len(a.actual_seq_lengths_key) == len(a.actual_seq_lengths_query), EVERY),
        ("key lengths from 0 on", lambda a: bool((a.actual_seq_lengths_key >= 0).all()), EVERY),
        ("block table", lambda a: a.block_table is not None and a.block_table.dtype == torch.int32, EVERY),
        ("block table, a row each", lambda a: a.block_table.shape[0] == len(a.actual_seq_lengths_key), EVERY),
        (
            "block table width",
            lambda a: _wide_enough(a.block_table, a.actual_seq_lengths_key, a.key.shape[1]),
            EVERY,
        ),
        ("count", lambda a: 1 <= a.sparse_count <= 2048 or a.sparse_count in range(3072, 8193, 1024), EVERY),
        ("sparse mode", lambda a: a.sparse_mode in (0, 3), EVERY),
        ("tokens before and after", lambda a: a.pre_tokens == a.next_tokens == 2**63 - 1, EVERY),
        ("no values with pages", lambda a: not a.return_value, EVERY),
    )
)


QLI = "npu_quant_lightning_indexer"
OF_LI_ALONE = ("type", "weights' type", "weights' type on 950", "contiguous", "count", "no values with pages")
QUANTISED = (torch.int8, torch.float8_e4m3fn)

RULES += tuple(
    Rule(QLI, rule.name, SOURCES["qli"], rule.holds, rule.families)
    for rule in RULES
    if rule.operator == LI and rule.name not in OF_LI_ALONE
)
RULES += tuple(
    _rule(QLI, name, "qli", holds, families)
    for name, holds, families in (
        ("contiguous", lambda a: all(t.is_contiguous() for t in (a.query, a.weights, a.query_dequant_scale)), EVERY),
        ("type", lambda a: a.query.dtype == a.key.dtype == torch.int8, ARCH22),
        ("type on 950", lambda a: a.query.dtype == a.key.dtype and a.key.dtype in QUANTISED, ARCH35),
        ("float16 with int8", lambda a: a.query.dtype != torch.int8 or _halves(a), EVERY),
        ("scales of queries", lambda a: a.query_dequant_scale.shape == a.query.shape[:2], EVERY),
        ("scales of keys", lambda a: a.key_dequant_scale.shape == a.key.shape[:3], EVERY),
        ("quant mode", lambda a: a.query_quant_mode == a.key_quant_mode == 0, EVERY),
        ("count", lambda a: 1 <= a.sparse_count <= 2048, EVERY),
        ("weights times scales fit float16", lambda a: _product_of(a).half().isfinite().all(), EVERY),
    )
)


def _halves(a: Any) -> bool:
    return all(t.dtype == torch.float16 for t in (a.weights, a.query_dequant_scale, a.key_dequant_scale))


def _product_of(a: Any) -> Tensor:
    """Weights times scales of the rows that belong to a batch: what lies in others is not read."""
    product = a.weights.float() * a.query_dequant_scale.float()
    return product[: _last(a.actual_seq_lengths_query)]


def npu_quant_lightning_indexer(a: Any) -> Tensor:
    product = _product_of(a)
    weights = product.half().float() if machine.readings.quant_weights == "fp16" else product

    def score(t: int, table: Tensor, entries: range) -> Tensor:
        keys = torch.stack([row_at(a.key, table, e, QLI) for e in entries]).float()
        scales = torch.stack([row_at(a.key_dequant_scale[..., None], table, e, QLI) for e in entries])[:, 0].float()
        return weights[t] @ torch.relu(a.query[t].float() @ keys.T * scales)

    return _best(a, score)


def npu_lightning_indexer(a: Any) -> tuple[Tensor, Tensor]:
    def score(t: int, table: Tensor, entries: range) -> Tensor:
        keys = torch.stack([row_at(a.key, table, e, LI) for e in entries]).float()
        return a.weights[t].float() @ torch.relu(a.query[t].float() @ keys.T)

    return _best(a, score), torch.full((0,), NAN)


def _best(a: Any, score: Callable[[int, Tensor, range], Tensor]) -> Tensor:
    """Lists in the order of scores; rows of no batch hold what was there, which may well look like a list. So do rows
    with a score that is NaN, the order of which is undefined (``SOURCES["qli"]``)."""
    out = torch.arange(a.sparse_count, dtype=torch.int32).repeat(len(a.query), 1, 1)
    start = 0
    for b, end in enumerate(a.actual_seq_lengths_query.tolist()):
        length = int(a.actual_seq_lengths_key[b])
        for t in range(start, end):
            limit = length if a.sparse_mode == 0 else max(length - (end - t) + 1, 0)
            scores = score(t, a.block_table[b], range(limit)) if limit else torch.zeros(0)
            if scores.isnan().any():
                continue
            out[t] = -1
            if limit:
                order = scores.sort(descending=True, stable=True).indices
                if machine.readings.last_of_equals:
                    order = scores.flip(0).sort(descending=True, stable=True).indices.neg() + limit - 1
                out[t, 0, : min(limit, a.sparse_count)] = order[: a.sparse_count].int()
        start = end
    return out


def _ropes(a: Any) -> bool:
    given = a.query_rope is not None and a.key_rope is not None
    return given and a.query_rope.shape == (*a.query.shape[:2], 64) and a.key_rope.shape == (*a.key.shape[:3], 64)


def obey(operator: str, arguments: Any) -> None:
    """Raise ``RuleBroken`` for the first rule of the operator on this chip that the arguments break."""
    for rule in RULES:
        if rule.operator == operator and machine.family in rule.families and not rule.holds(arguments):
            raise RuleBroken(f"{operator} on {machine.family}: {rule.name} ({rule.source})")


# what they compute


def row_at(plane: Tensor, table: Tensor, entry: int, operator: str) -> Tensor:
    """A row through the block table; the operators trust both, so that either out of range is a fault of memory."""
    page_size = plane.shape[1]
    if not 0 <= entry // page_size < len(table):
        raise RuleBroken(f"{operator}: entry {entry} lies past the block table ({SOURCES['issue 9616']})")
    page = int(table[entry // page_size])
    if not 0 <= page < len(plane):
        raise RuleBroken(f"{operator}: page {page} of {len(plane)} ({SOURCES['issue 9616']})")
    return plane[page, entry % page_size, 0]


def packed(row: list[int]) -> list[int] | None:
    """The valid indices of a row; None if one stands behind a -1, where operators read what an earlier call left."""
    valid = next((i for i, index in enumerate(row) if index < 0), len(row))
    return row[:valid] if all(index < 0 for index in row[valid:]) else None


def softmax(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return torch.softmax(q.float() @ keys.float().T * scale, -1) @ values.float()


def sparse_flash(a: Any, operator: str, q: Tensor, read: Callable[[int, int], Tensor], width: int) -> Tensor:
    """Rows of 576 elements, whose first 512 are the value. ``read(batch, entry)`` gives one."""
    out = torch.full((*q.shape[:2], width), NAN)
    start = 0
    for b, end in enumerate(a.actual_seq_lengths_query.tolist()):
        length = int(a.actual_seq_lengths_kv[b])
        for t in range(start, end):
            limit = length if a.sparse_mode == 0 else length - (end - start) + (t - start) + 1
            chosen = packed(a.sparse_indices[t, 0].tolist())
            if chosen is None:
                continue
            block = a.sparse_block_size
            entries = [i * block + o for i in chosen for o in range(block)]
            if any(e >= length + block for e in entries):
                raise RuleBroken(f"{operator}: index past the {length} tokens of batch {b} ({SOURCES['sfa kernel']})")
            entries = [e for e in entries if e < min(limit, length)]
            if not entries:
                continue  # SOURCES["issue 12833"]
            rows = torch.stack([read(b, e) for e in entries])
            out[t, :, :512] = softmax(q[t], rows, rows[:, :512], a.scale_value)
        start = end
    return out


def npu_sparse_flash_attention(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.cat([a.query, a.query_rope], -1)

    def read(b: int, entry: int) -> Tensor:
        table = a.block_table[b]
        return torch.cat([row_at(a.key, table, entry, SFA), row_at(a.key_rope, table, entry, SFA)])

    out = sparse_flash(a, SFA, q, read, 512).to(a.query.dtype)
    return out, torch.full((0,), NAN), torch.full((0,), NAN)


def npu_kv_quant_sparse_flash_attention(a: Any) -> Tensor:
    def read(b: int, entry: int) -> Tensor:
        row = row_at(a.key, a.block_table[b], entry, KV_QUANT)
        rope = row[512:640].contiguous().view(a.query.dtype).float()
        scales = row[640:656].contiguous().view(torch.float32)
        return torch.cat([row[:512].float() * scales.repeat_interleave(128), rope])

    return sparse_flash(a, KV_QUANT, a.query, read, machine.readings.kv_quant_width).to(a.query.dtype)


SCHEMAS = {
    SFA: (
        "npu",
        "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
        "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
        "str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int attention_mode=0, bool return_softmax_lse=False, "
        "Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
    ),
    KV_QUANT: (
        "npu",
        "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, int key_quant_mode, "
        "int value_quant_mode, *, Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
        "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
        "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, int? key_dtype=None, "
        "int? value_dtype=None) -> Tensor",
    ),
    QLI: (
        "npu",
        "(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, Tensor key_dequant_scale, "
        "int query_quant_mode, int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int? query_dtype=None, int? key_dtype=None) -> Tensor",
    ),
    LI: (
        "npu",
        "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
    ),
    SMLA: (
        "_C_ascend",
        "(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None, "
        "Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
        "Tensor? seqused_q=None, Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None, "
        "Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, "
        "Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=1., int cmp_ratio=1, int ori_mask_mode=4, "
        "int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', "
        "str layout_kv='PA_BBND', int topk_value_mode=1, bool return_softmax_lse=False) -> (Tensor, Tensor)",
    ),
    SMLA_METADATA: (
        "_C_ascend",
        "(int num_heads_q, int num_heads_kv, int head_dim, *, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, "
        "Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, "
        "Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, int batch_size=0, int max_seqlen_q=0, "
        "int max_seqlen_ori_kv=0, int max_seqlen_cmp_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=1, "
        "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', "
        "str layout_kv='PA_BBND', bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> Tensor",
    ),
}
"""Operator to the namespace that ships it and its schema there: as torch_npu 2.13 prints it, or as vllm-ascend's
sources and callers show it."""

COMPUTE: dict[str, Callable[[Any], Any]] = {
    SFA: npu_sparse_flash_attention,
    KV_QUANT: npu_kv_quant_sparse_flash_attention,
    LI: npu_lightning_indexer,
    QLI: npu_quant_lightning_indexer,
    SMLA: npu_sparse_flash_mla,
    SMLA_METADATA: npu_sparse_flash_mla_metadata,
}
