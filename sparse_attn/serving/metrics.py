"""Counts of steps and requests as Prometheus metrics. Imports no torch; ``prometheus_client`` only where it exports.

``docs/signals.md`` says what the counts mean. No label has the identity of a request: that is in ``records``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..models import Model, dense
from .stats import Counter, Counts, StepStats

MARGIN = 0.2
"""How far above the configured ratio the effective one may stay before an alarm."""

COMMON = ("model_name", "engine")
"""Labels of every metric: the model as it is served, and the number of the engine in its deployment."""

PLANES = ("main", "window", "index", "state")
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
            "Layers that were run, by path; the reason is the plan, or the engine where it has no sparse kernels.",
            ("path", "reason"),
        ),
        Metric(
            "sparse_attn_build_info", "gauge", "1, labelled by version and the plan that counts.", ("version", "plan")
        ),
    )
}


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
        self._labels = dict(model_name=model_name, engine=engine)
        self._bytes_known = bytes_known
        self._families = _families(registry)
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._set("sparse_attn_build_info", 1, version=version, plan=plan)
        # exported from the start, so that a query finds them
        self.step(StepStats())
        for side in ("before", "past"):
            self._child("sparse_attn_effective_kv_ratio", crossover=side)
            self._child("sparse_attn_configured_kv_ratio", crossover=side)

    def step(self, stats: StepStats) -> None:
        """Add the counts of a step."""
        for phase, counts in (("prefill", stats.prefill), ("decode", stats.decode)):
            for kind, pairs in kinds(counts).items():
                self._add("sparse_attn_kv_pairs_total", pairs, kind=kind, phase=phase)
            self._add("sparse_attn_query_tokens_total", counts.tokens, phase=phase)
        total = stats.total
        for part in ("select", "attend", "compress", "dense"):
            label = "dense_equiv" if part == "dense" else part
            self._add("sparse_attn_flops_estimated_total", total.flops.get(part, 0), part=label)
        if self._bytes_known:
            for plane in (*PLANES, "dense"):
                label = "dense_equiv" if plane == "dense" else plane
                self._add("sparse_attn_kv_read_bytes_estimated_total", total.read.get(plane, 0), plane=label)
            for plane in PLANES:
                self._add("sparse_attn_kv_written_bytes_estimated_total", total.written.get(plane, 0), plane=plane)
        self._set("sparse_attn_step_effective_kv_ratio", total.effective_kv_ratio)
        self._set("sparse_attn_selection_overhead_ratio", total.selection_flops_ratio, source="estimated")

    def layers(self, path: str, reason: str, number: int) -> None:
        """Add layers that a step ran."""
        self._add("sparse_attn_dispatch_total", number, path=path, reason=reason)

    def request(self, effective: float, configured: float, past: bool) -> None:
        """Add a finished request: its ratios, and whether it went past the crossover."""
        side = "past" if past else "before"
        self._child("sparse_attn_effective_kv_ratio", crossover=side).observe(effective)
        self._child("sparse_attn_configured_kv_ratio", crossover=side).observe(configured)

    def kernels(self, select: float, attend: float) -> None:
        """Add the time that the kernels of a step took, in seconds."""
        self._add("sparse_attn_kernel_seconds_total", select, part="select")
        self._add("sparse_attn_kernel_seconds_total", attend, part="attend")
        share = select / (select + attend) if select + attend else 0.0
        self._set("sparse_attn_selection_overhead_ratio", share, source="measured")

    def _add(self, name: str, amount: float, **labels: str) -> None:
        child = self._child(name, **labels)
        if amount:
            child.inc(amount)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._child(name, **labels).set(value)

    def _child(self, name: str, **labels: str) -> Any:
        key = (name, tuple(labels.values()))
        if key not in self._series:
            self._series[key] = self._families[name].labels(**self._labels, **labels)
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
