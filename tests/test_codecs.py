"""Every quantiser against ml_dtypes or float64, over all codes and all bfloat16 inputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from sparse_attn import codecs
from sparse_attn.layout import Codec

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
FINITE = ALL_BF16[ALL_BF16.isfinite()]
AMAX = ALL_BF16[:0x7F80]  # 0 and every finite positive number
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "int4": ml_dtypes.int4,
}


def same_numbers(a: Tensor, b: np.ndarray) -> bool:
    """Equal, signs of zeros included, NaN for NaN."""
    ours = a.numpy()
    return bool(
        np.array_equal(ours, b.astype(np.float32), equal_nan=True)
        and np.array_equal(np.signbit(ours)[~np.isnan(ours)], np.signbit(b.astype(np.float32))[~np.isnan(ours)])
    )


@pytest.mark.parametrize("type", ["e4m3", "e8m0"])
def test_every_code_of_8_bits_is_read(type: str) -> None:
    assert same_numbers(codecs.from_bytes(type, ALL_BYTES), ALL_BYTES.numpy().view(ML_DTYPES[type]))


@pytest.mark.parametrize("type", ["e2m1", "int4"])
def test_every_code_of_4_bits_is_read_in_both_halves(type: str) -> None:
    low, high = ALL_BYTES & 15, ALL_BYTES >> 4
    pairs = codecs.from_bytes(type, ALL_BYTES[:, None])
    assert same_numbers(pairs[:, 0], low.numpy().view(ML_DTYPES[type]))
    assert same_numbers(pairs[:, 1], high.numpy().view(ML_DTYPES[type]))


def test_every_number_is_rounded_to_e4m3() -> None:
    inputs = FINITE[FINITE.abs() <= 448]  # the scale admits no larger ones
    expected = inputs.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codecs.to_bytes("e4m3", inputs).numpy(), expected)
    codes = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F]
    assert torch.equal(codecs.to_bytes("e4m3", codecs.from_bytes("e4m3", codes)), codes)
    assert codecs.to_bytes("e4m3", torch.tensor([torch.nan])).tolist() == [0x7F]


def test_every_number_is_rounded_to_e2m1() -> None:
    """Saturated at 6 and with the sign of zero, as ml_dtypes does; halfway cases between all bf16 inputs included."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat(
        [middles, torch.nextafter(middles, torch.tensor(9.0)), torch.nextafter(middles, torch.tensor(0.0))]
    )
    inputs = torch.cat([FINITE, near, -near])
    expected = np.clip(inputs.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert np.array_equal(codecs.e2m1_codes(inputs).numpy(), expected)
    packed = codecs.to_bytes("e2m1", inputs[: len(inputs) // 2 * 2])
    assert np.array_equal(packed.numpy(), (expected[0::2] | expected[1::2] << 4)[: len(packed)])


@pytest.mark.parametrize("power", [-127, -22, -1, 0, 1, 120, 127])
def test_powers_of_two_in_e8m0(power: int) -> None:
    assert codecs.to_bytes("e8m0", torch.tensor([2.0**power])).tolist() == [127 + power]


@pytest.mark.parametrize(("largest", "floor"), [(448, 1e-4), (6, 6 * 2.0**-126)])
def test_power_of_two_scales_of_every_amax(largest: int, floor: float) -> None:
    scale = codecs.power_of_two_scale(AMAX, largest, floor).double().numpy()
    assert np.array_equal(scale, 2.0 ** np.ceil(np.log2(np.maximum(AMAX.double().numpy(), floor) / largest)))
    fits = np.maximum(AMAX.double().numpy(), floor)
    assert (fits <= largest * scale).all() and (fits > largest * scale / 2).all()
    for power in range(-10, 10):
        exact = torch.tensor([largest * 2.0**power])
        assert codecs.power_of_two_scale(exact, largest, floor) == 2.0**power
        assert codecs.power_of_two_scale(exact.nextafter(torch.tensor(1e9)), largest, floor) == 2.0 ** (power + 1)


def test_e4m3_scales_of_every_amax() -> None:
    """IEEE division in float32, from 2**-9 to 448, rounded to nearest even."""
    expected = np.clip(AMAX.numpy() / np.float32(6), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    assert same_numbers(codecs.e4m3_scale(AMAX, 6), expected)
    assert (expected.view(np.uint8) >= 1).all() and (expected.view(np.uint8) <= 0x7E).all()


@pytest.mark.parametrize("largest", [127, 7])
def test_fp16_scales_of_every_amax(largest: int) -> None:
    """The least float16 whose product with ``largest`` is not below amax."""
    scale = codecs.fp16_scale(AMAX, largest).numpy().astype(np.float16)
    amax = AMAX.double().numpy()
    held = np.isfinite(scale)
    assert (scale[held].astype(np.float64) * largest >= amax[held]).all()
    below = np.nextafter(scale, np.float16(0))
    needed = held & (amax > 0)
    assert (below[needed].astype(np.float64) * largest < amax[needed]).all()
    assert (amax[~held] > 65504.0 * largest).all() and (scale[amax == 0] == 0).all()


def test_fp32_scales_of_every_amax() -> None:
    expected = np.maximum(AMAX.numpy() / np.float32(127), np.float32(2.0**-126))
    assert np.array_equal(codecs.fp32_scale(AMAX, 127).numpy(), expected)


@pytest.mark.parametrize(
    "codec",
    [
        Codec("e4m3", "e8m0", 32),
        Codec("e4m3", "fp32", 32),
        Codec("e4m3", "bf16", 32),
        Codec("e2m1", "e8m0", 32),
        Codec("e2m1", "e4m3", 16),
        Codec("int8", "fp16", 32),
        Codec("int8", "fp32", 32),
        Codec("int4", "fp16", 32),
    ],
    ids=lambda c: f"{c.element}-{c.scale}",
)
class TestCodec:
    def test_all_of_bfloat16(self, codec: Codec) -> None:
        """Whole groups of neighbouring numbers, each within half a step of its element."""
        inputs = FINITE[FINITE.abs() < 2.0**30].unflatten(0, (-1, codec.group))
        if codec.scale == "fp16":
            inputs = inputs[inputs.abs().amax(-1) < 65504]
        assert len(inputs) > 1000
        parts = codecs.encode(codec, inputs)
        read = codecs.decode(codec, parts).double()
        scale = codecs.from_bytes(codec.scale, parts["scales"]).double()
        exact = inputs.double()
        if codec.element == "e4m3":
            bound = torch.maximum(exact.abs() * 2.0**-4, scale * 2.0**-10)
        elif codec.element == "e2m1":
            bound = torch.maximum(scale / 4, exact.abs() / 4)
            bound = torch.maximum(bound, exact.abs() - 6 * scale)  # what the scale of e4m3 saturates
        else:
            bound = (scale / 2 * (1 + 2.0**-20)).expand_as(exact)
        assert ((read - exact).abs() <= bound).all()
        if codec.scale != "e4m3":
            assert (exact.abs() <= codecs.LARGEST[codec.element] * scale * (1 + 2.0**-23)).all(), "nothing is clipped"

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_a_fault_shows_in_its_group_alone(self, codec: Codec, bad: float) -> None:
        rows = torch.randn(3, 4 * codec.group)
        clean = codecs.decode(codec, codecs.encode(codec, rows))
        rows[1, codec.group + 3] = bad
        read = codecs.decode(codec, codecs.encode(codec, rows))
        group = slice(codec.group, 2 * codec.group)
        assert read[1, group].isnan().all()
        clean[1, group] = read[1, group] = 0
        assert torch.equal(read, clean)

    def test_zeros(self, codec: Codec) -> None:
        rows = torch.zeros(2, codec.group)
        rows[1] = -0.0
        read = codecs.decode(codec, codecs.encode(codec, rows))
        assert torch.equal(read, rows)
        if codec.element in ("e4m3", "e2m1"):
            assert read.signbit().tolist() == rows.signbit().tolist()


def test_known_bytes() -> None:
    """By hand. amax 6 gives the scale 1 (0x38 in e4m3, 0x7F in e8m0), amax 5 the scale 0.8125 of e4m3."""
    row = torch.tensor([0.5, -6.0, 1.0, 4.0, -0.0, 0.25, 0.26, 5.0, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0, -0.2, 0.0])
    for scale, byte in (("e4m3", 0x38), ("e8m0", 0x7F)):
        parts = codecs.encode(Codec("e2m1", scale, 16), row)
        assert parts["scales"].tolist() == [byte]
        assert parts["values"].tolist() == [0xF1, 0x62, 0x08, 0x61, 0x22, 0x44, 0xE6, 0x08]
    # 5 / 6 = 0.8333 lies between 0.8125 (0x35) and 0.875 (0x36)
    assert codecs.encode(Codec("e2m1", "e4m3", 16), row * 5 / 6)["scales"].tolist() == [0x35]
    eight = torch.tensor([448.0, -448, 1, 0.001953125, 0.0009765625, 0.0009765626, -0.0, 17.0])
    parts = codecs.encode(Codec("e4m3", "e8m0", 8), eight)
    assert parts["scales"].tolist() == [127]
    assert parts["values"].tolist() == [0x7E, 0xFE, 0x38, 0x01, 0x00, 0x01, 0x80, 0x58]
    assert codecs.encode(Codec("e4m3", "fp32", 8), eight)["scales"].tolist() == [0, 0, 0x80, 0x3F]
    ints = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, 3.0, 4.0])
    parts = codecs.encode(Codec("int8", "fp16", 8), ints)
    assert parts["scales"].tolist() == [0x00, 0x3C]
    assert parts["values"].tolist() == [127, 129, 0, 2, 2, 0, 3, 4]
    assert codecs.encode(Codec("int4", "fp16", 8), ints[2:].repeat(2)[:8] * 7 / 4)["values"].tolist() == [
        0x31,
        0xF4,
        0x75,
        0x31,
    ]


def test_the_largest_groups_saturate_and_the_smallest_keep_the_smallest_scale() -> None:
    """The rule of e4m3 scales: from 2**-9 to 448. 2688 = 6 * 448 is the largest that it holds."""
    codec = Codec("e2m1", "e4m3", 16)
    parts = codecs.encode(codec, torch.tensor([[1e5] + [2688.0] * 15, [1e-6] * 15 + [3e-3]]))
    assert parts["scales"].flatten().tolist() == [0x7E, 0x01]
    assert (codecs.decode(codec, parts)[0] == 2688).all()
    assert codecs.decode(codec, parts)[1].tolist() == [0.0] * 15 + [1.5 * 2.0**-9]


def test_reading_twice_changes_nothing() -> None:
    """What `docs/formats.md` promises of rows that were read and are stored again."""
    rows = torch.randn(400, 512) * torch.logspace(-6, 6, 400)[:, None]
    for element, scale, group, promise in (
        ("e4m3", "e8m0", 32, "values"),
        ("e4m3", "fp32", 128, "values"),
        ("e4m3", "bf16", 64, "values"),
        ("e2m1", "e8m0", 32, "values"),
        ("e2m1", "e4m3", 16, "bytes"),
        ("int8", "fp16", 512, "bytes"),
        ("int4", "fp16", 512, "bytes"),
    ):
        codec = Codec(element, scale, group)
        parts = codecs.encode(codec, rows)
        read = codecs.decode(codec, parts)
        again = codecs.encode(codec, read)
        held = torch.ones(400, 512 // group, dtype=torch.bool)
        if promise == "bytes":
            factors = codecs.from_bytes(scale, parts["scales"])
            held = factors >= (2.0**-14 if scale == "fp16" else 2.0**-6)
            held &= factors.isfinite()
        assert held.sum() > held.numel() // 5
        assert torch.equal(codecs.decode(codec, again).unflatten(1, (-1, group))[held],
                           read.unflatten(1, (-1, group))[held]), element  # fmt: skip
        if promise == "bytes":
            for name in ("values", "scales"):
                a, b = (p[name].unflatten(1, (held.shape[1], -1))[held] for p in (parts, again))
                assert torch.equal(a, b), (element, name)
    codec = Codec("int8", "fp32", 128)
    read = codecs.decode(codec, codecs.encode(codec, rows))
    torch.testing.assert_close(codecs.decode(codec, codecs.encode(codec, read)), read, rtol=2.0**-22, atol=0)


def test_the_one_scale_of_fp4_v41_that_does_not_survive() -> None:
    """2**-8 with 4 as the largest code: read and stored again, its group gets 2**-9, and 8 * 2**-9 saturates at 6."""
    codec = Codec("e2m1", "e4m3", 16)
    subnormal = torch.linspace(1e-3, 9.5e-2, 4000)[:, None] * torch.linspace(-1, 1, 16)
    parts = codecs.encode(codec, subnormal)
    read = codecs.decode(codec, parts)
    changed = (codecs.decode(codec, codecs.encode(codec, read)) != read).any(-1)
    expected = (parts["scales"][:, 0] == 2) & (read.abs().amax(-1) == 4 * 2.0**-8)
    assert changed.any() and torch.equal(changed, expected)
