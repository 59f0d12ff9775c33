"""Arithmetic of the serving suite: limits, goodput, arrivals, verdicts. The suite itself takes a model and minutes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from sparse_attn import bench
from sparse_attn.__main__ import main
from sparse_attn.serving.admission import Limits

pytest.importorskip("transformers")
arms, suite = bench.load("serving_arms"), bench.load("serving")
RESULTS = json.loads((Path(__file__).parents[1] / "benchmarks/results/serving-2026-11-29.json").read_text())
LIMIT = arms.Limit({"short": 1.0, "long": 2.0}, 0.5)


def record(kind: str, first: float, gaps: list[float], refused: str = "") -> Any:
    times = [] if refused else [10.0 + first + sum(gaps[:n]) for n in range(len(gaps) + 1)]
    return arms.Record(10.0, times, refused, kind)


def test_goodput_counts_tokens_of_requests_that_met_both_limits() -> None:
    steady = [0.1] * 19
    records = [
        record("short", 0.9, steady),
        record("short", 1.1, steady),
        record("long", 1.1, steady),
        record("long", 1.1, [0.1] * 18 + [9.0]),  # one gap of nineteen may be longer
        record("long", 1.1, [0.1] * 16 + [0.6] * 3),
        record("short", 0, [], refused="overdue"),
        arms.Record(3.0, kind="long"),
    ]
    found = arms.Goodput.of(arms.Served(records, 3, 10.0), LIMIT)
    assert (found.short, found.long, found.tokens) == (2.0, 4.0, 6.0)
    assert (found.offered, found.refused, found.late, found.slow, found.preemptions) == (7, 1, 1, 1, 3)


def test_arrivals_are_poisson() -> None:
    found = arms.poisson(5.0, 100.0, 400.0, 0.25, random.Random(0))
    assert len(found) == pytest.approx(2000, rel=0.1) and found[0][0] > 100 and found[-1][0] < 500
    assert sum(kind == "long" for _, kind in found) == pytest.approx(500, rel=0.15)
    assert [time for time, _ in found] == sorted(time for time, _ in found)


def good(tokens: float, long: float = 1.0):  # type: ignore[no-untyped-def]
    return arms.Goodput(tokens, tokens - long, long, 0, 0, 0, 0, 0)


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


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    """Goodput of the arms in the simulator, with what the experiment measured: means over ten seeds."""
    it = arms.Replay.of(RESULTS)
    tuned = {"B": 8.0, "C": 0.7, "default": Limits(1.0).compute}
    found = {}
    for name, value in tuned.items():
        runs = [it.run("C" if name == "default" else name, value, seed) for seed in range(11, 21)]
        found[name] = {part: mean(getattr(run, part) for run in runs) for part in ("tokens", "short", "long")}
    return found


def test_the_simulator_tells_what_the_experiment_found() -> None:
    """The model served the same arrivals; the simulator has its coefficients. Not arm A: it tips over by chance."""
    it = arms.Replay.of(RESULTS)
    for name, value in (("B", 8.0), ("C", 0.7), ("D", 0.0)):
        runs, measured = [it.run(name, value, seed) for seed in range(11, 16)], RESULTS["goodput"][name]
        for run, found in zip(runs, measured, strict=True):
            assert run.tokens == pytest.approx(found["tokens"], rel=0.2), name
        assert mean(run.tokens for run in runs) == pytest.approx(mean(m["tokens"] for m in measured), rel=0.1)
        assert mean(run.long for run in runs) == pytest.approx(mean(m["long"] for m in measured), rel=0.2)


def test_at_the_default_watermark_long_requests_get_their_part(replayed: dict[str, Any]) -> None:
    """At 0.7, which a short try had chosen, they got less than under the best static limit."""
    assert replayed["default"]["long"] > 0.9 * replayed["B"]["long"] > replayed["C"]["long"]
    assert replayed["default"]["tokens"] > 1.3 * replayed["B"]["tokens"]
    assert replayed["default"]["tokens"] > 0.98 * replayed["C"]["tokens"]


def test_the_simulator_chooses_a_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    it = arms.Replay.of(RESULTS)
    tokens = {0.7: 3.0, 0.8: 5.0, 0.9: 4.0}
    monkeypatch.setattr(
        arms.Replay, "run", lambda self, name, tuned, seed: good(tokens[tuned] + (seed == 2) * (tuned == 0.9))
    )
    assert it.best("C", [0.7, 0.8, 0.9], [1]) == 0.8 and it.best("C", [0.9], [1, 2]) == 0.9
    assert it.best("C", [0.9, 0.7], [1, 2]) == 0.9


def test_a_suite_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "none")
    assert main(["bench", "--suite", "serving"]) == 2
    assert "expected a checkout with the folder benchmarks" in capsys.readouterr().err
