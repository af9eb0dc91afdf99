# SPDX-License-Identifier: Apache-2.0
"""Smoothing: factors moved between tensors so that low-bit blocks lose less; the model's function stays.

An input channel of a product that is large on real text is given finer steps by making it smaller in the
activations and larger in the weight's columns, as SmoothQuant does (Xiao et al. 2022, arXiv 2211.10438).
The inverse factors go where they cost nothing at run time:

* inputs of q, k, v and of gate, up: out of the norm's weight, into the columns;
* inputs of o: out of the rows of v, into the columns of o; heads of one group share the factors of their v;
* inputs of down: out of the rows of up, into the columns of down.

The residual stream stays as it is. A factor is (RMS of the channel / geometric mean of its layer's) to an
exponent, rounded to an eighth of an octave: codes are small, and the same on machines that sum otherwise.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdraft.checkpoint.model import Checkpoint, ModelConfig
from mxdraft.checkpoint.reference import F32, Teacher
from mxdraft.errors import RefusedError, UsageError

_STEPS = 8  # codes an octave
_EXPONENTS = {"attention": 0.5, "value": 0.3, "ffn": 0.5, "up": 0.3}
_FLOOR = 1e-3  # of a layer's mean RMS, below which a channel counts as this large
# One octave in float32, written out: no machine's exp2 has a say.
_OCTAVE = np.array(
    [1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081], np.float32
)


@dataclass(frozen=True)
class Smoothing:
    """Factors of every layer. ``codes``: int8, c means 2**(c/8); layer by layer, those of ``_parts`` one
    after another. ``tokens``, ``text_sha256``: the text they were measured on."""

    codes: NDArray[np.int8]
    tokens: int
    text_sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return what provenance holds."""
        packed = base64.b64encode(zlib.compress(self.codes.tobytes(), 9)).decode("ascii")
        return {"codes": packed, "tokens": self.tokens, "text_sha256": self.text_sha256}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Smoothing:
        """Read what ``to_json`` returned. Raises ValueError, KeyError or TypeError if not that."""
        try:
            codes = np.frombuffer(zlib.decompress(base64.b64decode(fields["codes"])), np.int8)
        except zlib.error as error:
            raise ValueError(f"smoothing codes do not inflate: {error}") from error
        return cls(codes, int(fields["tokens"]), str(fields["text_sha256"]))


def smooth(checkpoint: Checkpoint, smoothing: Smoothing | None) -> Checkpoint:
    """Return the checkpoint with the factors moved. Without ``smoothing`` that is the checkpoint itself.

    Raises RefusedError if the factors are of a model of other dimensions.
    """
    if smoothing is None:
        return checkpoint
    config = checkpoint.config
    count = config.layers * sum(_parts(config).values())
    if smoothing.codes.size != count:
        raise RefusedError(f"{smoothing.codes.size} smoothing factors do not fit a model that has {count}")
    tensors = dict(checkpoint.tensors)
    group = config.heads // config.kv_heads
    for prefix, factor in _factors(config, smoothing.codes):
        value = factor["value"].reshape(config.kv_heads, 1, config.head_dim)
        shared = np.broadcast_to(value, (config.kv_heads, group, config.head_dim)).ravel()
        for name, columns in {
            "self_attn.q_proj": factor["attention"],
            "self_attn.k_proj": factor["attention"],
            "self_attn.v_proj": factor["attention"],
            "self_attn.o_proj": shared,
            "mlp.gate_proj": factor["ffn"],
            "mlp.up_proj": factor["ffn"],
            "mlp.down_proj": factor["up"],
        }.items():
            tensors[f"{prefix}{name}.weight"] = tensors[f"{prefix}{name}.weight"] * columns
        for name, rows in {
            "input_layernorm": factor["attention"],
            "post_attention_layernorm": factor["ffn"],
            "self_attn.v_proj": factor["value"][:, None],
            "mlp.up_proj": factor["up"][:, None],
        }.items():
            tensors[f"{prefix}{name}.weight"] = tensors[f"{prefix}{name}.weight"] / rows
    return replace(checkpoint, tensors=tensors)


def measure(checkpoint: Checkpoint, windows: NDArray[np.integer]) -> Smoothing:
    """Measure factors by what the channels of ``checkpoint`` hold on ``windows`` [n, tokens] of token ids.

    Raises UsageError if there is no window.
    """
    if windows.size == 0:
        raise UsageError("the text to smooth by is empty")
    teacher = Teacher(checkpoint)
    squares: dict[str, NDArray[np.float64]] = {}

    def observe(name: str, inputs: F32) -> None:
        if not name.endswith("_proj"):  # a residual stream
            return
        squares[name] = squares.get(name, 0) + np.square(inputs, dtype=np.float64).sum(axis=0)

    for window in windows:
        teacher.hidden(window, observe)
    config = checkpoint.config
    codes = []
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        heads = squares[prefix + "self_attn.o_proj"].reshape(config.kv_heads, -1, config.head_dim)
        for part, square in {
            "attention": squares[prefix + "self_attn.q_proj"],
            "value": heads.mean(axis=1).ravel(),
            "ffn": squares[prefix + "mlp.gate_proj"],
            "up": squares[prefix + "mlp.down_proj"],
        }.items():
            codes.append(_code(np.sqrt(square / windows.size), _EXPONENTS[part]))
    digest = hashlib.sha256(np.ascontiguousarray(windows, "<i8").tobytes()).hexdigest()
    return Smoothing(np.concatenate(codes), int(windows.size), digest)


def _parts(config: ModelConfig) -> dict[str, int]:
    """Return a layer's kinds of factors and how many it has of each, in the order of ``Smoothing.codes``."""
    values = config.kv_heads * config.head_dim
    return {"attention": config.hidden, "value": values, "ffn": config.hidden, "up": config.ffn}


def _factors(config: ModelConfig, codes: NDArray[np.int8]) -> Iterator[tuple[str, dict[str, F32]]]:
    """Yield for each layer what its tensors' names begin with, and its factors."""
    sizes = _parts(config)
    ends = np.cumsum(list(sizes.values()))
    for layer, row in enumerate(codes.astype(np.int32).reshape(config.layers, -1)):
        octave, step = np.divmod(row, _STEPS)
        factors = np.split(np.ldexp(_OCTAVE[step], octave), ends[:-1])
        yield f"model.layers.{layer}.", dict(zip(sizes, factors, strict=True))


def _code(rms: NDArray[np.float64], exponent: float) -> NDArray[np.int8]:
    """Compute the codes of one layer's channels from their ``rms``."""
    mean = rms.mean()
    if mean == 0:
        return np.zeros(rms.shape, np.int8)
    octaves = np.log2(np.maximum(rms, _FLOOR * mean))
    code = np.rint(_STEPS * exponent * (octaves - octaves.mean())).clip(-127, 127)
    return np.asarray(code, np.int8)
