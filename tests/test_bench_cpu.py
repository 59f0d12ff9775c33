"""The benchmark: its cases compute what they say, its rows say what was measured, and a worse run is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparse_attn import bench

main = bench.load("cpu").main
from cpu import attend, calls, cli, compress, expanded, machine, merge, report, rows, select, suite  # noqa: E402 (its folder is found now)
from cpu.timing import OURS, Case, Time, measure  # noqa: E402

SMALL = {
    "latent": replace(attend.latent(8, 256, 64), qk_dim=48, v_dim=32),
    "window": attend.Shape("window", 8, 1, 32, 32, 256, 64, window=16, separate_v=False, page=16),
    "blocks": attend.Shape("blocks", 8, 2, 32, 32, 512, 128, block=64),
    "dense": attend.Shape("dense", 8, 2, 32, 32, 128),
    "rows": attend.Shape("rows", 8, 2, 32, 32, 64, rows=64),
}


@pytest.fixture(autouse=True)
def few_variants(monkeypatch):
    for module in (attend, select):
        monkeypatch.setattr(module, "variants_for", lambda bytes_read, least=4: 4)
    monkeypatch.setattr(rows, "ROWS", 128)


@pytest.mark.parametrize("name", SMALL)
def test_peers_of_attend_compute_the_same(name):
    case = attend.make(SMALL[name], 2, peers=True, dense=True)
    case.check()
    assert len(case.functions) > 2 or name == "rows"


def test_peers_on_packed_rows():
    case = attend.make(attend.latent(8, 128, 64), 1, "bf16", "fp8_v32")
    case.check()
    assert attend.PLAIN in case.functions


@pytest.mark.parametrize("format", ["bf16", "int8_index_planar"])
def test_peers_of_select_choose_the_same(format):
    select.make(replace(select.INDEXER, k=64), 512, "bf16", format).check()


@pytest.mark.parametrize("format", rows.ENCODE)
def test_peers_of_rows(format):
    rows.make_store(format).check()
    rows.make_load(format).check()


def test_peers_of_other_ops():
    rows.make_convert("bf16", "fp8_v41").check()
    merge.make_merge(2, torch.bfloat16).check()
    compress.make(compress.SHAPES[-1], "decode, batch 64").check()
    assert calls.make().functions[OURS](0).shape == (1, 1, 64)


@pytest.mark.parametrize("rows", [256, 64])
def test_a_prompt_of_latents_is_the_same_expanded_and_absorbed(rows):
    case = expanded.make(4, 256, rows)
    assert (attend.DENSE in case.functions) == (rows == 256)
    case.check()


def test_a_peer_that_computes_something_else_is_noticed():
    case = attend.make(SMALL["latent"], 1)
    case.functions["wrong"] = lambda i: case.functions[OURS](i) + 1
    with pytest.raises(AssertionError, match="wrong differs"):
        case.check()


def test_functions_take_turns_and_variants():
    seen: list[tuple[str, int]] = []

    def function(name: str):
        return lambda i: seen.append((name, i)) or torch.zeros(1)

    times = measure(Case("", {name: function(name) for name in ("a", "b")}, variants=4), 0.0, least=4)
    assert list(times) == ["a", "b"]
    assert seen[:6] == [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 0), ("b", 1)]
    assert len(seen) == 12


LIMITS = {"bf16": 200.0, "blocks": 10.0}


def example(**changed: float) -> report.Result:
    """A run of one case, with times in milliseconds."""
    milliseconds = {OURS: 2.0, "index_select + bmm": 4.0, attend.IDIOMATIC: 5.0, attend.PLAIN: 1.9} | changed
    plan = suite.Plan("Decode", lambda: case, 0.5, {suite.BEST: 1.4, attend.IDIOMATIC: 3.0}, {attend.PLAIN: 1.1})
    case = Case("V3.2", {}, flops=2e8, limit="bf16")
    times = {name: Time(value / 1e3, value / 1e3, 0.1) for name, value in milliseconds.items()}
    return report.result({"processor": "P"}, {"bf16": 200.0}, suite._rows(plan, case, times, {"bf16": 200.0}, 2))


def test_rows_of_a_case():
    by_peer = {row["peer"]: row for row in example()["rows"]}
    assert by_peer[""]["value"] == 2.0 and by_peer[""]["unit"] == "ms"
    assert by_peer["bf16 peak"]["value"] == pytest.approx(0.5)
    assert by_peer[suite.BEST]["value"] == pytest.approx(2.0)
    assert by_peer[attend.PLAIN]["value"] == pytest.approx(2 / 1.9)
    met = {peer: row["met"] for peer, row in by_peer.items() if row["target"]}
    assert met == {"bf16 peak": True, suite.BEST: True, attend.IDIOMATIC: False, attend.PLAIN: True}


@pytest.mark.parametrize(("read", "binds", "share"), [(0.0, "bf16", 0.5), (6e6, "bf16", 0.5), (14e6, "blocks", 0.7)])
def test_the_larger_share_is_of_the_limit_that_binds(read: float, binds: str, share: float) -> None:
    case = Case("V3.2", {}, flops=2e8, bytes=read, limit="bf16")
    rows = suite._rows(suite.Plan("Decode", lambda: case, 0.6), case, {OURS: Time(2e-3, 2e-3, 0.1)}, LIMITS, 2)
    (row,) = (row for row in rows if row.unit == "of limit")
    assert (row.peer, row.met) == (machine.LIMITS[binds][0], share > 0.6)
    assert row.value == pytest.approx(share)


def test_forms_of_a_result(tmp_path, capsys):
    result = example()
    file = tmp_path / "run.json"
    file.write_text(report.as_json(result))
    assert json.loads(file.read_text()) == result
    assert "MISSED" in report.table(result) and "2.50x (>= 3.00x expected)" in report.markdown(result)
    assert main(["--read", str(file), "--against", str(file)]) == 0
    slower = tmp_path / "before.json"
    slower.write_text(report.as_json(example(**{"index_select + bmm": 6.0, attend.PLAIN: 1.9})))
    assert main(["--read", str(file), "--against", str(slower)]) == 1
    assert "index_select + bmm: 2.00x, was 3.00x" in capsys.readouterr().err


def test_the_gate_fails_where_nothing_is_compared(tmp_path, capsys):
    result = example()
    files = [tmp_path / "run.json", tmp_path / "before.json"]
    files[0].write_text(report.as_json(result))
    files[1].write_text(report.as_json(result | {"rows": [row | {"threads": 1} for row in result["rows"]]}))
    assert main(["--read", str(files[0]), "--against", str(files[1])]) == 1
    assert "no ratio or share of this run" in capsys.readouterr().err


def test_the_gate_says_that_another_machine_is_compared(tmp_path, capsys):
    files = [tmp_path / "run.json", tmp_path / "before.json"]
    files[0].write_text(report.as_json(example()))
    files[1].write_text(report.as_json(example() | {"machine": {"processor": "Q"}}))
    assert main(["--read", str(files[0]), "--against", str(files[1])]) == 0
    assert "has another processor, Q instead of P" in capsys.readouterr().err


def test_the_gate_compares_shares_of_whichever_limit_binds():
    before = example()
    for row in before["rows"]:
        if row["unit"] == "of limit":
            row |= {"peer": machine.LIMITS["blocks"][0], "value": 0.9}
    assert any("50 %, was 90 %" in line for line in report.worse(example(), before, 0.1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--seconds", "-1"], "--seconds: expected a number from 0 on, got -1.0"),
        (["--slack", "nan"], "--slack: expected a number from 0 on, got nan"),
        (["--output", "nowhere/run.json"], "--output: there is no folder nowhere"),
        (["--read", "nowhere.json"], "--read: there is no file nowhere.json"),
        (["--against", "nowhere.json"], "--against: there is no file nowhere.json"),
        (["--read", __file__], "is no run of the suite"),
        (["--only", "nothing"], "--only: no group's name contains 'nothing', they are: Calls; V3.2 decode;"),
        (["--only", "growth", "--quick"], "--only: no group's name contains 'growth', they are: Calls; V3.2 decode;"),
    ],
)
def test_arguments_that_lead_nowhere_are_refused(arguments, says, capsys, monkeypatch):
    for name in cli.PINNED:  # as if it had started itself again
        monkeypatch.setenv(name, cli.PINNED[name])
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_smaller_share_of_a_limit_is_worse():
    assert report.worse(example(), example(), 0.0) == []
    lines = report.worse(example(sparse_attn=2.4), example(), 0.1)
    assert any("bf16 peak" in line for line in lines) and any(attend.PLAIN in line for line in lines)


def test_every_group_of_the_suite_has_a_short_case_or_is_long_by_nature():
    every = list(suite.plans(True))
    short = {plan.group for plan in every if plan.quick}
    assert {"V3.2 decode", "V4 decode", "Packed rows", "GQA decode, blocks", "select", "Prefill", "Rows"} <= short


def last_run(kind: str) -> report.Result:
    return report.load(max((Path(__file__).parents[1] / "benchmarks" / "results").glob(f"{kind}-*.json")))


def test_the_page_shows_the_rows_of_the_last_run():
    root = Path(__file__).parents[1]
    result = last_run("cpu")
    page = (root / "docs" / "benchmarks.md").read_text()
    assert page.split("<!-- rows -->")[1].strip() == report.markdown(result)
    pictures = {report.picture(group) for group in report.grouped(result)}
    assert pictures == {file.name for file in (root / "docs" / "benchmarks").iterdir()}


def test_the_page_of_amx_shows_its_rows():
    page = (Path(__file__).parents[1] / "docs" / "benchmarks-amx.md").read_text()
    lines = [line for line in report.markdown(last_run("amx")).splitlines() if not line.startswith("![")]
    assert [line for line in page.split("<!-- rows -->")[1].splitlines() if line] == [line for line in lines if line]
