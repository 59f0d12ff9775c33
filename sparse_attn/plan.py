"""What a model's cache costs and buys on a device: memory, time, and which of them binds."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from .models import BF16, METHODS, PRESETS, Model, shard, sparse
from .serving import devices, traces
from .serving.planner import MOST, WORTH, Cache, Rank, cache_of, demand
from .serving.weights import WEIGHTS, Weights

CONTEXTS = (8192, 32768, 131072, 524288, 1048576)
"""Contexts of the frontier."""


def tokens(text: str) -> int:
    """``131072``, ``128k`` or ``1m``; k is 1024."""
    match = re.fullmatch(r"([1-9]\d*)([km]?)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number of tokens such as 131072, 128k or 1m, got {text!r}")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def counts(text: str) -> list[int]:
    """``8k,32k``."""
    return [*map(tokens, text.split(","))]


def seconds(text: str) -> float:
    """``50ms`` or ``0.05s``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 50ms or 0.05s, got {text!r}")
    return float(match[1]) * {"ms": 1e-3, "s": 1.0}[match[2]]


def share(text: str) -> Fraction:
    """``1/4`` or ``0.25``."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a share such as 1/4 or 0.25, got {text!r}") from None


def shares(text: str) -> list[Fraction]:
    """``1/2,1/4``, each above 0 and below 1, and no two alike."""
    found = [*map(share, text.split(","))]
    if not all(0 < each < 1 for each in found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"expected different shares between 0 and 1 such as 1/2,1/4, got {text!r}")
    return found


def formats(text: str) -> dict[str, str]:
    """``bf16``, or formats by plane: ``main=bf16,index=int8_index``."""
    if text == "bf16":
        return dict(BF16)
    found = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not found or len(found) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"expected bf16 or such as main=bf16,index=int8_index, got {text!r}")
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn plan", description=__doc__)
    parser.add_argument("--model", required=True, metavar="NAME", help=", ".join(PRESETS))
    parser.add_argument("--device", required=True, metavar="NAME", help=", ".join(devices.DEVICES))
    parser.add_argument("--devices", metavar="FILE", help="devices of your own, TOML or JSON: see docs/plan.md")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, one device each")
    parser.add_argument("--context", type=tokens, default="128k", metavar="TOKENS", help="of each request (128k)")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests in flight (64)")
    parser.add_argument("--format", type=formats, metavar="FORMATS", help="bf16, or main=...,window=...,index=...")
    parser.add_argument("--method", choices=METHODS, help="run a dense model sparsely by this method")
    parser.add_argument("--k", type=int, default=0, metavar="N", help="indices that the method selects")
    parser.add_argument("--share", type=share, metavar="PART", help="or this share of what is visible, as 1/4")
    parser.add_argument("--baseline", default="dense", metavar="NAME", help="dense (bf16), or another model")
    parser.add_argument("--weights-gb", type=float, metavar="GB", help="weights of the whole model on the devices")
    parser.add_argument("--active-b", type=float, metavar="N", help="10**9 parameters that a token passes")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the device that the engine uses (0.9)")
    parser.add_argument(
        "--step-tokens", type=int, default=8192, help="query tokens whose index scores are held at once (8192; 0: none)"
    )
    parser.add_argument("--slo", type=seconds, metavar="TIME", help="that a decode step may take, as 50ms")
    parser.add_argument("--trace", metavar="FILE", help="requests: JSON lines as Mooncake's, or CSV as Azure's")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def preset(name: str) -> Model:
    if name not in PRESETS:
        raise ValueError(f"model: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report, of plain types. Raises ValueError."""
    model = preset(options.model)
    if options.method:
        model = sparse(model, METHODS[options.method], options.k, share=options.share)
    elif options.k or options.share:
        raise ValueError("k, share: expected together with --method, got no method")
    for name in ("tp", "concurrency"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(options, name)}")
    device = devices.find(options.device, options.devices)
    weights = _weights(options)
    rank = Rank(
        model,
        device,
        weights,
        ranks=options.tp,
        formats=options.format,
        share=options.memory_share,
        step_tokens=options.step_tokens,
        slo=options.slo,
    )
    context, concurrency = options.context, options.concurrency
    pool = rank.pool(context)
    if pool is not None and pool <= 0:
        taken = (rank.weight_bytes or 0) + rank.workspace(context)
        raise ValueError(
            f"memory: expected room for a cache, got {_gb(taken)} of weights and index scores in the "
            f"{_gb(taken + pool)} that a rank may use; use more --tp or fewer --step-tokens"
        )
    before = _baseline(options, rank)
    change = rank.change(before, context, concurrency)
    point = rank.limits(context)
    found: dict[str, Any] = {
        "model": model.name,
        "method": options.method,
        "ranks": options.tp,
        "context": context,
        "concurrency": concurrency,
        "slo_seconds": options.slo,
        "device": asdict(device),
        "weights": asdict(weights),
        "rank": {
            "weights_bytes": rank.weight_bytes,
            "index_scores_bytes": rank.workspace(context),
            "pool_bytes": pool,
            "memory_share": options.memory_share,
            "step_tokens": options.step_tokens,
        },
        "cache": {
            "bytes_per_token": dict(rank.cache.per_token),
            "fixed_bytes": dict(rank.cache.fixed),
            "bytes": rank.cache.of(context),
            "baseline": options.baseline,
            "baseline_bytes": before.of(context),
        },
        "ratios_to_dense": asdict(rank.ratios(context)),
        "pairs": dict(rank.decode(context).pairs),
        "step_seconds": rank.step(context, concurrency),
        "limits": dict(point.limits),
        "binds": point.binds,
        "frontier": [
            {"context": at.context, "limits": dict(at.limits), "requests": at.requests, "binds": at.binds}
            for at in map(rank.limits, CONTEXTS)
        ],
        "change": asdict(change) | {"freed": change.freed},
        "break_even": {
            "context": rank.even_contexts(),
            "requests": rank.even_requests(context),
        },
    }
    if options.trace:
        found["trace"] = asdict(demand(rank, traces.read(options.trace)))
    return found


def _weights(options: argparse.Namespace) -> Weights:
    found = WEIGHTS.get(options.model, Weights())
    for option, name, unit in (("weights_gb", "size", 1e9), ("active_b", "active", 1e9)):
        value = getattr(options, option)
        if value is None:
            continue
        if not 0 < value < float("inf"):
            raise ValueError(f"{option}: expected a finite number above 0, got {value}")
        source = f"--{option.replace('_', '-')}"
        found = replace(found, **{name: devices.Figure(value * unit, "published", source)})
    return found


def _baseline(options: argparse.Namespace, rank: Rank) -> Cache:
    if options.baseline == "dense":
        return rank.full
    if options.baseline not in PRESETS:
        raise ValueError(f"baseline: expected dense or one of {', '.join(PRESETS)}, got {options.baseline!r}")
    return cache_of(shard(PRESETS[options.baseline], options.tp))


# --- Text ----------------------------------------------------------------------------------------------------------


def _gb(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"


def _figure(figure: dict[str, Any] | None, unit: float, name: str, option: str) -> tuple[str, str, str]:
    if figure is None:
        return "unknown", "", f"no source: give {option}"
    return f"{figure['value'] / unit:,g} {name}", figure["level"], figure["source"]


def _times(times: dict[str, float | None]) -> str:
    return ", ".join(f"{n} {'unknown' if t is None else f'{1e3 * t:.2f} ms'}" for n, t in times.items())


def _parts(sizes: dict[str, float]) -> str:
    return " + ".join(f"{kind} {size:,.1f}" for kind, size in sizes.items()) or "none"


Row = tuple[str, str, str, str]
"""A name, a value, how it is known, and a remark."""


def sections(report: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """The report as titles and rows."""
    device, rank, cache = report["device"], report["rank"], report["cache"]
    weights, ratios, pairs = report["weights"], report["ratios_to_dense"], report["pairs"]
    own = "--devices"
    published: list[Row] = [
        ("memory", *_figure(device["memory"], 1e9, "GB", own)),
        ("bandwidth", *_figure(device["bandwidth"], 1e12, "TB/s", own)),
        ("bf16", *_figure(device["compute"], 1e12, "TFLOPS", own)),
        ("weights, whole model", *_figure(weights["size"], 1e9, "GB", "--weights-gb")),
        ("parameters of a token", *_figure(weights["active"], 1e9, "10**9", "--active-b")),
    ]
    memory: list[Row] = []
    if rank["weights_bytes"] is not None:
        memory.append(("weights", _gb(rank["weights_bytes"]), "derived", "an even part"))
    scores = f"of {rank['step_tokens']:,} query tokens, fp32, one layer at a time; none where selection streams"
    memory.append(("index scores", _gb(rank["index_scores_bytes"]), "exact", scores))
    rest = f"{rank['memory_share']:.0%} of memory less weights and index scores"
    pool = "unknown" if rank["pool_bytes"] is None else _gb(rank["pool_bytes"])
    memory.append(("pool of caches", pool, "estimated", rest))
    per_token, fixed = sum(cache["bytes_per_token"].values()), sum(cache["fixed_bytes"].values())
    memory += [
        ("cache, each token", f"{per_token:,.1f} B", "exact", _parts(cache["bytes_per_token"])),
        ("cache, each request", f"{fixed:,.0f} B", "exact", _parts(cache["fixed_bytes"])),
    ]
    to_dense: list[Row] = [
        ("resident bytes", f"{ratios['resident']:.4f}", "exact", "of the cache"),
        ("bytes read", f"{ratios['read']:.4f}", "exact", "by attention and selection of a decode step"),
        ("pairs", f"{ratios['pairs']:.4f}", "exact", "attended in a decode step"),
    ]
    if pairs.get("scored"):
        to_dense.append(
            ("pairs scored", f"{pairs['scored'] / pairs['dense']:.4f}", "exact", "besides, by the selector")
        )
    title = f"{report['concurrency']} requests of {report['context']:,} tokens"
    return [
        ("figures of a device and the model", published),
        ("memory of a rank", memory),
        (f"ratios to full attention on bf16 rows, at {report['context']:,} tokens; three different numbers", to_dense),
        (title, _point(report)),
        ("most requests by context, and what binds", _frontier(report)),
        *_change(report),
        ("break-even, against the same planes without selection", _even(report)),
        *([("trace", _trace(report))] if "trace" in report else []),
    ]


def _point(report: dict[str, Any]) -> list[Row]:
    need = report["concurrency"] * report["cache"]["bytes"]
    pool = report["rank"]["pool_bytes"]
    share = "" if pool is None else f"{need / pool:.0%} of the pool"
    rows: list[Row] = [("caches", _gb(need), "exact", share)]
    rows.append(("least time of a step", _times(report["step_seconds"]), "estimated", ""))
    if report["binds"] is None:
        return [*rows, ("binds", "unknown", "", "weights or the device's memory are unknown")]
    at = report["limits"][report["binds"]]
    fits = f"at {at:,} requests" + ("" if at >= report["concurrency"] else ": fewer than asked for")
    return [*rows, ("binds first", report["binds"], "estimated", fits)]


def _frontier(report: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for at in report["frontier"]:
        limits = ", ".join(f"{name} {'unknown' if n is None else f'{n:,}'}" for name, n in at["limits"].items())
        found = "unknown" if at["requests"] is None else f"{at['requests']:,}"
        rows.append((f"{at['context']:,}", found, "estimated", limits))
    return rows


def _change(report: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    change, cache = report["change"], report["cache"]
    ratio = cache["bytes"] / cache["baseline_bytes"]
    name, each = cache["baseline"], f"of {change['context']:,} tokens"
    title = f"against {name}: a cache {each} takes {ratio:.4f} of the bytes"
    if ratio > 1:
        more = change["after"] - change["before"]
        return [(title, [("memory rises", f"{ratio - 1:+.1%}", "exact", f"{_gb(more)}: nothing is freed")])]
    held = f"{name} holds {change['requests']} such requests in {_gb(change['before'])}; of this, freed"
    level = "estimated" if change["requests"] < report["concurrency"] else "exact"  # as many as the pool holds
    rows: list[Row] = [("freed", _gb(change["freed"]), level, held)]
    units = {"requests": "requests", "context": "tokens of context", "step tokens": "query tokens more in a step"}
    for use in change["uses"]:
        if use["name"] == "weights":
            size = _gb(use["amount"] * report["ranks"])
            rows.append(("or weights", size, level, "of this or another model, over all ranks"))
        elif use["amount"] is None:
            rows.append((f"or {use['name']}", "nothing", "exact", "no index scores take memory"))
        else:
            end = "" if use["until"] is None else f"; {use['binds']} binds at {use['until']:,}"
            amount = f"above {MOST:,}" if use["amount"] > MOST else f"{use['amount']:,}"
            rows.append(
                (
                    f"or {use['name']}",
                    amount,
                    level if not end else "estimated",
                    f"{units[use['name']]}, by memory{end}",
                )
            )
    return [(f"{title}; each use by itself, not all", rows)]


def _even(report: dict[str, Any]) -> list[Row]:
    even = report["break_even"]
    rows: list[Row] = []
    for name, context in even["context"].items():
        value = "never" if context is None else f"from {context:,} tokens"
        rows.append((name, value, "exact", "of a decode step"))
    requests = even["requests"]
    value = "never, or unknown" if requests is None else f"from {requests:,} requests"
    return [*rows, ("time", value, "estimated", f"{WORTH:.0%} of a decode step at {report['context']:,} tokens")]


def _trace(report: dict[str, Any]) -> list[Row]:
    found, pool, slo = report["trace"], report["rank"]["pool_bytes"], report["slo_seconds"]
    shares = {name: None if time is None else time / slo for name, time in found["seconds"].items()}
    shares["memory"] = None if pool is None else found["bytes"] / pool
    known = {name: share for name, share in shares.items() if share is not None}
    text = ", ".join(f"{name} {share:.0%}" for name, share in known.items())
    contexts = f"final lengths: median {found['median_context']:,}, longest {found['longest_context']:,}"
    binds = max(known, key=lambda name: known[name]) if known else "unknown"
    fits = "does not fit" if any(share > 1 for share in known.values()) else "fits"
    return [
        ("requests in flight", f"{found['requests']:,}", "estimated", f"at the peak of caches; {contexts}"),
        ("caches", _gb(found["bytes"]), "estimated", "of a rank, at that moment"),
        ("binds first", binds, "estimated", f"{text or 'unknown'} in use: {fits}"),
    ]


def text(report: dict[str, Any]) -> str:
    ranks = f" x {report['ranks']}" if report["ranks"] > 1 else ""
    method = f", selecting by {report['method']}" if report["method"] else ""
    lines = [f"{report['model']}{method} on {report['device']['name']}{ranks}"]
    for title, rows in sections(report):
        lines += ["", title]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True))
            lines.append("  ".join(("", *cells, row[3])).rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Returns 0, or 2 where it is refused."""
    parser = arguments()
    options = parser.parse_args(argv)
    try:
        report = plan(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0
