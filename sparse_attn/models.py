"""Layer plans of models as data: the planes each layer owns and reads, and how it selects. Imports no torch.

Draft (multi-token prediction) layers are left out. Heads are those of the whole model, not of a tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from .layout import FORMATS

BF16 = {"main": "bf16", "window": "bf16", "index": "bf16"}
"""A choice of formats: nothing quantised."""

OWNERS = ("kv_owner", "index_owner", "selection_owner", "candidate_owner")
"""Fields of a layer that are numbers of layers."""

SELECT_ARGUMENTS = (
    *("k", "out_heads", "keep_first", "keep_last"),
    *("score", "score_dtype", "pool", "span", "bounds", "tail"),
)
"""Fields of a selection that are arguments of ``select``."""


@dataclass(frozen=True)
class Plane:
    """A paged plane of one layer.

    ``kind`` is ``"main"`` (what attention reads), ``"window"`` (raw rows of the last tokens), ``"index"`` (what a
    selector reads) or ``"state"`` (a compressor's incomplete groups). An entry stands for ``ratio`` tokens and holds,
    for each of ``heads``, rows of so many elements: ``(512,)``, or ``(128, 128)`` for keys and values apart. A plane
    with ``entries`` keeps that many of a sequence; without, it grows with the sequence.
    """

    kind: str
    rows: tuple[int, ...]
    format: str
    heads: int = 1
    ratio: int = 1
    entries: int = 0

    def entry_bytes(self, format: str = "") -> int:
        """Bytes of one entry, all heads and scales included, in ``format`` (default: the plane's own)."""
        name = format or self.format
        allowed = [f.name for f in FORMATS.values() if f.use == "kv" or self.kind == "index"]
        if name not in allowed:
            raise ValueError(f"format of a {self.kind} plane: expected one of {', '.join(allowed)}, got {name!r}")
        return self.heads * sum(FORMATS[name].entry_bytes(row) for row in self.rows)


@dataclass(frozen=True)
class Selection:
    """How the list of indices of a query token is found.

    ``k`` indices, each of ``block`` entries of the main plane, in one list for all heads, or in ``out_heads`` of them:
    one per KV head or per query head. ``heads`` index queries of ``dim`` elements score, each with a weight of the
    model's if ``weighted``. The first ``keep_first`` and the last ``keep_last`` indices are always in the list and
    count in ``k``. In two levels: ``candidate_k`` blocks of ``candidate_block`` index entries are found once, and later
    selections are made among their entries. With a ``share``, a row's budget is this share of what it may select,
    rounded up, and ``k`` if that is less. The other fields are arguments of ``select`` by their names.
    """

    k: int
    heads: int
    dim: int
    out_heads: int = 1
    block: int = 1
    keep_first: int = 0
    keep_last: int = 0
    candidate_k: int = 0
    candidate_block: int = 0
    weighted: bool = False
    score: str = "relu_sum"
    score_dtype: str = "fp32"
    pool: str = "none"
    span: int = 0
    bounds: bool = False
    tail: str = "none"
    share: Fraction | None = None


@dataclass(frozen=True)
class Layer:
    """One attention layer, as ``attend`` sees it: MLA in the absorbed form, ``qk_dim`` 576 and ``v_dim`` 512.

    Owners are numbers of layers, this one or an earlier one; None where there is nothing to own.

    * ``kv_owner``: whose main plane it attends to. None: a window and no more.
    * ``index_owner``: whose index plane it scores. None: it scores nothing.
    * ``selection_owner``: whose list of indices it attends by. None: it attends to every visible entry.
    * ``candidate_owner``: whose candidate blocks restrict its selection. The owner itself is not restricted by them.

    A layer with ``attends_index`` also attends to every visible entry of its index plane, which holds values too. A
    ``window`` without a window plane is read from the main plane.
    """

    number: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    planes: tuple[Plane, ...]
    window: int = 0
    sinks: bool = False
    selection: Selection | None = None
    kv_owner: int | None = None
    index_owner: int | None = None
    selection_owner: int | None = None
    candidate_owner: int | None = None
    attends_index: bool = False

    @property
    def kind(self) -> str:
        """``"window"``, ``"dense"``, ``"full"`` (selects by its own index plane), ``"reindex"`` (selects anew by
        another layer's) or ``"reuse"`` (attends by another layer's list). All but the first may have a window too."""
        if self.kv_owner is None:
            return "window"
        if self.selection_owner is None:
            return "dense"
        if self.selection_owner != self.number:
            return "reuse"
        return "full" if self.index_owner == self.number else "reindex"

    @property
    def reads(self) -> dict[str, int]:
        """The layer that owns the plane, for each kind of plane that this layer reads."""
        owners: dict[str, int | None] = {plane.kind: self.number for plane in self.planes}
        owners |= {"main": self.kv_owner, "index": self.index_owner}
        return {kind: owner for kind, owner in owners.items() if owner is not None}


@dataclass(frozen=True)
class Model:
    """The attention layers of a model."""

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            if layer.number != number:
                raise ValueError(f"{self.name}: layer {number}: expected this number, got {layer.number}")
            for kind, owner in layer.reads.items():
                if owner > number or all(plane.kind != kind for plane in self.layers[owner].planes):
                    raise ValueError(f"{self.name}: layer {number}: expected a layer with {kind} plane, got {owner}")
            if (layer.selection is None) != (layer.selection_owner is None):
                raise ValueError(f"{self.name}: layer {number}: expected a selection together with its owner, got one")

    def by_kind(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the layers of each kind."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        return {kind: tuple(layer.number for layer in self.layers if layer.kind == kind) for kind in kinds}

    def plane(self, kind: str, number: int) -> Plane:
        """The plane of this kind that layer ``number`` reads, its own or another's; of two states the first."""
        owner = self.layers[self.layers[number].reads[kind]]
        return next(plane for plane in owner.planes if plane.kind == kind)

    def readers(self, kind: str, owner: int) -> tuple[int, ...]:
        """Numbers of the layers that read the plane of this kind that layer ``owner`` owns."""
        return tuple(layer.number for layer in self.layers if layer.reads.get(kind) == owner)

    def select_arguments(self, number: int) -> dict[str, Any]:
        """What layer ``number``, which has an index owner, passes to ``select`` besides tensors, scale and lengths."""
        layer, index = self.layers[number], self.plane("index", number)
        selection = layer.selection
        assert selection is not None
        found = {f.name: getattr(selection, f.name) for f in fields(selection) if f.name in SELECT_ARGUMENTS}
        found |= dict(format=index.format, ratio=index.ratio)
        found["block"] = selection.block * self.plane("main", number).ratio // index.ratio
        if layer.candidate_owner is not None:
            found["candidate_block"] = selection.candidate_block
        if layer.candidate_owner == number:
            found["candidate_k"] = selection.candidate_k
        return found

    def attend_arguments(self, number: int) -> dict[str, Any]:
        """What layer ``number`` passes to ``attend`` besides tensors, scale and lengths."""
        layer = self.layers[number]
        found: dict[str, Any] = dict(v_dim=layer.v_dim)
        if "window" in layer.reads:
            found |= dict(win_format=self.plane("window", number).format, window=layer.window)
        if "main" in layer.reads:
            main = self.plane("main", number)
            found |= dict(format=main.format, ratio=main.ratio)
        if layer.selection is not None:
            found["select_block"] = layer.selection.block
        return found

    def excerpt(self, numbers: Sequence[int]) -> Model:
        """The layers ``numbers`` (ascending) alone, numbered anew. The layers that own what they read must be there."""
        places = {number: place for place, number in enumerate(numbers)}

        def moved(number: int) -> Layer:
            layer = self.layers[number]
            there: dict[str, Any] = {"number": places[number]}
            for name in OWNERS:
                owner = getattr(layer, name)
                if owner is not None and owner not in places:
                    raise ValueError(f"{self.name}: layer {number}: expected its {name}, layer {owner}, in the excerpt")
                there[name] = None if owner is None else places[owner]
            return replace(layer, **there)

        return Model(self.name, tuple(map(moved, numbers)))

    def bytes_per_token(self, formats: Mapping[str, str] | None = None) -> dict[str, float]:
        """Bytes that a token adds to a sequence, by kind of plane; a compressed entry in parts of 1 / ratio.

        ``formats`` names another format than the planes' own for ``"main"``, ``"window"`` or ``"index"`` planes.
        ``sum(model.bytes_per_token().values())`` is the total.
        """
        found: dict[str, float] = {}
        for plane, size in self._sizes(formats):
            if not plane.entries:
                found[plane.kind] = found.get(plane.kind, 0) + size / plane.ratio
        return found

    def fixed_bytes(self, formats: Mapping[str, str] | None = None) -> dict[str, int]:
        """Bytes that a sequence needs whatever its length, by kind of plane; ``formats`` as above."""
        found: dict[str, int] = {}
        for plane, size in self._sizes(formats):
            if plane.entries:
                found[plane.kind] = found.get(plane.kind, 0) + size * plane.entries
        return found

    def _sizes(self, formats: Mapping[str, str] | None) -> list[tuple[Plane, int]]:
        """Every plane, with the bytes of an entry."""
        chosen = formats or {}
        if not isinstance(chosen, Mapping) or not chosen.keys() <= BF16.keys():
            got = ", ".join(map(str, chosen)) if isinstance(chosen, Mapping) else repr(chosen)
            raise ValueError(f"formats: expected names by {' or '.join(BF16)}, got {got}")
        planes = (plane for layer in self.layers for plane in layer.planes)
        return [(plane, plane.entry_bytes(chosen.get(plane.kind, ""))) for plane in planes]


def _last(numbers: Sequence[int], upto: int) -> int:
    return max(number for number in numbers if number <= upto)


def mla(
    name: str,
    layers: int,
    q_heads: int,
    selection: Selection | None = None,
    full: Sequence[int] = (),
    latent: int = 512,
    rope: int = 64,
    formats: tuple[str, str] = ("fp8_v32", "fp8_index"),
) -> Model:
    """MLA in the absorbed form; with a lightning indexer in the layers ``full``, the others of which attend by the
    list of the last of these. No ``selection``: dense. ``formats`` are those of the latents and the index keys.
    """

    main = Plane("main", (latent + rope,), formats[0])

    def layer(number: int) -> Layer:
        plain = Layer(number, q_heads, 1, latent + rope, latent, (main,), kv_owner=number)
        if selection is None:
            return plain
        if number in full:
            return _selecting(plain, Plane("index", (selection.dim,), formats[1]), selection)
        return replace(plain, selection=selection, selection_owner=_last(full, number))

    return Model(name, tuple(map(layer, range(layers))))


def deepseek_v4(
    name: str,
    ratios: Sequence[int],
    q_heads: int,
    selection: Selection,
    dim: int = 512,
    window: int = 128,
    overlapping: int = 4,
    formats: tuple[str, str] = ("fp8_v4", "fp4_index"),
) -> Model:
    """V4: every layer has a window; ratio ``overlapping`` selects, a larger one attends to every compressed entry.

    ``ratios`` of each layer (0: a window and no more). ``formats`` are those of KV entries and the index keys.
    """

    def layer(number: int, ratio: int) -> Layer:
        raw = Plane("window", (dim,), formats[0], entries=window)
        windowed = Layer(number, q_heads, 1, dim, dim, (raw,), window=window, sinks=True)
        if not ratio:
            return windowed
        main = Plane("main", (dim,), formats[0], ratio=ratio)
        # state rows are values and gate logits; overlapping groups are two, a half of each row for each
        wide, rows = (2, 2 * ratio) if ratio == overlapping else (1, ratio)
        state = Plane("state", (wide * dim, wide * dim), "fp32", entries=rows)
        dense = replace(windowed, planes=(raw, main, state), kv_owner=number)
        if ratio != overlapping:
            return dense
        index_state = Plane("state", (wide * selection.dim, wide * selection.dim), "fp32", entries=rows)
        full = replace(dense, planes=(*dense.planes, index_state))
        return _selecting(full, Plane("index", (selection.dim,), formats[1], ratio=ratio), selection)

    return Model(name, tuple(layer(number, ratio) for number, ratio in enumerate(ratios)))


def deepseek_v41(
    name: str,
    ratios: Sequence[int],
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int | None,
    q_heads: int = 64,
    window: int = 128,
    selection: Selection = Selection(
        512, 32, 128, candidate_k=2048, candidate_block=8, weighted=True, score_dtype="bf16"
    ),
) -> Model:
    """V4.1: a few layers own the KV and the index keys that all read, more of them select, one finds candidates.

    The arguments are those of the model's configuration: ``ratios`` of each layer (0: a window and no more),
    ``kv_sources``, ``index_sources`` (all KV sources among them), and ``candidate_source``, a KV source (None: no
    candidates), whose blocks of index entries restrict every later index source that scores them.
    """

    def layer(number: int, ratio: int) -> Layer:
        planes = [Plane("window", (512,), "fp8_v41", entries=window)]
        windowed = Layer(number, q_heads, 1, 512, 512, tuple(planes), window=window, sinks=True)
        if not ratio:
            return windowed
        if number in kv_sources:
            planes.append(Plane("main", (512,), "fp4_v41", ratio=ratio))
            planes.append(Plane("index", (selection.dim,), "fp4_index", ratio=ratio))
            if ratio > 1:  # value and gate logits of the tokens of an incomplete group
                planes.append(Plane("state", (512, 512), "fp32", entries=ratio - 1))
        kv_owner, selection_owner = _last(kv_sources, number), _last(index_sources, number)
        two_levels = candidate_source is not None and kv_owner == candidate_source
        return replace(
            windowed,
            planes=tuple(planes),
            selection=selection if two_levels else replace(selection, candidate_k=0, candidate_block=0),
            kv_owner=kv_owner,
            index_owner=kv_owner if number in index_sources else None,
            selection_owner=selection_owner,
            candidate_owner=candidate_source if two_levels and number in index_sources else None,
        )

    return Model(name, tuple(layer(number, ratio) for number, ratio in enumerate(ratios)))


def gqa(name: str, layers: int, q_heads: int, kv_heads: int, dim: int, format: str = "bf16") -> Model:
    """A dense model with grouped-query attention, as Llama and Qwen; ``format`` is that of keys and values."""
    main = Plane("main", (dim, dim), format, kv_heads)
    plan = (Layer(number, q_heads, kv_heads, dim, dim, (main,), kv_owner=number) for number in range(layers))
    return Model(name, tuple(plan))


@dataclass(frozen=True)
class Method:
    """A way to run a dense model sparsely, by an index plane with rows for each KV head.

    An index stands for ``block`` tokens. An entry of the index plane stands for ``ratio`` tokens and holds ``rows``
    rows of the head dimension. There is a list for each query head if ``per_query_head``, else for each KV head. The
    first ``dense_layers`` layers stay dense. The window is read from the main plane and does not count in k. With
    ``attends_index``, the index plane holds keys and values, and attention reads all that is visible of it. The other
    fields are arguments of ``select`` by their names.
    """

    block: int = 1
    ratio: int = 1
    rows: int = 1
    format: str = "bf16"
    per_query_head: bool = False
    keep_first: int = 0
    keep_last: int = 0
    window: int = 0
    attends_index: bool = False
    dense_layers: int = 0
    score: str = "softmax_sum"
    pool: str = "none"
    span: int = 0
    bounds: bool = False
    tail: str = "none"


METHODS: dict[str, Method] = {
    "tokens": Method(format="int8_index_h"),  # a quantised copy of each key
    # lower and upper bounds; decode only
    "quest": Method(
        16, 16, rows=2, per_query_head=True, keep_last=1, dense_layers=2, score="dot", bounds=True, tail="counted"
    ),
    "moba": Method(2048, 2048, per_query_head=True, keep_last=1, score="dot", tail="counted"),  # mean keys
    # keys and values compressed from spans of 32 tokens, which attention reads as well; three softmaxes
    "nsa": Method(
        64,
        16,
        rows=2,
        keep_first=1,
        keep_last=2,
        window=512,
        attends_index=True,
        pool="sum",
        span=32,
        tail="counted",
    ),
}


def sparse(model: Model, method: Method, k: int, share: Fraction | None = None) -> Model:
    """The dense ``model`` run by ``method``, with ``k`` indices (of ``method.block`` tokens each) in a list.

    With a ``share`` (0 to 1), lists have this share of what a row may select, and ``k`` indices at least.
    """
    planes = sorted({plane.kind for layer in model.layers for plane in layer.planes})
    if planes != ["main"]:
        raise ValueError(f"{model.name}: expected a dense model, with main planes alone, got {', '.join(planes)}")
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"{model.name}: k: expected at least 1 index, got {k}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"{model.name}: share: expected above 0 and at most 1, got {share}")

    def selecting(layer: Layer) -> Layer:
        index = Plane("index", (layer.qk_dim,) * method.rows, method.format, layer.kv_heads, method.ratio)
        heads = layer.q_heads if method.per_query_head else layer.kv_heads
        shared = {f.name: getattr(method, f.name) for f in fields(method) if f.name in SELECT_ARGUMENTS}
        selection = Selection(k, layer.q_heads, layer.qk_dim, heads, method.block, share=share, **shared)
        attending = replace(layer, window=method.window, attends_index=method.attends_index)
        return _selecting(attending, index, selection)

    first = method.dense_layers
    return Model(model.name, (*model.layers[:first], *map(selecting, model.layers[first:])))


def at_share(model: Model, share: Fraction) -> Model:
    """The model whose layers select this share (0 to 1) of what a row may select, and k indices at least."""
    if not 0 < share <= 1:
        raise ValueError(f"{model.name}: share: expected above 0 and at most 1, got {share}")
    chosen = (
        layer if layer.selection is None else replace(layer, selection=replace(layer.selection, share=share))
        for layer in model.layers
    )
    return Model(model.name, tuple(chosen))


def dense(model: Model) -> Model:
    """The model with every layer attending to all that is visible: how an engine runs it that has no sparse kernel."""

    def attending(layer: Layer) -> Layer:
        if layer.selection is None:
            return layer
        window = layer.window if "window" in layer.reads else 0
        return replace(
            layer,
            window=window,
            selection=None,
            index_owner=None,
            selection_owner=None,
            candidate_owner=None,
            attends_index=False,
        )

    return Model(model.name, tuple(map(attending, model.layers)))


def shard(model: Model, ranks: int) -> Model:
    """What one of ``ranks`` tensor-parallel ranks holds and computes.

    Query heads are split, KV heads and lists too until there is one of each in a rank. What serves all heads is whole
    in each rank: planes with one head, and the index queries of a list for all.
    """

    def part(what: str, heads: int) -> int:
        if max(heads, ranks) % min(heads, ranks):
            raise ValueError(
                f"{model.name}: ranks: expected a divisor or a multiple of the {heads} {what}, got {ranks}"
            )
        return max(heads // ranks, 1)

    def parted(layer: Layer) -> Layer:
        if ranks < 1 or layer.q_heads % ranks:
            raise ValueError(f"{model.name}: ranks: expected a divisor of the {layer.q_heads} query heads, got {ranks}")
        planes = tuple(replace(plane, heads=part("heads of a plane", plane.heads)) for plane in layer.planes)
        chosen = layer.selection
        if chosen is not None:
            lists = part("lists of indices", chosen.out_heads)
            chosen = replace(chosen, out_heads=lists, heads=chosen.heads * lists // chosen.out_heads)
        q_heads, kv_heads = layer.q_heads // ranks, part("KV heads", layer.kv_heads)
        return replace(layer, q_heads=q_heads, kv_heads=kv_heads, planes=planes, selection=chosen)

    return Model(model.name, tuple(map(parted, model.layers)))


def _selecting(layer: Layer, index: Plane, selection: Selection) -> Layer:
    """The layer with an index plane of its own, which it selects by."""
    planes, own = (*layer.planes, index), layer.number
    return replace(layer, planes=planes, selection=selection, index_owner=own, selection_owner=own)


def selecting(model: Model, numbers: Collection[int], selection: Selection, format: str = "bf16") -> Model:
    """The dense ``model`` whose layers ``numbers`` select by an index plane of their own, with a row for all heads."""
    index = Plane("index", (selection.dim,), format)
    chosen = (_selecting(layer, index, selection) if layer.number in numbers else layer for layer in model.layers)
    return Model(model.name, tuple(chosen))


PRESETS: dict[str, Model] = {
    model.name: model
    for model in (
        mla("deepseek-v3.2", 61, 128, Selection(2048, 64, 128, weighted=True), full=range(61)),
        deepseek_v4("deepseek-v4-flash", [0, 0, *[4, 128] * 20, 4], 64, Selection(512, 64, 128, weighted=True)),
        deepseek_v4("deepseek-v4-pro", [128, 128, *[4, 128] * 29, 4], 128, Selection(1024, 64, 128, weighted=True)),
        deepseek_v41(
            "deepseek-v4.1-flash",
            [0] * 2 + [2] * 18 + [1] * 20,
            kv_sources=(2, 8, 14, 20),
            index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
            candidate_source=20,
        ),
        mla("glm-5", 78, 64, Selection(2048, 32, 128, weighted=True), full=range(78)),
        mla("glm-5.2", 78, 64, Selection(2048, 32, 128, weighted=True), full=(0, 1, *range(2, 78, 4))),
        # three dense layers, then blocks of 128 tokens by index keys that all heads share
        selecting(
            gqa("minimax-m3", 60, 64, 4, 128),
            range(3, 60),
            Selection(16, 4, 128, out_heads=4, block=128, keep_last=1, score="dot", pool="max"),
        ),
        gqa("llama-3.1-8b", 32, 32, 8, 128),
        gqa("qwen3-8b", 36, 32, 8, 128),
        gqa("smollm2-135m", 30, 9, 3, 64),
    )
}
