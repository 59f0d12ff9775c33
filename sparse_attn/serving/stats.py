"""What attention reads and computes, from the lengths of sequences and a model's plan alone. Imports no torch.

Nothing is read back from a device, and nothing depends on values: ``docs/signals.md`` has the definitions, and says
what is exact. Costs are of attention and selection as ``sparse_attn`` runs them; projections are the model's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import accumulate
from math import ceil, lcm
from typing import Any, Protocol

from ..models import PRESETS, Layer, Model, Plane, Selection

Span = tuple[int, int]
"""Tokens of a sequence before and after a step: the step's query tokens are those between."""


# --- Rules: a number that depends on the tokens that a query token sees --------------------------------------------


class Rule(Hashable, Protocol):
    """A number for a query token that sees ``n`` tokens, itself included.

    From ``settled`` tokens on, it grows by the same amount each ``period`` tokens, whatever its remainder.
    """

    @property
    def settled(self) -> int: ...
    @property
    def period(self) -> int: ...
    def __call__(self, n: int) -> int: ...


@dataclass(frozen=True)
class Visible:
    """Visible entries of a plane: an entry covers ``strides`` strides of ``ratio`` tokens."""

    ratio: int
    strides: int = 1

    @property
    def settled(self) -> int:
        return self.ratio * self.strides

    @property
    def period(self) -> int:
        return self.ratio

    def __call__(self, n: int) -> int:
        return max(n // self.ratio - self.strides + 1, 0)


@dataclass(frozen=True)
class Window:
    """Tokens of a window."""

    size: int
    period: int = 1

    @property
    def settled(self) -> int:
        return self.size

    def __call__(self, n: int) -> int:
        return min(n, self.size)


@dataclass(frozen=True)
class Completed:
    """Entries that the token completes."""

    ratio: int
    settled: int = 1

    @property
    def period(self) -> int:
        return self.ratio

    def __call__(self, n: int) -> int:
        return int(n > 0 and n % self.ratio == 0)


@dataclass(frozen=True)
class Choice:
    """One selection. Its units are of ``unit`` entries of the main plane, and ``block`` strides of the index plane."""

    selection: Selection
    index_ratio: int
    main_ratio: int
    candidates: str
    """Whether the selection makes candidate blocks, takes them or has none."""

    @property
    def block(self) -> int:
        return self.selection.block * self.main_ratio // self.index_ratio

    @property
    def strides(self) -> int:
        return (self.selection.span or self.index_ratio) // self.index_ratio

    @property
    def settled(self) -> int:
        chosen, tokens = self.selection, self.index_ratio * self.block
        most = ceil(chosen.k / (chosen.share or 1)) + 2
        of_candidates = chosen.candidate_block * (chosen.candidate_k + 1) if self.candidates == "taken" else 0
        return max(tokens * most, self.index_ratio * of_candidates) + self.index_ratio * self.strides

    @property
    def period(self) -> int:
        share = self.selection.share
        units = self.index_ratio * self.block * (share.denominator if share else 1)
        return lcm(units, self.index_ratio * self.selection.candidate_block) if self.candidates == "taken" else units

    def entries(self, n: int) -> int:
        """Index entries that may be scored."""
        visible = Visible(self.index_ratio, self.strides)(n)
        size, most = self.selection.candidate_block, self.selection.candidate_k
        if self.candidates != "taken" or visible <= size * most:
            return visible
        return size * (most - 1) + (visible - 1) % size + 1  # the newest block is one of them, and may be incomplete

    def units(self, n: int) -> tuple[int, int]:
        """Units that may be selected, and those of them that hold no visible entry."""
        entries = self.entries(n)
        covered = -(-(entries + self.strides - 1) // self.block) if entries else 0
        every = covered if self.selection.tail == "none" else -(-n // (self.index_ratio * self.block))
        return max(covered, every), max(every - covered, 0)

    def selected(self, n: int) -> int:
        """Units that are selected."""
        chosen = self.selection
        units, tail = self.units(n)
        budget = chosen.k if chosen.share is None else max(chosen.k, ceil(chosen.share * units))
        return min(units, budget - (chosen.tail == "reserved" and not tail))


@dataclass(frozen=True)
class OfChoice:
    """What rules of a selection share: they are as regular as it is."""

    choice: Choice

    @property
    def settled(self) -> int:
        return self.choice.settled

    @property
    def period(self) -> int:
        return self.choice.period


@dataclass(frozen=True)
class Scored(OfChoice):
    """Index entries that a selection scores: none where all that may be selected fits."""

    def __call__(self, n: int) -> int:
        choice = self.choice
        fits = choice.candidates != "made" and choice.selected(n) == choice.units(n)[0]
        return 0 if fits else choice.entries(n)


@dataclass(frozen=True)
class Attended(OfChoice):
    """Entries of the main plane that a query token attends by a selection."""

    def __call__(self, n: int) -> int:
        choice, size = self.choice, self.choice.selection.block
        selected, (units, tail) = choice.selected(n), choice.units(n)
        if not selected or size == 1:
            return selected
        if selected < units and not tail and not choice.selection.keep_last:
            return selected * size  # whether the newest unit is among them depends on scores
        newest = n // choice.main_ratio - (units - 1) * size
        return (selected - 1) * size + min(max(newest, 0), size)


@dataclass(frozen=True)
class StateRead:
    """Rows of a compressor's state that entries are made of: those of tokens before the step.

    An entry is made of ``span`` tokens, the last of which completes it.
    """

    ratio: int
    span: int

    @property
    def settled(self) -> int:
        return self.span

    @property
    def period(self) -> int:
        return self.ratio

    def __call__(self, n: int) -> int:
        return min(self.span, n) - 1 if n and n % self.ratio == 0 else 0

    def step(self, before: int, after: int) -> int:
        first = (before // self.ratio + 1) * self.ratio  # tokens when the step's first entry is complete
        return max(before - max(first - self.span, 0), 0) if first <= after else 0


@dataclass(frozen=True)
class StateWritten:
    """Rows that a step leaves in a compressor's state, which keeps the last ``rows`` tokens."""

    rows: int
    settled: int = 1
    period: int = 1

    def __call__(self, n: int) -> int:
        return min(n, 1)

    def step(self, before: int, after: int) -> int:
        return min(after - before, self.rows)


class Table:
    """Values of a rule and their sums, for any number of tokens: a look-up, whatever the length."""

    def __init__(self, rule: Rule) -> None:
        self.start, self.period = rule.settled, rule.period
        self.values = [rule(n) for n in range(self.start + 2 * self.period)]
        self.sums = [*accumulate(self.values)]
        self.growth = self.values[self.start + self.period] - self.values[self.start]
        self.sum_of_period = self.sums[self.start + self.period] - self.sums[self.start]

    def at(self, lengths: Sequence[int]) -> int:
        """Sum over query tokens that see so many tokens."""
        values, start, period, growth = self.values, self.start, self.period, self.growth
        found = sum([values[n] for n in lengths if n < start])
        past = [n - start for n in lengths if n >= start]
        if period == 1:
            return found + values[start] * len(past) + growth * sum(past)
        return found + sum([values[start + n % period] + n // period * growth for n in past])

    def upto(self, lengths: Sequence[int]) -> int:
        """Sum over the first tokens of sequences, so many of each."""
        sums, start, period, growth, each = self.sums, self.start, self.period, self.growth, self.sum_of_period
        found = sum([sums[n] for n in lengths if n < start])
        past = [n - start for n in lengths if n >= start]
        if period == 1:
            total = sum(past)
            return found + sums[start] * len(past) + each * total + growth * (sum([n * n for n in past]) - total) // 2
        whole = [n // period for n in past]
        grown = [
            period * (times * (times - 1) // 2) + times * (n % period) for times, n in zip(whole, past, strict=True)
        ]
        return found + sum([sums[start + n % period] for n in past]) + each * sum(whole) + growth * sum(grown)

    def between(self, spans: Sequence[Span]) -> int:
        """Sum over the query tokens of spans."""
        return self.upto([after for _, after in spans]) - self.upto([before for before, _ in spans]) if spans else 0


LONGEST = 2**21
"""Tokens within which a rule must be regular: its table is as long."""


@cache
def table(rule: Rule) -> Table:
    return Table(rule)


# --- What a layer does, as sums of rules ---------------------------------------------------------------------------

Terms = dict[tuple[str, str], dict[Rule, int]]
"""For each count (field of ``Counts`` and key in it): the rules that make it up, each with its factor."""


def _terms(model: Model, layer: Layer, formats: Mapping[str, str]) -> Terms:
    found: Terms = {}

    def add(field: str, key: str, rule: Rule, factor: int) -> None:
        rules = found.setdefault((field, key), {})
        rules[rule] = rules.get(rule, 0) + factor

    def size(plane: Plane) -> int:
        return plane.entry_bytes(formats.get(plane.kind, ""))

    def read(key: str, rule: Rule, size: int, times: int = 1) -> None:
        add("read", key, rule, size * times)
        add("least_read", key, rule, size)

    def attend(kind: str, plane: Plane, rule: Rule, times: int = 1) -> None:
        add("pairs", kind, rule, 1)
        add("flops", "attend", rule, flops_a_pair)
        read(plane.kind, rule, size(plane), times)

    flops_a_pair = 2 * layer.q_heads * (layer.qk_dim + layer.v_dim)
    planes = {kind: model.plane(kind, layer.number) for kind in layer.reads}
    raw = planes.get("main") or planes["window"]
    tokens = Visible(1)
    add("pairs", "dense", tokens, 1)
    add("flops", "dense", tokens, flops_a_pair)
    read("dense", tokens, raw.entry_bytes("bf16"))
    if layer.window:
        attend("window", planes.get("window") or planes["main"], Window(layer.window))
    if "main" in planes and layer.selection_owner is None:
        attend("main", planes["main"], Visible(planes["main"].ratio))
    elif layer.selection_owner is not None:
        choice, lists = _choice(model, layer), model.layers[layer.selection_owner].selection
        assert lists is not None
        attend("main", planes["main"], Attended(choice), max(lists.out_heads // layer.kv_heads, 1))
        if layer.index_owner is not None:
            rows = len(planes["index"].rows) if layer.attends_index else 1  # the other rows are values
            add("pairs", "scored", Scored(choice), 1)
            products = lists.heads * lists.dim * (2 if lists.bounds else 1)
            add("flops", "select", Scored(choice), 2 * products)
            read("index", Scored(choice), size(planes["index"]) // rows)
        if layer.attends_index:
            attend("index", planes["index"], Visible(choice.index_ratio, choice.strides))
    for plane in layer.planes:
        if plane.kind == "state":
            ratio = planes["main"].ratio
            span = max(plane.entries, ratio)
            add("flops", "compress", Completed(ratio), 2 * ratio * plane.rows[0])
            read("state", StateRead(ratio, span), size(plane))
            add("written", "state", StateWritten(plane.entries), size(plane))
        else:
            add("written", plane.kind, Completed(plane.ratio), size(plane))
    return found


def _choice(model: Model, layer: Layer) -> Choice:
    """The selection that the layer attends by, its own or another layer's."""
    assert layer.selection_owner is not None
    owner = model.layers[layer.selection_owner]
    selection, index, main = owner.selection, model.plane("index", owner.number), model.plane("main", layer.number)
    assert selection is not None
    where = f"{model.name}: layer {owner.number}"
    if selection.block * main.ratio % index.ratio:
        tokens = selection.block * main.ratio
        raise ValueError(
            f"{where}: expected a block of whole index entries of {index.ratio} tokens, got {tokens} tokens"
        )
    restricted = owner.candidate_owner is not None
    if restricted and (selection.keep_first or selection.keep_last or selection.share or selection.block > 1):
        raise ValueError(f"{where}: candidates with keep_first, keep_last, share or blocks cannot be counted")
    made = owner.candidate_owner == owner.number
    return Choice(selection, index.ratio, main.ratio, "made" if made else "taken" if restricted else "none")


def _joined(many: Iterable[Terms]) -> Terms:
    found: Terms = {}
    for terms in many:
        for name, rules in terms.items():
            into = found.setdefault(name, {})
            for rule, factor in rules.items():
                into[rule] = into.get(rule, 0) + factor
    return found


# --- Counts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What steps did, summed over layers. Counts add up: ``a + b``.

    * ``sequences`` and ``tokens``: sequences in steps, and their query tokens.
    * ``pairs``: of one query head. ``"dense"``: what full attention attends. ``"scored"``: by the selector. ``"main"``,
      ``"window"``, ``"index"``: attended in this plane.
    * ``flops``: two for each multiplication and addition of matrix products, in ``"select"``, ``"attend"`` and
      ``"compress"``; ``"dense"``: in full attention.
    * ``read``: bytes by kind of plane, if each query token reads its own entries; ``least_read``: if the query tokens
      of a sequence share one reading, of what the last of them reads. A kernel lies between. ``"dense"``: by full
      attention on bf16 rows.
    * ``written``: bytes by kind of plane.
    """

    sequences: int = 0
    tokens: int = 0
    pairs: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    least_read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(_sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    @property
    def attended_pairs(self) -> int:
        """Pairs that are attended, in all planes."""
        return sum(self.pairs.get(plane, 0) for plane in ("main", "window", "index"))

    @property
    def effective_kv_ratio(self) -> float:
        """Attended pairs over dense pairs; 0 if there are none. Above 1 in short sequences that a layer attends both
        raw and compressed."""
        return _ratio(self.attended_pairs, self.pairs.get("dense", 0))

    @property
    def bytes_read(self) -> int:
        """``read`` of all planes."""
        return sum(size for kind, size in self.read.items() if kind != "dense")

    @property
    def read_ratio(self) -> float:
        """Bytes read over those that full attention reads on bf16 rows."""
        return _ratio(self.bytes_read, self.read.get("dense", 0))

    @property
    def flops_ratio(self) -> float:
        """FLOPs of selection, attention and compression over those of full attention."""
        dense = self.flops.get("dense", 0)
        return _ratio(sum(self.flops.values()) - dense, dense)

    @property
    def selection_flops_ratio(self) -> float:
        """The selector's share of the FLOPs of selection and attention."""
        select = self.flops.get("select", 0)
        return _ratio(select, select + self.flops.get("attend", 0))

    def to_dict(self) -> dict[str, Any]:
        """Counts and ratios, of plain types."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        found = ("attended_pairs", "bytes_read", *RATIOS)
        return counts | {name: getattr(self, name) for name in found}


RATIOS = ("effective_kv_ratio", "read_ratio", "flops_ratio", "selection_flops_ratio")
"""Properties of ``Counts`` that are ratios, 0 if there is nothing to count."""


def _sum(a: Any, b: Any) -> Any:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a | b} if isinstance(a, dict) else a + b


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class Counter:
    """Counts what a model's attention does in a step.

    Args:
        model: a plan, or the name of a preset. ``models.shard`` makes the plan of a tensor-parallel rank, and
            ``models.dense`` that of an engine which ignores selections.
        formats: other formats than the plan's own for ``"main"``, ``"window"`` or ``"index"`` planes.
    """

    def __init__(self, model: Model | str, formats: Mapping[str, str] | None = None) -> None:
        if isinstance(model, str) and model not in PRESETS:
            raise ValueError(f"model: expected a plan or one of {', '.join(PRESETS)}, got {model!r}")
        self.model = PRESETS[model] if isinstance(model, str) else model
        self.model.bytes_per_token(formats)  # refuses formats that do not fit
        self._layers = [_terms(self.model, layer, formats or {}) for layer in self.model.layers]
        self._whole = _joined(self._layers)
        rules = dict.fromkeys(rule for rules in self._whole.values() for rule in rules)
        long = max(rule.settled + rule.period for rule in rules)
        if long > LONGEST:
            raise ValueError(
                f"{self.model.name}: expected k and a share whose pattern is at most {LONGEST:,} tokens long, got "
                f"{long:,}; use a smaller k, or a share such as 1/4 or 0.3"
            )
        self._tables = {rule: table(rule) for rule in rules}

    @property
    def settled(self) -> int:
        """From so many tokens on, every count of a decode step grows by the same amount each ``period`` tokens."""
        return max(rule.settled for rule in self._tables)

    @property
    def period(self) -> int:
        return lcm(*(rule.period for rule in self._tables))

    def __call__(self, spans: Sequence[Span], runs: Sequence[Span] = ()) -> Counts:
        """Counts of a step with these sequences. A span of ``runs`` stands for as many steps as it has tokens."""
        sums = self._sums(spans, runs)
        return _counts(self._whole, *sums, spans, runs)

    def layers(self, spans: Sequence[Span]) -> list[Counts]:
        """The same, layer by layer."""
        sums = self._sums(spans, ())
        return [_counts(terms, *sums, spans, ()) for terms in self._layers]

    def _sums(self, spans: Sequence[Span], runs: Sequence[Span]) -> tuple[dict[Rule, int], dict[Rule, int]]:
        """Of each rule: its sum over query tokens, and over the last query token of each sequence and step."""
        for before, after in (*spans, *runs):
            if not 0 <= before < after:
                raise ValueError(
                    f"lengths: expected 0 <= before < after, got {before} before and {after} after the step"
                )
        ones = [after for before, after in spans if after - before == 1]
        many = [span for span in spans if span[1] - span[0] > 1]
        ends = [after for _, after in many]
        every: dict[Rule, int] = {}
        last: dict[Rule, int] = {}
        for rule, values in self._tables.items():
            single = values.at(ones) + values.between(runs)
            if isinstance(rule, (StateRead, StateWritten)):
                every[rule] = last[rule] = single + sum([rule.step(*span) for span in many])
            else:
                every[rule] = single + values.between(many)
                last[rule] = single + values.at(ends)
        return every, last


def _counts(
    terms: Terms, every: dict[Rule, int], last: dict[Rule, int], spans: Sequence[Span], runs: Sequence[Span]
) -> Counts:
    groups: dict[str, dict[str, int]] = {}
    for (group, key), rules in terms.items():
        sums = last if group == "least_read" else every
        groups.setdefault(group, {})[key] = sum([factor * sums[rule] for rule, factor in rules.items()])
    steps = sum([after - before for before, after in runs])
    tokens = sum([after - before for before, after in spans]) + steps
    return Counts(len(spans) + steps, tokens, **groups)


# --- Steps of an engine --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepStats:
    """Counts of prefill and decode apart. They add up, too: ``a + b``."""

    prefill: Counts = Counts()
    decode: Counts = Counts()

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(self.prefill + other.prefill, self.decode + other.decode)

    @property
    def total(self) -> Counts:
        return self.prefill + self.decode

    @property
    def effective_kv_ratio(self) -> float:
        return self.total.effective_kv_ratio

    def to_dict(self) -> dict[str, Any]:
        """Both phases, and the ratio of the whole, of plain types: a line of JSON."""
        phases = {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()}
        return phases | {"effective_kv_ratio": self.effective_kv_ratio}


FOLD = 256
"""Steps with several query tokens that a request collects before they are counted, many at once."""


@dataclass
class _Request:
    run: list[int] | None = None
    """Tokens before and after consecutive steps of one token."""
    prefill: list[Span] = field(default_factory=list)
    decode: list[Span] = field(default_factory=list)
    counted: StepStats = field(default_factory=StepStats)


class Stats:
    """Counts of an engine's steps: each step, each request, and all of them.

    A step of a sequence that has tokens already, with at most ``1 + drafts`` query tokens, counts as decode.
    """

    def __init__(self, model: Model | str, *, drafts: int = 0, formats: Mapping[str, str] | None = None) -> None:
        if drafts < 0:
            raise ValueError(f"drafts: expected 0 or more, got {drafts}")
        self.counter = Counter(model, formats)
        self.drafts = drafts
        self.total = StepStats()
        self._requests: dict[Hashable, _Request] = {}

    def step(self, batch: Mapping[Hashable, Span]) -> StepStats:
        """Count a step: for each request, its tokens before and after."""
        prefill: list[Span] = []
        decode: list[Span] = []
        for request, span in batch.items():
            try:
                (decode if self._decodes(span) else prefill).append(span)
            except TypeError:
                raise ValueError(f"request {request!r}: expected its tokens before and after, got {span!r}") from None
        found = StepStats(self._count(prefill), self._count(decode))
        for request, span in batch.items():
            self._note(request, span)
        self.total += found
        return found

    def finish(self, request: Hashable) -> StepStats:
        """The counts of a request, which is forgotten."""
        if request not in self._requests:
            raise KeyError(f"request {request!r}: expected one that was in a step, and has not finished")
        state = self._requests.pop(request)
        return state.counted + self._folded(state)

    def __contains__(self, request: Hashable) -> bool:
        """Whether the request was in a step and has not finished."""
        return request in self._requests

    def _decodes(self, span: Span) -> bool:
        before, after = span
        return before > 0 and after - before <= 1 + self.drafts

    def _count(self, spans: Sequence[Span], runs: Sequence[Span] = ()) -> Counts:
        return self.counter(spans, runs) if spans or runs else Counts()

    def _note(self, request: Hashable, span: Span) -> None:
        state = self._requests.get(request)
        if state is None:
            state = self._requests[request] = _Request()
        before, after = span
        if before and after - before == 1:
            if state.run and state.run[1] == before:
                state.run[1] = after
                return
            if state.run:
                state.counted += StepStats(decode=self._count((), [(state.run[0], state.run[1])]))
            state.run = [before, after]
            return
        (state.decode if self._decodes(span) else state.prefill).append(span)
        if len(state.prefill) + len(state.decode) >= FOLD:
            state.counted += self._folded(state)
            state.run, state.prefill, state.decode = None, [], []

    def _folded(self, state: _Request) -> StepStats:
        runs = [(state.run[0], state.run[1])] if state.run else []
        return StepStats(self._count(state.prefill), self._count(state.decode, runs))
