"""The command for people with hardware runs from end to end, here on the emulated machine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import device
import pytest
from conftest import become

import sparse_attn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ascend.py"


def run(path: Path, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--output", str(path), "--rounds", "2", "--heads", "2", "--only", only]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(
    ("family", "only", "calls"),
    [("A3", ", decode", 33), ("950", "V3.2, int8, decode", 1), ("A2", "compress V4", 1), ("A2", "LSE, draft", 1)],
)
def test_result_file(family: str, only: str, calls: int, tmp_path, monkeypatch) -> None:
    become(family, every_kernel=True)
    path = tmp_path / "result.json"
    run(path, only, monkeypatch)
    report = json.loads(path.read_text())
    assert len(report["calls"]) == calls and report["device"].startswith("Ascend9")
    for name, results in report["calls"].items():
        assert "triton" in results["ascend_triton"]["refused"], name
        result = results["ascend_npu"]
        if not name.startswith("select"):
            assert result["largest error over 1 + |value|"] < 1e-2 and not result["NaN"], name
        else:
            least = 0.99 if "int8" in name else 1  # what is multiplied with their products is rounded to float16
            assert result["counts are equal"] and result["least share of equal entries"] >= least, name
        assert result["microseconds"] > 0


def test_results_before_a_fault_are_kept(tmp_path, monkeypatch) -> None:
    become("A2", every_kernel=True)
    path, asked = tmp_path / "result.json", []

    def attend(*_: Any, backend: str, **__: Any) -> None:
        asked.append(backend)
        if len(asked) > 2:
            raise KeyboardInterrupt
        raise ValueError("a compiler's")

    monkeypatch.setattr(sparse_attn, "attend", attend)
    with pytest.raises(KeyboardInterrupt):
        run(path, "V3.2, bf16", monkeypatch)
    calls = json.loads(path.read_text())["calls"]
    assert calls == {"attend V3.2, bf16, decode": dict.fromkeys(asked[:2], {"error": "ValueError: a compiler's"})}


def test_a_machine_without_a_device_is_refused_in_one_sentence(tmp_path, monkeypatch) -> None:
    become("A2")
    monkeypatch.setattr(device.chip, "name", "Ascend310P3")
    with pytest.raises(SystemExit) as refused:
        run(tmp_path / "result.json", "", monkeypatch)
    assert str(refused.value) == (
        "ascend.py: expected an Ascend device, got none that runs these kernels: the device is Ascend310P3, "
        "supported: Ascend910B*, Ascend910_93*, Ascend950*"
    )
