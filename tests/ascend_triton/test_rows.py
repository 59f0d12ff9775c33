"""What `store` and `load` of `ascend_triton` do where they cannot refuse, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import sparse_attn


def test_slots_past_the_plane_are_left_out_and_read_as_nan() -> None:
    plane, rows = torch.full((2, 3, 1, 16), 7.0), torch.randn(3, 1, 16)
    slots = torch.tensor([6, 4, 1 << 40])
    sparse_attn.store(rows, plane, slots, format="fp32", backend="ascend_triton")
    assert torch.equal(plane.flatten(0, 1)[4], rows[1]) and (plane == 7).sum() == 5 * 16
    read = sparse_attn.load(plane, torch.tensor([4, 6, -1]), format="fp32", backend="ascend_triton")
    assert torch.equal(read[0], rows[1]) and read[1].isnan().all() and (read[2] == 0).all()


@pytest.mark.parametrize("first", [1, 2])
def test_unaligned_packed_planes_are_refused(first: int) -> None:
    pool = torch.zeros(2 * 3 * 656 + 4, dtype=torch.uint8)
    plane = pool[first : first + 2 * 3 * 656].view(2, 3, 1, 656)
    match = "store: plane: expected entries at multiples of [24] bytes, where the device loads such numbers"
    with pytest.raises(sparse_attn.InvalidCall, match=match):
        sparse_attn.store(torch.zeros(1, 1, 576), plane, torch.tensor([0]), format="fp8_v32", backend="ascend_triton")
