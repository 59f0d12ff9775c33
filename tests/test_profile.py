"""``python -m sparse_attn profile --model``: every plan runs, work is what the calls do, and the parts add up."""

from __future__ import annotations

import json

import pytest
import torch

from sparse_attn import timings
from sparse_attn.__main__ import main as command
from sparse_attn.models import PRESETS
from sparse_attn.serving.stats import Counter

MODELS = ("deepseek-v3.2", "glm-5", "deepseek-v4-flash", "deepseek-v4.1-flash", "minimax-m3")
SMALL = ("--lengths", "192,300", "--rounds", "1")


@pytest.mark.parametrize("arguments", [*([m, "--tp", "4"] for m in MODELS), ["smollm2-135m", "--select", "64"]])
def test_every_kind_of_plan(arguments, capsys):
    assert command(["profile", "--model", *arguments, *SMALL, "--queries", "1,40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["calls"]:
        lost = sum(row[name] for name in ("selection", "scattered", "launches", "rest"))
        sparse = row["select"]["seconds"] + row["attend"]["seconds"]
        assert sparse == pytest.approx(row["pairs"] * row["dense"]["seconds"] + lost)
        assert row["promised"] == pytest.approx(1 / row["pairs"])
        assert row["measured"] == pytest.approx(row["dense"]["seconds"] / sparse)
        assert row["limits"]["compute"] > 0 and row["limits"]["bandwidth"] > 0
        assert all(row[part]["seconds"] > 0 for part in ("dense", "select", "attend"))
    assert [(row["length"], row["queries"]) for row in found["calls"]] == [(192, 1), (300, 1), (192, 40), (300, 40)]


def counted(monkeypatch, name: str, number: int, length: int, queries: int = 1) -> timings.LayerProfile:
    """A profile of two sequences by its counts alone: every call takes a second, and limits are 1."""

    class Ones(timings.Yardsticks):
        def limits(self, times):
            assert all(len(times[name]) > 1 for name in self.calls())
            return timings.Limits(1.0, 1.0)

    monkeypatch.setattr(timings, "timed", lambda calls, device, rounds: {name: [1.0] for name in calls})
    return timings.profile(PRESETS[name], number, length, 2, queries, "cpu", Ones("cpu"), 1)


def test_work_is_counted_once_for_each_query(monkeypatch):
    found = counted(monkeypatch, "deepseek-v3.2", 0, 4096)
    assert found.pairs == found.effective_kv_ratio == 0.5
    assert found.attend.compute == 2 * 2048 * 128 * (576 + 512) * 2
    assert found.attend.bandwidth == 2 * 2048 * 656
    assert found.dense.compute == 2 * found.attend.compute
    assert found.dense.bandwidth == 2 * 4096 * 656  # the rows of the plane, as the call reads them
    assert found.select.compute == 2 * 4096 * 64 * 128 * 2
    assert found.select.bandwidth == 2 * 4096 * 132
    assert found.attend.binds == "compute" and timings.Part(1.0, 0.1, 0.2).binds == "neither"


def test_dense_attention_is_that_on_the_models_own_planes(monkeypatch):
    """V4 selects among compressed entries: a dense call attends to all 2048, and to no raw token but a window."""
    found = counted(monkeypatch, "deepseek-v4-flash", 2, 8192)
    assert found.dense.compute == 2 * (2048 + 128) * 64 * (512 + 512) * 2
    assert found.dense.bandwidth == 2 * (2048 + 128) * 584
    assert found.attend.compute == 2 * (512 + 128) * 64 * (512 + 512) * 2
    assert found.attend.bandwidth == 2 * (512 + 128) * 584
    assert found.pairs == (512 + 128) / (2048 + 128) and found.effective_kv_ratio == (512 + 128) / 8192
    found = counted(monkeypatch, "deepseek-v4.1-flash", 2, 8192)
    assert found.dense.bandwidth == 2 * (4096 * 288 + 128 * 528)
    assert found.pairs == (512 + 128) / (4096 + 128)


def test_query_tokens_of_a_sequence_share_what_they_read(monkeypatch):
    found = counted(monkeypatch, "deepseek-v3.2", 0, 4096, queries=3)
    assert found.attend.bandwidth == found.dense.bandwidth == 2 * 4096 * 656
    assert found.attend.compute == 2 * 3 * 2048 * 128 * (576 + 512) * 2
    found = counted(monkeypatch, "deepseek-v3.2", 0, 16_384, queries=3)
    assert found.attend.bandwidth == 2 * 3 * 2048 * 656


@pytest.mark.parametrize(("name", "number"), [("deepseek-v3.2", 0), ("deepseek-v4-flash", 2)])
@pytest.mark.parametrize("length", [3, 2060])
def test_lists_hold_what_is_counted(name, number, length):
    """Each row's list has as many entries as a selection would give it, all of them visible to it."""
    model, queries = PRESETS[name], 3
    step = timings.Step(model, number, length, 2, queries, "cpu")
    ratio = model.plane("main", number).ratio
    spans = [(length - queries, length)] * 2
    entries = Counter(model.excerpt((number,)))(spans).pairs["main"]
    seen = (torch.arange(length - queries, length) + 1) // ratio
    for lists in (step.scattered, step.adjacent):
        assert (lists >= 0).sum() == entries
        assert (lists < seen.repeat(2)[:, None, None]).all()
        assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in lists.flatten(0, 1))


def test_the_tables(capsys):
    assert command(["profile", "--model", "smollm2-135m", "--select", "64", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("smollm2-135m, layer 0, 1 sequences, cpu\n")
    assert "| dense attend |" in out and "| 300 | 1 | 0.213 | 0.213 | 4.69 |" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["smollm2-135m"], "one whose layers select, got smollm2-135m; a dense one takes --select N"),
        (["deepseek-v3.2", "--select", "64"], "expected a dense model"),
        (["deepseek-v3.2", "--device", "cuda"], "finds no accelerator here"),
        (["deepseek-v3.2", "--queries", "193"], "queries: expected 1 to 192, the tokens of a sequence, got 193"),
        (["minimax-m3", "--tp", "3"], "expected"),
    ],
)
def test_what_cannot_run_is_said(arguments, message, capsys):
    if "cuda" in arguments and torch.accelerator.is_available():
        pytest.skip("there is a device")
    assert command(["profile", "--model", *arguments, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_limits_are_the_most_that_was_reached():
    it = timings.Yardsticks("cpu")
    found = it.limits({"product": [3.0, 1.0, 2.0], "copy": [4.0, 2.0]})
    assert found.compute == 2 * 512**3 and found.bandwidth == 2**24 * 4
