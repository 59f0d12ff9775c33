"""``crossover --measure``: both paths of the bundled engine are timed, on calls that its runner makes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import tiny_config, tiny_model

from sparse_attn import serve
from sparse_attn.__main__ import main
from sparse_attn.serving import paths, runner
from sparse_attn.serving.crossover import Switches

SHARES = [Fraction(1, 4), Fraction(1, 8)]


def test_each_cell_has_its_rounds_and_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[int], int | None]] = []
    attend = runner.Batch.attend

    def noted(batch: runner.Batch, *arguments: Any) -> torch.Tensor:
        calls.append((batch.seq_lens.tolist(), None if batch.budgets is None else int(batch.budgets.max())))
        out = attend(batch, *arguments)
        assert out.isfinite().all() and out.abs().max() > 0
        return out

    monkeypatch.setattr(runner.Batch, "attend", noted)
    found = list(paths.measure(tiny_config(), SHARES, [40, 2000], [1, 3], 2, page_size=16))
    assert len(found) == 2 * 2 * 2 * 2 * 2 and all(timing.seconds > 0 for timing in found)
    cells = {(t.length, t.batch, t.ratio, t.path) for t in found}
    assert cells == {
        (n, b, r, p) for n in (40, 2000) for b in (1, 3) for r in (0.25, 0.125) for p in ("dense", "sparse")
    }
    budgets = {40: 40, 2000: {0.25: 500, 0.125: 256}}
    assert set(map(str, calls)) == {
        str(([n] * b, budget)) for n in (40, 2000) for b in (1, 3)
        for budget in (None, *({40} if n == 40 else budgets[2000].values()))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "sequences", "rounds"), [([], [1], 1), ([0], [1], 1), ([8], [0], 1), ([8], [1], 0)]
)
def test_what_cannot_be_measured_is_refused(lengths: list[int], sequences: list[int], rounds: int) -> None:
    with pytest.raises(ValueError, match="expected numbers of at least 1, got"):
        list(paths.measure(tiny_config(), SHARES, lengths, sequences, rounds))


def test_the_command_measures_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(serve, "load", lambda folder: (tiny_model(), None, "tiny"))
    file, saved = tmp_path / "calls.jsonl", tmp_path / "crossover.json"
    command = ["crossover", str(file), "--measure", "--lengths", "64,300", "--sequences", "1", "--rounds", "2"]
    assert main([*command, "--share", "1/4,1/8", "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "| 1 | 0.125 | 64 |" in out and "| 1 | 0.25 | 300 |" in out
    assert len(file.read_text().splitlines()) == 2 * 2 * 2 * 2
    found = json.loads(saved.read_text())
    assert found["k"] == runner.FLOOR and found["device"] == serve.fingerprint("tiny", "bfloat16")
    assert Switches.load(saved).of(0.25, found["device"], runner.FLOOR)[1] == ""
    assert main(command) == 2 and "File exists" in capsys.readouterr().err
