"""`compress` of cpu_native on every instruction set, and on several threads. `test_compressions.py` tests what it
computes on the best one."""

from __future__ import annotations

from importlib import import_module

import pytest
import test_compressions
import torch
from compressions import Line, Sequences, lines

from sparse_attn import registry

native = next((impl for impl in registry.implementations("compress") if impl.backend == "cpu_native"), None)
if native is None or registry.availability(native) is not None:
    pytest.skip("cpu_native is not built", allow_module_level=True)

cpu_native = import_module("sparse_attn.backends.cpu_native")
ISAS = import_module("sparse_attn._cpu_native").instruction_sets()
LINES = pytest.mark.parametrize("line", lines(), ids=lambda line: line.of)


@pytest.fixture(params=ISAS, autouse=True)
def isa(request, monkeypatch) -> str:
    monkeypatch.setattr(cpu_native, "_isa", lambda wanted: ISAS[request.param])
    return request.param


@LINES
def test_line(line: Line) -> None:
    test_compressions.test_line(line, native)


@LINES
def test_any_cut_into_steps_gives_the_same_bits(line: Line) -> None:
    test_compressions.test_any_cut_into_steps_gives_the_same_bits(line, 7, native)


@LINES
def test_threads_change_no_bit(line: Line) -> None:
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            s = Sequences(line, [700, 0, 333, 64])
            latent = s.run(native, s.lengths, s.lengths, entries=sum(s.lengths))
        finally:
            torch.set_num_threads(before)
        results.append((latent, s.plane, s.scale, None if s.state is None else s.state.nan_to_num(9)))
    for one, three in zip(*results, strict=True):
        assert one is three is None or torch.equal(one, three)


@pytest.mark.parametrize("dim", [1, 2, 7, 15, 17, 33, 100])
def test_any_dimension(dim: int) -> None:
    """Rows that fill no whole vector."""
    for line in (x for x in lines() if x.format == "bf16" and "cos_sin" not in x.arguments):
        s = Sequences(line, [3 * line.stride + 1] if line.stride < 64 else [40], format="fp32", dim=dim)
        s.run(native, s.lengths, s.lengths)
        for j, entry in enumerate(s.entries()[0]):
            torch.testing.assert_close(entry.double(), s.expected(0, j)[1], atol=1.6e-2, rtol=1.6e-2)
