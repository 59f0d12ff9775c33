"""The command for people with hardware runs from end to end, here on the emulated machine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from conftest import become

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ascend.py"


@pytest.mark.parametrize("family", ["A3", "950"])
def test_result_file(family: str, tmp_path, monkeypatch) -> None:
    become(family, every_kernel=True)
    path = tmp_path / "result.json"
    arguments = ["--output", str(path), "--rounds", "2", "--heads", "2", "--only", "decode"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(path.read_text())
    assert len(report["calls"]) == 10 and report["device"].startswith("Ascend9")
    for name, result in report["calls"].items():
        if name.startswith("attend"):
            assert result["largest error"] < 1e-2 and not result["NaN"], name
        else:
            assert result["counts are equal"] and result["least share of equal entries"] == 1, name
        assert result["microseconds"] > 0
