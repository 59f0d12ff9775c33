"""A Grafana dashboard and Prometheus alert rules over the metrics of ``metrics``. Imports no torch.

Thresholds are computed: from a plan and the context that a service is built for, or from what the service exports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..models import Model
from .metrics import MARGIN, METRICS, crossover
from .stats import Counter

WINDOW, PATIENCE = "10m", "15m"
"""Over how long an alert averages, and how long it must hold."""
CHOSEN = 'model_name=~"$model_name",engine=~"$engine"'
"""What the variables of the dashboard choose."""
SPAN = "$__rate_interval"


def rate(name: str, by: str = "", where: str = CHOSEN, span: str = SPAN) -> str:
    """The query of a counter's rate, summed by these labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{where}}}[{span}]))"


def mean(name: str, side: str, by: str = "", where: str = CHOSEN, span: str = SPAN) -> str:
    """The query of the mean of a histogram, of requests on one side of the crossover."""
    where = ",".join(filter(None, [where, f'crossover="{side}"']))
    return f"{rate(f'{name}_sum', by, where, span)} / {rate(f'{name}_count', by, where, span)}"


def decode_ratio(model: Model, context: int) -> float:
    """Attended over dense pairs of a token that the plan decodes at this context."""
    return Counter(model)([(context - 1, context)]).effective_kv_ratio


def _pairs(kind: str, by: str = "") -> str:
    return rate("sparse_attn_kv_pairs_total", by, f'{CHOSEN},kind="{kind}"')


def _panels(model: Model | None, context: int) -> list[dict[str, Any]]:
    limits = [] if model is None else [decode_ratio(model, context) + MARGIN]
    flops = "sparse_attn_flops_estimated_total"
    select, selection = (rate(flops, where=f'{CHOSEN},part=~"{parts}"') for parts in ("select", "select|attend"))
    requests = "sparse_attn_effective_kv_ratio_count"
    past, every = (rate(requests, where=f'{CHOSEN},crossover=~"{sides}"') for sides in ("past", "past|before"))
    effective, configured = (mean(f"sparse_attn_{which}_kv_ratio", "past") for which in ("effective", "configured"))
    buckets = rate("sparse_attn_effective_kv_ratio_bucket", "le")
    by_phase = f"{_pairs('effective', 'phase')} / {_pairs('dense', 'phase')}"
    read, written = (rate(f"sparse_attn_kv_{done}_bytes_estimated_total", "plane") for done in ("read", "written"))
    share = f"avg by (source) (sparse_attn_selection_overhead_ratio{{{CHOSEN}}})"
    last = f"sparse_attn_step_effective_kv_ratio{{{CHOSEN}}}"
    layers = rate("sparse_attn_dispatch_total", "path, reason")
    return [
        _panel("stat", "Effective KV ratio", "percentunit", {f"{_pairs('effective')} / {_pairs('dense')}": ""}, limits),
        _panel("stat", "Selection's share of FLOPs", "percentunit", {f"{select} / {selection}": "estimated"}),
        _panel("stat", "Requests past the crossover", "percentunit", {f"{past} / {every}": ""}),
        _panel("stat", "Plan", "none", {f"sparse_attn_build_info{{{CHOSEN}}}": "{{plan}}"}),
        _panel("timeseries", "Pairs a second", "short", {rate("sparse_attn_kv_pairs_total", "kind"): "{{kind}}"}),
        _panel("timeseries", "Effective KV ratio by phase", "percentunit", {by_phase: "{{phase}}"}, limits),
        _panel(
            "timeseries",
            "Requests past the crossover: effective and configured ratio",
            "percentunit",
            {effective: "effective", configured: "configured", f"{configured} + {MARGIN}": "alarm"},
        ),
        _panel(
            "timeseries",
            "Effective KV ratio of requests",
            "percentunit",
            {f"histogram_quantile({q}, {buckets})": f"{100 * q:g} % of requests" for q in (0.5, 0.9)},
        ),
        _panel("timeseries", "FLOPs by part, estimated", "flops", {rate(flops, "part"): "{{part}}"}),
        _panel("timeseries", "Selection's share", "percentunit", {share: "{{source}}"}),
        _panel("timeseries", "KV bytes read, estimated", "Bps", {read: "{{plane}}"}),
        _panel("timeseries", "KV bytes written, estimated", "Bps", {written: "{{plane}}"}),
        _panel(
            "timeseries", "Tokens computed", "short", {rate("sparse_attn_query_tokens_total", "phase"): "{{phase}}"}
        ),
        _panel("timeseries", "Layers by path", "short", {layers: "{{path}}, by the {{reason}}"}),
        _panel("timeseries", "Ratio of the last step", "percentunit", {last: "{{model_name}}, engine {{engine}}"}),
        _panel(
            "timeseries",
            "Time of kernels, measured",
            "s",
            {rate("sparse_attn_kernel_seconds_total", "part"): "{{part}}"},
        ),
        _panel(
            "timeseries",
            "Admission: verdicts a second",
            "short",
            {
                rate(
                    "sparse_attn_admission_verdicts_total", "mode, verdict, reason"
                ): "{{verdict}}: {{reason}} ({{mode}})"
            },
        ),
        _panel(
            "timeseries",
            "Admission: memory and compute, with the last request",
            "percentunit",
            {f"sparse_attn_admission_{what}_ratio{{{CHOSEN}}}": what for what in ("memory", "compute")},
        ),
    ]


def _panel(type: str, title: str, unit: str, queries: dict[str, str], limits: Sequence[float] = ()) -> dict[str, Any]:
    """A panel of these queries, each with its legend; values above a limit are red."""
    metrics = [metric for name, metric in METRICS.items() if any(name in query for query in queries)]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": "red", "value": round(limit, 4)} for limit in limits]
    defaults: dict[str, Any] = {
        "unit": unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "noValue": "no traffic",
    }
    if limits and type == "timeseries":
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    # a value of 1 would say nothing: where the unit is none, the legend is the text
    text = {"textMode": "name" if unit == "none" else "auto", "colorMode": "value"}
    options = text if type == "stat" else {"tooltip": {"mode": "multi"}}
    return {
        "type": type,
        "title": title,
        "description": " ".join(f"`{metric.name}`: {metric.help}" for metric in metrics),
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend or "ratio"}
            for number, (query, legend) in enumerate(queries.items())
        ],
    }


def dashboard(model: Model | None = None, context: int = 0) -> dict[str, Any]:
    """The dashboard, as Grafana imports it.

    With a ``model`` and the ``context`` that the service is built for, ratios are red where they exceed what the plan
    reads there by more than the margin.
    """
    panels = _panels(model, context)
    stats = [panel for panel in panels if panel["type"] == "stat"]
    for number, panel in enumerate(panels):
        panel["id"] = number + 1
        if number < len(stats):
            panel["gridPos"] = {"x": number * 24 // len(stats), "y": 0, "w": 24 // len(stats), "h": 4}
        else:
            row, column = divmod(number - len(stats), 2)
            panel["gridPos"] = {"x": 12 * column, "y": 4 + 8 * row, "w": 12, "h": 8}
    about = "" if model is None else f" Thresholds: {model.name}, {context} tokens."
    source = {"type": "prometheus", "uid": "$datasource"}
    return {
        "uid": "sparse-attn",
        "title": "Sparse attention",
        "description": f"Pairs, ratios, FLOPs and bytes of attention, from sparse_attn.{about}",
        "tags": ["sparse_attn"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *(
                    {
                        "name": name,
                        "type": "query",
                        "label": label,
                        "datasource": source,
                        "query": f"label_values({where}, {name})",
                        "refresh": 2,
                        "multi": True,
                        "includeAll": True,
                        "current": {"text": "All", "value": "$__all"},
                    }
                    for name, label, where in (
                        ("model_name", "Model", "sparse_attn_build_info"),
                        ("engine", "Engine", 'sparse_attn_build_info{model_name=~"$model_name"}'),
                    )
                ),
            ]
        },
        "panels": panels,
    }


def alerts(model: Model | None = None) -> list[dict[str, Any]]:
    """The rules: name, expression, how long it must hold, severity, summary and description.

    With a ``model``, descriptions give its crossover, and a rule that cannot fire for it is left out.
    """
    by = "model_name, engine"
    effective, configured = (
        mean(f"sparse_attn_{which}_kv_ratio", "past", by, "", WINDOW) for which in ("effective", "configured")
    )
    tokens = None if model is None else crossover(model)
    who = "{{ $labels.model_name }}, engine {{ $labels.engine }}"
    above = {
        "alert": "SparseAttentionRatioAboveConfigured",
        "expr": f"{effective} > {configured} + {MARGIN}",
        "for": PATIENCE,
        "severity": "warning",
        "summary": f"{who}: requests past the crossover read more than their plan says",
        "description": "Effective KV ratio {{ $value | humanizePercentage }}, of requests "
        + ("past the crossover" if tokens is None else f"of {tokens} tokens and more")
        + f": more than {MARGIN} above the configured one for {PATIENCE}. Sparse layers may run dense.",
    }
    dense = {
        "alert": "SparseAttentionRunsDense",
        "expr": rate("sparse_attn_dispatch_total", by, 'path="dense",reason="engine"', WINDOW) + " > 0",
        "for": PATIENCE,
        "severity": "warning",
        "summary": f"{who}: layers that select attend to everything",
        "description": "The engine has no sparse kernels for this model here: it pays for full attention.",
    }
    dearer = {
        "alert": "SparseAttentionCostsMoreThanDense",
        "expr": rate("sparse_attn_flops_estimated_total", by, 'part=~"select|attend|compress"', WINDOW)
        + " > "
        + rate("sparse_attn_flops_estimated_total", by, 'part="dense_equiv"', WINDOW),
        "for": PATIENCE,
        "severity": "info",
        "summary": f"{who}: selection and attention take more FLOPs than full attention would",
        "description": "Contexts are too short for selection to pay: {{ $value | humanize }}FLOP/s by estimate.",
    }
    selects = model is None or any(layer.selection for layer in model.layers)
    return [*([above] if model is None or tokens is not None else []), *([dense] if selects else []), dearer]


def to_yaml(rules: list[dict[str, Any]]) -> str:
    """The rules as a file for Prometheus. Strings are quoted as in JSON, which is YAML."""
    lines = ["groups:", "  - name: sparse_attn", "    rules:"]
    for rule in rules:
        lines += [
            f"      - alert: {rule['alert']}",
            f"        expr: {json.dumps(rule['expr'])}",
            f"        for: {rule['for']}",
            "        labels:",
            f"          severity: {rule['severity']}",
            "        annotations:",
            f"          summary: {json.dumps(rule['summary'])}",
            f"          description: {json.dumps(rule['description'])}",
        ]
    return "\n".join(lines) + "\n"
