"""Fits of step times against known coefficients and the conditions of an optimum; knees; refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from faults import faulty
from test_cost import MODEL

from sparse_attn.serving import calibration
from sparse_attn.serving import knee as knees
from sparse_attn.serving.calibration import Row, error, read, throughputs
from sparse_attn.serving.cost import KINDS, TERMS, Predictor, Profile, StepCost, Work
from sparse_attn.serving.knee import NoKnee
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.stats import Stats

TRUE = StepCost(2e-3, 3e-5, 4e-8, 5e-7, "a device")


def seconds(cost: StepCost, row: Row) -> float:
    return sum(getattr(cost, term) * x for term, x in zip(TERMS, row.columns, strict=True))


@cache
def rows(noise: float = 0.0, seed: int = 0, count: int = 120, cost: StepCost = TRUE) -> list[Row]:
    """Steps of batches of all sizes and lengths, some with a chunk of a prompt."""
    chosen = random.Random(seed)
    found = []
    stats = Stats(MODEL)
    for _ in range(count):
        lengths = [chosen.randint(1, 4000) for _ in range(chosen.choice((1, 2, 4, 8, 16)))]
        spans = {n: (length, length + 1) for n, length in enumerate(lengths)}
        if chosen.random() < 0.3:
            spans["chunk"] = (0, chosen.randint(16, 512))  # type: ignore[index]
        step = {**stats.step(spans).to_dict(), "seconds": 1.0}
        row = calibration.row(step)
        exact = seconds(cost, row)
        found.append(Row(row.tokens, row.scored, row.attended, exact * (1 + chosen.gauss(0, noise)), row.decoding))
    return found


def the_coefficients_are_found(module: ModuleType) -> None:
    found = module.fit(rows(), "a device")
    for term in TERMS:
        assert getattr(found.cost, term) == pytest.approx(getattr(TRUE, term), rel=1e-6)
    assert found.error < 1e-9 and found.cost.device == "a device" and found.steps == 120


def the_intervals_hold_the_coefficients(module: ModuleType) -> None:
    """Of 12 fits to steps with 5 % noise: each term's interval misses seldom, and is not wide without need."""
    held = dict.fromkeys(TERMS, 0)
    for seed in range(12):
        found = module.fit(rows(0.05, seed))
        assert 0.02 < found.error < 0.05
        for term, (low, high) in found.intervals.items():
            true = getattr(TRUE, term)
            held[term] += low <= true <= high
            assert high - low < 3 * true
    assert all(9 <= count <= 12 for count in held.values()), held


def no_coefficient_is_negative_and_none_is_better(module: ModuleType) -> None:
    """The conditions of an optimum: no gradient at a coefficient above 0, none that invites at one of 0."""
    left_out = 0
    for seed in range(200):
        chosen = random.Random(seed)
        some = [Row(*(chosen.randint(0, 9) for _ in range(3)), chosen.uniform(0.1, 9)) for _ in range(12)]
        matrix, right = module._sum(module._equations(row, [1.0] * 4, 1.0) for row in some)
        found = module._least((matrix, right), range(4))
        for n, x in enumerate(found):
            slope = right[n] - sum(matrix[n][m] * found[m] for m in range(4))
            assert slope < 1e-8 and (x == 0 or abs(slope) < 1e-8)
        left_out += found.count(0)
        assert min(found) >= 0
    assert left_out > 100, "times that are noise leave terms out"


def other_lengths_are_predicted(module: ModuleType) -> None:
    """Fitted to short and small, the time of long and large steps is right."""
    it = Predictor(MODEL, module.fit(rows(0.02)).cost)
    exact = Predictor(MODEL, TRUE)
    for batch, length in ((64, 3000), (16, 20_000), (1, 100_000)):
        works = [Work.decode(length)] * batch
        assert it.seconds(works) == pytest.approx(exact.seconds(works), rel=0.1)


def a_pause_spoils_little(module: ModuleType) -> None:
    steps = rows(0.02)
    late = [Row(r.tokens, r.scored, r.attended, r.seconds * (50 if n % 30 == 0 else 1)) for n, r in enumerate(steps)]
    assert error(module.fit(late).cost, steps) < 0.06
    nothing = [Row(0, 0, 1 + n % 3, 1e-3) for n in range(6)] + [Row(1, 5, 1 + n % 3, 2e-3) for n in range(6)]
    with pytest.raises(ValueError, match="token and scored"):
        module.fit(nothing)


def what_cannot_be_told_apart_is_refused(module: ModuleType) -> None:
    alike = [Row(n, 100 * n, 50 * n, 1e-3 * n) for n in range(1, 30)]
    with pytest.raises(ValueError, match="tell token and scored apart"):
        module.fit(alike)
    one = [Row(8, 100 * n, 7 * n * n, 1e-3 * n) for n in range(1, 30)]
    with pytest.raises(ValueError, match="tell step and token apart"):
        module.fit(one)
    with pytest.raises(ValueError, match="steps: expected at least 12, got 11"):
        module.fit(rows(count=11))
    dense = [Row(r.tokens, 0, r.attended, seconds(TRUE, Row(r.tokens, 0, r.attended, 1))) for r in rows()]
    found = module.fit(dense)
    assert found.cost.scored == 0 and found.intervals["scored"] == (0, 0)
    assert found.cost.attended == pytest.approx(TRUE.attended)


KIND_COSTS = Profile(TRUE, StepCost(1.5e-3, 2e-5, 0.0, 2e-7, "a device"), StepCost(3e-3, 1e-5, 0.0, 3e-8, "a device"))


@cache
def steps_of_an_engine(count: int = 200, noise: float = 0.0, dense: bool = True) -> list[Row]:
    """Rows of steps that tell kinds apart: a third of them with chunks of prompts beside what decodes."""
    chosen = random.Random(0)
    predictor, observer = Predictor(MODEL, KIND_COSTS), Observer(MODEL)
    lines: list[dict[str, object]] = []
    observer._records = SimpleNamespace(write=lambda _, counts, **facts: lines.append({**facts, **counts.to_dict()}))  # type: ignore[assignment]
    for n in range(count):
        paths = {0: (False,), 1: (True,), 2: (False, True)}[n % 3] if dense else (False,)
        works = [Work.decode(chosen.randint(1, 4000), chosen.choice(paths)) for _ in range(chosen.choice((1, 4, 16)))]
        if n % 3 == 2:
            before = chosen.randint(0, 3000)
            works.append(Work(before, before + chosen.randint(2, 300), True))
        seconds = predictor.seconds(works) * (1 + chosen.gauss(0, noise))
        observer.works(dict(enumerate(works)), {"plan": len(works)}, seconds)
    return list(map(calibration.row, lines))


def kinds_are_fitted_apart(module: ModuleType) -> None:
    found, why = module.fits(steps_of_an_engine(), "a device")
    assert not why and set(found) == set(KINDS)
    for kind in ("selecting", "dense"):
        for term in TERMS:
            assert getattr(found[kind].cost, term) == pytest.approx(getattr(KIND_COSTS.of(kind), term), rel=1e-6)
    # a step with a chunk takes the longest of the times of a step itself: the chunk's
    for term in TERMS:
        assert getattr(found["chunk"].cost, term) == pytest.approx(getattr(KIND_COSTS.of("chunk"), term), rel=1e-6)
    profile = module.profile(found)
    assert profile.device == "a device" and profile.chunk == found["chunk"].cost
    whole = Predictor(MODEL, module.profile(module.fits(steps_of_an_engine(noise=0.03))[0]))
    for works in ([Work.decode(9000)] * 8, [Work.decode(6000, True)] * 8, [Work(5000, 5512, True), Work.decode(3000)]):
        assert whole.seconds(works) == pytest.approx(Predictor(MODEL, KIND_COSTS).seconds(works), rel=0.1)


def a_kind_that_cannot_be_fitted_is_told(module: ModuleType) -> None:
    few = steps_of_an_engine()[:30]
    found, why = module.fits(few)
    assert set(found) == {"selecting"} and set(why) == {"selecting", "dense", "chunk"}
    assert why["dense"] == "steps: expected at least 12, got 10; measure more"
    assert found["selecting"].steps == 30, "all steps stand for those that select alone"
    found, why = module.fits(steps_of_an_engine(dense=False))
    assert set(found) == {"selecting", "chunk"} and not why
    without = [replace(row, kinds={}) for row in steps_of_an_engine()]
    found, why = module.fits(without)
    assert set(found) == {"selecting"} and not why and found["selecting"] == module.fit(without)


def curve(levels, height, noise=0.0, seed=0):  # type: ignore[no-untyped-def]
    chosen = random.Random(seed)
    return [(float(x), height(x) * (1 + chosen.gauss(0, noise))) for x in levels]


EVERY, DOUBLING = range(1, 33), (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def the_knee_is_found(module: ModuleType) -> None:
    for levels in (EVERY, DOUBLING):
        exact = module.knee(curve(levels, lambda x: 100 * min(x, 12)))
        assert exact.at == pytest.approx(12, rel=0.02) and exact.throughput == pytest.approx(1200, rel=0.02)
        held = 0
        for seed in range(20):
            found = module.knee(curve(levels, lambda x: 100 * min(x, 12), 0.04, seed))
            assert found.at == pytest.approx(12, rel=0.15)
            held += found.interval[0] <= 12 <= found.interval[1]
            assert found.interval[1] - found.interval[0] < 6
        assert held >= 15, held


def no_knee_is_said(module: ModuleType) -> None:
    cases = {
        "to flatten": lambda x: 5.0 * x,
        "hardly any rise": lambda x: 5.0,
        "one that stays": lambda x: x / (x + 8),
    }
    for message, height in cases.items():
        with pytest.raises(module.NoKnee, match=message):
            module.knee(curve(EVERY, height))
    for seed in range(20):
        for noise in (0.02, 0.05):
            for height in (cases["to flatten"], cases["hardly any rise"]):
                with pytest.raises(module.NoKnee):
                    module.knee(curve(EVERY, height, noise, seed))
    with pytest.raises(module.NoKnee, match="measurements past it"):
        module.knee(curve(DOUBLING, lambda x: min(x, 48)))
    with pytest.raises(module.NoKnee, match="at least 5 different concurrencies, got 4"):
        module.knee(curve([1, 2, 3, 4, 4], lambda x: min(x, 2)))


CHECKS = {
    "calibration": [
        the_coefficients_are_found,
        the_intervals_hold_the_coefficients,
        no_coefficient_is_negative_and_none_is_better,
        other_lengths_are_predicted,
        a_pause_spoils_little,
        what_cannot_be_told_apart_is_refused,
        kinds_are_fitted_apart,
        a_kind_that_cannot_be_fitted_is_told,
    ],
    "knee": [the_knee_is_found, no_knee_is_said],
}


@pytest.mark.parametrize(("module", "check"), [(m, c) for m, cs in CHECKS.items() for c in cs])
def test_the_rule(module: str, check) -> None:  # type: ignore[no-untyped-def]
    check({"calibration": calibration, "knee": knees}[module])


# (check that must notice, text in the file, what stands there instead)
FAULTS = {
    "calibration": [
        (the_intervals_hold_the_coefficients, "a * row.seconds / weight for", "a for"),
        (
            the_intervals_hold_the_coefficients,
            "max(p, row.seconds / 2)",
            "row.seconds",
        ),
        (the_coefficients_are_found, "term: x / scale", "term: x * scale"),
        (the_intervals_hold_the_coefficients, "k=len(blocks)", "k=4 * len(blocks)"),
        (the_intervals_hold_the_coefficients, "(1 - LEVEL) / 2", "0.4"),
        (no_coefficient_is_negative_and_none_is_better, "found is None or min(found) < 0", "found is None"),
        (no_coefficient_is_negative_and_none_is_better, "if explained > most:", "if not most:"),
        (
            no_coefficient_is_negative_and_none_is_better,
            "range(len(used), 0, -1)",
            "range(len(used), len(used) - 1, -1)",
        ),
        (a_pause_spoils_little, "max(p, row.seconds / 2)", "p"),
        (what_cannot_be_told_apart_is_refused, "    _refuse_alike(whole, used)\n", ""),
        (what_cannot_be_told_apart_is_refused, "if any(row.columns[n] for row in rows)]", "]"),
        (kinds_are_fitted_apart, "if [*row.kinds] == [kind]]", "if kind in row.kinds]"),
        (
            kinds_are_fitted_apart,
            "zip(TERMS[1:], row.kinds[kind].columns[1:], strict=True)",
            "zip((), (), strict=True)",
        ),
        (kinds_are_fitted_apart, "zip(TERMS[1:], row.kinds[kind].columns[1:],", "zip(TERMS, row.kinds[kind].columns,"),
        (a_kind_that_cannot_be_fitted_is_told, 'found["selecting"] = fit(rows, device)', "pass"),
        (a_kind_that_cannot_be_fitted_is_told, "others <= costs.keys()", "True"),
    ],
    "knee": [
        (the_knee_is_found, "max(x - at, 0.0)", "max(x - at - 3, 0.0)"),
        (the_knee_is_found, "best.errors * (1 + 4 /", "best.errors * (1 + 0 /"),
        (no_knee_is_said, "best.after > FLAT * best.before or", "False and"),
        (no_knee_is_said, "if throughput < RISE *", "if throughput < 0 *"),
        (no_knee_is_said, "if moved < min(low, STAYS * best.at):", "if False:"),
        (no_knee_is_said, "if high >= levels[-2]:", "if False:"),
    ],
}


@pytest.mark.parametrize(("module", "check", "old", "new"), [(m, *f) for m, fs in FAULTS.items() for f in fs])
def test_the_checks_notice(module: str, check, old: str, new: str) -> None:  # type: ignore[no-untyped-def]
    broken = faulty(module, old, new)
    with pytest.raises((AssertionError, KeyError, ValueError, ZeroDivisionError, pytest.fail.Exception)):
        check(broken)


def test_lines_of_a_running_service(tmp_path: Path) -> None:
    stats = Stats(MODEL)
    steps = [{"a": (0, 64)}, {"a": (64, 65), "b": (0, 9)}, {"a": (65, 66), "b": (9, 10)}]
    lines = [{"record": "step", "time": 1.0, **stats.step(step).to_dict(), "seconds": 0.5} for step in steps]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"record": "request", "tokens": 9}])) + "\n\n")
    found = read(path)
    assert [(row.tokens, row.seconds, row.decoding) for row in found] == [(64, 0.5, None), (10, 0.5, None), (2, 0.5, 2)]
    expected = stats.counter([(65, 66), (9, 10)])
    assert (found[2].scored, found[2].attended) == (expected.pairs["scored"], expected.attended_pairs)
    assert throughputs(found) == [(2.0, 4.0)]
    assert error(StepCost(step=1.0), found) == 1.0
    for line, message in (
        ({**lines[0], "seconds": 0}, "seconds: expected"),
        ({"record": "step"}, "KeyError"),
        (3, "line 1"),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(ValueError, match=message):
            read(path)


def test_a_missing_knee_is_a_value_error() -> None:
    assert issubclass(NoKnee, ValueError)
