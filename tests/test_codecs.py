# SPDX-License-Identifier: Apache-2.0
"""The MX codecs of the C runtime give the bytes of ``mxdraft.mx``, and refuse what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from clib import library, pointer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxdraft import mx
from numpy.typing import NDArray

ERR_ARGUMENT, ERR_NUMERIC = 1, 5
RULES: tuple[mx.Rule, ...] = ("floor", "search")
KINDS: list[tuple[mx.Format, mx.Rule]] = [("mxfp4", "floor"), ("mxfp4", "search"), ("mxint8", "floor")]
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
INFINITY = np.float32(np.inf)

Arrays = tuple[NDArray[Any], NDArray[np.uint8]]


def c_encode(x: NDArray[np.float32], format: mx.Format, rule: mx.Rule) -> tuple[int, str, Arrays]:
    """(status, message, (data, scale)) of the C encoder."""
    ffi, lib = library()
    rows, k = x.shape
    error = ffi.new("mxd_error *")
    scale = np.zeros((rows, k // 32), np.uint8)
    if format == "mxfp4":
        data: NDArray[Any] = np.zeros((rows, k // 2), np.uint8)
        out = pointer(data, "uint8_t *"), pointer(scale, "uint8_t *")
        status = lib.mxd_mxfp4_encode(pointer(x, "float *"), rows, k, RULES.index(rule), *out, error)
    else:
        data = np.zeros((rows, k), np.int8)
        out = pointer(data, "int8_t *"), pointer(scale, "uint8_t *")
        status = lib.mxd_mxint8_encode(pointer(x, "float *"), rows, k, *out, error)
    return status, ffi.string(error.message).decode("utf-8"), (data, scale)


def c_decode(tensor: mx.MXTensor) -> NDArray[np.float32]:
    lib = library()[1]
    rows, k = tensor.shape
    x = np.full((rows, k), np.nan, np.float32)
    scale, out = pointer(tensor.scale, "uint8_t *"), pointer(x, "float *")
    if tensor.format == "mxfp4":
        lib.mxd_mxfp4_decode(pointer(tensor.data, "uint8_t *"), scale, rows, k, out)
    else:
        lib.mxd_mxint8_decode(pointer(tensor.data, "int8_t *"), scale, rows, k, out)
    return x


def assert_same(x: NDArray[np.float32], format: mx.Format, rule: mx.Rule) -> None:
    expected = mx.quantize(x, format, rule)
    status, _, (data, scale) = c_encode(x, format, rule)
    assert status == 0
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(data, expected.data)


def finite(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Bit patterns as float32, with NaN and Inf made finite."""
    return np.where(bits & 0x7F800000 == 0x7F800000, bits & 0xBFFFFFFF, bits).view(np.float32)


def around(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values, their two neighbours, and the negatives of all."""
    near = np.concatenate([values, np.nextafter(values, -INFINITY), np.nextafter(values, INFINITY)])
    return np.concatenate([near, -near])


def adversarial(name: str) -> NDArray[np.float32]:
    """Rows of one or two blocks."""
    rng = np.random.default_rng(0)
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))[:, None].astype(np.float32)
    match name:
        case "normal":
            return (rng.standard_normal((2000, 64)) * 2.0 ** rng.integers(-30, 30, (2000, 1))).astype(
                np.float32
            )
        case "any bits":
            return finite(rng.integers(0, 2**32, (2000, 64), np.uint32))
        case "small integers":  # their squared errors are exact: many ties of the search rule
            return (rng.integers(-127, 128, (2000, 32)) / np.float32(16)).astype(np.float32)
        case "midpoints":  # at every scale, with the exponent fixed by a 4
            row = np.zeros(64, np.float32)
            row[: 6 * len(MIDPOINTS)] = around(MIDPOINTS)
            row[[31, 63]] = 4
            return row * powers[:-3]
        case "largest":  # the largest value alone, around each number that decides about exponent or clamping
            deciding = around(np.array([1, 1.5, 1.75, 1.984375, 1.9921875], np.float32)) * powers
            x = np.zeros((deciding.size, 32), np.float32)
            x[:, 5] = deciding.ravel()
            x[:, 6] = deciding.ravel() / 3
            return x
        case "subnormal":
            return rng.integers(0, 2**23, (500, 32), np.uint32).view(np.float32)
        case "tiny":
            return rng.integers(0, 12, (500, 32), np.uint32).view(np.float32)
        case "huge":
            return finite(rng.integers(0x7E000000, 0x7F800000, (500, 32), np.uint32))
        case _:
            return np.array([[0.0] * 32 + [-0.0] * 32, [1.0] + [0.0] * 62 + [-1.0]], np.float32)


NAMES = ["normal", "any bits", "small integers", "midpoints", "largest", "subnormal", "tiny", "huge", "zero"]


@pytest.mark.parametrize(("format", "rule"), KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_encoders_agree(format: mx.Format, rule: mx.Rule, name: str) -> None:
    assert_same(adversarial(name), format, rule)


@pytest.mark.parametrize(("format", "rule"), KINDS)
@given(bits=hnp.arrays(np.uint32, st.sampled_from([(1, 32), (3, 64)]), elements=st.integers(0, 2**32 - 1)))
def test_encoders_agree_on_anything(format: mx.Format, rule: mx.Rule, bits: NDArray[np.uint32]) -> None:
    assert_same(finite(bits), format, rule)


@pytest.mark.parametrize("format", ["mxfp4", "mxint8"])
def test_decoders_agree_on_every_byte_at_every_scale(format: mx.Format) -> None:
    every = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    data = every if format == "mxfp4" else every.view(np.int8)
    blocks = 16 if format == "mxfp4" else 8
    scale = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, blocks))
    tensor = mx.MXTensor(format, data, scale, "floor")
    with np.errstate(over="ignore"):
        expected = mx.dequantize(tensor)
    np.testing.assert_array_equal(c_decode(tensor).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("format", "rule"), KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_with_row_and_column(
    format: mx.Format, rule: mx.Rule, value: float
) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 33] = x[2, 0] = value
    status, message, _ = c_encode(x, format, rule)
    assert status == ERR_NUMERIC
    assert "row 1, column 33" in message
    with pytest.raises(ValueError, match=r"\(1, 33\)"):
        mx.quantize(x, format, rule)


@pytest.mark.parametrize(("format", "rule"), KINDS)
@pytest.mark.parametrize("columns", [0, 31, 48])
def test_columns_that_are_no_whole_blocks_are_refused(format: mx.Format, rule: mx.Rule, columns: int) -> None:
    status, message, _ = c_encode(np.ones((2, columns), np.float32), format, rule)
    assert status == ERR_ARGUMENT
    assert str(columns) in message
