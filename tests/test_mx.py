# SPDX-License-Identifier: Apache-2.0
"""The MX codec against ml_dtypes' element types, float64 and the specification's worked examples."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxdraft import mx
from numpy.typing import NDArray

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
SMALLEST, LARGEST = np.float32(2.0**-149), np.finfo(np.float32).max


def codes(tensor: mx.MXTensor) -> NDArray[np.uint8]:
    """Element codes of an mxfp4 tensor, unpacked by the definition: low nibble = even index."""
    packed = tensor.data.view(np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(tensor.shape)


def block(*values: float | np.floating) -> NDArray[np.float32]:
    """A block that begins with ``values``, else zero."""
    x = np.zeros((1, 32), np.float32)
    x[0, : len(values)] = values
    return x


def e8m0(scale: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(scale.view(ml_dtypes.float8_e8m0fnu), np.float64)


def test_nibble_order_of_the_worked_example() -> None:
    tensor = mx.quantize(block(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6))
    assert tensor.data[0, :6].tolist() == [0x10, 0x32, 0x54, 0x76, 0xF9, 0x00]
    assert tensor.scale.tolist() == [[127]]
    assert tensor.shape == (1, 32)
    assert tensor.nbytes == 17


def test_rounding_at_and_around_every_midpoint_is_that_of_ml_dtypes() -> None:
    below, above = np.nextafter(MIDPOINTS, np.float32(0)), np.nextafter(MIDPOINTS, np.float32(9))
    magnitudes = np.concatenate([MIDPOINTS, below, above, E2M1[:8]])
    for value in np.concatenate([magnitudes, -magnitudes]):
        tensor = mx.quantize(block(value, 4))  # the 4 fixes the shared exponent at 0
        expected = value.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        assert tensor.scale[0, 0] == 127
        assert mx.dequantize(tensor)[0, 0] == expected, value


@given(st.integers(-125, 125), st.lists(st.floats(-7.75, 7.75, width=32), min_size=31, max_size=31))
def test_rounding_anywhere_is_that_of_ml_dtypes(exponent: int, values: list[float]) -> None:
    v = block(4, *values)
    x = np.ldexp(v, exponent)
    v = np.ldexp(x, -exponent)  # what the scaling to a small exponent leaves of it
    expected = np.clip(v, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    tensor = mx.quantize(x)
    assert tensor.scale[0, 0] == 127 + exponent
    np.testing.assert_array_equal(np.ldexp(mx.dequantize(tensor), -exponent), expected)


def test_values_that_round_to_zero_are_stored_as_plus_zero() -> None:
    tensor = mx.quantize(block(-0.25, -0.0, -1e-30, 4))
    assert codes(tensor)[0, :4].tolist() == [0, 0, 0, 6]


@pytest.mark.parametrize("k", [-120, -1, 0, 1, 124])
def test_floor_exponent_at_its_edges(k: int) -> None:
    scale = np.float32(2.0**k)
    for amax, exponent in [
        (4 * scale, k),
        (6 * scale, k),
        (7 * scale, k),  # saturates
        (np.nextafter(8 * scale, np.float32(0)), k),
        (8 * scale, k + 1),
        (np.nextafter(8 * scale, np.float32(np.inf)), k + 1),
    ]:
        if np.isfinite(amax):
            assert mx.quantize(block(1e-3 * scale, -amax)).scale[0, 0] == 127 + exponent, amax


def test_exponent_is_clamped_to_e8m0() -> None:
    assert mx.quantize(block(2.0**-125)).scale[0, 0] == 0  # floor gives -127, the smallest
    smallest = mx.quantize(block(2.0**-128, SMALLEST))
    assert smallest.scale[0, 0] == 0
    assert mx.dequantize(smallest)[0, :2].tolist() == [2.0**-128, 0]
    largest = mx.quantize(block(-LARGEST))
    assert largest.scale[0, 0] == 127 + 125
    assert mx.dequantize(largest)[0, 0] == -6 * 2.0**125


@pytest.mark.parametrize("rule", ["floor", "search"])
def test_block_of_zeros(rule: mx.Rule) -> None:
    tensor = mx.quantize(block(-0.0), "mxfp4", rule)
    assert not tensor.data.any()
    assert tensor.scale.tolist() == [[0]]


def test_mxfp4_decode_is_exact_for_every_scale_and_code() -> None:
    scales = np.arange(255, dtype=np.uint8)
    data = np.tile(np.arange(0x10, 0x100, 0x22, dtype=np.uint8), (255, 2))  # nibbles 0 1 2 3 … 14 15
    tensor = mx.MXTensor("mxfp4", data, scales[:, None], "floor")
    assert codes(tensor)[0].tolist() == [*range(16), *range(16)]
    with np.errstate(over="ignore"):
        expected = (E2M1.astype(np.float64) * e8m0(scales)[:, None]).astype(np.float32)
        decoded = mx.dequantize(tensor)
    np.testing.assert_array_equal(decoded[:, :16], expected)
    np.testing.assert_array_equal(decoded[:, 16:], expected)


def test_mxint8_decode_is_exact_for_every_scale_and_value() -> None:
    scales = np.arange(255, dtype=np.uint8)
    values = np.arange(-128, 128, dtype=np.int8)
    tensor = mx.MXTensor("mxint8", np.tile(values, (255, 1)), np.tile(scales[:, None], (1, 8)), "floor")
    with np.errstate(over="ignore"):
        expected = (values.astype(np.float64) / 64 * e8m0(scales)[:, None]).astype(np.float32)
        decoded = mx.dequantize(tensor)
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("format", ["mxfp4", "mxint8"])
def test_scale_255_is_refused(format: mx.Format) -> None:
    tensor = mx.quantize(block(1), format)
    broken = mx.MXTensor(format, tensor.data, np.full((1, 1), 255, np.uint8), "floor")
    with pytest.raises(ValueError, match="255"):
        mx.dequantize(broken)


def search_by_definition(x: NDArray[np.float32]) -> int:
    """Scale code of the ``search`` rule for one block, in rational arithmetic."""
    floor = int(np.frexp(np.abs(x).max())[1]) - 1 - 2
    errors: list[tuple[Fraction, int]] = []
    for exponent in (floor - 1, floor, floor + 1):
        v = np.ldexp(x, -exponent)
        rounded = np.clip(v, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        error = sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(v, rounded, strict=True))
        errors.append((error * Fraction(4) ** exponent, exponent))
    return min(errors)[1] + 127


def test_search_rule_is_the_least_squared_error() -> None:
    # Multiples of 1/16 below 8: their squared errors are exact in binary64, so ties are ties there, too.
    x = (np.random.default_rng(0).integers(-127, 128, (300, 32)) / 16).astype(np.float32)
    x[100:] *= np.float32(0.5) * (np.arange(32) > 0)
    expected = [search_by_definition(row) for row in x]
    assert mx.quantize(x, "mxfp4", "search").scale[:, 0].tolist() == expected
    assert expected != mx.quantize(x).scale[:, 0].tolist()


@pytest.mark.parametrize(
    ("values", "floor", "search"),
    [
        ((4, *(0.25,) * 31), 127, 126),  # one value saturates, but all others fit
        ((7, 7), 127, 127),  # 6 and 8 are as near: the smaller exponent
        ((7.5, 7.5), 127, 128),
        ((2.0**-128, 0.75 * 2.0**-127), 0, 0),  # e - 1 does not exist
        ((LARGEST,), 252, 252),  # under e + 1 it would be infinite
    ],
)
def test_search_rule_examples(values: tuple[float, ...], floor: int, search: int) -> None:
    assert mx.quantize(block(*values)).scale[0, 0] == floor
    assert mx.quantize(block(*values), "mxfp4", "search").scale[0, 0] == search


@given(st.sampled_from(["floor", "search"]), st.integers(0, 252), st.binary(min_size=16, max_size=16))
def test_what_mxfp4_can_represent_survives(rule: mx.Rule, scale: int, data: bytes) -> None:
    tensor = mx.MXTensor(
        "mxfp4", np.frombuffer(data, np.uint8)[None], np.full((1, 1), scale, np.uint8), "floor"
    )
    x = mx.dequantize(tensor)
    np.testing.assert_array_equal(mx.dequantize(mx.quantize(x, "mxfp4", rule)), x)


@pytest.mark.parametrize("rule", ["floor", "search"])
def test_blocks_do_not_influence_each_other(rule: mx.Rule) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, 1500, 64)) * 2.0 ** rng.integers(-9, 9, (3, 1500, 1))).astype(np.float32)
    whole = mx.quantize(x, "mxfp4", rule)
    assert whole.shape == x.shape
    assert whole.data.shape == (3, 1500, 32)
    assert whole.scale.shape == (3, 1500, 2)
    for index in [(0, 0), (1, 548), (2, 1499)]:  # more than one chunk of work
        alone = mx.quantize(x[index], "mxfp4", rule)
        np.testing.assert_array_equal(whole.data[index], alone.data)
        np.testing.assert_array_equal(whole.scale[index], alone.scale)


def test_search_beats_floor_and_two_planes_beat_one() -> None:
    x = np.random.default_rng(2).standard_normal((256, 1024)).astype(np.float32)

    def error(y: NDArray[np.float32]) -> float:
        return float(np.sqrt(np.mean((x - y) ** 2)))

    base, residual = mx.quantize_planes(x)
    floor_error, base_error = error(mx.dequantize(mx.quantize(x))), error(mx.dequantize(base))
    full_error = error(mx.dequantize(base) + mx.dequantize(residual))
    assert 0.10 < base_error < floor_error < 0.12
    assert 0.005 < full_error < 0.013


def residual_by_definition(x: NDArray[np.float32], base_code: int) -> int:
    """Scale code of one residual block by rule ``search``: the best of three, each within reach of base."""
    highest = base_code - 127
    lowest = max(highest - mx.RESIDUAL_REACH, -127)
    floor = int(np.frexp(np.abs(x).max())[1]) - 1 - 2
    errors = []
    for candidate in (floor - 1, floor, floor + 1):
        exponent = min(max(candidate, lowest), highest)
        v = np.ldexp(x.astype(np.float64), -exponent)
        rounded = np.clip(v, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        errors.append((float(np.square(np.ldexp(v - rounded, exponent)).sum()), exponent))
    return min(errors)[1] + 127


def test_residual_stays_within_reach_of_its_base_and_composes_with_it() -> None:
    rng = np.random.default_rng(3)
    x = (rng.integers(-127, 128, (300, 32)) / 16).astype(np.float32)
    base = mx.quantize(x, "mxfp4", "search")
    # Residuals of all sizes: none, far below what three powers of two reach, and beyond the largest element.
    left = ((x - mx.dequantize(base)) * np.exp2(rng.integers(-6, 6, (300, 1)))).astype(np.float32)
    left[:7] = 0
    residual = mx.quantize_residual(left, base)
    wanted = [
        residual_by_definition(row, int(code)) for row, code in zip(left[7:], base.scale[7:, 0], strict=True)
    ]
    assert residual.scale[7:, 0].tolist() == wanted
    shift = base.scale.astype(int) - residual.scale
    assert set(shift[7:].ravel()) == set(range(mx.RESIDUAL_REACH + 1))
    assert (shift[:7] == mx.RESIDUAL_REACH).all()
    floor = mx.quantize_residual(left, base, "floor").scale.astype(int)
    assert ((base.scale - floor >= 0) & (base.scale - floor <= mx.RESIDUAL_REACH)).all()
    doubled = [np.rint(2 * np.ldexp(mx.dequantize(t), 127 - t.scale.astype(int))) for t in (base, residual)]
    operand = np.ldexp(doubled[0], shift) + doubled[1]
    assert np.abs(operand).max() <= 108
    both = mx.dequantize(base) + mx.dequantize(residual)
    assert np.array_equal(np.ldexp(operand, residual.scale.astype(int) - 128).astype(np.float32), both)


def test_residual_of_the_smallest_base_and_of_another_shape() -> None:
    base = mx.quantize(block(2.0**-126), "mxfp4", "search")
    assert base.scale[0, 0] < mx.RESIDUAL_REACH
    assert mx.quantize_residual(block(2.0**-130), base).scale[0, 0] == 0
    with pytest.raises(ValueError, match="is not the base plane's"):
        mx.quantize_residual(np.zeros((2, 32), np.float32), base)


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (1.0, 0),
        (np.nextafter(np.float32(2), np.float32(0)), 0),  # 127.99… steps: clamped to 127
        (2.0, 1),
        (2.0**-120, -120),
        (2.0**-121, -120),
        (SMALLEST, -120),
        (LARGEST, 127),
    ],
)
def test_mxint8_exponent(amax: float, exponent: int) -> None:
    tensor = mx.quantize(block(-amax), "mxint8")
    assert tensor.scale[0, 0] == 127 + exponent
    assert tensor.data[0, 0] == np.clip(np.rint(float(-amax) * 2.0 ** (6 - exponent)), -127, 127)


def test_mxint8_rounds_to_even() -> None:
    tensor = mx.quantize(block(1, 0.5 / 64, 1.5 / 64, -2.5 / 64), "mxint8")
    assert tensor.data[0, :4].tolist() == [64, 0, 2, -2]
    assert tensor.data.dtype == np.int8


def test_mxint8_block_of_zeros_has_code_7() -> None:
    tensor = mx.quantize(block(0), "mxint8")
    assert not tensor.data.any()
    assert tensor.scale.tolist() == [[7]]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_mxint8_error_is_at_most_one_step(values: list[float]) -> None:
    x = block(*values).astype(np.float64)
    tensor = mx.quantize(block(*values), "mxint8")
    step = 2.0 ** (int(tensor.scale[0, 0]) - 127 - 6)
    decoded = mx.dequantize(tensor)
    clamped = np.abs(tensor.data) == 127
    assert (np.abs(decoded - x) <= np.where(clamped, step, step / 2)).all()


@pytest.mark.parametrize("format", ["mxfp4", "mxint8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_with_their_index(format: mx.Format, value: float) -> None:
    x = np.ones((2, 3, 64), np.float32)
    x[1, 2, 33] = value
    with pytest.raises(ValueError, match=r"\(1, 2, 33\)"):
        mx.quantize(x, format)


@pytest.mark.parametrize("shape", [(2, 33), (31,), (), (0, 32), (4, 0)])
def test_shapes_that_are_not_whole_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mx.quantize(np.zeros(shape, np.float32))


def test_mxint8_has_one_rule() -> None:
    with pytest.raises(ValueError, match="floor"):
        mx.quantize(block(1), "mxint8", "search")
