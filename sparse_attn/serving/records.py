"""Counts of steps and requests as lines of JSON. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from types import TracebackType
from typing import Any

from .stats import StepStats

BYTES = ("read", "least_read", "written", "read_ratio")
"""What depends on the formats of planes."""


class Records:
    """A file with a line for each step and each finished request; several processes may append to the same file.

    A line has ``"record"`` (``"step"`` or ``"request"``), ``"time"`` (seconds since 1970), what the caller says, and
    the counts of ``StepStats.to_dict``, without bytes unless ``bytes_known``.
    """

    def __init__(self, path: str, bytes_known: bool = True) -> None:
        self.path, self.bytes_known = path, bytes_known
        # a line is one write to the end of the file, so lines of several processes do not mix
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: str, stats: StepStats, **facts: Any) -> None:
        line = {"record": record, "time": time.time(), **facts, **stats.to_dict()}
        if not self.bytes_known:
            for phase in ("prefill", "decode"):
                line[phase] = {name: count for name, count in line[phase].items() if name not in BYTES}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
