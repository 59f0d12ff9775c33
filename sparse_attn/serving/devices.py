"""What accelerators have, as published, and what own ones have, from a file. Imports no torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

LEVELS = ("published", "derived", "measured")
"""How a figure is known: said by somebody, computed from such figures, or measured by whoever gives it."""


@dataclass(frozen=True)
class Figure:
    """A number, how it is known, and from where."""

    value: float
    level: str
    source: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {self.level!r}")


@dataclass(frozen=True)
class Device:
    """One accelerator. ``family`` names the generation that engines have kernels for.

    ``memory`` in bytes, ``bandwidth`` of it in bytes per second, ``compute`` in bf16 operations per second, of dense
    matrices. None: no source.
    """

    name: str
    family: str
    memory: Figure | None = None
    bandwidth: Figure | None = None
    compute: Figure | None = None


_SXM = "dataset devidasmishra/ai-inference-hardware-economics-2026, SXM, dense"
_950 = "announcement at Huawei Connect 2025, by secondary pages"
_950_CORES = "32 cores x 4096 multiply-adds x 1.65 GHz, from FlashMLA's design notes for Ascend 950"
_910C = "techpowerup.com/335749, after DigiTimes"


def _published(value: float, source: str) -> Figure:
    return Figure(value, "published", source)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("h100", "sm90", _published(80e9, _SXM), _published(3.35e12, _SXM), _published(989e12, _SXM)),
        Device("h200", "sm90", _published(141e9, _SXM), _published(4.8e12, _SXM), _published(989e12, _SXM)),
        Device(
            "b200",
            "sm100",
            _published(180e9, "system descriptions of MLPerf Inference 6.0"),
            _published(8e12, _SXM),
            _published(2250e12, _SXM),
        ),
        Device("ascend-310p", "310p"),
        Device("ascend-910b", "a2"),
        Device(
            "ascend-910c",
            "a3",
            _published(128e9, "aiwiki.ai/wiki/huawei_ascend_910c, an estimate; two dies"),
            _published(3.2e12, _910C),
            _published(780e12, _910C),
        ),
        Device(
            "ascend-950pr",
            "950",
            _published(128e9, f"{_950}; another page says 112 GB"),
            _published(1.6e12, f"{_950}; another page says 1.4 TB/s"),
            Figure(432.5e12, "derived", _950_CORES),
        ),
        Device(
            "ascend-950dt",
            "950",
            _published(144e9, _950),
            _published(4e12, _950),
            Figure(432.5e12, "derived", _950_CORES),
        ),
        Device("cpu", "cpu"),
    )
}

FIGURES = {"memory": ("memory_gb", 1e9), "bandwidth": ("bandwidth_gb_s", 1e9), "compute": ("bf16_tflops", 1e12)}
"""Of each figure of a device, its key in a file and the unit there."""


def read(path: str | Path) -> dict[str, Device]:
    """Devices of a file, TOML (Python 3.11 or newer) or JSON: a table for each, by its name.

    Keys: ``memory_gb`` (10**9 bytes), ``bandwidth_gb_s``, ``bf16_tflops``, ``source``, and if wanted ``level`` (one of
    ``LEVELS``, else ``"published"``) and ``family`` (that of a device in ``DEVICES``). Raises ValueError.
    """
    path = Path(path)
    if path.suffix == ".json":
        parse = json.loads
    elif path.suffix == ".toml":
        try:
            parse = importlib.import_module("tomllib").loads
        except ModuleNotFoundError:
            raise ValueError(f"{path}: TOML needs Python 3.11 or newer: write the same tables as JSON") from None
    else:
        raise ValueError(f"{path}: expected a name that ends in .toml or .json")
    try:
        tables = parse(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tables, dict):
        raise ValueError(f"{path}: expected a table for each device, by its name, got {type(tables).__name__}")
    return {name: _device(f"{path}: {name}", name, table) for name, table in tables.items()}


def _device(where: str, name: str, table: Any) -> Device:
    keys = {key for key, _ in FIGURES.values()}
    known = keys | {"source", "level", "family"}
    if not isinstance(table, Mapping) or not keys | {"source"} <= table.keys() or not table.keys() <= known:
        got = ", ".join(sorted(table)) if isinstance(table, Mapping) else repr(table)
        raise ValueError(f"{where}: expected {', '.join(sorted(keys))}, source, and if wanted level, family, got {got}")
    families = sorted({device.family for device in DEVICES.values()})
    family = table.get("family", "")
    if family and family not in families:
        raise ValueError(f"{where}: family: expected one of {', '.join(families)}, got {family!r}")
    level = table.get("level", "published")
    found: dict[str, Figure] = {}
    for figure, (key, unit) in FIGURES.items():
        if isinstance(table[key], bool) or not isinstance(table[key], (int, float)) or not 0 < table[key] < inf:
            raise ValueError(f"{where}: {key}: expected a finite number above 0, got {table[key]!r}")
        found[figure] = Figure(table[key] * unit, level, str(table["source"]))
    return Device(name, family, **found)


def find(name: str, own: str | Path | None = None) -> Device:
    """The device of this name, of the file ``own`` or of ``DEVICES``. Raises ValueError."""
    devices = DEVICES | (read(own) if own else {})
    if name not in devices:
        raise ValueError(f"device: expected one of {', '.join(devices)}, or one of a file of your own, got {name!r}")
    return devices[name]
