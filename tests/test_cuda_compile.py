"""What `cuda_triton` launches compiles for every architecture to what it should be, within budgets, and `docs/cuda.md`
shows the figures."""

from __future__ import annotations

import pytest

from sparse_attn import env

pytest.importorskip("triton")
if env.TRITON_INTERPRET.get() == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import cuda_compile

PAGE = cuda_compile.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", cuda_compile.CALLS)
def test_within_budgets(name: str) -> None:
    for c in cuda_compile.compiled(list(cuda_compile.ARCHITECTURES), [name]):
        assert c.ok, c
        shown = f"| {c.case} | {cuda_compile.target(c.arch)} | {c.tile} |"
        assert (shown if c.shown else f"| {c.kernel} | {c.case} |") in PAGE, c


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "products", "loads"),
    [
        ("V3.2, bf16, 128 heads", 90, "wgmma", 18 + 9),
        ("V3.2, fp8_v32, 128 heads", 90, "mma.sync", 9 + 4),
        ("GQA 32/8, bf16, dense, 600 rows", 90, "wgmma", 4 + 8),
        ("GQA 32/8, bf16, dense, 600 rows", 100, "tcgen05", 4 + 8),
    ],
)
def test_instructions(name: str, arch: int, products: str, loads: int) -> None:
    """Matrix units, and loads of 16 bytes: as many as the queries of a tile and the rows of a block are for each of 256
    threads."""
    c = next(c for c in cuda_compile.compiled([arch], [name]) if c.kernel == "attend_kernel")
    assert c.products == products and c.wide_loads >= loads


@pytest.mark.slow
def test_the_budgets_can_be_missed(monkeypatch) -> None:
    """A tile too large spills; one too large for sm_100 becomes a trap that assembles without complaint."""
    from sparse_attn.backends.cuda_triton import attend
    from sparse_attn.backends.cuda_triton.schedule import Tile

    name = "V3.2, bf16, 128 heads"
    for arch, tile in ((90, Tile(64, 64, 8, 1)), (100, Tile(64, 64, 8, 1))):
        monkeypatch.setattr(attend, "tile_of", lambda *_, tile=tile: tile)
        found = [c for c in cuda_compile.compiled([arch], [name]) if c.kernel == "attend_kernel"]
        assert len(found) == 1 and not found[0].ok
        assert (found[0].spilled > 0) if arch == 90 else (found[0].products == "none")
