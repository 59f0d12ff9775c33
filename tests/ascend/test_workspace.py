"""`attend` of rows that are gathered before an operator sees them, and by torch's own operations alone."""

from __future__ import annotations

from typing import Any

import cases
import emulator
import npu
import operators
import pytest
import torch
from test_sparse_flash import LATENT
from test_sparse_mla import FORMS, WINDOWED

from sparse_attn import layout, reference, registry
from sparse_attn.backends.ascend_npu import memory, workspace
from sparse_attn.backends.ascend_npu.kernels import TOLERANCE
from sparse_attn.ops.attend import Attend

PACKED = [name for name in layout.names("kv", packed=True) if layout.FORMATS[name].dim == 512]
LATENTS = [name for name in layout.names("kv", packed=True) if layout.FORMATS[name].dim == 576]


def runs(operator: str, leading: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    before = operators.calls[operator]
    npu.assert_agrees(leading, kwargs)
    assert operators.calls[operator] > before


@pytest.mark.parametrize(
    ("form", "format", "win_format"),
    [(form, "fp4_v41", "fp8_v41") for form in ("window", "ratio 1", "ratio 4")]
    + [("ratio 2", "fp8_v41" if "fp4" in format else format, format) for format in PACKED],
)
def test_packed_rows(whole_family, form: str, format: str, win_format: str) -> None:
    runs(emulator.SMLA, *cases.attend(**(WINDOWED | FORMS[form] | dict(format=format, win_format=win_format))))


@pytest.mark.parametrize("format", [*LATENTS, "bf16"])
@pytest.mark.parametrize("selected", [1, 130])
def test_latent_rows(whole_family, format: str, selected: int) -> None:
    facts = LATENT | dict(format=format, rope_dim=0, selected=selected, lengths=(140, 1, 0, 57), rows=(3, 1, 1, 2))
    leading, kwargs = cases.attend(**facts)
    kwargs["kv"] = torch.cat([kwargs["kv"]] * 2, -1)[..., : kwargs["kv"].shape[-1]]
    runs(emulator.SFA, leading, kwargs)


def test_ranges_of_latent_rows(whole_family) -> None:
    leading, kwargs = cases.attend(**(LATENT | dict(format="bf16", rope_dim=64, lengths=(140, 9), rows=(3, 2))))
    ends = torch.randint(0, 140, (7, 2)).sort().values.to(torch.int32)
    ends[0], ends[5:] = torch.tensor([4, 4]), torch.tensor([-3, 1 << 30])
    runs(emulator.SFA, leading, kwargs | dict(kv_range=ends))


def test_entries_that_are_not_visible_yet(whole_family) -> None:
    facts = WINDOWED | FORMS["ratio 1"] | dict(format="fp4_v41", win_format="fp8_v41", lengths=(9,), rows=(4,))
    leading, kwargs = cases.attend(**facts)
    every = torch.arange(8, -1, -1, dtype=torch.int32).expand(len(leading[0]), 1, 9)
    runs(emulator.SMLA, leading, kwargs | dict(indices=every))


def overlaid(plane: torch.Tensor) -> torch.Tensor:
    """The plane as every fifth run of a pool that others share, whose bytes are not zero."""
    pool = torch.full((len(plane), 5, *plane.shape[1:]), 255, dtype=torch.uint8).view(plane.dtype)
    pool[:, 2] = plane
    return pool[:, 2]


@pytest.mark.parametrize("form", ["window", "ratio 1"])
def test_no_operation_is_given_more_than_32_bits_count(whole_family, form: str, monkeypatch) -> None:
    leading, kwargs = cases.attend(**(WINDOWED | FORMS[form] | dict(format="fp4_v41", win_format="fp8_v41")))
    kwargs |= {name: overlaid(kwargs[name]) for name in ("win", "kv") if kwargs.get(name) is not None}
    whole = npu.attend(leading, kwargs)
    monkeypatch.setattr(memory, "MOST_ELEMENTS", 2000)
    monkeypatch.setattr(workspace, "WORKSPACE", 1 << 20)
    assert torch.equal(npu.attend(leading, kwargs), whole)
    npu.assert_agrees(leading, kwargs)


def test_overlaid_pools_of_bf16_rows(whole_family) -> None:
    """Their pages lie apart, and the last is past 2**31 elements: the facts say so, and rows are gathered first."""
    for facts, names in ((WINDOWED | FORMS["ratio 1"], ("kv", "win")), (LATENT | dict(format="bf16"), ("kv",))):
        leading, kwargs = cases.attend(**facts)
        kwargs |= {name: overlaid(kwargs[name].view(torch.uint8)).view(kwargs[name].dtype) for name in names}
        npu.assert_agrees(leading, kwargs)
        call = npu.call_of(leading, kwargs)
        far = call._replace(facts=tuple((n, 1 << 40 if n.endswith("reach") and v else v) for n, v in call.facts))
        assert "rows gathered first" in registry.choose(far, "ascend_npu").variant


def test_a_plane_without_pages(whole_family) -> None:
    leading, kwargs = cases.attend(**(WINDOWED | FORMS["ratio 1"] | dict(format="fp4_v41", win_format="fp8_v41")))
    empty = kwargs | {name: kwargs[name][:0] for name in ("kv", "win")}
    nobody = (*leading[:2], torch.zeros_like(leading[2]), *leading[3:])
    for lse in (False, True):
        for given, missing in ((leading, True), (nobody, False)):
            call = {name: npu.on_npu(value) for name, value in empty.items()} | dict(return_lse=lse)
            out = torch.ops.sparse_attn.attend(*map(npu.on_npu, given), **call, backend="ascend_npu")[0].cpu()
            assert (out[:3].isnan() if missing else out[:3] == 0).all()


def test_a_rope_part_of_another_type(whole_family) -> None:
    leading, kwargs = cases.attend(**(LATENT | dict(format="bf16", rope_dim=64, select_block=1)))
    kwargs |= dict(kv_rope=kwargs["kv_rope"].float(), kv=torch.cat([kwargs["kv"]] * 2, -1)[..., :512])
    runs(emulator.SFA, leading, kwargs)


@pytest.mark.parametrize("name", ["win_page_table", "page_table"])
def test_a_page_that_does_not_exist_is_seen(whole_family, name: str) -> None:
    leading, kwargs = cases.attend(**(WINDOWED | FORMS["ratio 1"] | dict(format="fp4_v41", win_format="fp8_v41")))
    kwargs[name][0] = 1 << 20
    moved = {name: npu.on_npu(value) for name, value in kwargs.items()}
    for lse in (False, True):  # on gathered rows, and by torch's own operations
        call = moved | dict(return_lse=lse, backend="ascend_npu")
        out = torch.ops.sparse_attn.attend(*map(npu.on_npu, leading), **call)[0].cpu()
        assert out[:3].isnan().all() and not out[3:].isnan().any()


ANY: dict[str, dict[str, Any]] = {
    "LSE and sinks of V3.2": LATENT | dict(format="fp8_v32", rope_dim=0, selected=24, lse=True, sinks=True),
    "V4.1 with LSE": WINDOWED | FORMS["ratio 2"] | dict(format="fp4_v41", win_format="fp8_v41", lse=True),
    "V4 ratio 128, packed": WINDOWED | FORMS["ratio 128"] | dict(format="fp8_v4_planar", win_format="fp8_v4_planar"),
    "another window": WINDOWED | FORMS["ratio 1"] | dict(window=9, lse=True),
    "grouped queries": dict(dtype="bfloat16", format="bf16", v_format="bf16"),
    "blocks": dict(dtype="float16", format="fp16", v_format="fp16", index_heads=2, selected=12, select_block=4),
    "int8 rows": dict(dtype="float32", format="int8", v_format="int8", index_heads=4, qk_dim=21, v_dim=13),
    "not causal": dict(causal=False, planes="main+window"),
}


@pytest.mark.parametrize("call", ANY)
def test_any_call(whole_family, call: str) -> None:
    leading, kwargs = cases.attend(**ANY[call])
    moved = {name: npu.on_npu(value) for name, value in kwargs.items()}
    out, lse = torch.ops.sparse_attn.attend(*map(npu.on_npu, leading), **moved, backend="ascend_npu")
    a = Attend(leading[0].double(), *leading[1:], **kwargs)
    expected, expected_lse = torch.empty(out.shape, dtype=torch.float64), torch.empty(out.shape[:2])
    reference.attend(a, expected, expected_lse)
    atol, rtol = TOLERANCE["attend"][str(leading[0].dtype).removeprefix("torch.")]
    torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=rtol)
    if a.return_lse:
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=atol, rtol=rtol)
