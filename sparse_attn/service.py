"""How an engine runs a model's sparse layers, and which limit binds a running service: two reports of the doctor."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .models import Model
from .plan import formats, preset
from .serving import devices, exposition
from .serving.diagnosis import diagnose, states
from .serving.engines import ENGINES, SPARSE, Verdict, verdicts


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print what was asked for. Returns 1 if a verdict on sparse layers is other than sparse, else 0."""
    report: dict[str, Any] = {}
    try:
        if (options.model, options.engine, options.device) != (None, None, None):
            report["layers"] = _layers(options)
        if options.metrics:
            report["limits"] = _limits(options)
        if not report:
            raise ValueError("expected --model, --engine and --device, or --metrics")
    except (ValueError, OSError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    print(json.dumps(report, indent=2) if options.json else "\n\n".join(_text(report)))
    return 0 if report.get("layers", {"sparse": True})["sparse"] else 1


def _layers(options: argparse.Namespace) -> dict[str, Any]:
    missing = [f"--{name}" for name in ("model", "engine", "device") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"expected --model, --engine and --device together, got no {' and no '.join(missing)}")
    model, device = preset(options.model), devices.find(options.device, options.devices)
    found = verdicts(model, options.engine, device, formats(options.format) if options.format else None)
    return {
        "model": model.name,
        "engine": options.engine,
        "engine_version": ENGINES[options.engine],
        "installed_version": _installed(options.engine),
        "device": device.name,
        "verdicts": [asdict(verdict) for verdict in found],
        "bytes_per_token": _bytes(model, {verdict.plane: verdict.format for verdict in found}),
        "plan_bytes_per_token": sum(model.bytes_per_token().values()),
        "sparse": all(verdict.verdict == SPARSE for verdict in found),
    }


def _installed(engine: str) -> str | None:
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bytes(model: Model, kept: Mapping[str, str]) -> float | None:
    """Bytes of a token in the formats that the engine keeps; None if one is unknown."""
    return sum(model.bytes_per_token(kept).values()) if kept and all(kept.values()) else None


def _limits(options: argparse.Namespace) -> list[dict[str, str]]:
    if len(options.metrics) > 2:
        raise ValueError(f"metrics: expected one source, or an older one and one of now, got {len(options.metrics)}")
    if options.max_num_seqs is not None and options.max_num_seqs < 1:
        raise ValueError(f"max-num-seqs: expected at least 1, got {options.max_num_seqs}")
    older, now = [None, *options.metrics][-2:]
    before = {state.service: state for state in states(exposition.read(older))} if older else {}
    return [
        asdict(diagnose(state, before.get(state.service), options.max_num_seqs))
        for state in states(exposition.read(now))
    ]


def _text(report: Mapping[str, Any]) -> list[str]:
    blocks = []
    if "layers" in report:
        blocks.append("\n".join(_layers_text(report["layers"])))
    for found in report.get("limits", ()):
        name = found["service"] or "the service"
        blocks.append(f"{name}: {found['seen']}\n  binds: {found['binds']}\n  to do: {found['advice']}")
    return blocks


def _layers_text(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['model']} in {found['engine']} {found['engine_version']} on {found['device']}"]
    if found["installed_version"] not in (None, found["engine_version"]):
        lines[0] += f" (installed here: {found['installed_version']})"
    rows = [Verdict(**verdict) for verdict in found["verdicts"]]
    if not rows:
        return [*lines, "  no layer selects: there is nothing to run sparsely"]
    cells = [
        (row.phase, row.plane, f"{row.layers} layers", row.verdict, row.format or "-", f"{row.reason} [{row.source}]")
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        lines.append("  ".join(("", *(c.ljust(w) for c, w in zip(row[:5], widths, strict=True)), row[5])))
    if found["bytes_per_token"] is not None:
        ratio = found["bytes_per_token"] / found["plan_bytes_per_token"]
        lines.append(
            f"  a token takes {found['bytes_per_token']:,.0f} B in these formats, {ratio:.2f} of the plan's own"
        )
    other = [f"{row.phase} {row.plane} is {row.verdict}" for row in rows if row.verdict != SPARSE]
    return [*lines, f"  verdict: {', '.join(other) or 'every sparse layer runs sparsely'}"]
