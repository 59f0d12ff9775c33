"""Reads Prometheus' text format. Imports no torch, and no client library."""

from __future__ import annotations

import re
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

LINE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
SECONDS = 10


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of an exposition, in its order. Raises ValueError, naming the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.split(" # ")[0].rstrip())  # an exemplar of OpenMetrics may follow
        try:
            if match is None:
                raise ValueError
            found.append(Sample(match[1], _labels(match[2] or ""), float(match[3])))
        except ValueError:
            raise ValueError(f"metrics, line {number}: expected a name, labels and a number, got {line!r}") from None
    return found


def _labels(text: str) -> dict[str, str]:
    found, place = {}, 0
    while place < len(text.rstrip()):
        match = LABEL.match(text, place)
        if match is None:
            raise ValueError
        found[match[1]] = re.sub(r"\\.", lambda escape: ESCAPES.get(escape[0], escape[0]), match[2])
        place = match.end()
    return found


def read(where: str) -> list[Sample]:
    """The samples at a URL (http or https) or in a file. Raises OSError or ValueError if it cannot be read."""
    try:
        if where.startswith(("http://", "https://")):
            with urlopen(where, timeout=SECONDS) as answer:
                text = answer.read().decode()
        else:
            text = Path(where).read_text()
    except (HTTPException, UnicodeError) as error:
        raise ValueError(f"{where}: expected metrics as text: {error}") from error
    return parse(text)
