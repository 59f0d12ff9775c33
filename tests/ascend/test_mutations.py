"""The tests notice faults: each of these, put into the backend, fails one of their calls or its self check."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import emulator
import npu
import pytest
import test_compress as compressed
import test_indexer as others
import test_move as moves
import test_plan as plans
import test_sparse_flash as flash
import test_sparse_mla as mla
import test_workspace as gathers
from conftest import become

import sparse_attn
from sparse_attn import library
from sparse_attn.backends.ascend_npu import (
    attend,
    codecs,
    compress,
    indexer,
    memory,
    merge,
    move,
    rows,
    sparse_flash,
    sparse_mla,
    workspace,
)

LATENT = flash.LATENT | flash.FORMS["bf16"]


def latent() -> None:
    flash.test_hostile_indices("A2", LATENT)
    flash.test_empty_rows_and_padding("A2", LATENT)
    flash.test_not_causal("A2", LATENT)
    npu.assert_agrees(*flash.call(LATENT, q_heads=3))


def windowed() -> None:
    become("A2")
    for form in mla.FORMS.values():
        mla.test_empty_rows_and_padding("A2", mla.WINDOWED | form)
    for sink in (float("inf"), None):
        mla.test_extreme_sinks("A2", mla.WINDOWED | mla.FORMS["window"], sink)
    npu.assert_agrees(*mla.call(mla.WINDOWED | mla.FORMS["ratio 128"], q_heads=1))
    mla.test_selections_of_any_length("A2", "first row of a tile")


def compressions() -> None:
    for line in compressed.LINES:
        compressed.test_entries("A2", line)
        compressed.test_cuts_and_the_state("A2", line)
    compressed.test_what_no_memory_holds_is_seen("A2")


def planned() -> None:
    become("A2")
    for form in (mla.FORMS["window"], mla.FORMS["ratio 4"], mla.FORMS["ratio 128"]):
        plans.test_one_schedule_for_all_layers("A2", mla.WINDOWED | form)
        for which in (1, 2):
            plans.test_a_stale_plan_is_seen("A2", mla.WINDOWED | form, which)


def selection() -> None:
    others.test_empty_rows("A2")
    others.test_not_causal("A2")
    others.test_int8_queries_and_keys("A2", "fp16", {})
    others.assert_agrees(others.call(heads=9))


def writes() -> None:
    become("A2", every_kernel=True)
    for slots in moves.SLOTS:
        moves.test_store("A2", "bf16", slots)


def packed() -> None:
    become("A2", every_kernel=True)
    for format in ("fp4_v41_planar", "fp8_v41", "fp8_v4", "int8_v32", "int8", "int4_index_h", "fp8_index"):
        moves.test_store_and_load("A2", format, 3)


def converted() -> None:
    become("A2", every_kernel=True)
    moves.test_convert("A2", "fp4_v41", "fp4_v41_planar", ([3, -1, 19, 2], [0, 4, 7, -1]))
    moves.test_convert("A2", "fp8_v32", "int8_v32", None)


def merged() -> None:
    become("A2", every_kernel=True)
    moves.test_merge("A2")
    moves.test_select_merge("A2", "index", 3)
    moves.test_select_merge("A2", "score", 40)


def gathered() -> None:
    become("A2", every_kernel=True)
    for form in ("window", "ratio 1", "ratio 4"):
        gathers.test_packed_rows("A2", form, "fp4_v41", "fp8_v41")
    gathers.test_latent_rows("A2", "fp8_v32", 130)
    gathers.test_ranges_of_latent_rows("A2")
    gathers.test_entries_that_are_not_visible_yet("A2")
    gathers.test_a_page_that_does_not_exist_is_seen("A2", "page_table")


def any_call() -> None:
    become("A2", every_kernel=True)
    for call in gathers.ANY:
        gathers.test_any_call("A2", call)


def nothing() -> None:
    flash.test_nothing_to_do("A2", LATENT)


FAULTS: tuple[tuple[types.ModuleType, str, str, Callable[[], None]], ...] = (
    (rows, "(indices >= 0) & ", "", latent),
    (rows, " & (indices < limit[:, None, None])", "", latent),
    (rows, "if counts is not None:", "if False:", latent),
    (rows, "keep.long().cumsum(-1) - 1", "torch.arange(indices.shape[2]).to(keep.device).expand_as(keep)", latent),
    (rows, "- t) + 1)", "- t))", latent),
    (rows, "- t) + 1)", "- t) + 2)", latent),
    (rows, "right=True", "right=False", latent),
    (rows, "(t < ends[-1]) & ", "", windowed),
    (rows, "(t < ends[-1]) & ", "", selection),
    (rows, "attended[:, None, None]", "torch.ones_like(attended)[:, None, None]", latent),
    (rows, "1 << (heads - 1).bit_length()", "heads", latent),
    (sparse_flash, "cu_seqlens_q[1:]", "cu_seqlens_q[:-1]", latent),
    (sparse_flash, "seq_lens.clamp(min=0)", "seq_lens", latent),
    (sparse_flash, "rows.tokens if a.causal else rows.length", "rows.tokens", latent),
    (sparse_flash, "CAUSAL if a.causal else ALL", "CAUSAL", latent),
    (sparse_flash, "a.scale,\n        query_rope", "1.0,\n        query_rope", latent),
    (sparse_flash, "count[:, 0] > 0", "count[:, 0] > 1", latent),
    (sparse_flash, "or len(a.seq_lens) == 0", "", nothing),
    (sparse_mla, "lengths % ratio", "lengths * 0", windowed),
    (sparse_mla, '"seqused_cmp_kv": lengths // ratio', '"seqused_cmp_kv": lengths', windowed),
    (sparse_mla, "a.window - 1", "a.window", windowed),
    (sparse_mla, "if a.indices is None:", "if True:", windowed),
    (sparse_mla, "sinks.clamp(-FAR, FAR)", "sinks", windowed),
    (sparse_mla, "(heads,), -FAR,", "(heads,), 0.0,", windowed),
    (sparse_mla, "rows.tokens > 0", "rows.tokens > 1", windowed),
    (sparse_mla, "rows.tokens // a.ratio", "rows.tokens", windowed),
    (sparse_mla, "a.win_page_table[rows.sequence]", "a.win_page_table[rows.sequence * 0]", windowed),
    (sparse_mla, "a.page_table[rows.sequence]", "a.page_table[rows.sequence * 0]", windowed),
    (sparse_mla, "(planned.cu_seqlens_q == a.cu_seqlens_q).all() & ", "", planned),
    (sparse_mla, " & (planned.seq_lens == a.seq_lens).all()", "", planned),
    (sparse_mla, "torch.where(fits, a.win_page_table, 0)", "a.win_page_table", planned),
    (sparse_mla, "torch.where(fits, a.page_table, 0)", "a.page_table", planned),
    (sparse_mla, "seq_lens=lengths,", "seq_lens=a.seq_lens,", planned),
    (sparse_mla, "if planned is None else planned.words", "if True else planned.words", planned),
    (indexer, "a.weights.float() * a.q_scale.float()", "a.weights.float()", selection),
    (indexer, "weights / torch.where(largest > 0, largest, 1.0)", "weights", selection),
    (indexer, "        a.key_scale,", "        torch.ones_like(a.key_scale),", selection),
    (indexer, "rows.tokens if a.causal else rows.length", "rows.tokens", selection),
    (indexer, "CAUSAL if a.causal else ALL", "CAUSAL", selection),
    (indexer, "seq_lens.clamp(min=0)", "seq_lens", selection),
    (indexer, "cu_seqlens_q[1:]", "cu_seqlens_q[:-1]", selection),
    (memory, "(slots >= 0) & ", "", writes),
    (memory, " & (slots < self.pages * self.page_size)", "", writes),
    (memory, "torch.where(some, values[first], memory[0])", "values[first]", writes),
    (memory, "torch.where(some, rows[first], 0)", "0", writes),
    (memory, "+ head * self.head_step", "", writes),
    (codecs, "+ code % 2", "", packed),
    (codecs, "+ negative * (1 << small.exponent + small.mantissa)", "", packed),
    (codecs, "codes % 16, codes // 16", "codes // 16, codes % 16", packed),
    (codecs, "math.frexp(largest)", "math.frexp(largest * 2)", packed),
    (codecs, "torch.where(clips, (scale", "torch.where(scale < 0, (scale", packed),
    (move, "kept & exists", "kept", converted),
    (move, "if src.format.codec != dst.format.codec", "if False", converted),
    (merge, "torch.where((part == -INF)[..., None], 0.0, weighted)", "weighted", merged),
    (merge, "sum_of_all - a.sinks", "a.sinks - sum_of_all", merged),
    (merge, "descending=True, stable=True", "descending=False, stable=True", merged),
    (merge, "local // a.run * a.stride", "local // a.run", merged),
    (workspace, "(positions > newest - a.window)", "(positions > newest - a.window + 1)", gathered),
    (workspace, "+ (tokens - length)[:, None]", "", gathered),
    (workspace, "ring = -(-a.window // PAGE)", "ring = a.window // PAGE - 1", gathered),
    (workspace, "tokens // a.ratio, width)", "tokens, width)", gathered),
    (workspace, "tokens.clamp(max=longest)", "tokens", gathered),
    (workspace, "width, low[part])", "width)", gathered),
    (workspace, "torch.where(lost[..., None], torch.nan, found)", "found", gathered),
    (attend, "torch.where(lost[..., None], torch.nan, found)", "found", gathered),
    (compress, "rows.length - a.kept", "rows.length - a.kept + 1", compressions),
    (compress, "(a.seq_lens.long() - a.cu_seqlens_q.diff()).clamp(min=0)", "a.seq_lens.long() * 0", compressions),
    (compress, "(ends[sequence] - n)", "(ends[sequence] - n) - 1", compressions),
    (compress, "a.bias[order % a.stride]", "a.bias[order * 0]", compressions),
    (compress, "x[:, 2 * half :]", "x[:, 2 * half : 2 * half]", compressions),
    (compress, "(token // a.stride)", "(token * 0)", compressions),
    (compress, "(exists[..., None, None], gates,", "(exists[..., None, None] | True, gates,", compressions),
    (compress, "torch.where(lost[..., None, None], torch.nan, earlier)", "earlier", compressions),
    (compress, "* a.rope_step", "* a.stride * 2", compressions),
    (compress, "torch.where(known[:, None], a.cos_sin", "torch.where(known[:, None] | True, a.cos_sin", compressions),
    (compress, "even * cos - odd * sin", "even * cos + odd * sin", compressions),
    (compress, "squares + a.eps", "squares + 1", compressions),
    (compress, "(wanted & ~lost)", "wanted", compressions),
    (attend, "exp(top - floor)", "exp(top - top)", any_call),
    (attend, "total - a.sinks", "a.sinks - total", any_call),
    (attend, "* self.keys.heads // groups", "* 0", any_call),
    (attend, "(high - a.window)", "(high - a.window - 1)", any_call),
    (attend, "+ columns % self.block", "", any_call),
)


TESTS = (
    latent,
    compressions,
    planned,
    windowed,
    selection,
    writes,
    nothing,
    packed,
    converted,
    merged,
    gathered,
    any_call,
)


def functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """The functions of a module, those of its classes included."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    classes = [value for value in own if isinstance(value, type)]
    members = [getattr(member, "fget", member) for each in classes for member in vars(each).values()]
    every = [value for value in (*own, *members) if isinstance(value, types.FunctionType)]
    return {value.__qualname__: value for value in every}


@contextmanager
def broken(module: types.ModuleType, old: str, new: str) -> Iterator[None]:
    """The module with ``old`` replaced in its source, once."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    changed = types.ModuleType(module.__name__)
    changed.__package__ = module.__package__
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(changed))
    kept = {name: function.__code__ for name, function in functions(module).items()}
    wrapped = getattr(module, "_no_sinks", None)
    for name, function in functions(changed).items():
        functions(module)[name].__code__ = function.__code__
    if wrapped is not None:
        module._no_sinks = changed._no_sinks  # type: ignore[attr-defined]
    library.forget()
    try:
        yield
    finally:
        for name, code in kept.items():
            functions(module)[name].__code__ = code
        if wrapped is not None:
            module._no_sinks = wrapped  # type: ignore[attr-defined]
        library.forget()


@pytest.mark.parametrize("tests", TESTS, ids=lambda test: test.__name__)
def test_they_pass_unbroken(tests: Callable[[], None]) -> None:
    become("A2")
    tests()


@pytest.mark.parametrize(("module", "old", "new", "tests"), FAULTS, ids=[f"{old}-{new}" for _, old, new, _ in FAULTS])
def test_a_fault_is_noticed(module: types.ModuleType, old: str, new: str, tests: Callable[[], None]) -> None:
    become("A2")
    noticed = (AssertionError, emulator.RuleBroken, sparse_attn.NoBackend, RuntimeError, IndexError)
    with broken(module, old, new), pytest.raises(noticed):
        tests()
