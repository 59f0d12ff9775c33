"""`docs/ascend.md` shows the limits that the backend has."""

from __future__ import annotations

from pathlib import Path

from sparse_attn.backends.ascend_npu import KERNELS, page

PAGE = Path(__file__).parents[1] / "docs" / "ascend.md"


def test_tables_are_current() -> None:
    text = PAGE.read_text()
    assert page.renewed(text) == text, f"run python -m sparse_attn.backends.ascend_npu.page {PAGE.name}"


def test_every_limit_names_its_source() -> None:
    assert all(len(source) > 10 for kernel in KERNELS for _, source in kernel.limits.values())


def test_every_kernel_of_attention_is_checked_with_a_known_answer() -> None:
    assert all(kernel.check is not None for kernel in KERNELS if kernel.op == "attend")
