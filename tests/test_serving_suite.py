"""Arithmetic of the serving suite: limits, goodput, arrivals, verdicts. The suite itself takes a model and minutes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sparse_attn import bench
from sparse_attn.__main__ import main

pytest.importorskip("transformers")
load, suite = bench.load("serving_load"), bench.load("serving")
LIMIT = suite.Limit({"short": 1.0, "long": 2.0}, 0.5)


def record(kind: str, first: float, gaps: list[float], refused: str = "") -> Any:
    times = [] if refused else [10.0 + first + sum(gaps[:n]) for n in range(len(gaps) + 1)]
    return load.Record(10.0, times, refused, kind)


def test_goodput_counts_tokens_of_requests_that_met_both_limits() -> None:
    steady = [0.1] * 19
    records = [
        record("short", 0.9, steady),
        record("short", 1.1, steady),
        record("long", 1.1, steady),
        record("long", 1.1, [0.1] * 18 + [9.0]),  # one gap of nineteen may be longer
        record("long", 1.1, [0.1] * 16 + [0.6] * 3),
        record("short", 0, [], refused="overdue"),
        load.Record(3.0, kind="long"),
    ]
    found = suite.Goodput.of(load.Served(records, [], 3, 10.0), LIMIT)
    assert (found.short, found.long, found.tokens) == (2.0, 4.0, 6.0)
    assert (found.offered, found.refused, found.late, found.slow, found.preemptions) == (7, 1, 1, 1, 3)


def test_arrivals_are_poisson() -> None:
    found = load.poisson(5.0, 100.0, 400.0, 0.25, random.Random(0))
    assert len(found) == pytest.approx(2000, rel=0.1) and found[0][0] > 100 and found[-1][0] < 500
    assert sum(kind == "long" for _, kind in found) == pytest.approx(500, rel=0.15)
    assert [time for time, _ in found] == sorted(time for time, _ in found)


def good(tokens: float, long: float = 1.0):  # type: ignore[no-untyped-def]
    return suite.Goodput(tokens, tokens - long, long, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "accepted"),
        ({"B": [good(100)] * 4 + [good(121)]}, "not accepted"),  # not better on every seed
        ({"B": [good(112)] * 5, "again": [good(112)] * 2}, "not accepted"),
        ({"A": [good(95)] * 5}, "not accepted"),
        ({"D": [good(95)] * 5}, "not accepted"),
        ({"C": [good(120, 0.8)] * 5}, "not accepted"),
        ({"again": [good(100), good(111)]}, "void"),
        ({"old": (good(100), good(96))}, "not accepted"),
    ],
)
def test_the_verdict_follows_the_conditions(change: dict[str, object], said: str) -> None:
    given = {"A": [good(80)] * 5, "B": [good(100)] * 5, "C": [good(120)] * 5, "D": [good(80)] * 5, **change}
    again, old = given.pop("again", [good(100), good(108)]), given.pop("old", (good(100), good(98)))
    assert suite.verdict(given, again, old)["verdict"] == said


def test_a_suite_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "none")
    assert main(["bench", "--suite", "serving"]) == 2
    assert "expected a checkout with the folder benchmarks" in capsys.readouterr().err
