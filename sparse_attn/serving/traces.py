"""Requests of public traces: when they came, and their lengths. Imports no torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from .planner import Request


def read(path: str | Path) -> list[Request]:
    """Requests of a file, in its order: JSON lines as Mooncake's (``timestamp`` in milliseconds, ``input_length``,
    ``output_length``), or CSV as Azure's (``TIMESTAMP`` in ISO form, ``ContextTokens``, ``GeneratedTokens``).

    Raises ValueError, naming the line.
    """
    path = Path(path)
    with path.open(newline="") as lines:
        if path.suffix == ".csv":
            rows: Any = enumerate(csv.DictReader(lines), 2)
            parse: Callable[[Any], Request] = _azure
        else:
            rows = ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
            parse = _mooncake
        found = []
        for number, row in rows:
            try:
                found.append(parse(row))
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: expected a time and two lengths, got {row}") from error
    return found


def _mooncake(line: str) -> Request:
    row = json.loads(line)
    return _request(float(row["timestamp"]) / 1000, row["input_length"], row["output_length"])


def _azure(row: Any) -> Request:
    stamp, _, fraction = row["TIMESTAMP"].partition(".")
    seconds = datetime.fromisoformat(stamp).timestamp() + float(f"0.{fraction or 0}")  # seven digits, in the trace
    return _request(seconds, row["ContextTokens"], row["GeneratedTokens"])


def _request(arrival: float, prompt: Any, output: Any) -> Request:
    found = Request(arrival, int(prompt), int(output))
    if not isfinite(arrival) or found.prompt < 0 or found.output < 0 or found.context < 1:
        raise ValueError("time or lengths")
    return found
