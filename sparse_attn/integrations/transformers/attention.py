"""The attention implementation: what transformers calls for masks and for each layer.

The keys and values of any cache are read where they lie: a batch of ``[B, heads, length, D]`` is a plane of B pages.
Causality and padding become ranges of entries, other masks lists of entries, and the lists that a model finds itself
(DeepSeek V3.2, GLM-5, MiniMax-M3) go to ``attend`` as they are. What cannot be computed exactly is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, eager_mask

from ... import attend, layout, select
from ...checks import InvalidCall, describe, expect

NAME = "sparse_attn"
FORMATS = {getattr(torch, layout.FORMATS[name].dtype): name for name in layout.PLAIN_FORMATS}

FROM_THE_FIRST_SLOT = ("deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text")
"""Models whose entries or blocks transformers counts from the first slot, a padded one too: their logits are wrong."""


@dataclass(frozen=True)
class Selection:
    """Which tokens a dense model attends: for each query token and KV head those with most attention, summed over the
    heads of the group, and always the first and the last.

    Args:
        ratio: share of the visible tokens that is attended, above 0 and at most 1.
        keep_first, keep_last: tokens at either end that are always attended, counted in the share.
        least: tokens that are attended at least, if there are so many.
        queries: attend sparsely in steps of at most so many query tokens (1: decoding only; 0: always).
    """

    ratio: float
    keep_first: int = 4
    keep_last: int = 32
    least: int = 256
    queries: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"Selection: ratio: expected a number above 0 and at most 1, got {self.ratio}")
        for name in ("keep_first", "keep_last", "least", "queries"):
            if getattr(self, name) < 0:
                raise ValueError(f"Selection: {name}: expected 0 or more, got {getattr(self, name)}")


def set_selection(model: nn.Module, selection: Selection | None) -> None:
    """Let the layers of a model with dense attention attend to a selection of the tokens; None: to all of them.

    Layers that select themselves, have a sliding window, or are not causal are left as they are.
    """
    given = selection is None or isinstance(selection, Selection)
    expect(given, "set_selection", "selection", "a Selection or None", type(selection).__name__)
    for module in model.modules():
        module.sparse_attn_selection = selection  # type: ignore[assignment]


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    config: Any = None,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Ranges of visible entries, int32 ``[B, 1, q_length, 2]``, where a plain causal mask is asked for; where a model
    reads its mask, or where it hides more, the mask of eager attention, ``[B, 1, q_length, kv_length]``.

    Both have 4 axes, so that transformers hands them on as they are.
    """
    kind = getattr(config, "model_type", "")
    if kind in FROM_THE_FIRST_SLOT and attention_mask is not None:
        padded = bool((attention_mask[:, 0] == 0).any())
        expected = f"no padding on the left for {kind}, whose blocks count from the first slot"
        do = "pad on the right" + (", or use a PagedCache" if kind == "deepseek_v4" else "")
        expect(not padded, "attention", "attention_mask", expected, "padding", do)
    if allow_is_causal_skip and mask_function is causal_mask_function and kv_offset == 0:
        ranges = causal_ranges(batch_size, q_length, q_offset, attention_mask, device)
        if ranges is not None:
            return ranges[:, None]
    made: Tensor | None = eager_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        config=config,
        **kwargs,
    )
    # None where all is visible. ``generate`` makes masks before it calls what it compiled
    if made is not None and not torch.compiler.is_compiling():
        made.sparse_attn_visible = visible_of(made, batch_size, q_length, kv_length)  # type: ignore[attr-defined]
    return made


def causal_ranges(
    batch: int, queries: int, offset: Any, padding: Tensor | None, device: torch.device | str
) -> Tensor | None:
    """``[first, position + 1)`` of every query token, with padding cut off at either side; None if there is padding in
    the middle."""
    high = (torch.arange(1, queries + 1, device=device) + offset).expand(batch, queries)
    low = torch.zeros_like(high)
    if padding is not None:
        real = padding.bool()
        first, count = real.int().argmax(-1), real.sum(-1)
        places = torch.arange(real.shape[1], device=real.device)
        whole = (places >= first[:, None]) & (places < (first + count)[:, None])
        if not torch.equal(whole, real):
            return None
        low = first[:, None].expand_as(high)
        high = torch.minimum(high, (first + count)[:, None])
    return torch.stack([low, torch.maximum(low, high)], -1).int()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer. See ``transformers.AttentionInterface``.

    Args:
        module: the layer.
        query: ``[B, Hq, S, D]``.
        key, value: ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``, of a cache or of this step.
        attention_mask: what ``mask`` gave, any mask of one head that only hides, or None.
        scaling: factor of the scores; default ``D ** -0.5``.

    Returns:
        ``[B, S, Hq, Dv]`` and None, as no weights are kept.

    Raises:
        InvalidCall: for what would need gradients, dropout, biases, soft caps, or returned weights.
    """
    for name in ("softcap", "position_bias", "sinks", "output_attentions", "head_mask"):
        given = kwargs.get(name)
        got = describe(given) if isinstance(given, Tensor) else given
        expect(given is None or given is False, "attention", name, "None", got, "use another implementation")
    expect(dropout == 0, "attention", "dropout", "0", dropout, "call model.eval()")
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    expect(not gradient, "attention", "query", "no gradient", "requires_grad", "use torch.no_grad()")
    batch, q_heads, queries, _ = query.shape
    entries = key.entries if isinstance(key, Paged) else dense_planes(key, value)
    length = entries.length
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

    indices, select_block = listed(module, kwargs, batch, queries)
    ranges, allowed = visible(attention_mask, batch, queries, length, causal, query.device)
    if allowed is not None:
        expect(indices is None, "attention", "attention_mask", "no holes with a selection", "holes")
        indices = allowed
    sequences: dict[str, Any] = dict(
        cu_seqlens_q=torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=query.device),
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=query.device),
        max_seqlen_q=queries,
        max_seq_len=length,
        page_table=entries.page_table,
        kv_range=ranges.flatten(0, 1).contiguous(),
    )
    q = query.transpose(1, 2).flatten(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    counts = None
    selection: Selection | None = getattr(module, "sparse_attn_selection", None)
    if selection is not None and indices is None and causal and kwargs.get("sliding_window") is None:
        chosen = choose(selection, q, entries.index, scale, sequences)
        if chosen is not None:
            indices, counts = chosen
    sinks = kwargs.get("s_aux")
    out = attend(
        q,
        **sequences,
        scale=scale,
        v_dim=value.shape[-1],
        kv=entries.keys.rows,
        kv_scale=entries.keys.scale,
        v=entries.values.rows,
        v_scale=entries.values.scale,
        format=entries.keys.format,
        v_format=entries.values.format,
        indices=indices,
        index_counts=counts,
        select_block=select_block,
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
    )
    assert isinstance(out, Tensor)
    return out.view(batch, queries, q_heads, -1), None


@dataclass
class Rows:
    """A plane ``[pages, page_size, heads, D]`` and, in formats that have one, its scale plane."""

    rows: Tensor
    format: str
    scale: Tensor | None = None

    @classmethod
    def zeros(cls, format: str, pages: int, page_size: int, heads: int, dim: int, device: torch.device) -> Rows:
        spec = layout.FORMATS[format]
        shape = spec.shape(pages, page_size, heads, dim)
        rows = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        scale = torch.zeros(shape[:3], dtype=torch.half, device=device) if spec.scale_dtype else None
        return cls(rows, format, scale)


@dataclass
class Entries:
    """Where keys and values of ``length`` tokens of one layer lie, and the rows that a selection scores."""

    keys: Rows
    values: Rows
    index: Rows
    page_table: Tensor
    length: int


class Paged(Tensor):
    """Keys or values of a step, ``[B, heads, S, D]``, of a layer whose tokens lie in ``entries``.

    A ``PagedCache`` hands them to ``attention``. What else computes with them would miss all earlier tokens: it is
    refused.
    """

    entries: Entries

    @classmethod
    def of(cls, rows: Tensor, entries: Entries) -> Paged:
        paged: Paged = Tensor._make_subclass(cls, rows.detach(), rows.requires_grad)
        paged.entries = entries
        return paged

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise InvalidCall(
            f"PagedCache: attention: expected {NAME!r}, which reads keys and values in their pages, got {func} on "
            "those of a step; call model.set_attn_implementation, or use the model's own cache"
        )


def dense_planes(key: Tensor, value: Tensor) -> Entries:
    """``[B, heads, L, D]`` as planes of B pages, without a copy where elements of a row lie together."""

    def plane(x: Tensor) -> Rows:
        x = x.transpose(1, 2)
        return Rows(x if x.stride(-1) == 1 else x.contiguous(), FORMATS[x.dtype])

    keys, table = plane(key), torch.arange(len(key), dtype=torch.int32, device=key.device)[:, None]
    return Entries(keys, plane(value), keys, table, key.shape[2])


def listed(module: nn.Module, kwargs: dict[str, Any], batch: int, queries: int) -> tuple[Tensor | None, int]:
    """The list that the model itself made for each query token, int32 ``[T, heads, K]``, and entries of a block."""
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if indices is not None:
        return indices.reshape(batch * queries, 1, -1).int(), 1
    if blocks is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if not isinstance(size, int):
            raise InvalidCall("attention: block_indices: expected a module with indexer.block_size, got none")
        return blocks.transpose(1, 2).flatten(0, 1).int(), size
    return None, 1


def visible(
    attention_mask: Tensor | None, batch: int, queries: int, length: int, causal: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Ranges of entries ``[B, S, 2]``, and lists of entries ``[T, 1, K]`` where a mask has holes."""
    if attention_mask is None:
        high = torch.full((queries,), length, device=device)
        if causal:
            high = high - torch.arange(queries - 1, -1, -1, device=device)
        ranges = torch.stack([torch.zeros_like(high), high], -1).int()
        return ranges.expand(batch, queries, 2), None
    if attention_mask.dtype == torch.int32 and attention_mask.shape[-1] == 2:
        return attention_mask[:, 0], None
    found = getattr(attention_mask, "sparse_attn_visible", None)  # layers share their masks
    if found is None:
        found = visible_of(attention_mask, batch, queries, length)
        attention_mask.sparse_attn_visible = found  # type: ignore[attr-defined]
    return found


def visible_of(attention_mask: Tensor, batch: int, queries: int, length: int) -> tuple[Tensor, Tensor | None]:
    shape = [*attention_mask.shape]
    ok = len(shape) == 4 and shape[0] in (1, batch) and shape[1] == 1 and shape[2] == queries and shape[3] >= length
    expect(ok, "attention", "attention_mask", f"[{batch}, 1, {queries}, {length}]", shape)
    kind = attention_mask.dtype
    known = kind == torch.bool or kind.is_floating_point
    expect(known, "attention", "attention_mask", "bool or a floating type", kind, "call .bool() on a mask of 0 and 1")
    seen = attention_mask[:, 0, :, :length].expand(batch, queries, length)
    if seen.dtype != torch.bool:
        hidden = seen <= torch.finfo(seen.dtype).min / 2
        only_hides = bool((hidden | (seen == 0)).all())
        expect(
            only_hides, "attention", "attention_mask", "a mask that only hides", "a bias", "use another implementation"
        )
        seen = ~hidden
    count = seen.sum(-1)
    low = seen.int().argmax(-1)
    high = length - seen.flip(-1).int().argmax(-1)
    high = torch.where(count > 0, high, low)
    ranges = torch.stack([low, high], -1).int()
    if torch.equal(high - low, count):
        return ranges, None
    most = int(count.max())
    order = torch.where(seen, torch.arange(length, device=seen.device), length).sort(-1).values[..., :most]
    lists = torch.where(order < length, order, -1).int()
    return ranges, lists.flatten(0, 1)[:, None]


def choose(
    selection: Selection, q: Tensor, index: Rows, scale: float, sequences: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Lists ``[T, Hkv, K]`` and their lengths; None where everything is attended."""
    if 0 < selection.queries < sequences["max_seqlen_q"]:
        return None
    ranges = sequences["kv_range"]
    count = (ranges[:, 1] - ranges[:, 0]).clamp(min=0)
    least = max(selection.least, selection.keep_first + selection.keep_last)
    budget = (count * selection.ratio).ceil().int().clamp(min=least)
    most = max(int(sequences["max_seq_len"] * selection.ratio) + 1, least)
    if most >= sequences["max_seq_len"]:
        return None
    chosen = select(
        q,
        None,
        keys=index.rows,
        key_scale=index.scale,
        format=index.format,
        k=most,
        scale=scale,
        **sequences,
        score="softmax_sum",
        out_heads=index.rows.shape[2],
        keep_first=selection.keep_first,
        keep_last=selection.keep_last,
        row_k=budget,
    )
    return chosen.indices, chosen.counts
