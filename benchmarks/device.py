"""One session on a CUDA device: whether kernels are right on it, what the device can do, and how long kernels take.

Sized for ten minutes on one H200. First every kernel against the reference, and a pool past 4 GiB; then each call,
plainly and replayed from a CUDA graph. Peak and bandwidth are measured in the same session, and every row is a fraction
of the one that binds it. Writes `<device>.json` and `<device>.md` into benchmarks/results/ after every row.
Run: python benchmarks/device.py [--only TEXT] [--out FOLDER]
FlashMLA is timed beside it where it is installed (its commit ba89a346 is the last with kernels for Hopper).
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
from functools import partial
from importlib.util import find_spec
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
BACKEND = "cuda_triton"
PAGE = 64
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Case:
    """One call: ``rows`` query rows of each of ``batch`` sequences of ``length`` tokens; a row lists ``selected`` ones,
    or with 0 all. ``target``: milliseconds not to pass, or TFLOPS to reach, and why."""

    name: str
    batch: int
    rows: int
    heads: int
    dim: int
    v_dim: int
    length: int
    selected: int
    format: str
    target: str = ""
    kv_heads: int = 1


def _decode(batch: int, heads: int, format: str, target: str = "") -> Case:
    name = f"V3.2 decode, B {batch}, {heads} heads, {format}"
    return Case(name, batch, 1, heads, 576, 512, 32768, 2048, format, target)


_HALF = ">= 246 TFLOPS: 60 % of FlashMLA's 410 on H800, published"
_SMALL = "< 0.0168 ms: TileLang on H200, published; FlashMLA 0.0228"
_PREFILL = ">= 320 TFLOPS: half of FlashMLA's 640 on H800, published"
CASES = (
    _decode(1, 16, "fp8_v32"),
    _decode(8, 8, "fp8_v32", _SMALL),
    _decode(8, 16, "bf16", _SMALL),
    _decode(8, 16, "fp8_v32", _SMALL),
    _decode(8, 128, "fp8_v32"),
    _decode(128, 16, "fp8_v32"),
    _decode(128, 128, "bf16"),
    _decode(128, 128, "fp8_v32", _HALF),
    Case("V4 decode, B 8, 64 heads, fp8_v4_planar", 8, 1, 64, 512, 512, 32768, 512, "fp8_v4_planar"),
    Case("V4.1 decode, B 8, 64 heads, fp4_v41", 8, 1, 64, 512, 512, 32768, 512, "fp4_v41"),
    Case(
        "V3.2 prefill, 2119 rows, 8 heads, bf16",
        1,
        2119,
        8,
        576,
        512,
        2119,
        2048,
        "bf16",
        "< 1.06 ms: FlashMLA on H200, heads padded to 64, published",
    ),
    Case("V3.2 prefill, 2119 rows, 64 heads, bf16", 1, 2119, 64, 576, 512, 2119, 2048, "bf16", _PREFILL),
    Case("V3.2 decode at 128K, B 8, 16 heads, bf16", 8, 1, 16, 576, 512, 131072, 2048, "bf16"),
    Case("the same, dense", 8, 1, 16, 576, 512, 131072, 0, "bf16", ">= 10 times the row above"),
    Case("GQA 32/8 dense prefill, 4096 rows, bf16", 1, 4096, 32, 128, 128, 4096, 0, "bf16", "", 8),
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
    kv_heads: int = 1
    target: str = "<= 1.5 times the time of its bytes"


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
    gigabytes_a_second: float
    of_roofline: float
    target: str
    peer_milliseconds: float | None


def small(case: Case) -> Case:
    """The same in little, to check values."""
    return replace(case, batch=2, rows=min(case.rows, 3), length=200, selected=min(case.selected, 96))


def small_selection(case: Selection) -> Selection:
    options = case.options | (dict(block=8) if "block" in case.options else {})
    return replace(case, batch=2, rows=min(case.rows, 3), length=200, k=min(case.k, 20), options=options)


def paged(case: Case | Selection, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A plane of random rows, and the page table."""
    f = layout.FORMATS[case.format]
    width = layout.pages_for(case.length, PAGE)
    pages = case.batch * width
    plane = torch.zeros(f.shape(pages, PAGE, case.kv_heads, case.dim), dtype=getattr(torch, f.dtype), device=DEVICE)
    for first in range(0, pages * PAGE, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), pages * PAGE), device=DEVICE)
        rows = torch.randn(len(slots), case.kv_heads, case.dim, generator=g, device=DEVICE).bfloat16()
        sparse_attn.store(rows, plane, slots, format=case.format, page_size=PAGE, backend=BACKEND)
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
    indices = None
    if case.selected:
        scores = torch.rand(case.batch * case.rows, 1, case.length, generator=g, device=DEVICE)
        indices = scores.topk(min(case.selected, case.length)).indices.int()
    given = dict(scale=case.dim**-0.5, v_dim=case.v_dim, kv=plane, page_table=table, indices=indices)
    return step(case, g) | given


def select_arguments(case: Selection) -> dict[str, Any]:
    """A call of ``select`` with its plane on the device."""
    g = torch.Generator(DEVICE).manual_seed(0)
    plane, table = paged(case, g)
    weights = torch.randn(case.batch * case.rows, case.heads, generator=g, device=DEVICE)
    given = dict(weights=weights, keys=plane, page_table=table, k=case.k, scale=case.dim**-0.5)
    return step(case, g) | given | case.options


def attend_error_of(case: Case, backend: str = BACKEND) -> float:
    """The largest error against the reference, on its own scale."""
    call = arguments(case)
    out, lse = sparse_attn.attend(**call, return_lse=True, backend=backend)
    a = Attend(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    expected = torch.empty(out.shape, dtype=torch.float64)
    expected_lse = torch.empty(lse.shape, dtype=torch.float64)
    reference.attend(a._replace(q=a.q.double(), return_lse=True), expected, expected_lse)
    pairs = ((out, expected), (lse, expected_lse))
    return max(float(((got.cpu().double() - x).abs() / (1 + x.abs())).max()) for got, x in pairs)


def select_error_of(case: Selection) -> float:
    """The largest error of the scores that are selected, best first, against the reference, on its own scale."""
    call = select_arguments(case) | dict(order="score", return_values=True)
    selected = sparse_attn.select(**call, backend=BACKEND)
    a = Select(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()})
    indices, counts, values = (torch.empty_like(x, device="cpu") for x in selected[:3])
    reference.select(a, indices, counts, values, None)
    if not torch.equal(selected.counts.cpu(), counts):
        return float("inf")
    given, expected = selected.values.cpu(), values
    return float(((given - expected).abs() / (1 + expected.abs())).nan_to_num(0).max())  # past the counts both are -inf


def check_rows() -> None:
    """What `store` writes, `load` reads and `convert` moves, in every format: the reference's bits."""
    for name, f in layout.FORMATS.items():
        heads, dim = (1, f.dim) if f.packed else (2, 128)
        rows = torch.randn(40, heads, dim).bfloat16()
        slots = torch.randperm(256)[:40]
        other = "fp32" if f.use == "kv" else "bf16"
        found = []
        for device, backend in ((DEVICE, BACKEND), ("cpu", "reference")):
            shape = f.shape(4, PAGE, heads, dim)
            plane = torch.zeros(shape, dtype=getattr(torch, f.dtype), device=device)
            scale = torch.zeros(4, PAGE, heads, dtype=torch.half, device=device) if f.scale_dtype else None
            plain = torch.zeros(4, PAGE, heads, dim, dtype=getattr(torch, layout.FORMATS[other].dtype), device=device)
            at = slots.to(device)
            options: dict[str, Any] = dict(format=name, page_size=PAGE if f.planar else 0, backend=backend)
            sparse_attn.store(rows.to(device), plane, at, scale=scale, **options)
            read = sparse_attn.load(plane, at, scale=scale, **options)
            sizes = dict(src_page_size=options["page_size"], src_scale=scale, backend=backend)
            sparse_attn.convert(plane, plain, at, at, src_format=name, dst_format=other, **sizes)
            found.append([t.cpu().contiguous().view(torch.uint8) for t in (plane, read, plain)])
        if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
            raise SystemExit(f"{name}: store, load or convert gives other bytes than the reference")


def check_large_pool() -> None:
    """The same bits from pages past 4 GiB as from a small pool, with NaN in all others."""
    call = arguments(small(CASES[2]))
    expected = sparse_attn.attend(**call, backend=BACKEND)[0]
    plane, table = call["kv"], call["page_table"]
    pages = 8 if INTERPRETED else (9 << 29) // plane[0].nbytes
    pool = torch.full((pages, *plane.shape[1:]), torch.nan, dtype=plane.dtype, device=DEVICE)
    pool[-len(plane) :] = plane
    call |= dict(kv=pool, page_table=table + pages - len(plane))
    if not torch.equal(sparse_attn.attend(**call, backend=BACKEND)[0], expected):
        raise SystemExit(f"a pool of {pool.nbytes / 2**30:.1f} GiB gives other bits than a small one")


def check_flash_mla() -> None:
    """The other backend against the reference, where FlashMLA is installed; else why it is not checked."""
    for format, dim in (("fp8_v32", 576), ("fp8_v4_planar", 512), ("bf16", 576)):
        case = Case(f"flash_mla, {format}", 2, 3, 64, dim, 512, 200, 96, format)
        try:
            error = attend_error_of(case, "flash_mla")
        except sparse_attn.NoBackend as refusal:
            print(next(line.strip() for line in str(refusal).splitlines() if f"{format} rows:" in line), flush=True)
            continue
        if not error <= TOLERANCE:
            raise SystemExit(f"{case.name}: error {error:.3g} against the reference")
        call = arguments(case)
        expected = sparse_attn.attend(**call, backend="flash_mla")
        out = torch.zeros_like(expected)
        replay = graph_of(partial(torch.ops.sparse_attn.attend.out, **call, backend="flash_mla", out=out))
        out.zero_()
        replay()
        if not torch.equal(out, expected):
            raise SystemExit(f"{case.name}: a graph gives other bits")
        print(f"{case.name}: right, and captured", flush=True)


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


def flash_mla(case: Case, call: dict[str, Any]) -> Callable[[], Tensor] | None:
    """The same call of FlashMLA, heads padded to 64, where it has one; the layout of `fp8_v32` is its own."""
    if find_spec("flash_mla") is None or case.dim != 576 or not case.selected:
        return None
    import flash_mla  # type: ignore[import-not-found]

    heads = -(-case.heads // 64) * 64
    q = torch.nn.functional.pad(call["q"], (0, 0, 0, heads - case.heads))
    chosen = call["indices"].view(case.batch, case.rows, -1)
    page = call["page_table"].long().gather(1, (chosen // PAGE).flatten(1).long()).view(chosen.shape)
    physical = (page * PAGE + chosen % PAGE).int()
    if case.rows > 1 and case.format == "bf16":
        positions = torch.arange(case.length - case.rows, case.length, device=DEVICE)
        physical = torch.where(chosen <= positions[None, :, None], physical, -1).view(len(q), 1, -1)
        plane = call["kv"].flatten(0, 1)
        return lambda: flash_mla.flash_mla_sparse_fwd(q, plane, physical, call["scale"])[0][:, : case.heads]
    if case.rows == 1 and case.format == "fp8_v32":
        lengths, topk = call["seq_lens"], physical.shape[-1]
        metadata = flash_mla.get_mla_metadata(lengths, heads, 1, heads, True, topk)
        plane, q = call["kv"].view(torch.float8_e4m3fn), q[:, None]
        options = dict(softmax_scale=call["scale"], is_fp8_kvcache=True, indices=physical)
        return lambda: flash_mla.flash_mla_with_kvcache(
            q, plane, call["page_table"], lengths, case.v_dim, *metadata, **options
        )[0][:, 0, : case.heads]
    return None


def peer_time(case: Case, call: dict[str, Any], out: Tensor) -> float | None:
    """Milliseconds of FlashMLA in a graph. What it refuses, or computes otherwise, is said and not timed."""
    try:
        run = flash_mla(case, call)
        if run is None:
            return None
        error = float((run().float() - out.float()).abs().max())
        if not error <= 5 * TOLERANCE:
            raise ValueError(f"differs by {error:.3g}")
        return time_of(graph_of(run))
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as e:
        print(f"{case.name}: FlashMLA: {e}", flush=True)
        return None


@dataclass
class Work:
    """A call, its output, its operations, and the bytes that it must read and write: each entry once."""

    call: dict[str, Any]
    run: Callable[[], Any]
    out: Tensor | None
    flops: int
    moved: int


def positions(case: Case | Selection) -> Tensor:
    return torch.arange(case.length - case.rows, case.length, device=DEVICE).repeat(case.batch)


def attend_work(case: Case) -> Work:
    call = arguments(case)
    out = torch.empty(*call["q"].shape[:2], case.v_dim, dtype=torch.bfloat16, device=DEVICE)
    at = positions(case)
    pairs = int(
        (at + 1 if call["indices"] is None else call["indices"] <= at[:, None, None]).sum()
    )  # others are masked
    run = lambda: torch.ops.sparse_attn.attend.out(**call, backend=BACKEND, out=out)  # noqa: E731
    flops = 2 * pairs * case.heads * (case.dim + case.v_dim)
    return Work(call, run, out, flops, read_bytes(case, pairs) + 2 * out.numel() + 2 * call["q"].numel())


def select_work(case: Selection) -> Work:
    call = select_arguments(case)
    pairs = int((positions(case) + 1).sum())
    run = lambda: torch.ops.sparse_attn.select(**call, backend=BACKEND)  # noqa: E731
    return Work(call, run, None, 2 * pairs * case.heads * case.dim, read_bytes(case, pairs) + 2 * call["q"].numel())


def read_bytes(case: Case | Selection, pairs: int) -> int:
    entries = min(pairs, case.batch * case.length)
    return entries * case.kv_heads * layout.FORMATS[case.format].entry_bytes(case.dim)


def measure(case: Case | Selection, peak: float, bandwidth: float) -> Result:
    attends = isinstance(case, Case)
    error = attend_error_of(small(case)) if attends else select_error_of(small_selection(case))
    if not error <= TOLERANCE:
        raise SystemExit(f"{case.name}: error {error:.3g} against the reference; nothing wrong is timed")
    if attends:
        shape = small(case) if INTERPRETED else case
        work = attend_work(shape)
    else:
        work = select_work(small_selection(case) if INTERPRETED else case)
    milliseconds, graph = time_of(work.run), time_of(graph_of(work.run))
    peer = peer_time(shape, work.call, work.out) if attends else None
    least = max(work.flops / peak / 1e9, work.moved / bandwidth / 1e6)
    rates = work.flops / graph / 1e9, work.moved / graph / 1e6
    return Result(case.name, error, milliseconds, graph, *rates, least / graph, case.target, peer)


def markdown(found: dict[str, Any], results: list[Result]) -> str:
    lines = [
        f"# {found['device']}",
        "",
        f"`python benchmarks/device.py`, PyTorch {found['torch']}. Measured limits: {found['peak_tflops']:.0f} TFLOPS "
        f"in bf16, {found['bandwidth']:.0f} GB/s. Bytes count every entry once. Of the roofline: the least time that "
        "these limits allow, over the time in a graph. FlashMLA was measured in the same session.",
        "",
        "| call | error | ms | ms in a graph | TFLOPS | GB/s | of roofline | target | FlashMLA, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = f"{r.error:.1e} | {r.milliseconds:.4f} | {r.graph_milliseconds:.4f} | {r.tflops:.0f}"
        peer = "" if r.peer_milliseconds is None else f"{r.peer_milliseconds:.4f}"
        cells += f" | {r.gigabytes_a_second:.0f} | {r.of_roofline:.0%} | {r.target} | {peer}"
        lines.append(f"| {r.case} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not INTERPRETED and not torch.cuda.is_available():
        sys.exit("no CUDA device; TRITON_INTERPRET=1 tries this script out")
    start = time.monotonic()
    check_rows()
    check_large_pool()
    check_flash_mla()
    print(f"rows and pools are right, {time.monotonic() - start:.0f} s", flush=True)
    device = "interpreter" if INTERPRETED else torch.cuda.get_device_name()
    peak, bandwidth = limits()
    found = dict(device=device, torch=torch.__version__, peak_tflops=peak, bandwidth=bandwidth)
    path = options.out / device.lower().replace(" ", "-")
    results = []
    for case in (*CASES, *SELECTIONS):
        if options.only not in case.name:
            continue
        results.append(measure(case, peak, bandwidth))
        print(f"{time.monotonic() - start:.0f} s", results[-1], flush=True)
        if not INTERPRETED:
            rows = list(map(asdict, results))
            path.with_suffix(".json").write_text(json.dumps(found | {"results": rows}, indent=1))
            path.with_suffix(".md").write_text(markdown(found, results))


if __name__ == "__main__":
    main()
