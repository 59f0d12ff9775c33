"""``cpu_native``: the kernels of ``csrc/cpu_native``, for every call on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_attn import env
from sparse_attn.checks import InvalidCall, refuse
from sparse_attn.layout import FORMATS
from sparse_attn.registry import Between, Impl, Limit, OneOf

if TYPE_CHECKING:
    from sparse_attn.ops.attend import Attend
    from sparse_attn.ops.compress import Compress
    from sparse_attn.ops.convert import Convert
    from sparse_attn.ops.load import Load
    from sparse_attn.ops.merge import Merge
    from sparse_attn.ops.select import Select
    from sparse_attn.ops.select_merge import SelectMerge
    from sparse_attn.ops.store import Store

_Tolerance = Mapping[str, tuple[float, float]]


@cache
def _native() -> ModuleType:
    return import_module("sparse_attn._cpu_native")


def _unavailable() -> str | None:
    """Why no kernel here can run, in one sentence."""
    try:
        machine = _native().instruction_sets()
    except ImportError as error:
        return f"the native module does not load ({error}); install again where a C++ compiler is"
    wanted = env.CPU_ISA.get()
    if wanted in ("auto", *machine):
        return None
    return f"{env.CPU_ISA.name} is {wanted}, this machine runs {', '.join(machine)}"


@cache
def _isa(wanted: str) -> int:
    """Number of an instruction set in the native module; of the best one for ``"auto"``."""
    machine = _native().instruction_sets()
    return list(machine.values())[-1] if wanted == "auto" else machine[wanted]


def _machine() -> tuple[int, int]:
    """Threads to use, and the number of the instruction set."""
    return torch.get_num_threads(), _isa(env.CPU_ISA.get())


def _attend(a: Attend, out: Tensor, lse: Tensor | None) -> None:
    failure = _native().attend(a, out, lse, *_machine())
    if failure is not None:
        in_window = failure[1]
        paging, table = (a.window_paging, a.win_page_table) if in_window else (a.main_paging, a.page_table)
        raise _refusal("attend", a, paging, table, "win_page_table" if in_window else "page_table", *failure)


def _select(a: Select, indices: Tensor, counts: Tensor, values: Tensor | None, candidate_blocks: Tensor | None) -> None:
    failure = _native().select(a, indices, counts, values, candidate_blocks, *_machine())
    if failure is not None:
        raise _refusal("select", a, a.paging, a.page_table, "page_table", *failure)


def _compress(a: Compress, latent: Tensor | None) -> None:
    failure = _native().compress(a, latent, *_machine())
    if failure is None:
        return
    error, in_state, first, _ = failure
    if error == "no_position":
        assert a.cos_sin is not None
        raise refuse("compress", "cos_sin", f"a row for position {first}", f"{a.cos_sin.shape[0]} positions")
    if error == "few_entries":
        raise refuse("compress", "entries", f"at least {first}, which the step completes", a.entries)
    if not in_state:
        raise _refusal("compress", a, a.paging, a.page_table, "page_table", *failure)
    assert a.state is not None
    pages, page_size, heads, _ = a.state.shape
    raise _refusal("compress", a, (pages, page_size, heads), a.state_page_table, "state_page_table", *failure)


def _refusal(
    op: str,
    a: Attend | Select | Compress,
    paging: tuple[int, int, int],
    table: Tensor | None,
    name: str,
    error: str,
    in_window: bool,
    first: int,
    second: int,
) -> InvalidCall:
    """The exception for a failure that a kernel reports with two values."""
    if error == "first_start":
        return refuse(op, "cu_seqlens_q", "a first value of 0", first)
    if error == "last_start":
        return refuse(op, "cu_seqlens_q", f"a last value of at most T = {a[0].shape[0]}", first)
    if error == "descending":
        return refuse(op, "cu_seqlens_q", "ascending values", a.cu_seqlens_q.tolist())
    if error == "too_many_rows":
        return refuse(op, "max_seqlen_q", f"at least {first}", a.max_seqlen_q)
    if error == "too_long":
        return refuse(op, "max_seq_len", f"at least {first}", a.max_seq_len)
    assert table is not None
    pages, page_size, _ = paging
    if error == "entry_unpaged":
        got = f"{table.shape[1]} pages of {page_size} entries"
        return refuse(op, name, f"a page for entry {first} of sequence {second}", got)
    return refuse(op, name, f"pages from 0 to {pages - 1} in sequence {first}", second)


def _store(a: Store) -> None:
    last = _native().store(a, *_machine())
    if last >= 0:
        raise _past("store", "slots", a.paging, last)


def _load(a: Load, out: Tensor) -> None:
    last = _native().load(a, out, *_machine())
    if last >= 0:
        raise _past("load", "slots", FORMATS[a.format].paging(a.plane.shape, a.page_size), last)


def _convert(a: Convert) -> None:
    past = _native().convert(a, *_machine())
    if past is None:
        return
    if past[0]:
        raise _past("convert", "dst_slots", FORMATS[a.dst_format].paging(a.dst.shape, a.dst_page_size), past[1])
    raise _past("convert", "src_slots", FORMATS[a.src_format].paging(a.src.shape, a.src_page_size), past[1])


def _merge(a: Merge, out: Tensor, lse: Tensor) -> None:
    _native().merge(a, out, lse, torch.get_num_threads())


def _select_merge(a: SelectMerge, indices: Tensor, counts: Tensor, values: Tensor) -> None:
    _native().select_merge(a, indices, counts, values, *_machine())


def _past(op: str, name: str, paging: tuple[int, int, int], slot: int) -> InvalidCall:
    """The exception for a slot past its plane."""
    return refuse(op, name, f"less than pages * page_size = {paging[0] * paging[1]}", slot)


def _impl(op: str, run: Callable[..., None], tolerance: _Tolerance | None = None, **limits: Limit) -> Impl:
    limits = {"device": OneOf(("cpu",)), **limits}
    return Impl(op, "cpu_native", limits, run, tolerance or {}, priority=10, available=_unavailable)


IMPLS = (
    _impl(
        "attend",
        _attend,
        # Standard normal inputs. bfloat16 products flush denormals, and round probabilities to bfloat16; also what
        # formats hold whose scales are no powers of two (codecs.py), by 2**-9 of it.
        {"float32": (4e-6, 4e-6), "bfloat16": (1e-2, 1e-2), "float16": (1e-3, 1e-3)},
    ),
    _impl("compress", _compress, {"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}),
    _impl("convert", _convert),
    _impl("load", _load),
    _impl("merge", _merge, {"float32": (2e-6, 2e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}),
    _impl(
        "select",
        _select,
        dict.fromkeys(("float32", "bfloat16", "float16"), (2e-5, 2e-5)),
        strides=Between(1, 64),
    ),
    _impl("select_merge", _select_merge),
    _impl("store", _store),
)
