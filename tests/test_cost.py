"""Predicted times of steps, batch targets, groups."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from faults import faulty
from hypothesis import given
from hypothesis import strategies as st

from sparse_attn.models import METHODS, dense, gqa, sparse
from sparse_attn.serving import batching, cost
from sparse_attn.serving.batching import BatchLimit, batch_target, groups
from sparse_attn.serving.cost import KINDS, Correction, Parts, Predictor, Profile, StepCost, Work
from sparse_attn.serving.stats import Counter

MODEL = sparse(gqa("small", 3, 8, 2, 16), METHODS["tokens"], 64, share=Fraction(1, 4))
PAIR = 1e-6


def predictor(module: ModuleType = cost, **terms: float) -> Predictor:
    return module.Predictor(MODEL, module.StepCost(**(terms or {"attended": PAIR}), device="a device"))


def four_terms(module: ModuleType) -> None:
    works = [module.Work(0, 100), module.Work.decode(900), module.Work(300, 304, True)]
    found = Counter(MODEL)([(0, 100), (899, 900)])
    whole = Counter(dense(MODEL))([(300, 304)])
    terms = {"step": 1.0, "token": 1e-2, "scored": 1e-4, "attended": 1e-6}
    scored, attended = found.pairs["scored"], found.attended_pairs + whole.attended_pairs
    assert whole.pairs.get("scored", 0) == 0 < scored
    values = {"step": 1, "token": 105, "scored": scored, "attended": attended}
    for term, value in terms.items():
        assert predictor(module, **{term: value}).seconds(works) == pytest.approx(value * values[term])
    everything = sum(value * values[term] for term, value in terms.items())
    assert predictor(module, **terms).seconds(works) == pytest.approx(everything)
    assert predictor(module, **terms).seconds([]) == 0
    selecting = module.StepCost(2.0, attended=1e-6)
    apart = module.Predictor(MODEL, module.Profile(selecting, module.StepCost(3.0, attended=1e-3)))
    expected = 3 + 1e-6 * found.attended_pairs + 1e-3 * whole.attended_pairs
    assert apart.seconds(works) == pytest.approx(expected)
    chunks = module.Predictor(MODEL, module.Profile(selecting, chunk=module.StepCost(4.0, attended=1e-9)))
    several = Counter(MODEL)([(0, 100)]).attended_pairs + whole.attended_pairs
    assert chunks.seconds(works) == pytest.approx(
        4 + 1e-6 * (found.attended_pairs - several + whole.attended_pairs) + 1e-9 * several
    )
    assert (apart.parts(works[:2]) + apart.parts(works[2:])).seconds == pytest.approx(expected), "parts add up"


def each_share_has_its_pairs(module: ModuleType) -> None:
    """MODEL selects 1/4 and at least 64; other shares are counted as they are, and a share of a dense one is none."""
    it, eighth = predictor(module), Fraction(1, 8)
    pairs = {share: 3 * max(64, 4000 * share) for share in (Fraction(1, 4), eighth, Fraction(1, 2))}
    for share, attended in pairs.items():
        assert it.seconds([module.Work.decode(4000, share=share)]) == pytest.approx(PAIR * attended)
    works = [module.Work.decode(4000), module.Work.decode(4000, share=eighth), module.Work.decode(4000, True, eighth)]
    assert it.seconds(works) == pytest.approx(PAIR * (pairs[Fraction(1, 4)] + pairs[eighth] + 3 * 4000))
    assert it.counts(works).tokens == 3
    with pytest.raises(ValueError, match="share: expected above 0 and at most 1, got 2"):
        it.seconds([module.Work.decode(4000, share=Fraction(2))])


def a_slower_device_is_noticed(module: ModuleType) -> None:
    it = predictor(module, step=1e-3, attended=PAIR)
    works = [module.Work.decode(500)]
    before = it.seconds(works)
    for _ in range(100):
        it.observe(works, 1.5 * before)
    assert it.seconds(works) == pytest.approx(1.5 * before, rel=0.02)
    it.observe(works, 150 * before)
    assert it.seconds(works) < 2 * before, "one long pause"


def the_target_is_the_budget_over_a_mean_request(module: ModuleType) -> None:
    lengths = [300, 700, 1500]
    works = [Work.decode(length) for length in lengths]
    found = Counter(MODEL)([(length - 1, length) for length in lengths])
    mean, ratio = sum(lengths) / 3, found.effective_kv_ratio
    budget, pair = 0.1, PAIR * len(MODEL.layers)  # a pair of all layers
    expected = budget / (mean * ratio * pair)
    assert expected > 1 and module.batch_target(budget, predictor(), works) == int(expected)
    doubled = predictor(step=budget / 2, attended=PAIR)
    assert module.batch_target(budget, doubled, works) == int(expected / 2)
    assert module.batch_target(budget, predictor(attended=1.0), works) == 1
    mixed = [*works, Work.decode(1500, dense=True)]
    assert module.batch_target(budget, predictor(), mixed) < int(expected)


def small_changes_are_ignored(module: ModuleType) -> None:
    """A device that is slower by 1.5 is followed; 1.1 is not."""
    it = predictor()
    works = [Work.decode(500)]
    limit = module.BatchLimit(100 * it.seconds(works), it)
    assert limit.update(works) == 100
    for factor, expected in ((1.1, 100), (1.24, 100), (1.5, 66), (1.3, 66), (1.0, 100)):
        for _ in range(300):
            it.observe(works, factor * it.parts(works).seconds)
        assert limit.update(works) == pytest.approx(expected, abs=1)


def groups_are_of_like_lengths(module: ModuleType) -> None:
    chosen = random.Random(0)
    requests = {n: Work.decode(chosen.randint(1, 5000), chosen.random() < 0.3) for n in range(200)}
    found = module.groups(requests, 16, 1.5)
    assert sorted(name for group in found for name in group) == sorted(requests)
    for group in found:
        works = [requests[name] for name in group]
        assert 0 < len(group) <= 16 and len({work.dense for work in works}) == 1
        assert max(work.after for work in works) <= 1.5 * min(work.after for work in works)
    shares = {n: Work.decode(100, share=Fraction(1, 2 + n % 2)) for n in range(4)}
    assert module.groups(shares, 9) == [[0, 2], [1, 3]]
    few = {name: Work.decode(length) for name, length in (("d", 18), ("a", 4), ("c", 9), ("b", 8))}
    assert module.groups(few, 9) == [["a", "b"], ["c", "d"]]
    assert module.groups({}, 4) == []


CHECKS = {
    "cost": [four_terms, each_share_has_its_pairs, a_slower_device_is_noticed],
    "batching": [the_target_is_the_budget_over_a_mean_request, small_changes_are_ignored, groups_are_of_like_lengths],
}


@pytest.mark.parametrize(("module", "check"), [(m, c) for m, cs in CHECKS.items() for c in cs])
def test_the_rule(module: str, check) -> None:  # type: ignore[no-untyped-def]
    check({"cost": cost, "batching": batching}[module])


# (check that must notice, text in the file, what stands there instead)
FAULTS = {
    "cost": [
        (four_terms, "+ scored + self.attended", "+ self.attended"),
        (four_terms, "self.token * counts.tokens", "self.token"),
        (four_terms, "max(self.step, other.step)", "self.step + other.step"),
        (four_terms, "getattr(self, kind) or self.selecting", "self.selecting"),
        (four_terms, "dense(model) if path == DENSE", "model if path"),
        (
            each_share_has_its_pairs,
            "return DENSE if work.dense else work.share",
            "return DENSE if work.dense else None",
        ),
        (each_share_has_its_pairs, "isinstance(path, Fraction)", "False"),
        (four_terms, "work.after - work.before > 1 and", "False and"),
        (four_terms, '"dense" if work.dense else "selecting"', '"selecting"'),
        (a_slower_device_is_noticed, "self.weight * (log(measured / predicted) - self._log)", "0"),
        (a_slower_device_is_noticed, "(log(measured / predicted) - self._log)", "log(measured / predicted)"),
        (a_slower_device_is_noticed, "self.correction.factor * parts.seconds", "parts.seconds"),
    ],
    "batching": [
        (the_target_is_the_budget_over_a_mean_request, "- parts.step", ""),
        (the_target_is_the_budget_over_a_mean_request, "/ len(running)\n", "\n"),
        (the_target_is_the_budget_over_a_mean_request, "each), 1)", "each), 0)"),
        (small_changes_are_ignored, "> STEADY * self.value", "> 0"),
        (small_changes_are_ignored, "> STEADY * self.value", "> 0.5 * self.value"),
        (small_changes_are_ignored, "budget / predictor.correction.factor", "budget"),
        (groups_are_of_like_lengths, "length > spread * shortest", "length > 2 * spread * shortest"),
        (groups_are_of_like_lengths, "or len(found[-1]) == most", ""),
        (
            groups_are_of_like_lengths,
            "                shortest = length\n",
            "                shortest = shortest or length\n",
        ),
        (groups_are_of_like_lengths, "        shortest = 0\n", "        shortest = shortest if path else 0\n"),
    ],
}


@pytest.mark.parametrize(("module", "check", "old", "new"), [(m, *f) for m, fs in FAULTS.items() for f in fs])
def test_the_checks_notice(module: str, check, old: str, new: str) -> None:  # type: ignore[no-untyped-def]
    broken = faulty(module, old, new)
    with pytest.raises((AssertionError, TypeError)):
        check(broken)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200), st.booleans()), max_size=6), st.integers(0, 6))
def test_parts_of_a_step_add_up(spans: list[tuple[int, int, bool]], cut: int) -> None:
    it = predictor(step=1.0, token=1e-2, scored=1e-4, attended=1e-6)
    works = [Work(before, before + tokens, path) for before, tokens, path in spans]
    assert (it.parts(works[:cut]) + it.parts(works[cut:])).seconds == pytest.approx(it.parts(works).seconds)


def test_refusals() -> None:
    assert Parts() + Parts() == Parts()
    with pytest.raises(ValueError, match="attended: expected seconds, 0 or more, got -1"):
        StepCost(attended=-1)
    with pytest.raises(ValueError, match="token: expected seconds, 0 or more, got nan"):
        StepCost(token=float("nan"))
    found = StepCost(1.0, 2.0, 3.0, 4.0, "a device")
    assert StepCost.from_dict(found.to_dict()) == found
    with pytest.raises(ValueError, match="cost of a step: expected attended, device"):
        StepCost.from_dict({"step": 1.0})
    for kind in ("dense", "chunk"):
        with pytest.raises(ValueError, match=f"{kind}: expected one of 'a', got one of 'b'"):
            Profile(StepCost(device="a"), **{kind: StepCost(device="b")})
    with pytest.raises(ValueError, match="weight: expected more than 0"):
        Correction(0)
    with pytest.raises(ValueError, match="expected times above 0"):
        Correction().observe(0, 1)
    with pytest.raises(ValueError, match="requests that run"):
        batch_target(1.0, predictor(), [])
    with pytest.raises(ValueError, match="coefficient above 0"):
        batch_target(1.0, predictor(step=1.0), [Work.decode(9)])
    with pytest.raises(ValueError, match="groups of at least 1 request"):
        groups({}, 0)
    assert BatchLimit(1.0, predictor()).value is None


@pytest.mark.parametrize("others", [{}, {"dense": StepCost(2.0, device="d")}, {"chunk": StepCost(3.0, device="d")}])
def test_a_profile_comes_back(tmp_path: Path, others: dict[str, StepCost]) -> None:
    path = tmp_path / "profile.json"
    it = Profile(StepCost(1.0, 2.0, 3.0, 4.0, "d"), **others)
    it.save(path)
    assert Profile.load(path) == it and it.device == "d"
    assert {kind: it.of(kind) for kind in KINDS} == {"selecting": it.selecting, "dense": it.selecting} | {
        "chunk": it.selecting
    } | others


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "x"}', '{"dense": 3}', '{"step": 1, "other": 2}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: expected a profile that calibrate --save wrote"):
        Profile.load(path)
