"""The page on observing: its example runs, and its tables are what is exported and computed."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from sparse_attn.models import PRESETS
from sparse_attn.serving.dashboard import alerts
from sparse_attn.serving.metrics import METRICS, crossover

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
PAGE = Path(__file__).parents[1] / "docs" / "observe.md"


def test_the_example_runs() -> None:
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0


def test_the_tables_are_complete() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^\| `(sparse_attn_\w+)`", text, re.MULTILINE) == sorted(METRICS, key=text.index)
    for name, metric in METRICS.items():
        (row,) = re.findall(rf"^\| `{name}` \|([^|]*)\|", text, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == list(metric.labels), name
    assert sorted(re.findall(r"^\| `(SparseAttention\w+)`", text, re.MULTILINE)) == sorted(r["alert"] for r in alerts())
    assert f"from {crossover(PRESETS['deepseek-v3.2'])} tokens" in text
