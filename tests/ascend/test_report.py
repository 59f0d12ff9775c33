"""The command for people with hardware runs from end to end, here on the emulated machine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from conftest import become

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ascend.py"


@pytest.mark.parametrize(
    ("family", "only", "calls"), [("A3", "decode", 11), ("950", "decode", 11), ("A2", "compress", 1)]
)
def test_result_file(family: str, only: str, calls: int, tmp_path, monkeypatch) -> None:
    become(family, every_kernel=True)
    path = tmp_path / "result.json"
    arguments = ["--output", str(path), "--rounds", "2", "--heads", "2", "--only", only]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(path.read_text())
    assert len(report["calls"]) == calls and report["device"].startswith("Ascend9")
    for name, result in report["calls"].items():
        if not name.startswith("select"):
            assert result["largest error"] < 1e-2 and not result["NaN"], name
        else:
            least = 0.99 if "int8" in name else 1  # what is multiplied with their products is rounded to float16
            assert result["counts are equal"] and result["least share of equal entries"] >= least, name
        assert result["microseconds"] > 0
