"""MX block formats (OCP Microscaling Formats v1.0): the only definition in Python.

``docs/arithmetic.md`` is the specification; ``mxd_mxfp4_encode`` and friends in the C runtime give the same bytes.
Arrays are blocked along the last axis, 32 values a block, one E8M0 scale byte each (code c means 2**(c - 127)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Midpoints between neighbouring magnitudes. A tie goes to the even mantissa, which is the lower magnitude at
# .25, 1.25, 2.5 and 5 and the higher one at .75, 1.75 and 3.5.
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_TIE_UP = np.array([False, True, False, True, False, True, False])

Format = Literal["mxfp4", "mxint8"]
Rule = Literal["floor", "search"]


@dataclass(frozen=True)
class MXTensor:
    """A quantized array. ``data``: uint8 [..., K/2] (mxfp4, low nibble = even index) or int8 [..., K] (mxint8);
    ``scale``: uint8 [..., K/32]; ``rule``: how the shared exponents were chosen."""

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

    ``rule`` is ``floor`` (OCP section 6.3) or, for mxfp4, ``search`` (least squared error among the neighbouring
    exponents). Raises ValueError on NaN or Inf (with its index) and on a last axis that is no multiple of 32.
    """
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
    exponent = np.where(amax > 0, np.frexp(amax)[1].astype(np.int32) - 1, -1000)
    if format == "mxint8":
        if rule != "floor":
            raise ValueError("mxint8 has only the rule 'floor'")
        exponent = np.clip(exponent, -120, 127)
        q = np.rint(np.ldexp(blocks, (6 - exponent)[:, None]))
        data = np.clip(q, -127, 127).astype(np.int8).reshape(x.shape)
        return MXTensor(format, data, _scale_bytes(exponent, x.shape), rule)
    exponent = np.clip(exponent - 2, -127, 127)
    if rule == "search":
        exponent = _search(blocks, exponent)
    exponent = np.where(amax > 0, exponent, -127)
    codes = _e2m1_codes(np.ldexp(blocks, -exponent[:, None]))
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return MXTensor(format, packed, _scale_bytes(exponent, x.shape), rule)


def dequantize(t: MXTensor) -> NDArray[np.float32]:
    """The float32 values of a quantized array (exact). Raises ValueError on a scale of 255 (NaN)."""
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
    """Base and residual MXFP4 planes: ``base = Q(x)``, ``residual = Q(x - base)``."""
    base = quantize(x, "mxfp4", rule)
    return base, quantize(np.asarray(x, np.float32) - dequantize(base), "mxfp4", rule)


def _e2m1_codes(v: NDArray[np.float32]) -> NDArray[np.uint8]:
    magnitude = np.abs(v)
    code = np.zeros(v.shape, np.uint8)
    for midpoint, up in zip(_MIDPOINTS, _TIE_UP, strict=True):
        code += (magnitude >= midpoint) if up else (magnitude > midpoint)
    return code | np.where((v < 0) & (code > 0), 8, 0).astype(np.uint8)


def _search(blocks: NDArray[np.float32], floor: NDArray[np.int32]) -> NDArray[np.int32]:
    best = np.full(floor.shape, np.inf)
    choice = floor.copy()
    for delta in (-1, 0, 1):
        exponent = np.clip(floor + delta, -127, 127)
        codes = _e2m1_codes(np.ldexp(blocks, -exponent[:, None]))
        with np.errstate(over="ignore"):
            values = np.ldexp(E2M1_VALUES[codes], exponent[:, None])
        error = np.zeros(floor.shape)
        for k in range(BLOCK):  # ascending order in binary64, as in C
            d = blocks[:, k].astype(np.float64) - values[:, k]
            error += d * d
        better = error < best
        choice = np.where(better, exponent, choice)
        best = np.where(better, error, best)
    return choice


def _scale_bytes(exponent: NDArray[np.int32], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return (exponent + 127).astype(np.uint8).reshape(*shape[:-1], shape[-1] // BLOCK)
