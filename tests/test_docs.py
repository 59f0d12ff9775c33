"""What the pages show runs, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def code(page: Path) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return block


def test_the_code_of_the_readme_runs() -> None:
    names: dict[str, torch.Tensor] = {}
    exec(code(PAGES[0]), names)
    assert names["dense"].shape == names["sparse"].shape == (6, 32, 128)
    selected = names["lse"] < torch.inf
    assert selected.all() and not torch.equal(names["dense"], names["sparse"])


def test_both_languages_show_the_same_code() -> None:
    assert code(PAGES[0]) == code(PAGES[1])


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("backends/*.md")]))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
