# SPDX-License-Identifier: Apache-2.0
"""MX block formats (OCP Microscaling Formats v1.0): the only definition in Python.

``docs/arithmetic.md`` is the specification; ``mxd_mxfp4_encode`` and friends in the C runtime give the same
bytes. Arrays are blocked along the last axis, 32 values a block, one E8M0 scale byte each (code c means
2**(c - 127)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
ACTIVATION_STEPS = 127  # activation integers reach this far from zero
ACTIVATION_TINY = 2.0**-100  # below it, 127 / max|x| would overflow
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Code of the doubled value d at d + 12; -0 is stored as +0.
_CODE_OF_DOUBLED = np.zeros(25, np.uint8)
_CODE_OF_DOUBLED[(2 * E2M1_VALUES).astype(np.int8) + 12] = [*range(8), 0, *range(9, 16)]
RESIDUAL_REACH = 3  # so many powers of two a residual block's exponent may lie below its base block's
_CHUNK = 4096  # blocks worked on at a time, so that intermediate results stay in the cache

Format = Literal["mxfp4", "mxint8"]
Rule = Literal["floor", "search"]


@dataclass(frozen=True)
class MXTensor:
    """A quantized array.

    ``data``: uint8 [..., K/2] (mxfp4, low nibble = even index) or int8 [..., K] (mxint8); ``scale``: uint8
    [..., K/32]; ``rule``: how the shared exponents were chosen.
    """

    format: Format
    data: NDArray[np.uint8] | NDArray[np.int8]
    scale: NDArray[np.uint8]
    rule: Rule

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scale.shape[:-1], self.scale.shape[-1] * BLOCK)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


def quantize(x: NDArray[np.float32], format: Format = "mxfp4", rule: Rule = "floor") -> MXTensor:
    """Quantize a float array whose last axis is a multiple of 32.

    ``rule`` is ``floor`` (OCP section 6.3) or, for mxfp4, ``search`` (least squared error among the
    neighbouring exponents). Raises ValueError on NaN or Inf (with its index) and on a last axis that is no
    multiple of 32.
    """
    blocks, exponent = _blocks(x)
    if format == "mxint8":
        if rule != "floor":
            raise ValueError("mxint8 has only the rule 'floor'")
        exponent = np.clip(exponent, -120, 127)
        q = np.rint(np.ldexp(blocks, (6 - exponent)[:, None]))
        data = np.clip(q, -127, 127).astype(np.int8).reshape(x.shape)
        return MXTensor(format, data, _scale_bytes(exponent, x.shape), rule)
    low, high = np.full(len(blocks), -127), np.full(len(blocks), 127)
    return _encode_mxfp4(blocks, exponent - 2, low, high, rule, x.shape)


def quantize_residual(x: NDArray[np.float32], base: MXTensor, rule: Rule = "search") -> MXTensor:
    """Quantize to MXFP4 what plane ``base`` leaves of a weight: ``x`` = weight − dequantize(base).

    Each exponent of ``rule`` (with ``search``, each candidate) is first brought to the base block's own or at
    most RESIDUAL_REACH below it. Then base and residual of an element are one int8 number times the
    residual's scale: 2**(difference of exponents) times the doubled base element, plus the doubled residual.
    Raises ValueError as ``quantize`` does.
    """
    blocks, exponent = _blocks(x)
    if x.shape != base.shape:
        raise ValueError(f"shape {x.shape} is not the base plane's, {base.shape}")
    high = base.scale.ravel().astype(np.int32) - 127
    low = np.maximum(high - RESIDUAL_REACH, -127)
    return _encode_mxfp4(blocks, exponent - 2, low, high, rule, x.shape)


def quantize_activations(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize rows that enter a matrix product as the runtime does: integers [..., K], f32 scale [...,
    K/32].

    Activations are never stored, so their scale need not be a power of two: it is max|x| / ACTIVATION_STEPS.
    NaN or Inf makes its block's scale NaN; a block below ``ACTIVATION_TINY`` becomes zeros with scale 0.
    """
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    finite = np.isfinite(amax)
    present = finite & (amax >= ACTIVATION_TINY)
    upscale = np.divide(np.float32(ACTIVATION_STEPS), amax, where=present, out=np.zeros_like(amax))
    scale = np.where(present, amax, np.where(finite, 0, np.nan)).astype(np.float32)
    scale /= np.float32(ACTIVATION_STEPS)
    q = np.zeros(blocks.shape, np.int8)
    q[present] = np.rint(blocks[present] * upscale[present, None])
    return q.reshape(x.shape), scale


def dequantize_activations(q: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the f32 values that a matrix product sees."""
    with np.errstate(over="ignore"):  # 127 * (max|x| / 127) may round up past the largest float
        values: NDArray[np.float32] = q.reshape(*scale.shape, BLOCK) * scale[..., None]
    return values.reshape(q.shape)


def dequantize(t: MXTensor) -> NDArray[np.float32]:
    """Return the float32 values of a quantized array (exact). Raises ValueError on a scale of 255 (NaN)."""
    if (t.scale == 255).any():
        raise ValueError("E8M0 scale 255 is NaN")
    if t.format == "mxfp4":
        codes = np.stack([t.data & 15, t.data >> 4], axis=-1).reshape(*t.scale.shape, BLOCK)
        values = E2M1_VALUES[codes]
        shift = 127
    else:
        values = t.data.reshape(*t.scale.shape, BLOCK).astype(np.float32)
        shift = 127 + 6
    exponent = t.scale.astype(np.int32) - shift
    return np.ldexp(values, exponent[..., None]).astype(np.float32, copy=False).reshape(t.shape)


def quantize_planes(x: NDArray[np.float32], rule: Rule = "search") -> tuple[MXTensor, MXTensor]:
    """Quantize to MXFP4 planes: ``base = Q(x)``, and ``residual = Q(x - base)`` within base's reach."""
    base = quantize(x, "mxfp4", rule)
    return base, quantize_residual(np.asarray(x, np.float32) - dequantize(base), base, rule)


def _blocks(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Blocks [n, 32] of ``x`` and floor(log2(max|x|)) of each (of zeros, −1000). Raises ValueError."""
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.size == 0:
        raise ValueError(f"shape {x.shape}: the last axis must be a positive multiple of {BLOCK}")
    finite = np.isfinite(x)
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"value {x[index]} at index {index} cannot be quantized")
    blocks = x.reshape(-1, BLOCK)
    amax = np.abs(blocks).max(axis=1)
    # frexp: amax = m * 2**e with m in [.5, 1), so floor(log2(amax)) = e - 1, exactly, also for subnormals.
    return blocks, np.where(amax > 0, np.frexp(amax)[1].astype(np.int32) - 1, -1000)


def _encode_mxfp4(
    blocks: NDArray[np.float32],
    floor: NDArray[np.int32],
    low: NDArray[np.int32],
    high: NDArray[np.int32],
    rule: Rule,
    shape: tuple[int, ...],
) -> MXTensor:
    """MXFP4 of ``blocks``: exponents ``floor``, or with ``search`` the best next to it, in [low, high]; of
    zeros, low."""
    floor = floor.clip(-127, 127)
    exponent = floor.clip(low, high)
    data = np.empty((len(blocks), BLOCK // 2), np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        columns = np.ascontiguousarray(blocks[chunk].T)  # [32, blocks]: element k of all blocks is contiguous
        if rule == "search":
            exponent[chunk] = _search(columns, floor[chunk], low[chunk], high[chunk])
        codes = _CODE_OF_DOUBLED[(2 * _scaled_e2m1(columns, exponent[chunk]) + 12).astype(np.uint8)]
        data[chunk] = (codes[0::2] | (codes[1::2] << 4)).T
    exponent = np.where(blocks.any(axis=1), exponent, low)
    return MXTensor("mxfp4", data.reshape(*shape[:-1], -1), _scale_bytes(exponent, shape), rule)


def _scaled_e2m1(x: NDArray[np.float32], exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """Round x * 2**-exponent to the nearest E2M1 values, ties to even mantissa, saturated; an exponent a
    column."""
    v = x * np.ldexp(np.float32(1), -exponent)
    # 2**floor(log2|v|), at least 1: E2M1 is spaced by half of it. So is float32 around 1.5 * 2**22 times as
    # much, which rounds the sum to E2M1's spacing, to even among equals.
    binade = np.maximum(v.view(np.uint32) & np.uint32(0x7F800000), np.uint32(0x3F800000)).view(np.float32)
    anchor = binade * np.float32(1.5 * 2**22)
    rounded: NDArray[np.float32] = (v + anchor) - anchor
    return rounded.clip(np.float32(-6), np.float32(6))


def _search(
    x: NDArray[np.float32], floor: NDArray[np.int32], low: NDArray[np.int32], high: NDArray[np.int32]
) -> NDArray[np.int32]:
    best = np.full(floor.shape, np.inf)
    choice = floor.clip(low, high)
    for delta in (-1, 0, 1):
        exponent = (floor + delta).clip(low, high)
        with np.errstate(over="ignore"):  # a candidate that overflows has an infinite error
            values = _scaled_e2m1(x, exponent) * np.ldexp(np.float32(1), exponent)
        error = np.zeros(floor.shape)
        for k in range(BLOCK):  # ascending order in binary64, as in C
            d = np.subtract(x[k], values[k], dtype=np.float64)
            error += d * d
        better = error < best
        choice = np.where(better, exponent, choice)
        best = np.where(better, error, best)
    return choice


def _scale_bytes(exponent: NDArray[np.int32], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return (exponent + 127).astype(np.uint8).reshape(*shape[:-1], shape[-1] // BLOCK)
