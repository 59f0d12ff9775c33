"""Dense against sparse from measured times: cells, switches, and both commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import faulty
from test_calibration import TRUE, rows

from sparse_attn.__main__ import main
from sparse_attn.serving.cost import Profile
from sparse_attn.serving.crossover import Switch, Switches, Timing, crossovers, read, switches

K = 1024


def timings(factors: dict[int, float], spread: float = 0.02, batch: int = 1, ratio: float = 0.25) -> list[Timing]:
    """Of each length, five times of either path; dense takes ``factor`` times as long."""
    found = []
    for length, factor in factors.items():
        for n in range(5):
            jitter = 1 + spread * (n - 2) / 2
            found.append(Timing(length, batch, ratio, "sparse", 1e-3 * jitter))
            found.append(Timing(length, batch, ratio, "dense", 1e-3 * factor * jitter))
    return found


@pytest.mark.parametrize(
    ("factors", "faster", "switch"),
    [
        ({512: 0.5, 2048: 0.8, 8192: 2.0}, ["dense", "dense", "sparse"], (2048, 8192)),
        ({512: 0.5, 2048: 1.01, 8192: 2.0}, ["dense", "", "sparse"], (2048, 8192)),
        ({512: 2.0, 2048: 0.5, 8192: 2.0}, ["sparse", "dense", "sparse"], (2048, 8192)),
        ({512: 2.0, 2048: 2.0}, ["sparse", "sparse"], (0, 512)),
        ({512: 2.0, 2048: 0.5}, ["sparse", "dense"], None),
    ],
)
def test_the_switch(factors: dict[int, float], faster: list[str], switch: tuple[int, int] | None) -> None:
    (found,) = crossovers(timings(factors), K)
    assert [cell.faster for cell in found.cells] == faster
    assert found.length == switch
    assert [cell.exact for cell in found.cells] == [length <= K for length in factors]
    assert [cell.speedup for cell in found.cells] == pytest.approx(list(factors.values()))


def test_times_that_spread_do_not_differ() -> None:
    (found,) = crossovers(timings({512: 1.2}, spread=0.5), K)
    assert found.cells[0].faster == ""
    (found,) = crossovers(timings({512: 1.2}, spread=0.1), K)
    assert found.cells[0].faster == "sparse"
    (found,) = crossovers(timings({512: 1.04}, spread=0.0), K)
    assert found.cells[0].faster == "", "less than 5 % apart"


def test_the_path_of_a_length() -> None:
    (found,) = crossovers(timings({512: 0.5, 2048: 1.0, 8192: 2.0}), K)
    paths = [found.path(length) for length in (100, 512, 2047, 2048, 8191, 8192, 10**6)]
    assert paths == ["", "dense", "dense", "dense", "dense", "sparse", "sparse"]


@pytest.mark.parametrize(
    ("factors", "switch"),
    [
        ({512: 0.5, 2048: 0.8, 8192: 2.0}, (1024, 8191)),
        ({512: 0.5, 1000: 2.0, 8192: 2.0}, (999, 0)),
        ({512: 2.0, 2048: 2.0}, (511, 0)),  # nothing is known of shorter ones: what is exact is dense
        ({2048: 2.0, 8192: 2.0}, (1024, 0)),
        ({512: 0.5, 2048: 1.0}, (1024, 2048)),  # of longer ones neither: they select
        ({128: 0.5, 512: 0.5}, (512, 0)),
    ],
)
def test_where_an_engine_changes_over(factors: dict[int, float], switch: tuple[int, int]) -> None:
    found = switches(crossovers(timings(factors), K), K)[0.25]
    assert (found.exact, found.approximate) == switch
    for length in (1, found.exact):
        assert found.reason(length) == "exact"
    if found.approximate:
        assert [found.reason(n) for n in (K, K + 1, found.approximate)] == ["exact", "approximate", "approximate"]
    assert found.reason(max(switch) + 1) == ""


def test_the_batch_that_selects_soonest_decides() -> None:
    """Else what a sequence gets would depend on its neighbours."""
    every = [*timings({512: 0.5, 4096: 2.0}, batch=1), *timings({512: 0.5, 4096: 0.5, 8192: 2.0}, batch=4)]
    found = switches(crossovers([*every, *timings({512: 2.0}, ratio=0.1)], K), K)
    assert found == {0.25: Switch(K, 4095), 0.1: Switch(511)}


# (text in the file, what stands there instead)
FAULTS = [
    ("faster - 1 if slower else", "faster if slower else"),
    ("min(faster - 1, k)", "faster - 1"),
    ("crossover.cells[-1].length", "crossover.cells[0].length"),
    ("min(limits.get(each.ratio, _limit(each, k)), _limit(each, k))", "_limit(each, k)"),
    ("Switch(min(limit, k)", "Switch(limit"),
    ("limit if limit > k else 0", "limit"),
    ('return "approximate" if visible <=', 'return "approximate" if visible <'),
    ("high_sparse < low_dense and s", "s"),
    ("s < (1 - CLEAR) * d", "s < d"),
    ("length <= k)", "length < k + 2000)"),
    ("won[::-1].index(False)", "won.index(False)"),
    ("if not won[-1]:", "if False:"),
    ('known[-1].faster or "dense"', 'known[0].faster or "dense"'),
    ("cell.length <= length]", "cell.length < length]"),
]


@pytest.mark.parametrize(("old", "new"), FAULTS)
def test_the_checks_notice(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = faulty("crossover", old, new)
    monkeypatch.setitem(globals(), "crossovers", broken.crossovers)
    with pytest.raises((AssertionError, IndexError)):
        for mark in test_the_switch.pytestmark:  # type: ignore[attr-defined]
            for case in mark.args[1]:
                test_the_switch(*case)
        test_times_that_spread_do_not_differ()
        test_the_path_of_a_length()
        monkeypatch.setitem(globals(), "switches", broken.switches)
        monkeypatch.setitem(globals(), "Switch", broken.Switch)
        for case in test_where_an_engine_changes_over.pytestmark[0].args[1]:  # type: ignore[attr-defined]
            test_where_an_engine_changes_over(*case)
        test_the_batch_that_selects_soonest_decides()


def test_what_was_saved_counts_for_its_device_and_lists_alone(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    Switches("here", K, {0.25: Switch(K, 4095), 0.125: Switch(511)}).save(path)
    it = Switches.load(path)
    assert it.of(0.25, "here", K) == (Switch(K, 4095), "")
    assert it.of(0.125, "here", K) == (Switch(511), "")
    for asked, said in (
        ((0.25, "there", K), "expected one of 'there', got one of 'here'; measure here"),
        ((0.25, "here", 256), "expected one for lists of 256 entries at least, got 1024; measure again"),
        ((0.5, "here", K), "expected one of ratio 0.5, got 0.25, 0.125; measure it"),
    ):
        assert it.of(*asked) == (Switch(asked[2]), said)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"device": "", "k": 9, "switches": [{"ratio": 0.5}]}',
        '{"device": "", "k": 9, "switches": [{"ratio": 0.5, "exact": 10}]}',
        '{"device": "", "k": 9, "switches": [{"ratio": 0.5, "exact": 9, "approximate": 8}]}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "crossover.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected switches that crossover --save wrote"):
        Switches.load(path)


def test_batches_and_ratios_are_apart() -> None:
    every = [*timings({512: 0.5}, batch=4), *timings({512: 2.0}, batch=1), *timings({512: 2.0}, ratio=0.1)]
    found = crossovers([*every, Timing(9, 9, 0.1, "dense", 1.0)], K)
    assert [(each.batch, each.ratio, each.cells[0].faster) for each in found] == [
        (1, 0.1, "sparse"),
        (1, 0.25, "sparse"),
        (4, 0.25, "dense"),
    ]


def lines(path: Path, some: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, some)))
    return str(path)


@pytest.mark.parametrize("change", [{"length": 0}, {"batch": 0}, {"ratio": "x"}, {"seconds": 0}, {"path": "fast"}])
def test_timings_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    timing = dict(length=8, batch=1, ratio=0.25, path="dense", seconds=1.0) | change
    (tmp_path / "timings.jsonl").write_text(json.dumps(timing))
    with pytest.raises(ValueError, match="line 1: expected length, batch, ratio and seconds above 0, and path"):
        read(tmp_path / "timings.jsonl")


def test_the_crossover_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "calls.jsonl", [vars(timing) for timing in timings({512: 0.5, 2048: 2.0})])
    assert len(read(path)) == 20
    assert main(["crossover", path, "--k", "1024"]) == 0
    said = capsys.readouterr().out
    assert "| 1 | 0.25 | 512 | 0.5 | 1 | 0.50 | dense | same |" in said
    assert "| 1 | 0.25 | 2048 | 2 | 1 | 2.00 | sparse | differ |" in said
    assert "batch 1, ratio 0.25: sparse becomes faster for good between 512 and 2048" in said
    assert main(["crossover", path, "--k", "1024", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["length"] == [512, 2048]
    saved = tmp_path / "crossover.json"
    assert main(["crossover", path, "--k", "1024", "--save", str(saved), "--device", "here"]) == 0
    assert Switches.load(saved) == Switches("here", 1024, {0.25: Switch(1024, 2047)})
    capsys.readouterr()
    for given, got in (([], "None"), (["--k", "0"], "0"), (["--k=-5"], "-5")):
        assert main(["crossover", path, *given]) == 2
        assert f"--k: expected the entries that are selected at least, 1 or more, got {got}" in capsys.readouterr().err
    for wrong in ({"length": 1}, {**vars(timings({9: 1.0})[0]), "path": "both"}):
        assert main(["crossover", lines(tmp_path / "wrong.jsonl", [wrong]), "--k", "1"]) == 2
        assert "line 1: expected length, batch, ratio" in capsys.readouterr().err
    assert main(["crossover", lines(tmp_path / "none.jsonl", []), "--k", "1"]) == 2
    assert "of the same length, batch and ratio, got none" in capsys.readouterr().err


def test_the_calibrate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"tokens": 0, "attended_pairs": 0, "pairs": {}, "sequences": 0}
    steps = []
    for row in rows(0.01):
        phase = {"tokens": row.tokens, "attended_pairs": row.attended, "pairs": {"scored": row.scored}}
        prefill, decode = (
            ({**phase, "sequences": 1}, nothing)
            if row.decoding is None
            else (nothing, {**phase, "sequences": row.decoding})
        )
        steps.append({"record": "step", "seconds": row.seconds, "prefill": prefill, "decode": decode})
    path, profile = lines(tmp_path / "steps.jsonl", steps), tmp_path / "profile.json"
    assert main(["calibrate", path, "--device", "here", "--save", str(profile)]) == 0
    said = capsys.readouterr().out
    assert "120 steps; half of them are predicted within 0." in said and "of a pair attended" in said and "knee" in said
    saved = Profile.load(profile).selecting
    assert saved.device == "here" and saved.step == pytest.approx(TRUE.step, rel=0.05)
    assert main(["calibrate", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]["selecting"]["cost"] == {**saved.to_dict(), "device": ""} and not found["not fitted"]
    assert main(["calibrate", lines(tmp_path / "few.jsonl", steps[:3])]) == 2
    assert "expected at least 12, got 3" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "missing.jsonl")]) == 2
