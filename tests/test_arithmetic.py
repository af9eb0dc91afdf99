# SPDX-License-Identifier: Apache-2.0
"""The scalar reference does what docs/arithmetic.md says, in exact arithmetic and against numpy."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
from clib import library, pointer, reference
from mxdraft import mx
from mxdraft.bundle.tiles import to_tiles
from numpy.typing import NDArray

Float = np.float32
Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(Float)


def assert_same_bits(a: Floats, b: Floats) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- exact arithmetic ----


def rounded(x: Fraction) -> Float:
    """The nearest float32, ties to even. float() alone would round twice."""
    near = Float(float(x))
    candidates = [near, np.nextafter(near, Float(-np.inf)), np.nextafter(near, Float(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1))


def fma(a: Float, b: Float, c: Float) -> Float:
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def sum16(terms: list[tuple[Float, Float]]) -> Float:
    """Products by fma, plain terms as products with 1."""
    lanes = [Float(0)] * 16
    for i, (a, b) in enumerate(terms):
        lanes[i % 16] = fma(a, b, lanes[i % 16])
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def exp(x: Floats) -> Floats:
    """The reference's exp, whose own tests are below: exp_weights with scale 1 and maximum 0."""
    out = np.empty_like(x)
    reference().exp_weights(pointer(x, "float *"), x.size, 1, 0, pointer(out, "float *"))
    return out


# ---- matrix product ----


Quantized = tuple[NDArray[np.int8], Floats, NDArray[np.int16], Any]


def quantize(x: Floats) -> Quantized:
    """Reference quantizer: integers, s, bias, and the mxd_act that points to them."""
    rows, k = x.shape
    q, s = np.empty((rows, k), np.int8), np.empty((rows, k // 32), Float)
    bias = np.empty((rows, k // 32, 2), np.int16)
    fields = (pointer(q, "int8_t *"), pointer(s, "float *"), pointer(bias, "int16_t *"))
    act = library()[0].new("mxd_act *", fields)
    reference().quantize(pointer(x, "float *"), k, rows, k, act)
    assert q.min() >= -127
    return q, s, bias, act


def test_row_quantizer() -> None:
    x = np.ldexp(normal(0, 46, 96), np.arange(-149, 127, 6, dtype=np.int32)[:, None])
    x[1, :32] = 0
    x[2, :32] = 0
    x[2, [3, 40]] = np.nextafter(Float(2.0**-100), Float(0)), 2.0**-100
    x[3, 7] = np.finfo(Float).max
    q, s, bias, _ = quantize(x)
    for m, b in np.ndindex(46, 3):
        block = x[m, 32 * b : 32 * b + 32]
        largest = np.abs(block).max()
        steps, scale = np.zeros(32), Float(0)
        if largest >= 2.0**-100:
            steps, scale = np.rint(block * (Float(127) / largest)), largest / Float(127)
        assert q[m, 32 * b : 32 * b + 32].tolist() == steps.tolist()
        assert s[m, b] == scale
        columns = q[m, 32 * b : 32 * b + 32].astype(int).reshape(8, 2, 2)  # 0, 1 and 2, 3 modulo 4
        assert bias[m, b].tolist() == (-12 * columns.sum(axis=(0, 2))).tolist()
    expected_q, expected_s = mx.quantize_activations(x)
    np.testing.assert_array_equal(q, expected_q)
    assert_same_bits(s, expected_s)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_row_quantizer_marks_the_block_of_a_fault(fault: float) -> None:
    x = normal(1, 2, 64)
    x[1, 40] = fault
    q, s, bias, _ = quantize(x)
    assert np.isnan(s).tolist() == [[False, False], [False, True]]
    assert not q[1, 32:].any()
    assert q[1, :32].any()
    assert not bias[1, 1].any()


def some_residual(base: mx.MXTensor) -> mx.MXTensor:
    """Any residual plane that a base plane may have: exponents 0 to 3 below the base's, any elements."""
    random = np.random.default_rng(4)
    reach = random.integers(0, 4, base.scale.shape, np.uint8)
    data = random.integers(0, 256, base.data.shape, np.uint8)
    return mx.MXTensor("mxfp4", data, base.scale - reach, "floor")


@pytest.mark.parametrize(("format", "planes"), [("mxfp4", 1), ("mxfp4", 2), ("mxint8", 1)])
def test_matrix_product_in_exact_arithmetic(format: mx.Format, planes: int) -> None:
    weights = np.ldexp(normal(2, 32, 160), np.arange(32, dtype=np.int32)[:, None] % 7)
    tensors = [mx.quantize(weights, format)]
    if planes == 2:
        tensors.append(some_residual(tensors[0]))
    q, s, _, act = quantize(normal(3, 3, 160) * Float(1000))
    tiles = [np.ascontiguousarray(to_tiles(t)) for t in tensors]
    base, residual = [*(pointer(t, "uint8_t *") for t in tiles), library()[0].NULL][:2]
    y = np.full((3, 40), np.nan, Float)
    kernel = reference().matmul_mxfp4 if format == "mxfp4" else reference().matmul_mxint8
    kernel(base, residual, 5, 2, act, 3, pointer(y, "float *"), 40)

    total = np.sum([mx.dequantize(tensor).astype(np.float64) for tensor in tensors], axis=0)
    for m, n in np.ndindex(3, 32):
        acc = Float(0)
        for b in range(5):
            block = slice(32 * b, 32 * b + 32)
            # An integer below 2^20 times a power of two: exact, also in binary32.
            dot = total[n, block] @ q[m, block].astype(np.float64)
            assert Float(dot) == dot
            acc = fma(Float(dot), s[m, b], acc)
        assert y[m, n] == acc
    assert np.isnan(y[:, 32:]).all()


# ---- vector operations ----


@pytest.mark.parametrize("n", [32, 41, 96])
def test_rmsnorm(n: int) -> None:
    x, w, y = normal(4, n), normal(5, n), np.empty(n, Float)
    eps = Float(1e-5)
    total = reference().rmsnorm(pointer(x, "float *"), pointer(w, "float *"), n, eps, pointer(y, "float *"))
    assert Float(total) == sum16([(a, a) for a in x])
    scale = Float(1) / np.sqrt(Float(total) / Float(n) + eps)
    assert_same_bits(y, x * scale * w)


def test_rope_rotates_the_two_halves() -> None:
    d = 40
    x, c, s = normal(6, d), normal(7, d // 2), normal(8, d // 2)
    lo, hi = x[: d // 2].copy(), x[d // 2 :].copy()
    reference().rope(pointer(x, "float *"), pointer(c, "float *"), pointer(s, "float *"), d)
    expected = [fma(a, t, -(b * u)) for a, b, t, u in zip(lo, hi, c, s, strict=True)]
    expected += [fma(b, t, a * u) for a, b, t, u in zip(lo, hi, c, s, strict=True)]
    assert_same_bits(x, np.array(expected))


@pytest.mark.parametrize(("n", "d", "heads"), [(1, 32, 1), (5, 40, 3), (37, 32, 2)])
def test_attention(n: int, d: int, heads: int) -> None:
    q, k, v = normal(9, heads, d), normal(10, n, d).astype(np.float16), normal(11, n, d).astype(np.float16)
    scores, out = np.empty((heads, n), Float), np.empty((heads, d), Float)
    scale = Float(1) / np.sqrt(Float(d))
    cache = pointer(k, "uint16_t *"), pointer(v, "uint16_t *")
    output = pointer(scores, "float *"), pointer(out, "float *")
    reference().attention(pointer(q, "float *"), heads, *cache, n, d, scale, *output)

    for h in range(heads):
        t = np.array([sum16(list(zip(q[h], row, strict=True))) for row in k.astype(Float)]) * scale
        w = exp(t - t.max())
        inverse = Float(1) / sum16([(x, Float(1)) for x in w])
        for i in range(d):
            mixed = reduce(lambda acc, j: fma(Float(w[j]), Float(v[j, i]), acc), range(n), Float(0))
            assert out[h, i] == mixed * inverse


def test_silu_mul() -> None:
    gate, up, out = normal(12, 64) * Float(20), normal(13, 64), np.empty(64, Float)
    reference().silu_mul(pointer(gate, "float *"), pointer(up, "float *"), 64, pointer(out, "float *"))
    assert_same_bits(out, gate / (Float(1) + exp(-gate)) * up)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate.astype(np.float64))) * up, rtol=2.0**-20)


def test_exp_weights() -> None:
    x, w = normal(14, 100) * Float(10), np.empty(100, Float)
    scale, top = Float(1 / 0.7), x.max()
    reference().exp_weights(pointer(x, "float *"), 100, scale, top, pointer(w, "float *"))
    assert_same_bits(w, exp((x - top) * scale))


# ---- exp ----


def test_exp_is_accurate() -> None:
    # Random, and around the multiples of ln(2)/2 where the reduction switches and its remainder is largest.
    switches = (np.arange(-250, 254) * (np.log(2) / 2)).astype(Float)
    near = (switches.view(np.int32)[:, None] + np.arange(-50, 51, dtype=np.int32)).view(Float).ravel()
    uniform = np.random.default_rng(15).uniform(-87, 88, 300_000).astype(Float)
    small = np.ldexp(uniform, -100)
    x = np.concatenate(
        [uniform, small, near[(near >= -87) & (near <= 88)], [Float(-87), Float(88), Float(0)]]
    )
    true = np.exp(x.astype(np.float64))
    assert np.abs(exp(x) / true - 1).max() < 2.0**-22


def test_exp_at_its_ends() -> None:
    x = np.array([0, -0.0, -88, -1e30, -np.inf, 89, 1e30, np.inf, np.nan], Float)
    lowest, highest = exp(np.array([-87, 88], Float))
    assert exp(x)[:-1].tolist() == [1, 1, lowest, lowest, lowest, highest, highest, highest]
    assert np.isnan(exp(x)[-1])
    assert np.isfinite([lowest, highest]).all()
    assert lowest >= 2.0**-126  # never subnormal


# ---- f16 ----


def to_f16(x: Floats) -> NDArray[np.uint16]:
    out = np.empty(x.shape, np.uint16)
    reference().to_f16(pointer(x, "float *"), x.size, pointer(out, "uint16_t *"))
    return out


def numpy_f16(x: Floats) -> NDArray[np.uint16]:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16)


EVERY_F16 = np.arange(65536, dtype=np.uint16)


def test_f16_to_f32_for_every_pattern() -> None:
    convert = library()[1].mxd_f16_to_f32
    ours = np.array([convert(h) for h in range(65536)], Float)
    theirs = EVERY_F16.view(np.float16).astype(Float)
    nan = np.isnan(theirs)
    assert_same_bits(ours[~nan], theirs[~nan])
    assert np.isnan(ours[nan]).all()


def test_f32_to_f16_returns_every_pattern() -> None:
    values = EVERY_F16.view(np.float16)
    back = to_f16(values.astype(Float))
    nan = np.isnan(values)
    np.testing.assert_array_equal(back[~nan], EVERY_F16[~nan])
    assert np.isnan(back[nan].view(np.float16)).all()


def test_f32_to_f16_at_and_around_every_midpoint() -> None:
    values = EVERY_F16[:0x7C01].view(np.float16).astype(Float)
    values[-1] = 65536  # what would follow 65504
    middle = (values[:-1] + values[1:]) / 2
    near = np.concatenate([middle, np.nextafter(middle, Float(0)), np.nextafter(middle, Float(np.inf))])
    for x in (near, -near):
        np.testing.assert_array_equal(to_f16(x), numpy_f16(x))


def test_f32_to_f16_of_any_bits() -> None:
    bits = np.random.default_rng(16).integers(0, 2**32, 500_000, np.uint32)
    in_range = bits & 0x8FFFFFFF | 0x30000000  # 2^-31 and up
    for x in (bits.view(Float), in_range.view(Float)):
        x = x[~np.isnan(x)]
        np.testing.assert_array_equal(to_f16(x), numpy_f16(x))
