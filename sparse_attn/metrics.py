"""What is exported to Prometheus, a Grafana dashboard and alert rules for it."""

from __future__ import annotations

import argparse
import json

from .models import PRESETS
from .plan import tokens
from .serving.dashboard import alerts, dashboard, to_yaml
from .serving.metrics import COMMON, METRICS


def main(argv: list[str] | None = None) -> int:
    """Print the metrics, the dashboard, or the rules."""
    parser = argparse.ArgumentParser(prog="python -m sparse_attn metrics", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dashboard", action="store_true", help="print a dashboard that Grafana imports")
    what.add_argument("--alerts", action="store_true", help="print alert rules for Prometheus")
    parser.add_argument("--model", choices=PRESETS, help="the preset that thresholds are computed from")
    parser.add_argument(
        "--context", type=tokens, default="32k", metavar="TOKENS", help="of a request, for the dashboard's limits (32k)"
    )
    options = parser.parse_args(argv)
    model = PRESETS[options.model] if options.model else None
    if options.dashboard:
        print(json.dumps(dashboard(model, options.context), indent=2))
    elif options.alerts:
        print(to_yaml(alerts(model)), end="")
    else:
        print(f"every metric has the labels {' and '.join(COMMON)}")
        for metric in METRICS.values():
            labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
            print(f"{metric.name}{labels}: {metric.type}\n  {metric.help}")
    return 0
