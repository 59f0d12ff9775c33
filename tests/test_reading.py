"""What every call does to its arguments: natively as in Python, and for tensors of older torch as of newer."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sparse_attn
from sparse_attn import library, reading
from sparse_attn.checks import InvalidCall, expect_apart
from sparse_attn.ops.attend import Attend


class Some(NamedTuple):
    """A small op's arguments."""

    q: Tensor
    bound: int
    scale: float
    kv: Tensor | None = None
    v: Tensor | None = None
    format: str = "bf16"
    causal: bool = True
    dtype: torch.dtype | None = None


ARGUMENTS = "some", Some, 1, 2
PLAIN = reading.PlainReader(*ARGUMENTS)


@pytest.fixture(scope="module")
def native() -> Any:
    return pytest.importorskip("sparse_attn._call").Reader(*ARGUMENTS)


@pytest.fixture(params=["plain", "native"])
def reader(request) -> reading.Reader:
    return PLAIN if request.param == "plain" else request.getfixturevalue("native")


def kinds() -> list[tuple[tuple, dict, tuple]]:
    """Calls that are all of another kind."""
    q, kv = torch.zeros(3, 4), torch.zeros(2, 6, 1)
    calls: list[tuple[tuple, dict, tuple]] = [
        ((q, 1, 0.5), {}, ()),
        ((q, 1, 0.25), {}, ()),
        ((q, 1, 1), {}, ()),
        ((q, 1, 2**40), {}, ()),
        ((q, 1, -1), {}, ()),
        ((q.half(), 1, 0.5), {}, ()),
        ((q.bfloat16(), 1, 0.5), {}, ()),
        ((q.int(), 1, 0.5), {}, ()),
        ((q.to(torch.uint8), 1, 0.5), {}, ()),
        ((q.to(torch.int8), 1, 0.5), {}, ()),
        ((q.bool(), 1, 0.5), {}, ()),
        ((q[:2], 1, 0.5), {}, ()),
        ((q.t().contiguous().t(), 1, 0.5), {}, ()),
        ((q[None], 1, 0.5), {}, ()),
        ((q[:, :0], 1, 0.5), {}, ()),
        ((q.view(4, 3), 1, 0.5), {}, ()),
        ((q.flatten(), 1, 0.5), {}, ()),
        ((torch.zeros(3, 128), 1, 0.5), {}, ()),
        *(((torch.zeros(3, n), 1, 0.5), {}, ()) for n in (256, 128 + 2**14)),
        ((q, 1, 0.5), dict(kv=kv), ()),
        ((q, 1, 0.5), dict(v=kv), ()),
        ((q, 1, 0.5), dict(kv=kv, v=kv), ()),
        ((q, 1, 0.5), dict(kv=kv.expand(2, 6, 5)), ()),
        ((q, 1, 0.5), dict(kv=kv.as_strided((2, 6, 1), (6, 1, 7))), ()),
        ((q, 1, 0.5), dict(causal=False), ()),
        ((q, 1, 0.5), dict(format="int8"), ()),
        ((q, 1, 0.5), dict(format=""), ()),
        ((q, 1, 0.5), dict(dtype=torch.bfloat16), ()),
        ((q, 1, 0.5), dict(dtype=torch.float16), ()),
        ((q, 1, 0.5), dict(format="int8", dtype=torch.float16), ()),
        ((q, 1, 0.5), {}, (None,)),
        ((q, 1, 0.5), {}, (None, None)),
        ((q, 1, 0.5), {}, (q,)),
        ((q, 1, 0.5), {}, (None, q)),
        ((q, 1, 0.5), {}, (q[:2],)),
    ]
    if hasattr(torch, "float8_e4m3fn"):
        calls += [((q.to(d), 1, 0.5), {}, ()) for d in (torch.float8_e4m3fn, torch.float8_e5m2)]
    return calls


def test_keys_tell_kinds_of_call_apart(reader) -> None:
    keys = [reader.read(*call)[1] for call in kinds()]
    assert None not in keys
    for (i, a), (j, b) in itertools.combinations(enumerate(keys), 2):
        assert a != b, (kinds()[i], kinds()[j])
    assert keys == [reader.read(*call)[1] for call in kinds()], "other memory is no other kind"


def test_keys_leave_out_bounds_and_how_a_call_was_written(reader) -> None:
    q, kv = torch.zeros(3, 4), torch.zeros(2, 6, 1)
    a, key = reader.read((q, 1, 0.5, kv), dict(format="int8", causal=False), ())
    assert reader.read((q, 999, 0.5), dict(causal=False, kv=kv, format="".join(["in", "t8"])), ())[1] == key
    assert reader.read((), dict(scale=0.5, causal=False, kv=kv, bound=1, q=q, format="int8"), ())[1] == key
    assert type(a) is Some and a.q is q and a.kv is kv and a[1:3] == (1, 0.5)
    assert a[4:] == (None, "int8", False, None)


def test_keys_of_two_ops_differ(native) -> None:
    other = type(native)("other", Some, 1, 2)
    assert other.read((torch.zeros(3), 1, 0.5), {}, ())[1] != native.read((torch.zeros(3), 1, 0.5), {}, ())[1]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {}),
        (tuple(range(9)), {}),
        ((1, 2, 3), dict(heads=1)),
        ((1, 2, 3), dict(scale=1)),
        ((), dict(q=1, scale=1)),
    ],
    ids=["too few", "too many", "unknown", "twice", "none for a field"],
)
def test_calls_that_do_not_fit_the_tuple(reader, args: tuple, kwargs: dict) -> None:
    with pytest.raises(TypeError) as expected:
        Some(*args, **kwargs)
    with pytest.raises(TypeError) as got:
        reader.read(args, kwargs, ())
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize(
    "value", [2**70, torch.empty(2, device="meta"), (1, 2), 1j], ids=["long", "meta", "tuple", "1j"]
)
def test_a_value_of_no_known_kind_has_no_key(native, value: object) -> None:
    """The router then takes Python's key."""
    a, key = native.read((value, 1, 0.5), {}, ())
    assert key is None and a.q is value
    assert native.read((torch.zeros(3), 1, 0.5), {}, (value,))[1] is None


def test_a_call_without_a_native_key_is_remembered(monkeypatch) -> None:
    rows, plane = torch.ones(2, 1, 4), torch.zeros(1, 4, 1, 4)
    op = next(op for op in library.defined() if op.name == "store")
    library.forget()
    a = op.arguments(rows, plane, torch.tensor([1, 2]), format="fp32")
    assert library.route(op, a, None) == library.route(op, a, None)
    assert len(library._memo) == 1
    library.forget()


def test_a_reader_is_made_whole_or_not_at_all(native) -> None:
    for wrong in ((), ("some", Some), (5, Some, 1, 2), ("some", tuple, 1, 2)):
        with pytest.raises((TypeError, AttributeError)):
            type(native).__new__(type(native), *wrong)


def test_half_of_a_surrogate_pair_has_no_key(native) -> None:
    assert native.read((torch.zeros(3), 1, 0.5), dict(format="\ud800"), ())[1] is None


def views(pool: Tensor) -> list[Tensor]:
    found = [pool.as_strided(*v) for v in (
        ((4,), (1,), 0), ((4,), (1,), 4), ((4,), (1,), 3), ((2, 3), (8, 1), 0), ((2, 3), (8, 1), 4),
        ((2, 3), (8, 1), 2), ((1, 4), (99, 1), 12), ((0, 4), (4, 1), 2), ((3,), (0,), 5), ((), (), 7),
    )]  # fmt: skip
    return [*found, pool[8:16].view(torch.float16)[3:9], torch.zeros(4)]


def refused(written: Tensor, others: list[Tensor]) -> bool:
    try:
        expect_apart("some", "kv", written, others)
    except InvalidCall:
        return True
    return False


def test_what_is_apart_at_first_sight_is_apart(native) -> None:
    """Against the rule itself, which also finds views that lie between each other's rows."""
    pool = torch.zeros(32)
    said = []
    for a, b in itertools.product(views(pool), repeat=2):
        said.append(native.apart((a,), (None, 1, 0.5, "x", True, torch.half, a, b)))
        assert not (said[-1] and refused(a, [b])), (a.shape, a.stride(), b.shape, b.stride())
    assert 0.4 < sum(said) / len(said) < 0.9, "it tells most of them"
    a, b, c, *_ = views(pool)
    assert native.apart((a, b), (a, b, None)) and not native.apart((a, c), (a, b, c))
    assert not native.apart((a,), (a, a)), "given as two arguments"
    assert native.apart((None, a), (a, b))
    assert not native.apart((a,), (a, torch.empty(2, device="meta")))
    assert not PLAIN.apart((a,), (a, b))


# torch before 2.10, and a table of a later DLPack


class Older:
    """A tensor as torch showed it before it had DLPack's table."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    shape = property(lambda self: self.tensor.shape)
    dtype = property(lambda self: self.tensor.dtype)

    def stride(self) -> tuple[int, ...]:
        return self.tensor.stride()

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


def table(major: int, older: int) -> object:
    """A table whose functions must not be called."""
    words = (ctypes.c_uint64 * 7)(major, older, *[1] * 5)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    KEPT.append(words)
    return new(ctypes.addressof(words), b"dlpack_exchange_api", None)


KEPT: list[object] = []
CALLS = {
    "attend": dict(kv=(9, 4, 2, 16), v=(9, 4, 2, 16), kv_rope=None),
    "attend, rope apart": dict(kv=(9, 4, 2, 12), v=(9, 4, 2, 16), kv_rope=(9, 4, 2, 4)),
}


@pytest.mark.parametrize("tensors", ["older", "no known table", "newer table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", CALLS)
def test_kernels_read_every_kind_of_tensor(call: str, dtype: torch.dtype, tensors: str) -> None:
    pytest.importorskip("sparse_attn._cpu_native")

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if tensors == "older":
            return Older(value)
        known = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        if known is None:
            pytest.skip("this torch has no table")
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        older = 0 if tensors == "no known table" else address(known, b"dlpack_exchange_api")
        kind = type("Newer", (Tensor,), {"__dlpack_c_exchange_api__": table(2, older)})
        return value.as_subclass(kind)

    torch.manual_seed(0)
    format = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    planes = {name: None if shape is None else torch.randn(shape).to(dtype) for name, shape in CALLS[call].items()}
    arguments = Attend(
        torch.randn(3, 4, 2, 16).to(dtype)[:, :, 1],
        torch.tensor([0, 1, 3], dtype=torch.int32),
        torch.tensor([5, 20], dtype=torch.int32),
        *(0.25, 16, 2, 20),
        **planes,
        page_table=torch.randperm(9, dtype=torch.int32)[None].expand(2, 9),
        indices=torch.randint(-1, 20, (5, 2, 3), dtype=torch.int32).transpose(0, 2),
        sinks=torch.randn(4),
        format=format,
    )
    impl = sparse_attn.resolve("attend", *arguments[:7], **dict(zip(arguments._fields[7:], arguments[7:], strict=True)))
    assert impl.backend == "cpu_native"
    expected, got = torch.full((2, 3, 4, 16), torch.nan, dtype=dtype)
    impl.run(arguments, expected, None)
    impl.run(arguments._make(map(wrap, arguments)), wrap(got), None)
    assert torch.equal(expected, got) and expected.isfinite().all() and expected.any()
