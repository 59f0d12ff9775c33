"""What a model, a device and lengths allow: memory, time, and which of them binds first. Imports no torch.

Bytes of caches and pairs are exact. Times are estimated: a step takes as long as its reads at the device's bandwidth,
or its operations at its compute, whichever is more. Real steps take longer. ``docs/plan.md`` has every definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, floor, gcd

from ..models import Model, dense, shard
from .devices import Device
from .stats import Counter, Counts
from .weights import Weights

SCORE_BYTES = 4
"""Bytes of an index score, fp32."""

WORTH = 0.1
"""Share of a decode step that must be saved for a batch to count as past break-even."""

GRAIN = 128
"""Tokens in steps of which, at most, break-even is looked for."""

MOST = 2**24
"""Tokens of context, and requests, beyond which nothing is looked for."""


@dataclass(frozen=True)
class Cache:
    """Bytes of cache that a sequence needs in one rank, by kind of plane: for each token, and whatever its length."""

    per_token: Mapping[str, float]
    fixed: Mapping[str, int]

    def of(self, context: int) -> float:
        """Bytes of a sequence of ``context`` tokens."""
        return sum(self.per_token.values()) * context + sum(self.fixed.values())

    def context(self, size: float) -> int:
        """The most tokens of a sequence in ``size`` bytes."""
        return max(floor((size - sum(self.fixed.values())) / sum(self.per_token.values())), 0)

    def requests(self, size: float, context: int) -> int:
        """The most sequences of ``context`` tokens in ``size`` bytes."""
        return floor(size / self.of(context))


def cache_of(model: Model, formats: Mapping[str, str] | None = None) -> Cache:
    """The cache of a rank's plan, in its own formats or in these."""
    return Cache(model.bytes_per_token(formats), model.fixed_bytes(formats))


def dense_cache(model: Model) -> Cache:
    """The cache of full attention in the same layers: of each a bf16 row for every token."""
    return Cache({"dense": _decode(Counter(model), 1).read["dense"]}, {})


def _decode(counter: Counter, context: int) -> Counts:
    return counter([(context - 1, context)])


@dataclass(frozen=True)
class Ratios:
    """To full attention on bf16 rows, of one sequence. Three different numbers: none stands for another."""

    resident: float
    """Bytes of cache."""
    read: float
    """Bytes that attention and selection of a decode step read."""
    pairs: float
    """Pairs that a decode step attends."""


@dataclass(frozen=True)
class Point:
    """The most requests of ``context`` tokens by each resource; None where its figures are unknown."""

    context: int
    limits: Mapping[str, int | None]

    @property
    def requests(self) -> int | None:
        """The most requests by every known resource."""
        known = [limit for limit in self.limits.values() if limit is not None]
        return min(known) if known else None

    @property
    def binds(self) -> str | None:
        """The resource that allows the fewest requests."""
        return next((name for name, limit in self.limits.items() if limit is not None and limit == self.requests), None)


@dataclass(frozen=True)
class Use:
    """One use of freed memory: ``amount`` by memory alone, ``until`` what ``binds`` then allows. None: unknown, or
    there is no such use."""

    name: str
    amount: float | None
    until: float | None = None
    binds: str | None = None


@dataclass(frozen=True)
class Change:
    """Bytes of cache in a rank before and after, at ``context`` and ``requests``, and what the difference buys, each
    use by itself."""

    context: int
    requests: int
    before: float
    after: float
    uses: tuple[Use, ...]

    @property
    def freed(self) -> float:
        """Bytes; below 0 where memory rises."""
        return self.before - self.after


class Rank:
    """One tensor-parallel rank of a service.

    Args:
        model: the whole model's plan. Heads are split over ``ranks``, and weights evenly.
        device: what it runs on. Figures without a source leave unknown what depends on them.
        weights: sizes of the whole model.
        formats: other formats than the plan's own.
        share: of the device's memory that the engine may use.
        step_tokens: query tokens of a prefill step whose index scores are held at once. 0 where selection streams,
            as ``sparse_attn.select`` does.
        slo: seconds that a decode step may take; None: no limit.

    Raises ValueError if an argument does not fit.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        weights: Weights,
        *,
        ranks: int = 1,
        formats: Mapping[str, str] | None = None,
        share: float = 0.9,
        step_tokens: int = 8192,
        slo: float | None = None,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"memory share: expected above 0 and at most 1, got {share}")
        if step_tokens < 0:
            raise ValueError(f"step tokens: expected 0 or more, got {step_tokens}")
        if slo is not None and slo <= 0:
            raise ValueError(f"slo: expected more than 0 seconds, got {slo}")
        self.model = shard(model, ranks)
        self.device, self.weights, self.ranks = device, weights, ranks
        self.share, self.step_tokens, self.slo = share, step_tokens, slo
        self.cache = cache_of(self.model, formats)
        self.full = dense_cache(self.model)
        self.counter = Counter(self.model, formats)
        self.unselected = Counter(dense(self.model), formats)
        self.decode: Callable[[int], Counts] = cache(lambda context: _decode(self.counter, context))

    # --- Memory ---

    @property
    def weight_bytes(self) -> float | None:
        return None if self.weights.size is None else self.weights.size.value / self.ranks

    def score_bytes(self, context: int) -> int:
        """Bytes of the index scores of one query token, in the layer that has most."""
        sizes = [0]
        for layer in self.model.layers:
            if layer.index_owner is not None and layer.selection is not None:
                entries = context // self.model.plane("index", layer.number).ratio
                sizes.append(SCORE_BYTES * entries * layer.selection.out_heads)
        return max(sizes)

    def workspace(self, context: int) -> int:
        """Bytes of the index scores of a prefill step, of one layer at a time."""
        return self.step_tokens * self.score_bytes(context)

    def pool(self, context: int) -> float | None:
        """Bytes left for caches. None where memory or weights are unknown."""
        if self.device.memory is None or self.weight_bytes is None:
            return None
        return self.share * self.device.memory.value - self.weight_bytes - self.workspace(context)

    def ratios(self, context: int) -> Ratios:
        found = self.decode(context)
        resident = self.cache.of(context) / self.full.of(context)
        return Ratios(resident, found.read_ratio, found.effective_kv_ratio)

    # --- Time ---

    def times(self, counts: Counts, tokens: int) -> dict[str, float | None]:
        """Least seconds of a step of ``tokens`` query tokens, by resource."""
        bandwidth, compute = self.device.bandwidth, self.device.compute
        seconds: dict[str, float | None] = {"bandwidth": None, "compute": None}
        if bandwidth is not None and self.weight_bytes is not None:
            seconds["bandwidth"] = (self.weight_bytes + _bytes_read(counts)) / bandwidth.value
        if compute is not None and self.weights.active is not None:
            model = 2 * self.weights.active.value / self.ranks * tokens
            seconds["compute"] = (model + _operations(counts)) / compute.value
        return seconds

    def step(self, context: int, requests: int) -> dict[str, float | None]:
        """Least seconds of a decode step, by resource."""
        return self.times(_decode_many(self.decode(context), requests), requests)

    # --- Limits ---

    def limits(self, context: int) -> Point:
        """The most requests of ``context`` tokens, by memory and, with an SLO, by bandwidth and compute."""
        pool = self.pool(context)
        found: dict[str, int | None] = {"memory": None if pool is None else self.cache.requests(max(pool, 0), context)}
        if self.slo is not None:
            empty, one = self.step(context, 0), self.step(context, 1)
            for name in empty:
                start, after = empty[name], one[name]
                unknown = start is None or after is None
                found[name] = None if unknown else max(floor((self.slo - start) / (after - start)), 0)  # type: ignore[operator]
        if self.weights.context is not None and context > self.weights.context.value:
            found["model's context"] = 0
        return Point(context, found)

    def longest(self, requests: int, memory: float | None = None) -> tuple[int, str | None]:
        """The longest context at which so many requests are allowed, and the resource that ends it. ``memory``:
        bytes for their caches, instead of the pool."""

        def allowed(context: int) -> Point:
            limits = dict(self.limits(context).limits)
            if memory is not None:
                limits["memory"] = self.cache.requests(memory, context)
            return Point(context, limits)

        found = _last(lambda context: _at_least(allowed(context).requests, requests))
        return found, allowed(found + 1).binds if found < MOST else None

    # --- Changes ---

    def change(self, before: Cache, context: int, requests: int) -> Change:
        """What this plan frees against the cache ``before``, at as many of the ``requests`` as that holds.

        If it holds none, the whole pool is free.
        """
        pool = self.pool(context)
        size = requests * before.of(context)
        if pool is not None and size > pool:
            requests = before.requests(max(pool, 0), context)
            size = requests * before.of(context) if requests else max(pool, 0)
        after = requests * self.cache.of(context)
        freed = size - after
        if freed <= 0:
            return Change(context, requests, size, after, ())
        by_time = Point(context, {name: n for name, n in self.limits(context).limits.items() if name != "memory"})
        more = self.cache.requests(size, context)
        bound = by_time.requests is not None and by_time.requests < more
        uses = [Use("requests", more, by_time.requests if bound else None, by_time.binds if bound else None)]
        length = self.cache.context(size / max(requests, 1))
        until, binds = self.longest(max(requests, 1), size)
        bound = until < length and binds != "memory"
        uses.append(Use("context", length, until if bound else None, binds if bound else None))
        token = self.score_bytes(context)
        tokens = floor(freed / token) if token else None
        most = self.step_limit(context)
        bound = tokens is not None and most is not None and most < tokens
        uses.append(Use("step tokens", tokens, most if bound else None, "compute" if bound else None))
        uses.append(Use("weights", freed))
        return Change(context, requests, size, after, tuple(uses))

    def step_limit(self, context: int) -> int | None:
        """The most query tokens of a step by compute within the SLO, each at ``context``."""
        if self.slo is None:
            return None
        seconds = self.step(context, 1)["compute"]
        return None if seconds is None else floor(self.slo / seconds)

    # --- Break-even ---

    def even_contexts(self) -> dict[str, int | None]:
        """From which context on a decode step reads less, and computes less, than without selection, in the same
        formats. None: never, or nothing is selected."""
        costs: dict[str, Callable[[Counts], int]] = {
            "bytes read": _bytes_read,
            "FLOPs": _operations,
        }
        if all(layer.selection is None for layer in self.model.layers):
            return dict.fromkeys(costs)
        settled, period = self.counter.settled, self.counter.period
        start, step = ceil(settled / period) * period, gcd(period, GRAIN)
        scan = [(n, self.decode(n), _decode(self.unselected, n)) for n in range(step, start + period + step, step)]
        found: dict[str, int | None] = {}
        for name, cost in costs.items():
            saved = [(n, cost(other) - cost(own)) for n, own, other in scan]
            growth = saved[-1][1] - saved[-1 - period // step][1]  # from here on, of each period
            least = min(value for _, value in saved[-(period // step) :])
            if growth < 0 or (growth == 0 and least <= 0):
                found[name] = None
                continue
            last = max((n for n, value in saved if value <= 0), default=0)
            if least <= 0:
                last = max(n + period * (-value // growth) for n, value in saved[-(period // step) :] if value <= 0)
            found[name] = last + step
        return found

    def even_requests(self, context: int) -> int | None:
        """From how many requests on selection saves ``WORTH`` of a decode step. None: never, or unknown."""
        counts = self.decode(context), _decode(self.unselected, context)
        empty = [self.times(_decode_many(count, 0), 0) for count in counts]
        one = [self.times(count, 1) for count in counts]
        if any(value is None for times in (*empty, *one) for value in times.values()):
            return None

        def seconds(which: int, requests: int) -> float:
            starts, ends = empty[which], one[which]
            return max(starts[name] + (ends[name] - starts[name]) * requests for name in starts)  # type: ignore[operator]

        few = range(1, 2**16)
        return next((n for n in few if seconds(0, n) <= (1 - WORTH) * seconds(1, n)), None)


def _bytes_read(counts: Counts) -> int:
    return sum(number for kind, number in counts.read.items() if kind != "dense")


def _operations(counts: Counts) -> int:
    return sum(number for part, number in counts.flops.items() if part != "dense")


def _decode_many(counts: Counts, requests: int) -> Counts:
    """Counts of a step of so many sequences alike."""
    times = {name: {key: n * requests for key, n in getattr(counts, name).items()} for name in ("read", "flops")}
    return Counts(requests, requests, **times)


def _at_least(limit: int | None, requests: int) -> bool:
    return limit is None or limit >= requests


def _last(allowed: Callable[[int], bool]) -> int:
    """The most tokens that are allowed, where fewer always are; at most ``MOST``."""
    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


# --- Traces --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """``arrival`` in seconds; tokens of the prompt and of the answer."""

    arrival: float
    prompt: int
    output: int

    @property
    def context(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Demand:
    """What a trace asks of one service in which each token takes ``slo`` seconds: at the moment at which caches need
    most memory, requests in flight, bytes of a rank's caches, and least seconds of a decode step by resource.

    Each request counts with its final length, from its arrival on, and for one token's time at least; prefill takes
    no time.
    """

    requests: int
    bytes: float
    seconds: Mapping[str, float | None]
    median_context: int
    longest_context: int


def demand(rank: Rank, trace: Sequence[Request]) -> Demand:
    """Raises ValueError for an empty trace, and without an SLO."""
    if not trace:
        raise ValueError("trace: expected at least one request, got none")
    if rank.slo is None:
        raise ValueError("trace: expected an SLO, the time of each token, got none; give --slo")
    ends = [(r.arrival + max(r.output, 1) * rank.slo, 0, r) for r in trace]
    events = [(r.arrival, 1, r) for r in trace] + ends
    size, flying = 0.0, dict[int, Request]()
    most, at = 0.0, list[Request]()
    for _, begins, request in sorted(events, key=lambda event: event[:2]):
        size += rank.cache.of(request.context) * (1 if begins else -1)
        if begins:
            flying[id(request)] = request
        else:
            del flying[id(request)]
        if size > most:
            most, at = size, [*flying.values()]
    counts = rank.counter([(r.context - 1, r.context) for r in at])
    contexts = sorted(request.context for request in trace)
    return Demand(len(at), most, rank.times(counts, len(at)), contexts[len(contexts) // 2], contexts[-1])
