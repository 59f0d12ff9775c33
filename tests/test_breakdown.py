"""``python -m sparse_attn profile --records``: what limits a service, by length of its requests and by phase."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sparse_attn.__main__ import main as command
from sparse_attn.serving import breakdown
from sparse_attn.serving.cost import Profile, StepCost, Work
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.records import Records
from sparse_attn.serving.stats import Counter

MODEL = "deepseek-v3.2"
TRUE = StepCost(step=4e-3, token=2e-5, scored=1e-11, attended=2e-10)
DECODED = 5


def service(path: Path, lengths: tuple[int, ...]) -> float:
    """Records of requests that prefill in chunks of 700 and decode beside each other. Returns seconds of all steps."""
    draw, total = random.Random(0), 0.0
    left = dict(enumerate(lengths))
    at = dict.fromkeys(left, 0)
    with Records(str(path)) as records:
        observer = Observer(MODEL, records=records)
        while left:
            batch = {}
            for n in draw.sample(sorted(left), min(len(left), draw.randint(1, 3))):
                prompt = lengths[n] - DECODED
                batch[n] = (at[n], min(at[n] + 700, prompt) if at[n] < prompt else at[n] + 1)
            counts = Counter(MODEL)(list(batch.values()))
            seconds = TRUE.step + TRUE.variable(counts)
            total += seconds
            observer.step(batch, seconds)
            for n, (_, after) in batch.items():
                at[n] = after
                if after == lengths[n]:
                    observer.finish(n)
                    del left[n]
    return total


LENGTHS = (300, 1024, 1025, 2048, 9000, 30_000, 16_000, 1500)


def test_counts_are_exact_and_seconds_add_up_to_those_of_all_steps(tmp_path: Path) -> None:
    total = service(tmp_path / "records", LENGTHS)
    requests, together = breakdown.read(tmp_path / "records")
    found = breakdown.buckets(requests, Profile(TRUE), together)
    assert [(b.above, b.upto, b.phase, b.requests) for b in found] == [
        (0, 1024, "prefill", 2),
        (0, 1024, "decode", 2),
        (1024, 2048, "prefill", 3),
        (1024, 2048, "decode", 3),
        (8192, 16384, "prefill", 2),
        (8192, 16384, "decode", 2),
        (16384, 32768, "prefill", 1),
        (16384, 32768, "decode", 1),
    ]
    assert sum(sum(b.seconds.values()) for b in found if b.seconds) == pytest.approx(total)
    last = found[-1]
    assert last.tokens == DECODED
    alone = Counter(MODEL)([(n, n + 1) for n in range(29_995, 30_000)])
    assert last.effective_kv_ratio == alone.effective_kv_ratio
    assert last.seconds is not None
    assert last.seconds["scored"] == pytest.approx(TRUE.scored * alone.pairs["scored"])
    assert last.seconds["attended"] == pytest.approx(TRUE.attended * alone.attended_pairs)
    assert last.seconds["token"] == pytest.approx(TRUE.token * DECODED)
    assert last.bottleneck == "step" and found[-2].bottleneck == "attention"


def test_kinds_are_priced_apart(tmp_path: Path) -> None:
    """Of an engine that says how each sequence attends."""
    path, profile = tmp_path / "records", Profile(StepCost(scored=1.0), StepCost(attended=1.0), StepCost(token=1.0))
    with Records(str(path)) as records:
        observer = Observer(MODEL, records=records)
        observer.works({"a": Work(0, 5000, True), "b": Work(0, 3000, True)}, {"prompt": 2}, 1.0)
        observer.works({"a": Work.decode(5001), "b": Work.decode(3001, True)}, {"plan": 1, "request": 1}, 1.0)
        observer.finish("a")
        observer.finish("b")
    found = {(b.upto, b.phase): b for b in breakdown.buckets(breakdown.read(path)[0], profile)}
    assert [found[8192, "prefill"].bottleneck, found[8192, "decode"].bottleneck] == ["tokens", "selection"]
    assert found[4096, "decode"].bottleneck == "attention" and found[4096, "decode"].effective_kv_ratio == 1
    assert found[4096, "decode"].seconds == {"step": 0, "token": 0, "scored": 0, "attended": 61 * 3001}
    assert found[8192, "decode"].seconds == {"step": 0, "token": 0, "scored": 61 * 5001, "attended": 0}
    assert found[8192, "prefill"].seconds == {"step": 0, "token": 5000, "scored": 0, "attended": 0}


@pytest.mark.parametrize(
    ("term", "bottleneck"), [("step", "step"), ("token", "tokens"), ("scored", "selection"), ("attended", "attention")]
)
def test_the_bottleneck_is_the_largest_term(tmp_path: Path, term: str, bottleneck: str) -> None:
    service(tmp_path / "records", (9000,))
    requests, together = breakdown.read(tmp_path / "records")
    found = breakdown.buckets(requests, Profile(StepCost(**{term: 1.0})), together)
    assert {b.bottleneck for b in found} == {bottleneck}
    assert {b.bottleneck for b in breakdown.buckets(requests, None)} == {"unknown"}


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = command(["profile", "--records", *arguments])
    return (code, *capsys.readouterr())


def test_the_command_fits_the_coefficients_itself(tmp_path: Path, capsys: Any) -> None:
    service(tmp_path / "records", LENGTHS)
    code, out, _ = run(capsys, str(tmp_path / "records"), "--json")
    found = json.loads(out)
    assert code == 0 and found["profile"]["selecting"]["attended"] == pytest.approx(TRUE.attended, rel=1e-3)
    rows = {(row["upto"], row["phase"]): row for row in found["buckets"]}
    assert [rows[32768, phase]["bottleneck"] for phase in ("prefill", "decode")] == ["attention", "step"]
    code, out, _ = run(capsys, str(tmp_path / "records"))
    assert code == 0 and "| 16384 to 32768 | decode | 1 | 5 | 0.068 | " in out and "| up to 1024 | prefill | 2 |" in out


def test_without_steps_that_can_be_fitted_ratios_are_told_alone(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "records"
    service(path, (9000,))
    some = [line for line in path.read_text().splitlines() if '"request"' in line or '"decode":{"sequences":1' in line]
    path.write_text("\n".join(some))
    code, out, _ = run(capsys, str(path))
    assert code == 0 and "unknown" in out and "times are unknown: steps: expected at least 12, got 5" in out
    cost = tmp_path / "cost.json"
    Profile(TRUE).save(cost)
    code, out, _ = run(capsys, str(path), "--cost", str(cost))
    assert code == 0 and "unknown" not in out and "| attention |" in out


PHASE = {"sequences": 1, "tokens": 1, "attended_pairs": 1, "pairs": {}}
REQUEST = {"record": "request", "tokens": 9, "prefill": PHASE, "decode": PHASE}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected records of requests that finished, got none"),
        ('{"record": "request"}', "line 1: expected a record of a step or a request, with prefill and decode"),
        ("[]", "line 1: expected a record"),
        (json.dumps(REQUEST | {"tokens": 0}), "line 1: expected a record"),
        (json.dumps(REQUEST | {"works": {"chunk": {"tokens": 1}}}), "line 1: expected a record"),
        (json.dumps(REQUEST | {"prefill": PHASE | {"tokens": -1}}), "line 1: expected a record"),
        ("{", "line 1: expected a record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, capsys: Any, content: str, said: str) -> None:
    (tmp_path / "records").write_text(content)
    code, _, err = run(capsys, str(tmp_path / "records"))
    assert code == 2 and said in err and err.count("\n") == 1
