"""`compress` on tensors of the emulated machine, against entries computed one by one. The tests that every backend must
pass run on CPU tensors (``own_operations``)."""

from __future__ import annotations

from typing import Any

import npu
import pytest
import torch
from compressions import Line, Sequences, lines
from torch import Tensor

import sparse_attn
from sparse_attn.backends.ascend_npu import compress

NAMES = ("DeepSeek V4, ratio 4", "DeepSeek V4.1 Full, ratio 2", "MoBA, stored mean keys")
LINES = [line for line in lines() if line.of in NAMES]
LINES += [Line("three tokens", 3, 1, True, "norm=norm", "bf16")]
HELD = ("plane", "scale", "state")


class OnNpu:
    """Sequences whose planes lie on the device."""

    def __init__(self, line: Line, format: str = "") -> None:
        stride = line.stride if line.stride < 64 else 8
        self.s = Sequences(line, [5 * stride + 1, 0, 2 * stride], format, dim=10)
        self.held = {name: npu.on_npu(getattr(self.s, name)) for name in HELD}

    def step(self, ends: list[int], counts: list[int], **options: Any) -> Tensor:
        args, kwargs = self.s.step(ends, counts, padding=2)
        moved = [self.held["plane"] if x is self.s.plane else npu.on_npu(x) for x in args]
        given = {name: npu.on_npu(x) for name, x in kwargs.items()} | {name: self.held[name] for name in HELD[1:]}
        return sparse_attn.compress(*moved, **given, **options, backend="ascend_npu").cpu()

    def back(self) -> Sequences:
        for name in HELD:
            tensor = self.held[name]
            setattr(self.s, name, None if tensor is None else tensor.cpu())
        return self.s


def cut() -> tuple[list[list[int]], list[list[int]]]:
    """Ends and counts of three steps that cut groups."""
    return [[3, 0, 1], [4, 0, 6], [9, 0, 6]], [[3, 0, 1], [1, 0, 5], [5, 0, 0]]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.of)
def test_entries(whole_family: str, line: Line) -> None:
    n = OnNpu(line, format="fp32")
    latent = n.step(n.s.lengths, n.s.lengths, entries=20)
    s = n.back()
    packed = iter(latent)
    for b, entries in enumerate(s.entries()):
        for j, entry in enumerate(entries):
            expected_latent, expected = s.expected(b, j)
            assert s.close(next(packed), expected_latent, 4e-6, 4e-6) and s.close(entry, expected, 8e-6, 8e-6)
    assert all((row == 0).all() for row in packed)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.of)
def test_cuts_and_the_state(whole_family: str, line: Line) -> None:
    """The bytes of one step, and the rows that the reference keeps."""
    once, often = OnNpu(line), OnNpu(line)
    for ends, counts in zip(*cut(), strict=True):
        args, kwargs = once.s.step(ends, counts, padding=2)
        sparse_attn.compress(*args, **kwargs, backend="reference")
        often.step(ends, counts)
    state = once.s.state
    once.step([9, 0, 6], [9, 0, 6])
    s, kept = often.back(), once.back()
    assert torch.equal(s.plane, kept.plane)
    if state is not None:
        assert torch.equal(s.state.nan_to_num(7), state.nan_to_num(7))


def test_in_parts_of_the_workspace(whole_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = OnNpu(LINES[0]), OnNpu(LINES[0])
    latent = whole.step(whole.s.lengths, whole.s.lengths, entries=7)
    monkeypatch.setattr(compress, "WORKSPACE", 1)
    assert torch.equal(parts.step(parts.s.lengths, parts.s.lengths, entries=7), latent)
    assert torch.equal(parts.back().plane, whole.back().plane)


def test_what_no_memory_holds_is_seen(whole_family: str) -> None:
    """Entries without a page are left out; those whose earlier rows or angles are lost are NaN, and no others."""
    line = LINES[0]
    lost = OnNpu(line, format="fp32")
    lost.step([9, 0, 0], [9, 0, 0])
    lost.s.state_table[:] = 1 << 30
    lost.held["state"].nan_to_num_(7)
    lost.step([17, 0, 8], [8, 0, 8])
    entries = lost.back().entries()
    assert [bool(entry.isnan().all()) for entry in entries[0][:4]] == [False, False, True, True]
    assert not entries[2].isnan().any(), "all of its tokens are of one step"
    short = OnNpu(line, format="fp32")
    short.s.cos_sin = short.s.cos_sin[:8]
    short.step(short.s.lengths, short.s.lengths)
    assert [bool(entry.isnan().any()) for entry in short.back().entries()[0]] == [False, False, True, True, True]
    away = OnNpu(line, format="fp32")
    away.s.table[2] = -1
    away.step(away.s.lengths, away.s.lengths)
    s = away.back()
    assert s.plane.any(-1).sum() == len(s.entries()[0])
    assert all(s.close(entry, s.expected(0, j)[1], 8e-6, 8e-6) for j, entry in enumerate(s.entries()[0]))
