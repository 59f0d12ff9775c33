"""The choice of a kernel: order, refusals with every reason, the reference's place, and the environment."""

from __future__ import annotations

import cases
import merges
import pytest
import torch
from selections import Batch

import sparse_attn
from sparse_attn import env, library, registry
from sparse_attn.ops.attend import Attend
from sparse_attn.ops.compress import Compress
from sparse_attn.ops.convert import Convert
from sparse_attn.ops.load import Load
from sparse_attn.ops.merge import Merge
from sparse_attn.ops.select import Select
from sparse_attn.ops.select_merge import SelectMerge
from sparse_attn.ops.store import Store
from sparse_attn.registry import Between, Call, Impl, OneOf

CALL = Call("attend", "cpu", (("dtype", "bfloat16"), ("qk_dim", 96), ("selected", 4096)))


def impl(backend: str, priority: int = 0, available=lambda: None, **limits) -> Impl:
    return Impl("attend", backend, limits, run=lambda *a: None, priority=priority, available=available)


REFERENCE = impl("reference", priority=-1)


@pytest.fixture
def backends(monkeypatch):
    """Installs kernels and broken backends in place of those found, best first as discovery gives them."""
    library.forget()

    def install(*impls: Impl, broken: dict[str, str] | None = None) -> None:
        monkeypatch.setattr(registry, "_found", lambda: (impls, broken or {}))

    yield install
    monkeypatch.undo()
    library.forget()


def test_the_first_that_fits_is_taken(backends) -> None:
    first, second = (
        impl("first", device=OneOf(("cpu",)), qk_dim=OneOf((64, 128))),
        impl("second", qk_dim=Between(32, 256, 32)),
    )
    backends(first, second, REFERENCE)
    assert registry.choose(CALL) is second
    assert registry.choose(CALL._replace(facts=(("qk_dim", 64),))) is first


def test_a_refusal_gives_every_reason_of_every_backend(backends) -> None:
    def no_driver() -> str:
        return "no driver was found"

    def crash() -> str:
        raise OSError("libfoo.so: cannot open")

    backends(
        impl("gpu", device=OneOf(("cuda",)), qk_dim=OneOf((1,))),
        impl("native", qk_dim=OneOf((64, 128)), selected=Between(0, 2048)),
        impl("driverless", available=no_driver),
        impl("crashing", available=crash),
        impl("reference", priority=-1, dtype=OneOf(("float64",))),
        broken={"copied": "sparse_attn.backends.copied could not be loaded: SyntaxError: bad"},
    )
    with pytest.raises(sparse_attn.NoBackend) as refused:
        registry.choose(CALL)
    assert str(refused.value).splitlines() == [
        "no backend can run this call (op=attend, device=cpu, backend=auto, dtype=bfloat16, qk_dim=96, selected=4096)",
        "  gpu: runs on cuda, the tensors are on cpu",
        "  native: qk_dim is 96, supported: one of 64, 128; selected is 4096, supported: 0 to 2048",
        "  driverless: no driver was found",
        "  crashing: probing it failed: OSError: libfoo.so: cannot open",
        "  reference: dtype is bfloat16, supported: float64",
        "  copied: sparse_attn.backends.copied could not be loaded: SyntaxError: bad",
        "run `python -m sparse_attn doctor` to see what this machine has",
    ]


def test_a_named_backend_is_used_or_refused_never_replaced(backends) -> None:
    small, large = impl("small", qk_dim=Between(1, 64)), impl("large")
    backends(large, small, REFERENCE)
    assert registry.choose(CALL._replace(facts=(("qk_dim", 64),)), "small") is small
    with pytest.raises(sparse_attn.NoBackend, match="small: qk_dim is 96, supported: 1 to 64") as refused:
        registry.choose(CALL, "small")
    assert "large" not in str(refused.value)
    with pytest.raises(
        sparse_attn.NoBackend, match="no backend is called 'smal' for this op; known: large, reference, small"
    ):
        registry.choose(CALL, "smal")


def test_the_reference_stands_in_on_cpu_and_says_so_once(backends, capsys) -> None:
    backends(impl("native", qk_dim=OneOf((64,))), REFERENCE)
    for _ in range(3):
        assert registry.choose(CALL) is REFERENCE
    said = capsys.readouterr().err
    assert said.count("no kernel fits this call of attend; the slow reference stands in") == 1
    assert "native: qk_dim is 96, supported: 64" in said


def test_the_reference_never_stands_in_on_a_device_unasked(backends, monkeypatch) -> None:
    backends(REFERENCE)
    call = CALL._replace(device="cuda")
    with pytest.raises(sparse_attn.NoBackend, match="reference: slow; set SPARSE_ATTN_ALLOW_REFERENCE=1"):
        registry.choose(call)
    assert registry.choose(call, "reference") is REFERENCE, "by name it always runs"
    monkeypatch.setenv("SPARSE_ATTN_ALLOW_REFERENCE", "1")
    env.reset()
    assert registry.choose(call) is REFERENCE


def test_the_choice_is_logged_on_request(backends, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SPARSE_ATTN_LOG", "choice")
    backends(impl("narrow", qk_dim=OneOf((64,))), impl("wide"), REFERENCE)
    registry.choose(CALL)
    said = capsys.readouterr().err
    assert "attend runs on wide" in said and "narrow: qk_dim is 96" in said


def test_a_misspelt_variable_is_refused(backends, monkeypatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_CHECKS", "ful")
    env.reset()
    with pytest.raises(ValueError, match="SPARSE_ATTN_CHECKS: expected one of 'shape', 'debug', got 'ful'; correct it"):
        env.CHECKS.get()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(indices="twice"), "attend: indices: expected no index twice in a row, got a duplicate in row 1, head 0"),
        (dict(max_seq_len=3), "attend: max_seq_len: expected at least the longest sequence, 21, got 3"),
        (dict(max_seqlen_q=1), "attend: max_seqlen_q: expected at least the longest query part, 3, got 1"),
    ],
)
def test_debug_checks_read_values(backends, monkeypatch, changes, sentence) -> None:
    """They run before the kernel, whichever it is: this one would compute anything."""
    monkeypatch.setenv("SPARSE_ATTN_CHECKS", "debug")
    backends(impl("careless"))
    leading, kwargs = cases.attend(index_heads=1)
    names = ("q", "cu_seqlens_q", "seq_lens", "scale", "v_dim", "max_seqlen_q", "max_seq_len")
    arguments = dict(zip(names, leading, strict=True), **kwargs)
    if "indices" in changes:
        twice = kwargs["indices"].clone()
        twice[1, 0, 3] = twice[1, 0, 0]
        changes = dict(indices=twice)
    torch.ops.sparse_attn.attend(**arguments)
    with pytest.raises(sparse_attn.InvalidCall, match=sentence):
        torch.ops.sparse_attn.attend(**(arguments | changes))


def test_every_kernel_declares_facts_that_its_card_has() -> None:
    """A misspelt limit would never refuse anything."""
    leading, kwargs = cases.attend()
    rows, plane, slots = torch.zeros(1, 1, 4), torch.zeros(1, 1, 1, 4), torch.tensor([0])
    starts = torch.tensor([0, 1], dtype=torch.int32)
    args, keywords = Batch(dict(k=2), 1, 1, False, [3], [1]).arguments()
    shards, _ = merges.Merge(1, 2).arguments()
    calls = {
        "attend": Attend(*leading, **kwargs),
        "compress": Compress(rows, None, starts, starts[1:], plane, starts[None], 1, 1, 1, format="fp32"),
        "convert": Convert(plane, plane, src_format="fp32", dst_format="fp32"),
        "load": Load(plane, slots, format="fp32"),
        "merge": Merge(rows[None], rows[..., 0][None]),
        "select": Select(*args, **keywords),
        "select_merge": SelectMerge(*shards),
        "store": Store(rows, plane, slots, format="fp32"),
    }
    known = {op.name: {name for name, _ in op.facts(calls[op.name]).facts} for op in library.defined()}
    for found in registry.implementations():
        assert set(found.limits) <= {"device"} | known[found.op], found.backend
