"""Rows of a run: as JSON, as a table, as a page with plots, and held against another run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .machine import LIMITS

Result = dict[str, Any]
"""``{"machine", "limits", "rows"}``: texts by name, 1e9 operations or bytes a second by name, rows of suite.Row."""

AT_MOST = ("ms", "us", "x of its time")
"""Units of which less is better."""


def result(machine: dict[str, str], limits: dict[str, float], rows: Sequence[Any]) -> Result:
    return {"machine": machine, "limits": limits, "rows": [asdict(row) | {"met": row.met} for row in rows]}


def as_json(found: Result) -> str:
    rows = ",\n".join("    " + json.dumps(row) for row in found["rows"])
    head = json.dumps({name: found[name] for name in ("machine", "limits")}, indent=2)
    return f'{head[:-2]},\n  "rows": [\n{rows}\n  ]\n}}'


def load(file: Path) -> Result:
    """The run that a file holds. Raises ``ValueError`` if it holds none."""
    try:
        loaded: Result = json.loads(file.read_text())
    except ValueError:
        loaded = {}
    if not isinstance(loaded, dict) or not {"machine", "limits", "rows"} <= loaded.keys():
        raise ValueError(f"{file} is no run of the suite, as --output writes it")
    return loaded


PLOTTED = ("of limit", "x", "x of its time")


def picture(group: str) -> str:
    return group.lower().replace(" ", "-").replace(",", "").replace(".", "") + ".svg"


def grouped(found: Result) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by group and case."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in found["rows"]:
        groups.setdefault(row["group"], {}).setdefault(row["name"], []).append(row)
    return groups


def figure(row: dict[str, Any]) -> str:
    if row["unit"] in ("ms", "us"):
        return f"{row['value']:.4g} {row['unit']}"
    if row["unit"] == "of limit":
        return f"{100 * row['value']:.0f} %"
    return f"{row['value']:.2f}x"


def wanted(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    sign = "<=" if row["unit"] in AT_MOST else ">="
    return f"{sign} {figure(row | {'value': row['target']})}"


def heading(found: Result) -> str:
    rates = ", ".join(f"{LIMITS[name][0]} {rate:.4g} {LIMITS[name][1]}" for name, rate in found["limits"].items())
    where = ", ".join(f"{name} {text}" for name, text in found["machine"].items())
    return f"{where}. Measured limits: {rates}."


def table(found: Result) -> str:
    lines = [heading(found)]
    for group, cases in grouped(found).items():
        lines += ["", group]
        for name, rows in cases.items():
            lines.append(f"  {name}")
            for row in rows:
                state = {True: "met", False: "MISSED", None: ""}[row["met"]]
                peer = row["peer"] or "time"
                lines.append(f"    {peer:34} {figure(row):>12} +-{50 * row['spread']:3.0f} %  {wanted(row):12} {state}")
    return "\n".join(lines)


def markdown(found: Result) -> str:
    lines = [heading(found)]
    for group, cases in grouped(found).items():
        lines += ["", f"### {group}", "", "| case | time | of limit | beside |", "|---|---|---|---|"]
        for name, rows in cases.items():
            times = ", ".join(figure(row) for row in rows if row["unit"] in ("ms", "us"))
            limits = ", ".join(_cell(row) for row in rows if row["unit"] == "of limit")
            others = [row for row in rows if row["unit"] not in ("ms", "us", "of limit")]
            beside = ", ".join(f"{row['peer']} {_cell(row)}" for row in others)
            lines.append(f"| {name} | {times} | {limits} | {beside} |")
        if any(row["unit"] in PLOTTED for rows in cases.values() for row in rows):
            lines += ["", f"![{group}](benchmarks/{picture(group)})"]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return figure(row)
    return f"**{figure(row)}**" if row["met"] else f"{figure(row)} ({wanted(row)} expected)"


BINDING = {called for called, _ in LIMITS.values()}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What names a figure in every run. Which limit binds a case, the larger share tells, may differ between two."""
    peer = "the limit that binds" if row["peer"] in BINDING else row["peer"]
    return row["name"], peer, row["unit"], row["threads"]


def compared(found: Result, before: Result) -> list[tuple[dict[str, Any], float]]:
    """Ratios and shares of limits that another run has too, and their values there.

    Times are not compared: they are those of a machine and its state.
    """
    known = {_key(row): row["value"] for row in before["rows"] if row["unit"] not in ("ms", "us")}
    return [(row, known[_key(row)]) for row in found["rows"] if _key(row) in known]


def worse(found: Result, before: Result, slack: float) -> list[str]:
    """What of `compared` is worse than there by more than `slack` of it, one line each."""
    lines = []
    for row, old in compared(found, before):
        change = row["value"] / old if row["unit"] in AT_MOST else old / row["value"]
        if change > 1 + slack:
            now = figure(row)
            lines.append(f"{row['name']}, {row['peer']}: {now}, was {figure(row | {'value': old})}")
    return lines


def draw(found: Result, folder: Path) -> None:
    """One picture for each group: shares of the limit, and times of others over ours."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same rows give the same bytes, and texts stay texts.
    pyplot.rcParams.update({"svg.hashsalt": "sparse_attn", "svg.fonttype": "none"})
    folder.mkdir(parents=True, exist_ok=True)
    for group, cases in grouped(found).items():
        shares = [(name, row) for name, rows in cases.items() for row in rows if row["unit"] == "of limit"]
        ratios = [(name, row) for name, rows in cases.items() for row in rows if row["unit"].startswith("x")]
        panels = [panel for panel in (shares, ratios) if panel]
        if not panels:
            continue
        heights = [len(panel) for panel in panels]
        plot, axes = pyplot.subplots(
            len(panels), 1, figsize=(9, 1.2 + 0.24 * sum(heights)), height_ratios=heights, squeeze=False
        )
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            _bars(axis, panel)
        plot.suptitle(group)
        plot.tight_layout()
        plot.savefig(folder / picture(group), metadata={"Date": None})
        pyplot.close(plot)


def _bars(axis: Any, panel: list[tuple[str, dict[str, Any]]]) -> None:
    places = range(len(panel))
    colours = ["tab:red" if row["met"] is False else "tab:green" if row["met"] else "tab:blue" for _, row in panel]
    axis.barh(places, [row["value"] for _, row in panel], color=colours)
    for place, (_, row) in zip(places, panel, strict=True):
        axis.text(row["value"], place, " " + figure(row), va="center", fontsize=6)
        if row["target"] is not None:
            axis.plot([row["target"]] * 2, [place - 0.4, place + 0.4], color="black")
    axis.set_yticks(places, [f"{name}: {row['peer']}" for name, row in panel], fontsize=6)
    axis.invert_yaxis()
    if panel[0][1]["unit"] == "of limit":
        axis.set_xlim(0, 1.1)
    elif max(row["value"] for _, row in panel) > 20:
        axis.set_xscale("log")
    axis.tick_params(axis="x", labelsize=6)
