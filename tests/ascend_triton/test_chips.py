"""Every kernel fits the memories of every chip."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from costs import costs, table
from launches import CALLS, kernels
from lowering import CHIPS, Overflow, hivm, linalg, specialise

from sparse_attn.backends.ascend_triton.soc import SOCS

PAGE = Path(__file__).parents[2] / "docs" / "ascend-triton.md"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_fit(name: str, chip: str) -> None:
    launched = kernels(name, CHIPS[chip])
    assert launched
    for kernel in launched:
        hivm(linalg(kernel, CHIPS[chip]), CHIPS[chip])


@pytest.mark.parametrize("chip", CHIPS)
def test_chips_are_what_the_compiler_plans_for(chip: str) -> None:
    kernel = kernels("merge, 4 parts, 64 heads of 512", CHIPS[chip])[0]
    planned = hivm(linalg(kernel, CHIPS[chip]), CHIPS[chip])
    facts = {name: int(n) for name, n in re.findall(r'"(\w+)", (\d+) : i32', planned)}
    soc = SOCS[CHIPS[chip].family]
    assert CHIPS[chip].target.startswith(soc.names)
    assert (facts["AI_CORE_COUNT"], facts["VECTOR_CORE_COUNT"]) == (soc.cores, soc.vector_cores)
    assert facts["UB_SIZE"] == 8 * soc.buffer


@triton.jit
def large(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(source + at)
    tl.store(target + at, tl.exp(x) * tl.sum(x, 0))


@pytest.mark.parametrize("chip", CHIPS)
def test_what_does_not_fit_is_found(chip: str) -> None:
    for size, fits in ((1024, True), (65536, False)):
        source = torch.zeros(size)
        text = linalg(specialise(large, CHIPS[chip], (source, source), {"SIZE": size}), CHIPS[chip])
        if fits:
            hivm(text, CHIPS[chip])
        else:
            with pytest.raises(Overflow, match="ub overflow"):
                hivm(text, CHIPS[chip])


def test_costs_are_those_of_the_page() -> None:
    """Better or worse: the table is to be made anew, and the difference to be looked at."""
    page = PAGE.read_text().split("<!-- generated: costs -->")[1].split("<!-- end -->")[0]
    assert page.strip() == table()


def test_rows_in_place_are_fetched_once() -> None:
    chip = CHIPS["910B3"]
    for name, least in {
        "GQA 32/8, bf16, dense": 512,
        "V4, bf16, 64 heads": 1024,
        "V3.2, bf16, 128 heads": 1152,
    }.items():
        kernel = next(k for k in kernels(f"attend, {name}", chip) if k.function.__name__ == "attend_kernel")
        measured = costs(hivm(linalg(kernel, chip), chip))
        assert measured.busiest.fetched == least * kernel.constants["MAIN"].tile
        assert measured.vector_units == 2
        assert measured.buffer <= SOCS["A2"].buffer
