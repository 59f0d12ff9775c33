"""The examples of the page on serving."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_examples_of_the_page() -> None:
    page = Path(__file__).parents[1] / "docs" / "serving.md"
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 35 and result.failed == 0
