"""Correctness and time of every kernel of ascend_npu and ascend_triton on this machine's NPU, in one file to send back.

Each call is compared with the reference on the CPU, and then timed: the lower quartile of wall time, the device
synchronised before and after. Random planes, the released models' dimensions, and small ones for every line of
docs/calls.md. The file is written anew after each call, so that a fault of the device loses none. From a checkout:
python benchmarks/ascend.py --output result.json [--only TEXT] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn import doctor, reference, registry
from sparse_attn.backends.ascend_npu import soc
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import calls as lines
import cases

BACKENDS = ("ascend_npu", "ascend_triton")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Call = tuple[str, Callable[..., Any], Callable[[], Arguments]]
"""Its name, the op, and what makes its arguments."""

LATENT = dict(planes="main", qk_dim=576, v_dim=512, index_heads=1, selected=2048)
WINDOWED = dict(qk_dim=512, v_dim=512, sinks=True, window=128, win_format="bf16", win_page_size=128)
LAYERS: dict[str, dict[str, Any]] = {
    "V3.2, bf16": LATENT | dict(format="bf16", rope_dim=64),
    "V3.2, int8": LATENT | dict(format="int8_v32"),
    "V4, window": WINDOWED | dict(planes="window"),
    "V4, ratio 4": WINDOWED | dict(planes="main+window", ratio=4, index_heads=1, selected=512, format="bf16"),
    "V4, ratio 128": WINDOWED | dict(planes="main+window", ratio=128, format="bf16"),
    "V4.1, ratio 2": WINDOWED | dict(planes="main+window", ratio=2, index_heads=1, selected=512, format="bf16"),
    "V4.1, ratio 1": WINDOWED | dict(planes="main+window", ratio=1, index_heads=1, selected=512, format="bf16"),
    "V4.1, ratio 1, packed rows": WINDOWED
    | dict(planes="main+window", ratio=1, index_heads=1, selected=512, format="fp4_v41", win_format="fp8_v41"),
    "V3.2, fp8, LSE": LATENT | dict(format="fp8_v32", lse=True),
}
PHASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((4000, 2000, 300, 9), (1, 1, 1, 1)),
    "draft": ((4000, 2000), (3, 3)),
    "chunk": ((2100,), (64,)),
}


def calls(heads: int) -> Iterator[Call]:
    """Every layer in every phase, the selection of V3.2, writes, entries, and the lines of docs/calls.md."""
    for phase, (lengths, rows) in PHASES.items():
        common = dict(dtype="bfloat16", kv_heads=1, page_size=128, lse=False, lengths=lengths, rows=rows)
        for layer, options in LAYERS.items():
            made = partial(cases.attend, **(common | dict(q_heads=heads) | options))
            yield f"attend {layer}, {phase}", sparse_attn.attend, made
        yield f"select V3.2, {phase}", sparse_attn.select, partial(selection, common)
        made = partial(int8_selection, common)
        yield f"select V3.2, int8 queries and keys, {phase}", sparse_attn.select, made
    yield "store V3.2", sparse_attn.store, partial(rows_to_store, 576, 576, "bf16")
    yield "store V4.1, packed rows", sparse_attn.store, partial(rows_to_store, 512, 288, "fp4_v41")
    yield "compress V4, ratio 4", sparse_attn.compress, entries
    for line in lines.lines():
        for phase in line.phases:
            yield f"docs/calls.md: {line.layer}, {phase}", sparse_attn.attend, partial(arguments, line, phase)


def selection(common: dict[str, Any]) -> Arguments:
    leading, kwargs = cases.attend(**(common | dict(q_heads=64, qk_dim=128, v_dim=128, format="bf16")))
    q, starts, seq_lens, scale, _, most, longest = leading
    weights = torch.rand(len(q), 64).to(q.dtype)
    given = (q, weights, starts, seq_lens, kwargs["kv"], kwargs["page_table"], 2048, scale, most, longest)
    return given, {"ties": "any"}


def int8_selection(common: dict[str, Any]) -> Arguments:
    given, options = selection(common)
    q, plane = (torch.randint(-127, 128, given[i].shape, dtype=torch.int8) for i in (0, 4))
    scales = {"q_scale": torch.rand(len(q), 64), "key_scale": torch.rand(plane.shape[:3]).half()}
    return (q, *given[1:4], plane, *given[5:]), options | {"format": "int8_index_h", **scales}


def rows_to_store(dim: int, width: int, format: str) -> Arguments:
    plane = torch.zeros(4, 128, 1, width, dtype=torch.bfloat16 if format == "bf16" else torch.uint8)
    return (torch.randn(100, 1, dim).bfloat16(), plane, torch.randperm(512)[:100]), {"format": format}


def entries() -> Arguments:
    starts, lengths = torch.tensor([0, 64, 100], dtype=torch.int32), torch.tensor([64, 36], dtype=torch.int32)
    rows = (*torch.randn(2, 100, 1, 1024), starts, lengths, torch.zeros(2, 128, 1, 512).bfloat16())
    pages = torch.tensor([[1], [0]], dtype=torch.int32)
    kept = {"span": 8, "state": torch.zeros(2, 64, 1, 2048), "state_page_table": pages}
    return (*rows, pages, 4, 64, 64), kept


def arguments(line: lines.Line, phase: str) -> Arguments:
    leading, kwargs = lines.Batch(line, phase, page=16, win_page=32).arguments(torch.bfloat16)
    return leading, kwargs | {"return_lse": False}  # operators give none


def expected(function: Callable[..., Any], given: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What the reference gives on the CPU; of a selection what the operator may choose freely is left out."""
    if function is sparse_attn.attend:
        out = torch.empty(*given[0].shape[:2], given[4], dtype=torch.float64)
        lse = torch.empty(out.shape[:2]) if kwargs["return_lse"] else None
        reference.attend(Attend(given[0].double(), *given[1:], **kwargs), out, lse)
        return [out] if lse is None else [out, lse]
    if function is sparse_attn.select:
        a = Select(*given, **kwargs)
        shape = (len(a.q), 1)
        counts = torch.empty(shape, dtype=torch.int32)
        indices = torch.empty((*shape, a.k), dtype=torch.int32)
        reference.select(a, indices, counts, None, None)
        return [counts, indices]
    if function is sparse_attn.compress:
        plane = given[4].clone()
        function(*given[:4], plane, *given[5:], **kwargs | {"state": kwargs["state"].clone()}, backend="reference")
        return [plane]
    plane = given[1].clone()
    sparse_attn.store(given[0], plane, given[2], backend="reference", **kwargs)
    return [plane]


def compare(function: Callable[..., Any], got: list[Tensor], want: list[Tensor]) -> dict[str, Any]:
    """How far a result is from what is expected."""
    if function is sparse_attn.select:
        pairs = zip(got[1].flatten(0, 1).tolist(), want[1].flatten(0, 1).tolist(), strict=True)
        shared = [len(set(a) & set(b)) / max(len(set(b)), 1) for a, b in pairs]
        return {"counts are equal": torch.equal(got[0], want[0]), "least share of equal entries": min(shared)}
    errors = []
    for part, wanted in zip(got, want, strict=True):
        a, b = part.cpu().double(), wanted.double()
        errors.append(torch.where(a == b, 0.0, (a - b).abs() / (1 + b.abs())).flatten())  # -inf is -inf
    error = torch.cat(errors)
    return {"largest error over 1 + |value|": float(error.max()), "NaN": bool(error.isnan().any())}


def measure(
    function: Callable[..., Any],
    given: tuple[Any, ...],
    kwargs: dict[str, Any],
    want: list[Tensor],
    backend: str,
    rounds: int,
) -> dict[str, Any]:
    """One call on the device: how far it is from what is wanted, and its time, or why there is no result."""
    device = [x.to("npu") if isinstance(x, Tensor) else x for x in given]
    options = {name: x.to("npu") if isinstance(x, Tensor) else x for name, x in kwargs.items()}

    def run() -> Any:
        return function(*device, **options, backend=backend)

    try:
        result = run()
        if function is sparse_attn.store:
            got = [device[1].cpu()]
        elif function is sparse_attn.compress:
            got = [device[4].cpu()]
        elif function is sparse_attn.select:
            got = [result.counts.cpu(), result.indices.cpu()]
        else:
            got = [*result] if kwargs["return_lse"] else [result]
        found = compare(function, got, want)
        samples = []
        for _ in range(rounds):
            torch.npu.synchronize()
            start = time.perf_counter()
            run()
            torch.npu.synchronize()
            samples.append(time.perf_counter() - start)
        return found | {"microseconds": round(statistics.quantiles(samples, n=4, method="inclusive")[0] * 1e6, 1)}
    except sparse_attn.NoBackend as refusal:
        return {"refused": str(refusal)}
    except Exception as error:  # a compiler's, a runtime's: whatever it is, it is to be sent back
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="calls whose name contains this text")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--heads", type=int, default=64, help="query heads")
    options = parser.parse_args()
    missing = soc.refusal(tuple(soc.FAMILIES))
    if missing:
        sys.exit(f"ascend.py: expected an Ascend device, got none that runs these kernels: {missing}")
    kernels = [kernel for kernel in registry.implementations() if kernel.backend in BACKENDS]
    states = {f"{k.op}: {k.backend} {k.variant}".rstrip(): registry.availability(k) for k in kernels}
    report: dict[str, Any] = {"doctor": doctor.collect(), "kernels": states, "calls": {}}
    report["device"] = torch.npu.get_device_name(0)
    options.output.write_text(json.dumps(report, indent=1))
    for name, function, made in calls(options.heads):
        if options.only in name:
            asked = (function, *made())
            want = expected(*asked)
            found = {backend: measure(*asked, want, backend, options.rounds) for backend in BACKENDS}
            report["calls"][name] = found
            options.output.write_text(json.dumps(report, indent=1))
            print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
