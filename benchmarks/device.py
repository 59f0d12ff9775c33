"""One session on a CUDA device: what it can do, whether kernels are right on it, and how long they take.

Sized for ten minutes. Peak and bandwidth are measured in the same session, and every row is a fraction of the one that
binds it. Writes `<device>.json` and `<device>.md` into benchmarks/results/.
Run: python benchmarks/device.py [--only TEXT] [--out FOLDER]
With TRITON_INTERPRET=1 PYTHONPATH=tests it tries itself out on small shapes of CPU tensors; times then mean nothing and
are not written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn import env, layout, reference
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.select import Select

INTERPRETED = env.TRITON_INTERPRET.get() == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    import triton_interpreter  # noqa: F401 (of tests/: without it products of bfloat16 are wrong)
PAGE = 64
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Case:
    """One call: ``rows`` query rows of each of ``batch`` sequences of ``length`` tokens; a row lists ``selected``."""

    name: str
    batch: int
    rows: int
    heads: int
    dim: int
    v_dim: int
    length: int
    selected: int
    format: str


def _decode(batch: int, heads: int, format: str) -> Case:
    return Case(f"V3.2 decode, B {batch}, {heads} heads, {format}", batch, 1, heads, 576, 512, 32768, 2048, format)


CASES = (
    *(_decode(batch, heads, format) for batch in (1, 8, 128) for heads in (16, 128) for format in ("bf16", "fp8_v32")),
    Case("V4 decode, B 8, 64 heads, fp8_v4_planar", 8, 1, 64, 512, 512, 32768, 512, "fp8_v4_planar"),
    Case("V4.1 decode, B 8, 64 heads, fp4_v41", 8, 1, 64, 512, 512, 32768, 512, "fp4_v41"),
    Case("V3.2 prefill, 2119 rows, 8 heads, bf16", 1, 2119, 8, 576, 512, 2119, 2048, "bf16"),
    Case("V3.2 prefill, 2119 rows, 64 heads, bf16", 1, 2119, 64, 576, 512, 2119, 2048, "bf16"),
)


@dataclass(frozen=True)
class Selection:
    """One call of ``select``: the ``k`` best of ``length`` entries for each row."""

    name: str
    batch: int
    rows: int
    heads: int
    length: int
    k: int
    format: str
    options: dict[str, Any]
    dim: int = 128


def _select(name: str, batch: int, heads: int, k: int, format: str, rows: int = 1, **options: Any) -> Selection:
    return Selection(f"select {name}, B {batch}, 128K, {format}", batch, rows, heads, 131072, k, format, options)


SELECTIONS = (
    *(_select("V3.2 decode", batch, 64, 2048, "fp8_index_planar") for batch in (1, 8, 64)),
    _select("V3.2 decode", 8, 64, 2048, "bf16"),
    _select("V4.1 decode", 8, 32, 512, "fp4_index_planar", score_dtype="bf16"),
    _select("GQA blocks decode", 8, 8, 64, "bf16", score="dot", out_heads=8, block=128, pool="max"),
    _select("V3.2 prefill, 512 rows", 1, 64, 2048, "fp8_index_planar", rows=512),
)


@dataclass
class Result:
    case: str
    error: float
    milliseconds: float
    graph_milliseconds: float
    tflops: float
    of_peak: float
    gigabytes_a_second: float
    of_bandwidth: float


def small(case: Case) -> Case:
    """The same in little, to check values."""
    return replace(case, batch=2, rows=min(case.rows, 3), length=200, selected=96)


def small_selection(case: Selection) -> Selection:
    options = case.options | (dict(block=8) if "block" in case.options else {})
    return replace(case, batch=2, rows=min(case.rows, 3), length=200, k=min(case.k, 20), options=options)


def paged(case: Case | Selection, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A plane of random rows, and the page table."""
    f = layout.FORMATS[case.format]
    width = layout.pages_for(case.length, PAGE)
    pages = case.batch * width
    plane = torch.zeros(f.shape(pages, PAGE, 1, case.dim), dtype=getattr(torch, f.dtype), device=DEVICE)
    for first in range(0, pages * PAGE, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), pages * PAGE), device=DEVICE)
        rows = torch.randn(len(slots), 1, case.dim, generator=g, device=DEVICE, dtype=torch.float32).bfloat16()
        sparse_attn.store(rows, plane, slots, format=case.format, page_size=PAGE, backend="cuda_triton")
    return plane, torch.randperm(pages, generator=g, device=DEVICE).int().view(case.batch, width)


def step(case: Case | Selection, g: torch.Generator) -> dict[str, Any]:
    """Queries of a step, and its lengths."""
    tokens = case.batch * case.rows
    return dict(
        q=torch.randn(tokens, case.heads, case.dim, generator=g, device=DEVICE).bfloat16(),
        cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.rows,
        seq_lens=torch.full((case.batch,), case.length, dtype=torch.int32, device=DEVICE),
        max_seqlen_q=case.rows,
        max_seq_len=case.length,
        format=case.format,
        page_size=PAGE,
    )


def arguments(case: Case) -> dict[str, Any]:
    """A call of ``attend`` with its plane on the device."""
    g = torch.Generator(DEVICE).manual_seed(0)
    plane, table = paged(case, g)
    scores = torch.rand(case.batch * case.rows, 1, case.length, generator=g, device=DEVICE)
    return step(case, g) | dict(
        scale=case.dim**-0.5,
        v_dim=case.v_dim,
        kv=plane,
        page_table=table,
        indices=scores.topk(min(case.selected, case.length)).indices.int(),
    )


def select_arguments(case: Selection) -> dict[str, Any]:
    """A call of ``select`` with its plane on the device."""
    g = torch.Generator(DEVICE).manual_seed(0)
    plane, table = paged(case, g)
    weights = torch.randn(case.batch * case.rows, case.heads, generator=g, device=DEVICE)
    given = dict(weights=weights, keys=plane, page_table=table, k=case.k, scale=case.dim**-0.5)
    return step(case, g) | given | case.options


def attend_error_of(case: Case) -> float:
    """The largest error against the reference, on its own scale."""
    call = arguments(case)
    out, lse = sparse_attn.attend(**call, return_lse=True, backend="cuda_triton")
    a = Attend(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    expected = torch.empty(out.shape, dtype=torch.float64)
    expected_lse = torch.empty(lse.shape, dtype=torch.float64)
    reference.attend(a._replace(q=a.q.double(), return_lse=True), expected, expected_lse)
    pairs = ((out, expected), (lse, expected_lse))
    return max(float(((got.cpu().double() - x).abs() / (1 + x.abs())).max()) for got, x in pairs)


def select_error_of(case: Selection) -> float:
    """The largest error of the scores that are selected, best first, against the reference, on its own scale."""
    call = select_arguments(case) | dict(order="score", return_values=True)
    selected = sparse_attn.select(**call, backend="cuda_triton")
    a = Select(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    indices, counts, values = (torch.empty_like(x, device="cpu") for x in selected[:3])
    reference.select(a, indices, counts, values, None)
    if not torch.equal(selected.counts.cpu(), counts):
        return float("inf")
    given, expected = selected.values.cpu(), values
    return float(((given - expected).abs() / (1 + expected.abs())).nan_to_num(0).max())  # past the counts both are -inf


def time_of(run: Callable[[], Any]) -> float:
    """Median milliseconds."""
    if INTERPRETED:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


def graph_of(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call, replayed from a CUDA graph."""
    if INTERPRETED:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def limits() -> tuple[float, float]:
    """TFLOPS of a large product in bfloat16, and GB/s of a large copy."""
    n = 256 if INTERPRETED else 8192
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    source = torch.empty(n * n * 8, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    peak = 2 * n**3 / time_of(lambda: a @ b) / 1e9
    return peak, 2 * source.numel() * 4 / time_of(lambda: target.copy_(source)) / 1e6


Work = tuple[Callable[[], Any], int, int]
"""A call, its operations, and the bytes that it moves."""


def positions(case: Case | Selection) -> Tensor:
    return torch.arange(case.length - case.rows, case.length, device=DEVICE).repeat(case.batch)


def attend_work(case: Case) -> Work:
    call = arguments(case)
    out = torch.empty(*call["q"].shape[:2], case.v_dim, dtype=torch.bfloat16, device=DEVICE)
    pairs = int((call["indices"] <= positions(case)[:, None, None]).sum())  # others are masked
    read = pairs * layout.FORMATS[case.format].entry_bytes(case.dim)
    run = lambda: torch.ops.sparse_attn.attend.out(**call, backend="cuda_triton", out=out)  # noqa: E731
    flops = 2 * pairs * case.heads * (case.dim + case.v_dim)
    return run, flops, read + 2 * out.numel() + 2 * call["q"].numel()


def select_work(case: Selection) -> Work:
    call = select_arguments(case)
    pairs = int((positions(case) + 1).sum())
    read = pairs * layout.FORMATS[case.format].entry_bytes(case.dim)
    run = lambda: torch.ops.sparse_attn.select(**call, backend="cuda_triton")  # noqa: E731
    return run, 2 * pairs * case.heads * case.dim, read + 2 * call["q"].numel()


def measure(case: Case | Selection, peak: float, bandwidth: float) -> Result:
    attends = isinstance(case, Case)
    error = attend_error_of(small(case)) if attends else select_error_of(small_selection(case))
    if not error <= TOLERANCE:
        raise SystemExit(f"{case.name}: error {error:.3g} against the reference; nothing wrong is timed")
    if attends:
        run, flops, moved = attend_work(small(case) if INTERPRETED else case)
    else:
        run, flops, moved = select_work(small_selection(case) if INTERPRETED else case)
    milliseconds, graph = time_of(run), time_of(graph_of(run))
    tflops, rate = flops / graph / 1e9, moved / graph / 1e6
    return Result(case.name, error, milliseconds, graph, tflops, tflops / peak, rate, rate / bandwidth)


def markdown(device: str, peak: float, bandwidth: float, results: list[Result]) -> str:
    lines = [
        f"# {device}",
        "",
        f"`python benchmarks/device.py`, PyTorch {torch.__version__}. Measured limits: {peak:.0f} TFLOPS in bf16, "
        f"{bandwidth:.0f} GB/s. Bytes are those of every pair, as if no cache served two rows.",
        "",
        "| call | error | ms | ms in a graph | TFLOPS | of peak | GB/s | of bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = f"{r.error:.1e} | {r.milliseconds:.4f} | {r.graph_milliseconds:.4f} | {r.tflops:.0f} | {r.of_peak:.0%}"
        lines.append(f"| {r.case} | {cells} | {r.gigabytes_a_second:.0f} | {r.of_bandwidth:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not INTERPRETED and not torch.cuda.is_available():
        sys.exit("no CUDA device; TRITON_INTERPRET=1 tries this script out")
    device = "interpreter" if INTERPRETED else torch.cuda.get_device_name()
    peak, bandwidth = limits()
    results = []
    for case in (*CASES, *SELECTIONS):
        if options.only in case.name:
            results.append(measure(case, peak, bandwidth))
            print(results[-1], flush=True)
    if INTERPRETED:
        return
    name = device.lower().replace(" ", "-")
    found = dict(device=device, torch=torch.__version__, peak_tflops=peak, bandwidth=bandwidth)
    (options.out / f"{name}.json").write_text(json.dumps(found | {"results": list(map(asdict, results))}, indent=1))
    (options.out / f"{name}.md").write_text(markdown(device, peak, bandwidth, results))


if __name__ == "__main__":
    main()
