"""Correctness and time of every kernel of ascend_npu on this machine's NPU, in one file to send back.

Each call is compared with the reference on the CPU, and then timed: the lower quartile of wall time, the device
synchronised before and after. Random planes, the released models' dimensions. From a checkout:
python benchmarks/ascend.py --output result.json [--only TEXT] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn import doctor, reference, registry
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import cases

Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]

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
    """Every layer in every phase, the selection of V3.2, writes, and entries."""
    for phase, (lengths, rows) in PHASES.items():
        common = dict(dtype="bfloat16", kv_heads=1, page_size=128, lse=False, lengths=lengths, rows=rows)
        for layer, options in LAYERS.items():
            leading, kwargs = cases.attend(**(common | dict(q_heads=heads) | options))
            yield f"attend {layer}, {phase}", sparse_attn.attend, leading, kwargs
        leading, kwargs = cases.attend(**(common | dict(q_heads=64, qk_dim=128, v_dim=128, format="bf16")))
        q, starts, seq_lens, scale, _, most, longest = leading
        weights = torch.rand(len(q), 64).to(q.dtype)
        given = (q, weights, starts, seq_lens, kwargs["kv"], kwargs["page_table"], 2048, scale, most, longest)
        yield f"select V3.2, {phase}", sparse_attn.select, given, {"ties": "any"}
        plane = torch.randint(-127, 128, kwargs["kv"].shape, dtype=torch.int8)
        scales = {"q_scale": torch.rand(len(q), 64), "key_scale": torch.rand(plane.shape[:3]).half()}
        quantised = (torch.randint(-127, 128, q.shape, dtype=torch.int8), *given[1:4], plane, *given[5:])
        options = {"ties": "any", "format": "int8_index_h", **scales}
        yield f"select V3.2, int8 queries and keys, {phase}", sparse_attn.select, quantised, options
    slots = torch.randperm(512)[:100]
    rows_given = (torch.randn(100, 1, 576).bfloat16(), torch.zeros(4, 128, 1, 576).bfloat16(), slots)
    yield "store V3.2", sparse_attn.store, rows_given, {}
    packed = (torch.randn(100, 1, 512).bfloat16(), torch.zeros(4, 128, 1, 288, dtype=torch.uint8), slots)
    yield "store V4.1, packed rows", sparse_attn.store, packed, {"format": "fp4_v41"}
    starts, lengths = torch.tensor([0, 64, 100], dtype=torch.int32), torch.tensor([64, 36], dtype=torch.int32)
    entries = (*torch.randn(2, 100, 1, 1024), starts, lengths, torch.zeros(2, 128, 1, 512).bfloat16())
    pages = torch.tensor([[1], [0]], dtype=torch.int32)
    kept = {"span": 8, "state": torch.zeros(2, 64, 1, 2048), "state_page_table": pages}
    yield "compress V4, ratio 4", sparse_attn.compress, (*entries, pages, 4, 64, 64), kept


def expected(function: Callable[..., Any], given: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What the reference gives on the CPU; of a selection what the operator may choose freely is left out."""
    if function is sparse_attn.attend:
        out = torch.empty(*given[0].shape[:2], given[4], dtype=torch.float64)
        reference.attend(Attend(given[0].double(), *given[1:], **kwargs), out, None)
        return [out]
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
    error = (got[0].double() - want[0].double()).abs()
    return {"largest error": float(error.max()), "NaN": bool(error.isnan().any())}


def measure(call: Call, rounds: int) -> dict[str, Any]:
    """One call on the device: its kernel or why there is none, how far it is off, and its time."""
    _, function, given, kwargs = call
    device = [x.to("npu") if isinstance(x, Tensor) else x for x in given]
    options = {name: x.to("npu") if isinstance(x, Tensor) else x for name, x in kwargs.items()}

    def run() -> Any:
        return function(*device, **options, backend="ascend_npu")

    try:
        result = run()
        if function is sparse_attn.store:
            got = [device[1].cpu()]
        elif function is sparse_attn.compress:
            got = [device[4].cpu()]
        elif function is sparse_attn.select:
            got = [result.counts.cpu(), result.indices.cpu()]
        else:
            got = [result[0].cpu() if kwargs["return_lse"] else result.cpu()]
        found = compare(function, got, expected(function, given, kwargs))
        samples = []
        for _ in range(rounds):
            torch.npu.synchronize()
            start = time.perf_counter()
            run()
            torch.npu.synchronize()
            samples.append(time.perf_counter() - start)
        return found | {"microseconds": round(statistics.quantiles(samples, n=4, method="inclusive")[0] * 1e6, 1)}
    except (sparse_attn.NoBackend, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="calls whose name contains this text")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--heads", type=int, default=64, help="query heads")
    options = parser.parse_args()
    kernels = registry.implementations()
    states = {f"{i.op}: {i.variant}": registry.availability(i) for i in kernels if i.backend == "ascend_npu"}
    report: dict[str, Any] = {"doctor": doctor.collect(), "kernels": states, "calls": {}}
    report["device"] = torch.npu.get_device_name(0) if hasattr(torch, "npu") else "none"
    for call in calls(options.heads):
        if options.only in call[0]:
            report["calls"][call[0]] = measure(call, options.rounds)
            print(call[0], json.dumps(report["calls"][call[0]]), flush=True)
    options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
