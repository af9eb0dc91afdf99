# SPDX-License-Identifier: Apache-2.0
"""The operators of the domain ``mxdraft``, version 2, as ONNX functions.

A body, in standard operators, is its operator's normative meaning at real-number level: a stock onnxruntime
runs it with no library. The C runtime computes the same quantities in the fixed order of docs/arithmetic.md,
so its results differ from a body's by float32 rounding only.

Shapes: X f32 [..., K]; W of MXFP4 uint8 [N, K/2], low nibble first; W of MXINT8 int8 [N, K]; S, its scales,
uint8 E8M0 [N, K/32]; RW and RS, the residual plane, like W and S; Y f32 [..., N].
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.parser
from numpy.typing import NDArray

from mxdraft.mx import ACTIVATION_STEPS, ACTIVATION_TINY, E2M1_VALUES

DOMAIN = "mxdraft"
DOMAIN_VERSION = 2
OPSET = 24  # the last one for which onnxruntime has a fused Attention kernel


def _powers(first: int, last: int) -> NDArray[np.float32]:
    return np.ldexp(np.float32(1), np.arange(first, last + 1)).astype(np.float32)


_BYTE = np.arange(256)
_NAN = np.array([np.nan], np.float32)
# What the bodies use by name.
_CONSTANTS: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
    "e2m1_pairs": E2M1_VALUES[np.stack([_BYTE & 15, _BYTE >> 4], axis=-1)],  # both elements of a byte
    "e8m0": np.concatenate([_powers(-127, 127), _NAN]),
    "e8m0_64th": np.concatenate([_powers(-133, 121), _NAN]),
    "steps": np.array(ACTIVATION_STEPS, np.float32),
    "tiny": np.array(ACTIVATION_TINY, np.float32),
    "zero": np.zeros((), np.float32),
    "last_axis": np.array([-1]),
    "rest": np.array([-1]),
    "rows_rest": np.array([0, -1]),
}

_BODIES = [
    # mx.quantize_activations, multiplied out again. A block of almost nothing gets scale 0, one with NaN or
    # Inf becomes NaN as a whole.
    """ActivationQuantizeDequantize <block_size: int = 32> (X) => (Y) {
        shape = Shape (X)
        leading = Shape <start = 0, end = -1> (X)
        size = Constant <value_int: int = @block_size> ()
        sizes = Reshape (size, rest)
        blocked = Concat <axis = 0> (leading, rest, sizes)
        B = Reshape (X, blocked)
        magnitude = Abs (B)
        amax = ReduceMax <keepdims = 1> (magnitude, last_axis)
        nothing = Less (amax, tiny)
        per_step = Div (steps, amax)
        upscale = Where (nothing, zero, per_step)
        scaled = Mul (B, upscale)
        q = Round (scaled)
        step = Div (amax, steps)
        downscale = Where (nothing, zero, step)
        zeros = Mul (B, zero)
        fault = ReduceSum <keepdims = 1> (zeros, last_axis)
        scale = Add (downscale, fault)
        D = Mul (q, scale)
        Y = Reshape (D, shape)
    }""",
    """MXFP4Dequantize (W, S) => (Y) {
        bytes = Cast <to = 6> (W)
        pairs = Gather (e2m1_pairs, bytes)
        blocks = Shape (S)
        blocked = Concat <axis = 0> (blocks, rest)
        B = Reshape (pairs, blocked)
        codes = Cast <to = 6> (S)
        scales = Gather (e8m0, codes)
        column = Unsqueeze (scales, last_axis)
        D = Mul (B, column)
        Y = Reshape (D, rows_rest)
    }""",
    """MXINT8Dequantize (W, S) => (Y) {
        q = Cast <to = 1> (W)
        blocks = Shape (S)
        blocked = Concat <axis = 0> (blocks, rest)
        B = Reshape (q, blocked)
        codes = Cast <to = 6> (S)
        scales = Gather (e8m0_64th, codes)
        column = Unsqueeze (scales, last_axis)
        D = Mul (B, column)
        shape = Shape (W)
        Y = Reshape (D, shape)
    }""",
    """MXFP4MatMul <block_size: int = 32> (X, W, S) => (Y) {
        A = mxdraft.ActivationQuantizeDequantize <block_size: int = @block_size> (X)
        B = mxdraft.MXFP4Dequantize (W, S)
        BT = Transpose <perm = [1, 0]> (B)
        Y = MatMul (A, BT)
    }""",
    """MXFP4ResidualMatMul <block_size: int = 32> (X, W, S, RW, RS) => (Y) {
        A = mxdraft.ActivationQuantizeDequantize <block_size: int = @block_size> (X)
        base = mxdraft.MXFP4Dequantize (W, S)
        residual = mxdraft.MXFP4Dequantize (RW, RS)
        B = Add (base, residual)
        BT = Transpose <perm = [1, 0]> (B)
        Y = MatMul (A, BT)
    }""",
    """MXINT8MatMul <block_size: int = 32> (X, W, S) => (Y) {
        A = mxdraft.ActivationQuantizeDequantize <block_size: int = @block_size> (X)
        B = mxdraft.MXINT8Dequantize (W, S)
        BT = Transpose <perm = [1, 0]> (B)
        Y = MatMul (A, BT)
    }""",
    """MXINT8Embedding (ids, W, S) => (Y) {
        rows = Gather <axis = 0> (W, ids)
        scales = Gather <axis = 0> (S, ids)
        Y = mxdraft.MXINT8Dequantize (rows, scales)
    }""",
]


def functions() -> list[onnx.FunctionProto]:
    """All operators of the domain, callees before callers."""
    return [_function(body) for body in _BODIES]


def _function(body: str) -> onnx.FunctionProto:
    imports = f'<opset_import: ["": {OPSET}, "{DOMAIN}": {DOMAIN_VERSION}], domain: "{DOMAIN}">'
    function = onnx.parser.parse_function(f"{imports}\n{body}")
    used = {name for node in function.node for name in node.input}
    for name in sorted(used & _CONSTANTS.keys(), reverse=True):
        value = onnx.numpy_helper.from_array(_CONSTANTS[name], name)
        function.node.insert(0, onnx.helper.make_node("Constant", [], [name], value=value))
    return function
