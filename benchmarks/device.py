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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn import env, layout, reference
from sparse_attn.ops.attend import Attend

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
    length = 200
    return Case(case.name, 2, min(case.rows, 3), case.heads, case.dim, case.v_dim, length, 96, case.format)


def arguments(case: Case) -> dict[str, Any]:
    """A call of ``attend`` with its plane on the device."""
    g = torch.Generator(DEVICE).manual_seed(0)
    f = layout.FORMATS[case.format]
    width = layout.pages_for(case.length, PAGE)
    pages = case.batch * width
    plane = torch.zeros(f.shape(pages, PAGE, 1, case.dim), dtype=getattr(torch, f.dtype), device=DEVICE)
    for first in range(0, pages * PAGE, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), pages * PAGE), device=DEVICE)
        rows = torch.randn(len(slots), 1, case.dim, generator=g, device=DEVICE, dtype=torch.float32).bfloat16()
        sparse_attn.store(rows, plane, slots, format=case.format, page_size=PAGE, backend="cuda_triton")
    tokens = case.batch * case.rows
    scores = torch.rand(tokens, 1, case.length, generator=g, device=DEVICE)
    return dict(
        q=torch.randn(tokens, case.heads, case.dim, generator=g, device=DEVICE).bfloat16(),
        cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.rows,
        seq_lens=torch.full((case.batch,), case.length, dtype=torch.int32, device=DEVICE),
        scale=case.dim**-0.5,
        v_dim=case.v_dim,
        max_seqlen_q=case.rows,
        max_seq_len=case.length,
        kv=plane,
        page_table=torch.randperm(pages, generator=g, device=DEVICE).int().view(case.batch, width),
        format=case.format,
        page_size=PAGE,
        indices=scores.topk(min(case.selected, case.length)).indices.int(),
    )


def error_of(case: Case) -> float:
    """The largest error of a small call against the reference, on its own scale."""
    call = arguments(small(case))
    out, lse = sparse_attn.attend(**call, return_lse=True, backend="cuda_triton")
    a = Attend(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    expected = torch.empty(out.shape, dtype=torch.float64)
    expected_lse = torch.empty(lse.shape, dtype=torch.float64)
    reference.attend(a._replace(q=a.q.double(), return_lse=True), expected, expected_lse)
    pairs = ((out, expected), (lse, expected_lse))
    return max(float(((got.cpu().double() - x).abs() / (1 + x.abs())).max()) for got, x in pairs)


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


def measure(case: Case, peak: float, bandwidth: float) -> Result:
    error = error_of(case)
    if not error <= TOLERANCE:
        raise SystemExit(f"{case.name}: error {error:.3g} against the reference; nothing wrong is timed")
    shape = small(case) if INTERPRETED else case
    call = arguments(shape)
    out = torch.empty(*call["q"].shape[:2], case.v_dim, dtype=torch.bfloat16, device=DEVICE)
    run = lambda: torch.ops.sparse_attn.attend.out(**call, backend="cuda_triton", out=out)  # noqa: E731
    milliseconds, graph = time_of(run), time_of(graph_of(run))
    positions = torch.arange(shape.length - shape.rows, shape.length, device=DEVICE).repeat(shape.batch)
    pairs = int((call["indices"] <= positions[:, None, None]).sum())  # others are masked
    tflops = 2 * pairs * case.heads * (case.dim + case.v_dim) / graph / 1e9
    read = pairs * layout.FORMATS[case.format].entry_bytes(case.dim)
    moved = (read + 2 * out.numel() + 2 * call["q"].numel()) / graph / 1e6
    return Result(case.name, error, milliseconds, graph, tflops, tflops / peak, moved, moved / bandwidth)


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
    for case in CASES:
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
