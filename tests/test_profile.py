"""``python -m sparse_attn profile``: every kind of plan runs, and the parts add up."""

from __future__ import annotations

import json

import pytest
import torch

from sparse_attn import profile
from sparse_attn.__main__ import main as command

MODELS = ("deepseek-v3.2", "glm-5", "deepseek-v4-flash", "deepseek-v4.1-flash", "minimax-m3")
SMALL = ("--lengths", "192,300", "--rounds", "1")


@pytest.mark.parametrize("arguments", [*([m, "--tp", "4"] for m in MODELS), ["smollm2-135m", "--select", "64"]])
def test_every_kind_of_plan(arguments, capsys):
    assert command(["profile", "--model", *arguments, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"]["compute"] > 0 and found["limits"]["bandwidth"] > 0
    for row in found["lengths"]:
        lost = sum(row[name] for name in ("selection", "scattered", "launches", "rest"))
        sparse = row["select"]["seconds"] + row["attend"]["seconds"]
        assert sparse == pytest.approx(row["ratio"] * row["dense"]["seconds"] + lost)
        assert row["promised"] == pytest.approx(1 / row["ratio"])
        assert row["measured"] == pytest.approx(row["dense"]["seconds"] / sparse)
        assert all(row[part]["seconds"] > 0 for part in ("dense", "select", "attend"))
    assert found["lengths"][0]["length"] == 192


def test_work_is_counted_once_for_each_query(monkeypatch):
    """By the counts, with clocks that stand still but for the call: shares are work over time and limit."""
    times = dict.fromkeys(("dense", "select", "attend", "adjacent", "empty select", "empty attend"), 1.0)
    monkeypatch.setattr(profile, "timed", lambda calls, device, rounds: times)
    model = profile.PRESETS["deepseek-v3.2"]
    found = profile.profile(model, 0, 4096, 2, 1, "cpu", profile.Limits(1.0, 1.0), 1)
    assert found.ratio == 0.5
    assert found.attend.compute == 2 * 2048 * 128 * (576 + 512) * 2
    assert found.attend.bandwidth == 2 * 2048 * 656
    assert found.dense.compute == 2 * found.attend.compute
    assert found.dense.bandwidth == 2 * 4096 * 1152  # bf16 rows
    assert found.select.compute == 2 * 4096 * 64 * 128 * 2
    assert found.select.bandwidth == 2 * 4096 * 132
    assert found.attend.binds == "compute" and profile.Part(1.0, 0.1, 0.2).binds == "neither"


def test_the_tables(capsys):
    assert command(["profile", "--model", "smollm2-135m", "--select", "64", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("smollm2-135m, layer 0, 1 sequences, 1 query tokens each, cpu; limits measured now: ")
    assert "| 192 | dense attend |" in out and "| 300 | 0.213 | 4.69 |" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["smollm2-135m"], "one whose layers select, got smollm2-135m; a dense one takes --select N"),
        (["deepseek-v3.2", "--select", "64"], "expected a dense model"),
        (["deepseek-v3.2", "--device", "cuda"], "finds no accelerator here"),
        (["minimax-m3", "--tp", "3"], "expected"),
    ],
)
def test_what_cannot_run_is_said(arguments, message, capsys):
    if "cuda" in arguments and torch.accelerator.is_available():
        pytest.skip("there is a device")
    assert command(["profile", "--model", *arguments, *SMALL]) == 2
    assert message in capsys.readouterr().err
