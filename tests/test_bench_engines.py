"""Engines as peers of the benchmark: adapters call the operators that engines have, here stand-ins in torch that read
the same bytes; ik_llama.cpp is checked where its library is named."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparse_attn import bench
from sparse_attn.planes import Plane

bench.load("cpu")
from cpu import attend, select  # noqa: E402 (its folder is found now)
from cpu.engines import ik_llama, operators, sglang, vllm  # noqa: E402
from cpu.timing import Case  # noqa: E402

LATENT = attend.latent(16, 512, 64)
V4 = replace(attend.V4, q_heads=16, context=512, selected=64)


@pytest.fixture(autouse=True)
def few_variants(monkeypatch):
    for module in (attend, select):
        monkeypatch.setattr(module, "variants_for", lambda bytes_read, least=4: 4)


def attended(q: Tensor, rows: Tensor, v_dim: int, scale: float) -> Tensor:
    """Attention of heads ``[T, H, D]`` over rows ``[T, K, D]``."""
    scores = torch.einsum("thd,tkd->thk", q.float(), rows.float()) * scale
    return torch.einsum("thk,tkd->thd", scores.softmax(-1), rows[..., :v_dim].float()).to(q.dtype)


def v4_rows(plane: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Rows at ``slots [T, K]`` of a planar plane ``[pages, bytes]``."""
    packed = Plane(plane, "fp8_v4_planar", None, page_size)
    return packed.rows(packed.at(slots.flatten().long())).view(*slots.shape, -1)


def vllm_attend(
    out: Tensor,
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_page: int,
    entries: Tensor,
    slots: Tensor,
    page: int,
    sinks: Tensor,
    scale: float,
) -> None:
    assert window_slots.dtype == slots.dtype == torch.int64 and bool(sinks.isneginf().all())
    rows = torch.cat([v4_rows(window, window_slots, window_page), v4_rows(entries, slots, page)], 1)
    out.copy_(attended(q, rows, 512, scale))


def sglang_attend(
    q: Tensor,
    cache: Tensor,
    v_dim: int,
    scale: float,
    indices: Tensor,
    lengths: Tensor | None,
    sinks: Tensor | None,
    extra: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    in_fp8: bool,
    number: int,
) -> tuple[Tensor, None]:
    assert lengths is None and sinks is None and extra_lengths is None and in_fp8 == (number > 0)

    def rows(plane: Tensor, at: Tensor) -> Tensor:
        assert at.dtype == torch.int32 and plane.dim() == 4 and plane.shape[2] == 1
        if number == 0:
            return plane.flatten(0, 2)[at[:, 0].long()]
        if number == 1:
            packed = Plane(plane, "fp8_v32", None, plane.shape[1])
            return packed.rows(packed.at(at.flatten().long())).view(len(at), at.shape[2], -1)
        whole = plane.as_strided((plane.shape[0], plane.stride(0)), (plane.stride(0), 1))
        return v4_rows(whole, at[:, 0], plane.shape[1])

    found = rows(cache, indices)
    if extra is not None and extra_indices is not None:
        found = torch.cat([found, rows(extra, extra_indices)], 1)
    return attended(q[:, 0], found, v_dim, scale)[:, None], None


def logits(q: Tensor, keys: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, page: int, longest: int) -> Tensor:
    """Scores ``[1, longest]`` of a row; q ``[1, H, 128]`` in fp8, keys ``[pages, page * 132]``."""
    assert q.dtype == torch.float8_e4m3fn and weights.dtype == torch.float32 and int(lengths[0]) == longest
    packed = Plane(keys, "fp8_index_planar", None, page)
    slots = (table[0].long()[:, None] * page + torch.arange(page)).flatten()[:longest]
    rows = packed.rows(packed.at(slots))[:, 0].float()
    return ((q[0].float() @ rows.T).relu() * weights[0][:, None]).sum(0)[None]


STANDINS = {
    "vllm": {"flash_mla_with_kvcache_cpu": vllm_attend, "fp8_paged_mqa_logits_cpu": logits},
    "sgl_kernel": {
        "flash_mla_with_kvcache_cpu": sglang_attend,
        "fp8_paged_mqa_logits_cpu": lambda q, keys, weights, lengths, table, longest, clean: logits(
            q[:, 0], keys.flatten(1), weights, lengths, table, keys.shape[1], longest
        ),
    },
}


@pytest.fixture
def engines(monkeypatch):
    for module, package in ((vllm, "vllm"), (sglang, "sgl_kernel")):
        monkeypatch.setattr(module, "operator", STANDINS[package].get)


def check(case: Case) -> None:
    """Every call of the case, by the check of its first."""
    for i in range(case.variants):
        moved = {name: lambda _, f=f, i=i: f(i) for name, f in case.functions.items()}
        module = select if case.name.startswith("select") else attend
        arguments = ("bf16",) if module is select else ()
        module.check(replace(case, functions=moved), *arguments)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("format", ["bf16", "fp8_v32"])
def test_latent_rows(engines, format, rows):
    case = attend.make(replace(LATENT, rows=rows), 2, "bf16", format)
    assert sglang.ATTEND in case.functions and vllm.ATTEND not in case.functions
    check(case)


def test_a_window_in_bf16(engines):
    case = attend.make(V4, 2)
    assert sglang.ATTEND in case.functions and vllm.ATTEND not in case.functions
    check(case)


def test_a_window_in_fp8(engines):
    case = attend.make(V4, 2, "bf16", "fp8_v4_planar", "fp8_v4_planar")
    assert {sglang.ATTEND, vllm.ATTEND} <= case.functions.keys()
    check(case)


@pytest.mark.parametrize("formats", [("fp4_v41", "fp8_v41"), ("int8_v32", "")])
def test_formats_that_engines_lack(engines, formats):
    shape = V4 if formats[1] else LATENT
    assert not {sglang.ATTEND, vllm.ATTEND} & attend.make(shape, 1, "bf16", *formats).functions.keys()


def test_an_indexer(engines):
    case = select.make(replace(select.INDEXER, k=64), 512, "bf16", "fp8_index_planar")
    assert {sglang.SELECT, vllm.SELECT} <= case.functions.keys()
    check(case)


def test_what_is_not_installed_is_no_peer(monkeypatch):
    monkeypatch.setattr(ik_llama, "library", lambda: None)
    assert operators.load("a_package_that_is_not_there", "*.so", "none") is None
    monkeypatch.setattr(vllm, "load", lambda *names: None)
    monkeypatch.setattr(sglang, "load", lambda *names: None)
    found = attend.make(LATENT, 1).functions.keys() | select.make(select.INDEXER, 4096).functions.keys()
    assert not [name for name in found if name.startswith(("vLLM", "SGLang", "ik_llama"))]


@pytest.mark.skipif(not os.environ.get(ik_llama.LIBRARY), reason=f"{ik_llama.LIBRARY} names no library")
@pytest.mark.parametrize("make", [lambda: attend.make(LATENT, 1), lambda: select.make(select.INDEXER, 4096)])
def test_ik_llama(make):
    case = make()
    assert {f"{ik_llama.NAME} {kind}" for kind in ik_llama.CACHES} <= case.functions.keys()
    check(case)
