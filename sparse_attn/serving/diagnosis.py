"""Which limit holds a service back, from the metrics it exposes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from .exposition import Sample

FULL = 0.9
"""Share of a resource in use from which it counts as the limit."""

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
POOLS = {
    "pool": ("vllm:kv_cache_usage_perc", "sglang:full_token_usage", "sglang:token_usage"),
    "window pool": ("sglang:swa_token_usage",),
    "state pool": ("sglang:mamba_usage",),
}
"""Pools of caches, each with the names of its share in use, of which the first that is there counts."""
COMPUTE = ("sparse_attn_compute_watermark_ratio",)
MEMORY_BUDGET = ("sparse_attn_memory_watermark_ratio",)
BATCH_LIMIT = ("sparse_attn_batch_limit",)
PREEMPTIONS = ("vllm:num_preemptions_total",)
TOKEN_SECONDS = ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds")
DECISIONS = "sparse_attn_admission_decisions_total"
REASONS = "vllm:num_requests_waiting_by_reason"
GROUPS = (("model_name",), ("engine", "dp_rank"))
"""Labels that tell apart services in one exposition: one of each group."""


@dataclass(frozen=True)
class State:
    """What one service of an exposition shows; None where it shows nothing.

    Shares are 0 to 1: ``pools`` in use, ``compute`` of the step's budget, ``memory_budget`` of admission's.
    ``deferred`` requests wait for something other than room. ``held`` counts admissions refused so far, by reason.
    ``token_seconds`` is the mean time between tokens.
    """

    service: str
    running: float
    waiting: float
    pools: Mapping[str, float]
    compute: float | None
    memory_budget: float | None
    batch_limit: float | None
    deferred: float
    preemptions: float | None
    held: Mapping[str, float]
    token_sum: float
    token_count: float

    @property
    def token_seconds(self) -> float | None:
        return self.token_sum / self.token_count if self.token_count else None


@dataclass(frozen=True)
class Finding:
    """``binds``: the limit, ``"none"`` where nothing waits, or ``"unknown"``. ``seen`` are the numbers that show it."""

    service: str
    binds: str
    seen: str
    advice: str


def states(samples: Iterable[Sample]) -> list[State]:
    """The services of an exposition. Raises ValueError if it has none of the names known here."""
    services: dict[str, list[Sample]] = {}
    for sample in samples:
        if isnan(sample.value):  # the service knows no value
            continue
        model, engine = (next((sample.labels[n] for n in names if n in sample.labels), "") for names in GROUPS)
        if model and not engine:
            engine = "0"  # SGLang names no rank where there is one, this package's metrics do
        services.setdefault(" ".join(filter(None, (model, engine))), []).append(sample)
    shared = services.pop("", []) if len(services) > 1 else []
    found = [_state(service, [*group, *shared]) for service, group in services.items()]
    known = [state for state in found if state is not None]
    if not known:
        raise ValueError(f"metrics: expected {' or '.join(RUNNING)} with {' or '.join(WAITING)}, got neither")
    return known


def _state(service: str, samples: Sequence[Sample]) -> State | None:
    highest: dict[str, float] = {}  # ranks of one service repeat its numbers
    for sample in samples:
        highest[sample.name] = max(sample.value, highest.get(sample.name, sample.value))

    def first(names: Sequence[str]) -> float | None:
        return next((highest[name] for name in names if name in highest), None)

    running, waiting = first(RUNNING), first(WAITING)
    if running is None or waiting is None:
        return None
    pools = {pool: share for pool, names in POOLS.items() if (share := first(names)) is not None}
    held: dict[str, float] = {}
    for sample in samples:
        if sample.name == DECISIONS and sample.labels.get("decision") not in (None, "admit", "admitted"):
            reason = sample.labels.get("reason", "")
            held[reason] = held.get(reason, 0) + sample.value
    deferred = [s.value for s in samples if s.name == REASONS and s.labels.get("reason") == "deferred"]
    return State(
        service=service,
        running=running,
        waiting=waiting,
        pools=pools,
        compute=first(COMPUTE),
        memory_budget=first(MEMORY_BUDGET),
        batch_limit=first(BATCH_LIMIT),
        deferred=max(deferred, default=0),
        preemptions=first(PREEMPTIONS),
        held=held,
        token_sum=first([f"{name}_sum" for name in TOKEN_SECONDS]) or 0,
        token_count=first([f"{name}_count" for name in TOKEN_SECONDS]) or 0,
    )


def diagnose(state: State, before: State | None = None, max_num_seqs: int | None = None) -> Finding:
    """Which limit binds. Counters tell only with a state from ``before``: from their start on, they tell the past.

    ``max_num_seqs`` is the engine's own, which no metric shows.
    """
    fullest = max(state.pools, key=lambda pool: state.pools[pool], default="pool")
    share, compute = state.pools.get(fullest), state.compute
    held = _grown(state.held, before.held) if before else {}
    preempted = _growth(state.preemptions or 0, before.preemptions or 0) if before else 0
    seen = [_share(fullest, share), _share("compute", compute)]
    seen += [f"{state.running:,.0f} running", f"{state.waiting:,.0f} waiting"]
    if before is not None:
        seen.append(_since(state, before, fullest))

    def finding(binds: str, advice: str) -> Finding:
        return Finding(state.service, binds, ", ".join(filter(None, seen)), advice)

    if not state.waiting:
        return finding("none", "nothing waits: more memory or compute would change nothing now")
    if state.deferred >= state.waiting:
        return finding("deferral", "all that wait, wait for something other than room, such as a transfer of caches")
    if share is not None and share >= FULL:
        return finding(fullest, "memory binds: a smaller format, more ranks or shorter contexts admit more")
    if preempted > 0:
        return finding(fullest, f"{preempted:,.0f} requests were preempted since: memory binds at its peaks")
    if compute is not None and compute >= FULL:
        return finding("compute", "compute binds: freeing memory admits nothing; shorten prefill chunks or add devices")
    budget = state.memory_budget is not None and state.memory_budget >= FULL
    if share is not None and (budget or held.get("memory", 0) > 0):
        return finding(
            "admission's memory threshold",
            f"admission holds requests back for memory while the {fullest} is {share:.0%} in use: its threshold is of "
            "a larger cache; set it in bytes of this one",
        )
    if state.batch_limit is not None and state.running >= state.batch_limit:
        return finding("sparse_attn_batch_limit", "the batch limit binds: calibrate it again")
    if max_num_seqs is not None and state.running >= max_num_seqs:
        return finding("max_num_seqs", f"raise max_num_seqs above {max_num_seqs}{_maybe(compute)}")
    if share is None:
        return finding("unknown", "no metric shows how much of the caches' memory is in use")
    if max_num_seqs is not None:
        return finding(
            "an admission limit",
            f"neither memory nor max_num_seqs binds{_maybe(compute)}: look at max_num_batched_tokens and at "
            "thresholds in tokens of an older cache",
        )
    return finding(
        "an admission limit",
        f"memory does not bind{_maybe(compute)}: look at max_num_seqs (SGLang: max_running_requests), which "
        "--max-num-seqs tells, then at max_num_batched_tokens and at thresholds in tokens of an older cache",
    )


def _maybe(compute: float | None) -> str:
    return "; compute may bind, which no metric shows" if compute is None else ""


def _grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Counters since; those that began anew count whole."""
    return {key: _growth(value, before.get(key, 0)) for key, value in now.items()}


def _growth(now: float, before: float) -> float:
    return now - before if now >= before else now


def _share(name: str, share: float | None) -> str:
    return f"{name} unknown" if share is None else f"{name} {share:.0%}"


def _since(state: State, before: State, pool: str) -> str:
    parts = []
    if pool in before.pools:
        parts.append(f"{pool} {before.pools[pool]:.0%}")
    parts += [f"{before.running:,.0f} running", f"{before.waiting:,.0f} waiting"]
    anew = state.token_count < before.token_count or state.token_sum < before.token_sum
    count, total = state.token_count, state.token_sum
    if not anew:
        count, total = count - before.token_count, total - before.token_sum
    if before.token_seconds is not None and count > 0:
        now = total / count
        parts.append(f"{1e3 * before.token_seconds:.1f} ms a token and now {1e3 * now:.1f}")
    return f"before: {', '.join(parts)}"
