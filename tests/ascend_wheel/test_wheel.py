"""torch_npu itself, without CANN or a device: its schemas are the emulator's, the backend's calls bind to them and give
the shapes that it expects, and there is a kernel for every operation of torch that the backend uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if runtime.missing():
    pytest.skip(runtime.missing(), allow_module_level=True)
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "ascend")]

import cases
import compressions
import emulator

from sparse_attn.backends.ascend_npu import attend, compress, indexer, merge, move, select, sparse_flash, workspace
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.compress import Compress
from sparse_attn.ops.load import Load
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select import Select
from sparse_attn.ops.select_merge import SelectMerge
from sparse_attn.ops.store import Store


@pytest.fixture(scope="module", autouse=True)
def torch_npu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    runtime.load(tmp_path_factory.mktemp("runtime"))
    return importlib.import_module("torch_npu")


@pytest.mark.parametrize("name", [name for name, (namespace, _) in emulator.SCHEMAS.items() if namespace == "npu"])
def test_the_emulator_has_its_schemas(name: str) -> None:
    real = getattr(torch.ops.npu, name).default._schema
    ours = torch._C.parse_schema(f"npu::{name}{emulator.SCHEMAS[name][1]}")

    def arguments(schema: Any) -> list[tuple[Any, ...]]:
        return [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in schema.arguments]

    assert arguments(ours) == arguments(real)
    assert [str(r.type) for r in ours.returns] == [str(r.type) for r in real.returns]


LATENT: dict[str, Any] = dict(
    dtype="bfloat16", kv_heads=1, qk_dim=576, v_dim=512, page_size=16, index_heads=1, lse=False
)
BOTH: dict[str, Any] = dict(planes="main+window", kv_heads=1, qk_dim=512, v_dim=512, index_heads=1, sinks=True, ratio=2)


def attending(**facts: Any) -> Attend:
    leading, kwargs = cases.attend(**facts)
    return Attend(*leading, **kwargs)


def selecting(**changes: Any) -> Select:
    a = attending(**(LATENT | dict(qk_dim=128, v_dim=128, format="bf16", q_heads=8)))
    assert a.kv is not None and a.page_table is not None
    weights = torch.rand(a.q.shape[:2]).to(a.q.dtype)
    given = (a.q, weights, a.cu_seqlens_q, a.seq_lens, a.kv, a.page_table, 4, 1.0, a.max_seqlen_q, a.max_seq_len)
    return Select(*given)._replace(**changes)


def on_meta(a: Any) -> Any:
    return a._replace(**{name: t.to("meta") for name, t in a._asdict().items() if isinstance(t, Tensor)})


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        (sparse_flash.sparse_flash_attention, dict(format="bf16", rope_dim=64)),
        (sparse_flash.kv_quant_sparse_flash_attention, dict(format="int8_v32")),
        (workspace.latent, dict(format="fp8_v32", selected=70)),
    ],
)
def test_calls_of_attend_bind(run: Callable[..., None], facts: dict[str, Any]) -> None:
    """On meta tensors torch_npu's own rules of shapes run, and the result fits the output."""
    a = on_meta(attending(**(LATENT | facts)))
    run(a, torch.empty(*a.q.shape[:2], 512, dtype=a.q.dtype, device="meta"), None)


def test_the_call_of_the_indexer_binds() -> None:
    a = on_meta(selecting())
    lists = torch.empty(len(a.q), 1, a.k, dtype=torch.int32, device="meta")
    indexer.lightning_indexer(a, lists, lists[..., 0], None, None)


def test_the_call_of_the_quantised_indexer_binds() -> None:
    a = selecting()
    keys = torch.zeros(a.keys.shape, dtype=torch.int8)
    scales = {"q_scale": torch.ones(a.q.shape[:2]), "key_scale": torch.ones(keys.shape[:3]).half()}
    a = on_meta(a._replace(q=a.q.to(torch.int8), keys=keys, format="int8_index_h", **scales))
    lists = torch.empty(len(a.q), 1, a.k, dtype=torch.int32, device="meta")
    indexer.quant_lightning_indexer(a, lists, lists[..., 0], None, None)


VIEWS = {"alias", "detach", "expand", "select.int", "slice.Tensor", "split_with_sizes", "transpose.int", "view.dtype"}
VIEWS |= {"_unsafe_view", "permute", "unbind.int", "unsqueeze", "split.Tensor", "lift_fresh"}
FILLS = {"new_full", "new_zeros", "zeros_like", "full_like", "scalar_tensor", "full", "ones_like", "constant_pad_nd"}
MADE_OF_OTHERS = {f"aten::{name}" for name in VIEWS | FILLS}
"""Operations that PyTorch makes of others on every device."""
FOREIGN = (torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu)
"""Types that A2 and A3 do not have."""


class Recorded(TorchDispatchMode):
    """The operations that reach a device, and the types of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.names.add(function.name())
        self.dtypes |= {t.dtype for t in (*args, result) if isinstance(t, Tensor)}
        return result


FORMATS = ("bf16", "int8", "int4_index_h", "fp8_v32", "int8_v32", "fp8_v4_608", "fp4_v41", "fp8_v41", "fp4_index")
"""One of each kind of number."""


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """One call of each kernel that is torch's own operations."""
    a = attending(**(BOTH | dict(format="fp4_v41", win_format="fp8_v41")))
    out, lse = torch.empty(*a.q.shape[:2], 512), torch.empty(a.q.shape[:2])
    yield "attend", lambda: attend.attend(a, out, lse)
    ranged = a._replace(kv_range=torch.tensor([[0, 9]] * len(a.q), dtype=torch.int32))
    yield "attend, ranges", lambda: attend.attend(ranged, out, lse)
    for format in (
        "bf16",
        "int8",
        "int4_index_h",
        "fp8_v32",
        "int8_v32",
        "fp8_v4_608",
        "fp4_v41",
        "fp8_v41",
        "fp4_index",
    ):
        dim = cases.layout.FORMATS[format].dim or 64
        plane, scale = cases.plane(format, 3, 4, 1, dim, torch.Generator())
        rows, slots, back = torch.randn(4, 1, dim), torch.tensor([1, -1, 3, 2]), torch.empty(4, 1, dim)
        store, load = Store(rows, plane, slots, scale, format), Load(plane, slots, scale, format)
        yield f"store {format}", lambda store=store: move.store(store)  # type: ignore[misc]
        yield f"load {format}", lambda load=load, back=back: move.load(load, back)  # type: ignore[misc]
    for line in compressions.lines():
        if line.of.startswith("DeepSeek V4"):
            s = compressions.Sequences(line, [9, 0, 3])
            args, kwargs = s.step(s.lengths, s.lengths)
            entries = Compress(*args, **kwargs)
            yield "compress", lambda entries=entries: compress.compress(entries, torch.empty(20, 1, entries.dim))  # type: ignore[misc]
    parts = Merge(torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2), torch.zeros(2), inf_is_empty=True)
    yield "merge", lambda: merge.merge(parts, torch.empty(5, 2, 8), torch.empty(5, 2))
    lists = torch.empty(5, 2, 4, dtype=torch.int32), torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2, 4)
    shards = (torch.ones(3, 5, 2, 7, dtype=torch.int32), torch.rand(3, 5, 2, 7), torch.zeros(3, 5, dtype=torch.int32))
    yield "select_merge", lambda: merge.select_merge(SelectMerge(*shards, 4), *lists)
    options = dict(candidate_k=3, score_dtype="bf16", keep_last=1, order="score", return_values=True)
    for chosen in (
        selecting(**options),
        selecting(candidates=torch.ones(10, 1, 2, dtype=torch.int32)[: len(selecting().q)]),
    ):
        found = torch.empty(len(chosen.q), 1, 4, dtype=torch.int32)
        blocks = torch.empty(len(chosen.q), 1, 3, dtype=torch.int32) if chosen.candidate_k else None
        call = (chosen, found, found[..., 0].clone(), found.float(), blocks)
        yield "select", lambda call=call: select.select(*call)  # type: ignore[misc]


@pytest.mark.parametrize(("name", "call"), [pytest.param(*each, id=f"{each[0]} {i}") for i, each in enumerate(calls())])
def test_it_has_the_operations(name: str, call: Callable[[], Any]) -> None:
    with Recorded() as recorded:
        call()
    own = {n for n in recorded.names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "PrivateUse1")}
    assert len(own) > 10 and recorded.names - own <= MADE_OF_OTHERS
    assert not recorded.dtypes & {*FOREIGN}
