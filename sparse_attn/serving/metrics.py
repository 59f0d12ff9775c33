"""Counts of steps and requests as Prometheus metrics. Imports no torch; ``prometheus_client`` only where it exports.

``docs/signals.md`` says what the counts mean. No label has the identity of a request: that is in ``records``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..models import Model, dense
from .admission import Decision
from .stats import Counter, Counts, StepStats

MARGIN = 0.2
"""How far above the configured ratio the effective one may stay before an alarm."""

COMMON = ("model_name", "engine")
"""Labels of every metric: the model as it is served, and the number of the engine in its deployment."""

PHASES, PARTS = ("prefill", "decode"), ("select", "attend", "compress", "dense_equiv")
PLANES = ("main", "window", "index", "state")
LABELS = {"dense": "dense_equiv"}
"""Labels of FLOPs and bytes that are not the keys of the counts."""
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 2.0)
"""Upper bounds of the buckets of ratios."""


@dataclass(frozen=True)
class Metric:
    """What is exported under a name. A counter's name is that of its samples, ``_total`` included."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "sparse_attn_kv_pairs_total",
            "counter",
            "Pairs of a query token and a KV entry, of one head, summed over layers: of dense attention, attended "
            "(effective), scored by the selector.",
            ("kind", "phase"),
        ),
        Metric("sparse_attn_query_tokens_total", "counter", "Tokens that were computed.", ("phase",)),
        Metric(
            "sparse_attn_effective_kv_ratio",
            "histogram",
            "Attended over dense pairs of a finished request, before or past the crossover: past it, an engine without "
            "sparse kernels would raise the alarm.",
            ("crossover",),
        ),
        Metric(
            "sparse_attn_configured_kv_ratio",
            "histogram",
            "The same, as the model's plan has it.",
            ("crossover",),
        ),
        Metric("sparse_attn_step_effective_kv_ratio", "gauge", "Attended over dense pairs of the last step."),
        Metric(
            "sparse_attn_flops_estimated_total",
            "counter",
            "FLOPs of selection, attention, compression and full attention, from counts of pairs.",
            ("part",),
        ),
        Metric(
            "sparse_attn_kv_read_bytes_estimated_total",
            "counter",
            "Bytes of KV planes that query tokens read, each on its own, and of full attention on bf16 rows.",
            ("plane",),
        ),
        Metric("sparse_attn_kv_written_bytes_estimated_total", "counter", "Bytes written to KV planes.", ("plane",)),
        Metric(
            "sparse_attn_selection_overhead_ratio",
            "gauge",
            "The selector's share of selection and attention, last step: of FLOPs (estimated) or time (measured).",
            ("source",),
        ),
        Metric("sparse_attn_kernel_seconds_total", "counter", "Measured time of kernels.", ("part",)),
        Metric(
            "sparse_attn_dispatch_total",
            "counter",
            "Layers that were run, by path. The reason is the plan, or the engine, where it has no sparse kernels; in "
            "serve also prompt, request, and exact or approximate, where dense attention was faster.",
            ("path", "reason"),
        ),
        Metric(
            "sparse_attn_admission_verdicts_total",
            "counter",
            "Requests that the admission rule decided on, once for each change of its verdict.",
            ("mode", "verdict", "reason"),
        ),
        Metric("sparse_attn_admission_memory_ratio", "gauge", "Pages in use with the request last decided on, of all."),
        Metric(
            "sparse_attn_admission_compute_ratio",
            "gauge",
            "Predicted time of a step with the request last decided on, of its budget.",
        ),
        Metric(
            "sparse_attn_build_info", "gauge", "1, labelled by version and the plan that counts.", ("version", "plan")
        ),
    )
}

START: tuple[tuple[str, ...], ...] = (
    *(("sparse_attn_kv_pairs_total", kind, phase) for kind in ("dense", "effective", "scored") for phase in PHASES),
    *(("sparse_attn_query_tokens_total", phase) for phase in PHASES),
    *(("sparse_attn_flops_estimated_total", part) for part in PARTS),
    *(("sparse_attn_kv_read_bytes_estimated_total", plane) for plane in (*PLANES, "dense_equiv")),
    *(("sparse_attn_kv_written_bytes_estimated_total", plane) for plane in PLANES),
    *((f"sparse_attn_{which}_kv_ratio", side) for which in ("effective", "configured") for side in ("before", "past")),
)
"""Series that are exported before they are written: names, and values of their own labels."""


def crossover(model: Model, margin: float = MARGIN) -> int | None:
    """The fewest tokens of a request of which dense attention would exceed the plan's ratio by more than ``margin``.

    None if no request of up to 2**24 tokens does, as that of a dense model.
    """
    configured, full = Counter(model), Counter(dense(model))

    def exceeds(tokens: int) -> bool:
        span = [(0, tokens)]
        return full(span).effective_kv_ratio - configured(span).effective_kv_ratio > margin

    most = next((1 << bits for bits in range(25) if exceeds(1 << bits)), None)
    if most is None:
        return None
    least = most >> 1
    while most - least > 1:
        middle = (most + least) // 2
        least, most = (least, middle) if exceeds(middle) else (middle, most)
    return most


class Exporter:
    """Counts of one engine as Prometheus metrics.

    In several processes, set ``PROMETHEUS_MULTIPROC_DIR`` before any of them starts: all then write there, and whoever
    serves ``/metrics`` reads the sums.

    Args:
        model_name, engine: values of the labels.
        plan: the plan's name, for ``sparse_attn_build_info``.
        bytes_known: whether the formats of the planes are known; if not, no bytes are exported.
        registry: where to register; default: prometheus_client's own.

    Raises:
        ModuleNotFoundError: ``prometheus_client`` is not installed.
    """

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        *,
        plan: str = "",
        version: str = "",
        bytes_known: bool = True,
        registry: Any = None,
    ) -> None:
        self._common = (model_name, engine)
        self._bytes_known = bytes_known
        self._families = _families(registry)
        self._series: dict[tuple[str, ...], Any] = {}
        self._child("sparse_attn_build_info", version, plan).set(1)
        # exported from the start, so that a query finds them
        for name, *values in START:
            if bytes_known or "bytes" not in name:
                self._child(name, *values)
        self.step(StepStats())

    def step(self, stats: StepStats) -> None:
        """Add the counts of a step."""
        for phase, counts in (("prefill", stats.prefill), ("decode", stats.decode)):
            for kind, pairs in kinds(counts).items():
                self._add("sparse_attn_kv_pairs_total", pairs, kind, phase)
            self._add("sparse_attn_query_tokens_total", counts.tokens, phase)
        total = stats.total
        for part, flops in total.flops.items():
            self._add("sparse_attn_flops_estimated_total", flops, LABELS.get(part, part))
        if self._bytes_known:
            for plane, size in total.read.items():
                self._add("sparse_attn_kv_read_bytes_estimated_total", size, LABELS.get(plane, plane))
            for plane, size in total.written.items():
                self._add("sparse_attn_kv_written_bytes_estimated_total", size, plane)
        self._child("sparse_attn_step_effective_kv_ratio").set(total.effective_kv_ratio)
        self._child("sparse_attn_selection_overhead_ratio", "estimated").set(total.selection_flops_ratio)

    def layers(self, path: str, reason: str, number: int) -> None:
        """Add layers that a step ran."""
        self._add("sparse_attn_dispatch_total", number, path, reason)

    def request(self, effective: float, configured: float, past: bool) -> None:
        """Add a finished request: its ratios, and whether it went past the crossover."""
        side = "past" if past else "before"
        self._child("sparse_attn_effective_kv_ratio", side).observe(effective)
        self._child("sparse_attn_configured_kv_ratio", side).observe(configured)

    def kernels(self, select: float, attend: float) -> None:
        """Add the time that the kernels of a step took, in seconds."""
        self._add("sparse_attn_kernel_seconds_total", select, "select")
        self._add("sparse_attn_kernel_seconds_total", attend, "attend")
        share = select / (select + attend) if select + attend else 0.0
        self._child("sparse_attn_selection_overhead_ratio", "measured").set(share)

    def decision(self, decision: Decision, mode: str) -> None:
        """Add a decision of the admission rule."""
        self._add("sparse_attn_admission_verdicts_total", 1, mode, decision.verdict, decision.reason)
        self._child("sparse_attn_admission_memory_ratio").set(decision.memory)
        if decision.compute is not None:
            self._child("sparse_attn_admission_compute_ratio").set(decision.compute)

    def _add(self, name: str, amount: float, *values: str) -> None:
        if amount:
            self._child(name, *values).inc(amount)

    def _child(self, *key: str) -> Any:
        """The series of a name and values of its labels."""
        if key not in self._series:
            name, *values = key
            self._series[key] = self._families[name].labels(*self._common, *values)
        return self._series[key]


def kinds(counts: Counts) -> dict[str, int]:
    """Pairs by the label ``kind``."""
    pairs = counts.pairs
    return {"dense": pairs.get("dense", 0), "effective": counts.attended_pairs, "scored": pairs.get("scored", 0)}


_registered: MutableMapping[Any, dict[str, Any]] = WeakKeyDictionary()
"""Families by registry: a process has each name once, whatever the number of its engines."""


def _families(registry: Any) -> dict[str, Any]:
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need prometheus_client, which is not installed: pip install prometheus-client"
        ) from error
    registry = registry or prometheus_client.REGISTRY
    if registry not in _registered:
        makers = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }
        of_type: dict[str, dict[str, Any]] = {
            "counter": {},
            "gauge": {"multiprocess_mode": "mostrecent"},
            "histogram": {"buckets": RATIOS},
        }
        _registered[registry] = {
            metric.name: makers[metric.type](
                metric.name, metric.help, (*COMMON, *metric.labels), registry=registry, **of_type[metric.type]
            )
            for metric in METRICS.values()
        }
    return _registered[registry]
