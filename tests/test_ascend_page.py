"""`docs/ascend.md` shows the limits that the backend has."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse_attn import models
from sparse_attn.backends.ascend_npu import page
from sparse_attn.backends.ascend_npu.kernels import KERNELS

PAGE = Path(__file__).parents[1] / "docs" / "ascend.md"


def test_tables_are_current() -> None:
    text = PAGE.read_text()
    assert page.renewed(text) == text, f"run python -m sparse_attn.backends.ascend_npu.page {PAGE.name}"


def test_every_limit_names_its_source() -> None:
    assert all(len(source) > 10 for kernel in KERNELS for _, source in kernel.limits.values())


def test_every_kernel_of_attention_is_checked_with_a_known_answer() -> None:
    assert all(kernel.check is not None for kernel in KERNELS if kernel.op == "attend")


@pytest.mark.parametrize(
    ("named", "formats"),
    [
        ("bf16 rows, bf16 index keys", models.BF16),
        ("bf16 rows, `int8_index` keys", models.BF16 | {"index": "int8_index"}),
        ("`fp4_v41` rows, `int8_index` keys", {"main": "fp4_v41", "index": "int8_index"}),
        ("`fp4_v41` rows, `fp4_index` keys", {"main": "fp4_v41", "index": "fp4_index"}),
    ],
)
def test_bytes_of_a_token_are_those_of_the_formats(named: str, formats: dict[str, str]) -> None:
    size = sum(models.PRESETS["deepseek-v4.1-flash"].bytes_per_token(formats).values())
    assert f"| {named} | {size:.0f} |" in PAGE.read_text()


@pytest.mark.parametrize("format", ["fp8_v41", "bf16"])
def test_bytes_of_windows_are_those_of_the_formats(format: str) -> None:
    assert str(models.PRESETS["deepseek-v4.1-flash"].fixed_bytes({"window": format})["window"]) in PAGE.read_text()


def test_calls_that_a_family_has_another_form_for_are_not_called_refused() -> None:
    rows = [line.strip("| ").split(" | ") for line in page.operators()[2:]]
    instead = {form: cell for _, form, *_, cell in rows if cell.startswith("as ")}
    assert instead["window and a selection, V4.1"] == 'as "window and a selection"' and len(instead) == 4
    assert not any("refused" in row for row in rows)
    for form, cell in instead.items():
        lacking = next(k for k in KERNELS if k.form == form)
        serving = next(k for k in KERNELS if f'as "{k.form}"' == cell and "950" in k.families)
        ratios = [r for r in (1, 2, 4, 128) if "ratio" in lacking.limits and lacking.limits["ratio"][0].admits(r)]
        assert all(serving.limits["ratio"][0].admits(r) for r in ratios)
