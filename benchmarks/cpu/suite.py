"""The suite of a CPU: what is measured, and what each kind of call is expected to reach."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from . import attend, calls, compress, engines, expanded, machine, merge, report, rows, select
from .engines import ik_llama, sglang, vllm
from .timing import MOVED, OURS, Case, Time, measure

BEST = "best torch form"
"""Stands for the quickest of the peers that are torch alone and read the same entries."""
SCORED = (select.PAGED, select.CONTIGUOUS)
IK_F16, IK_Q8 = (f"{ik_llama.NAME} {kind}" for kind in ik_llama.CACHES)


@dataclass(frozen=True)
class Row:
    """One figure. Ratios to a peer say how many times as long as ours it takes."""

    group: str
    name: str
    value: float
    unit: str
    target: float | None
    """At most it, in units of time and shares of ours; else at least."""
    peer: str
    """What it is compared with; empty for a time."""
    spread: float
    """Distance of the quartiles over the median, of our times."""
    threads: int
    median: float | None = None
    """Of a time, whose value is the lower quartile."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.unit in report.AT_MOST else self.value >= self.target


@dataclass(frozen=True)
class Plan:
    """A case to measure and its targets."""

    group: str
    make: Callable[[], Case]
    limit: float | None = None
    """Of the limit that binds the case."""
    over: dict[str, float] = field(default_factory=dict)
    """By peer, how many times as long it should take."""
    under: dict[str, float] = field(default_factory=dict)
    """By another call of ours, at most how many times its time we should take."""
    quick: bool = False
    """Whether the short form has it too."""
    scaling: bool = False
    """Whether one thread is measured as well."""


def in_caches(case: Case) -> Case:
    """The case with one set of arguments, whose rows caches hold from the second call on."""
    return replace(case, name=f"{case.name}, in caches", variants=1, bytes=0)


def plans(compiled: bool) -> Iterator[Plan]:
    """Everything, in the order of the page. `compiled`: with peers that torch compiles, which takes minutes."""
    best = attend.IDIOMATIC
    latent_peers = {BEST: 1.4, best: 2.1, sglang.ATTEND: 1.8, IK_F16: 2.4, IK_Q8: 2.4}

    group = "V3.2 decode"
    for context in (8192, 32768, 131072):
        middle = context == 32768
        make = partial(attend.make, attend.latent(128, context), 1, compiled=compiled and middle)
        yield Plan(group, make, 0.85, latent_peers, quick=middle, scaling=middle)
    yield Plan(group, partial(attend.make, attend.latent(128), 8), 0.85, latent_peers)
    yield Plan(group, lambda: in_caches(attend.make(attend.latent(128), 1, peers=False)), 0.90)
    yield Plan(group, partial(attend.make, attend.latent(128), 1, "fp32"), 0.85, quick=True)
    yield Plan(group, partial(attend.make, attend.latent(128), 1, "fp16"))
    group = "V3.2 decode on a part of the heads"
    for batch, limit in ((1, 0.58), (8, 0.65), (16, 0.68)):
        make = partial(attend.make, attend.latent(16), batch, compiled=compiled and batch == 1)
        yield Plan(group, make, limit, {BEST: 2.5, sglang.ATTEND: 1.9}, quick=batch == 1)
    yield Plan(group, partial(attend.make, attend.latent(8), 1))
    group = "V4 decode"
    for batch, limit in ((1, 0.75), (16, 0.80)):
        yield Plan(
            group, partial(attend.make, attend.V4, batch), limit, {BEST: 1.6, sglang.ATTEND: 1.5}, quick=batch == 1
        )

    group = "Packed rows"
    packed_peers = {BEST: 3.0, sglang.ATTEND: 1.5, vllm.ATTEND: 1.5}
    for heads, most in ((128, 1.08), (16, 1.15)):
        for format in ("fp8_v32", "int8_v32"):
            make = partial(attend.make, replace(attend.latent(heads), context=8192), 1, "bf16", format)
            yield Plan(group, make, None, packed_peers, {attend.PLAIN: most}, quick=format == "fp8_v32")
    for formats in (("fp8_v4_planar", "fp8_v4_planar"), ("fp4_v41", "fp8_v41")):
        make = partial(attend.make, attend.V4, 1, "bf16", *formats)
        yield Plan(group, make, None, packed_peers, {attend.PLAIN: 1.08})

    group = "GQA decode, blocks"
    for batch, limit in ((1, 0.78), (4, 0.88)):
        over = {BEST: 3.5, attend.FLEX: 9.0, attend.DENSE: 27.0}
        make = partial(attend.make, attend.GQA_BLOCKS, batch, compiled=compiled and batch == 1, dense=batch == 1)
        yield Plan(group, make, limit, over, quick=batch == 1)
    for heads_first in (False, True):
        yield Plan(group, partial(attend.make, replace(attend.GQA_BLOCKS, heads_first=heads_first), 1, peers=False))

    group = "select"
    for context, limit in ((8192, 0.75), (32768, 0.85), (131072, 0.88)):
        heavy = compiled and context == 32768
        over = {select.CONTIGUOUS: 1.4, select.PAGED: 2.2, IK_Q8: 1.6}
        under = {select.TOPK: 1.08} if context == 8192 else {}
        make = partial(select.make, select.INDEXER, context, compiled=heavy)
        yield Plan(group, make, limit, over, under, quick=context == 32768)
    for format in ("fp8_index_planar", "int8_index_planar", "fp4_index_planar"):
        make = partial(select.make, select.INDEXER, 32768, "bf16", format)
        yield Plan(
            group,
            make,
            None,
            {sglang.SELECT: 11.0, vllm.SELECT: 11.0},
            {select.PLAIN: 1.05},
            quick=format == "int8_index_planar",
        )
    for scored in select.SCORES:
        yield Plan("select, models without an indexer", partial(select.make, scored, 8192, "fp32", "int8_index_h"))
    for format in ("bf16", "int8_index_h"):
        yield Plan("select, models without an indexer", partial(select.make, select.LLAMA, 32768, "bf16", format))

    group = "Prefill"
    for heads in (128, 16):
        make = partial(attend.make, attend.latent(heads, 8192, rows=64), 1)
        yield Plan(group, make, 0.88, {BEST: 1.5, sglang.ATTEND: 1.5}, quick=heads == 16)
    yield Plan(group, partial(attend.make, attend.latent(128, 8192, rows=4096), 1, peers=False), 0.88)
    yield Plan(group, partial(attend.make, replace(attend.SMOLLM, context=2048, selected=0, rows=2048), 1))

    group = "Prompts of latents, expanded"
    for heads, context in ((128, 1024), (16, 1024), (16, 2048)):
        make = partial(expanded.make, heads, context, context)
        yield Plan(group, make, quick=(heads, context) == (16, 1024))
    for heads in (128, 16):
        for context in (2048, 4096, 8192):
            yield Plan(group, partial(expanded.make, heads, context, 64))

    group = "Rows"
    for format in rows.ENCODE:
        yield Plan(group, partial(rows.make_store, format), 0.7, quick=format == "fp8_v41")
    for format in rows.DECODE:
        yield Plan(group, partial(rows.make_load, format), 0.7, quick=format == "fp8_v41")
    for formats in (("bf16", "bf16"), ("fp8_v41", "fp8_v41_planar"), ("bf16", "fp8_v41")):
        yield Plan(group, partial(rows.make_convert, *formats), 0.7)
    group = "compress"
    for compressor in compress.SHAPES:
        for step in compress.STEPS:
            yield Plan(group, partial(compress.make, compressor, step), 0.7 if "prefill" in step else None)
    group = "merge"
    for parts in (2, 8):
        yield Plan(group, partial(merge.make_merge, parts, torch.bfloat16), quick=parts == 8)
    yield Plan(group, partial(merge.make_select_merge, 16))

    group = "Growth"
    for selected in (256, 512, 1024, 2048, 4096):
        yield Plan(group, partial(attend.make, attend.latent(128, selected=selected), 1, peers=False))
    for context in (4096, 16384, 65536, 262144):
        yield Plan(group, partial(attend.make, attend.latent(128, context), 1, peers=False))
    for heads in (1, 2, 4, 8, 16, 32, 64, 128):
        yield Plan(group, partial(attend.make, attend.latent(heads), 1, peers=False))
    for batch in (1, 2, 4, 8, 16):
        yield Plan(group, partial(attend.make, attend.latent(16), batch, peers=False))


def run(
    only: str, quick: bool, compiled: bool, threads: int, budget: float, say: Callable[[str], None]
) -> tuple[dict[str, float], list[Row]]:
    """The machine's limits by name, and rows of every case whose group's name contains `only`.

    Raises ``ValueError`` if no name does.
    """
    groups = ["Calls", *dict.fromkeys(plan.group for plan in plans(False) if plan.quick or not quick)]
    groups += [] if quick else ["Sparse over dense"]
    if not any(only.lower() in group.lower() for group in groups):
        raise ValueError(f"--only: no group's name contains {only!r}, they are: {'; '.join(groups)}")
    torch.set_num_threads(threads)
    limits = machine.measure()
    found: list[Row] = []
    with torch.inference_mode():
        if only.lower() in "calls":
            found += _calls(budget)
        for plan in plans(compiled and not quick):
            if quick and not plan.quick:
                continue
            if only.lower() not in plan.group.lower():
                continue
            case = plan.make()
            say(f"{plan.group}: {case.name}")
            case.check()
            times = measure(case, budget)
            found += _rows(plan, case, times, limits, threads)
            if plan.scaling and threads > 1:
                found.append(_scaling(plan, case, threads, budget))
            del case
            gc.collect()  # cases refer to themselves, and their pools are large
        if not quick and only.lower() in "sparse over dense":
            found += _dense(threads, budget, say)
    return limits, found


def _row(
    plan_group: str, case: str, value: float, unit: str, target: float | None, peer: str, ours: Time, threads: int
) -> Row:
    return Row(plan_group, case, value, unit, target, peer, ours.spread, threads)


def _shares(case: Case, ours: Time, limits: dict[str, float]) -> Iterator[tuple[float, str]]:
    """Shares of the case's limit, and of memory's where rows come from there: the larger is of the one that binds."""
    for limit in {case.limit} if case.limit == "copy" else {case.limit, "blocks"}:
        if limit in limits:
            work = case.bytes if limit in ("copy", "blocks") else case.flops
            yield work / ours.quartile / 1e9 / limits[limit], limit


def _rows(plan: Plan, case: Case, times: dict[str, Time], limits: dict[str, float], threads: int) -> list[Row]:
    ours = times[OURS]
    row = partial(_row, plan.group, case.name, ours=ours, threads=threads)
    found = [Row(plan.group, case.name, ours.quartile * 1e3, "ms", None, "", ours.spread, threads, ours.median * 1e3)]
    if case.limit in limits:
        share, limit = max(_shares(case, ours, limits))
        found.append(row(value=share, unit="of limit", target=plan.limit, peer=machine.LIMITS[limit][0]))
    torch_forms = []
    for name, time in times.items():
        if name == MOVED:
            share = time.quartile / ours.quartile
            found.append(row(value=share, unit="of limit", target=plan.limit, peer=name))
        elif name in (attend.PLAIN, select.TOPK):
            share, target = ours.quartile / time.quartile, plan.under.get(name)
            found.append(row(value=share, unit="x of its time", target=target, peer=name))
        elif name != OURS:
            ratio = time.quartile / ours.quartile
            found.append(row(value=ratio, unit="x", target=plan.over.get(name), peer=name))
            if not name.startswith(("dense", "compiled", *engines.NAMES)) and name not in SCORED:
                torch_forms.append(ratio)
    if BEST in plan.over and torch_forms:
        found.append(row(value=min(torch_forms), unit="x", target=plan.over[BEST], peer=BEST))
    return found


def _scaling(plan: Plan, case: Case, threads: int, budget: float) -> Row:
    """One thread's time over that of several, both without peers in between."""
    alone = replace(case, functions={OURS: case.functions[OURS]})
    torch.set_num_threads(1)
    one = measure(alone, budget)[OURS]
    torch.set_num_threads(threads)
    several = measure(alone, budget)[OURS]
    ratio = one.quartile / several.quartile
    return _row(plan.group, case.name, ratio, "x", 0.95 * threads, "one thread", several, threads)


def _calls(budget: float) -> list[Row]:
    case = calls.make()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = measure(case, budget)
    torch.set_num_threads(threads)
    found = []
    for name, peer, target in ((OURS, "", 10.0), (calls.RESOLVED, calls.RESOLVED, 3.0)):
        time, scale = times[name], 1e6 / calls.REPEATS
        found.append(
            Row("Calls", case.name, time.quartile * scale, "us", target, peer, time.spread, 1, time.median * scale)
        )
    ours = times[OURS]
    found.append(_row("Calls", case.name, times[calls.EMPTY].quartile / ours.quartile, "x", None, calls.EMPTY, ours, 1))
    return found


def _dense(threads: int, budget: float, say: Callable[[str], None]) -> list[Row]:
    """Sparse attention over dense, of the same kernel and of torch, alone and with the selection before it."""
    group, shape = "Sparse over dense", attend.latent(128, 131072)
    sparse = attend.make(shape, 1, peers=False, dense=True)
    dense = attend.make(replace(shape, selected=0), 1, peers=False)
    scores = select.make(select.INDEXER, 131072)
    say(f"{group}: {sparse.name}")
    names = [name for name in sparse.functions if name != attend.DENSE]  # which takes seconds for one query
    joined = replace(sparse, functions={name: sparse.functions[name] for name in names}, variants=4)
    joined.functions |= {"own dense": dense.functions[OURS], "select": scores.functions[OURS]}
    times = measure(joined, budget)
    ours, with_select = times[OURS], times[OURS].quartile + times["select"].quartile
    found = []
    for name, target, selecting in (("own dense", 62.0, 13.0), *((n, None, None) for n in names if n != OURS)):
        time = times[name].quartile
        found.append(_row(group, sparse.name, time / ours.quartile, "x", target, name, ours, threads))
        named = f"{name}, select included"
        found.append(_row(group, sparse.name, time / with_select, "x", selecting, named, ours, threads))
    return found
