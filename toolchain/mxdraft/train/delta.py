# SPDX-License-Identifier: Apache-2.0
"""A trained base plane as a compact difference from its checkpoint; numpy only, no torch.

Each trained element is entropy coded *given the teacher's weight*: the weight in grid units (weight /
2**exponent of the trained block) nearly tells the element, and how nearly is what the frequency tables say.
Tensors of one kind (``self_attn.q_proj.weight`` of every layer) share a table and a stream. Exponents are
stored as differences from rule ``search``; norm weights as they are.

File, little-endian: magic; u32 length of the header; header (JSON, UTF-8); the sections whose lengths the
header lists; SHA-256 of everything before. ``apply_delta`` refuses anything else, a checkpoint other than
the one trained from, and a result that is not byte for byte what was written.

The coder is rANS (Duda 2013, arXiv 1311.2540), many states at a time so that numpy can step all of them
at once.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdraft import mx
from mxdraft.checkpoint import Checkpoint, expected_tensors
from mxdraft.checkpoint.smooth import Smoothing, smooth
from mxdraft.errors import RefusedError
from mxdraft.files import parse_json_object, parsing, read_file, replacing
from mxdraft.mx import BLOCK, MXTensor

_MAGIC = b"MXQDELT2"
_UNSMOOTHED = b"MXQDELT1"  # as _MAGIC, of weights that were trained as they are
_LANES = 16384  # rANS states at a time
_PRECISION = 12  # bits of a symbol's frequency
_LOW = 1 << 16  # a state lies in [_LOW, _LOW << 16) and moves 16 bits at a time
_CONTEXTS = 256  # |weight| / 2**exponent in steps of 1/32, the last one open
_LIMIT = 1 << 30  # bytes of a file
_SYMBOLS = 15  # signed E2M1 magnitudes -7 … 7, the teacher's sign taken as positive

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class TrainedBase:
    """What training made of a checkpoint: the MXFP4 base plane of every linear, and the norms that go with
    it."""

    planes: dict[str, MXTensor]
    norms: dict[str, NDArray[np.float32]]
    meta: dict[str, Any]  # recipe and results, for people and provenance
    smoothing: Smoothing | None = None  # of the weights that training began with


def write_delta(path: Path, checkpoint: Checkpoint, trained: TrainedBase) -> None:
    """Write ``trained`` as a difference from ``checkpoint``, which it smooths, whole or not at all."""
    checkpoint = smooth(checkpoint, trained.smoothing)
    scales = bytearray()
    sections = []
    for names in _kinds(checkpoint).values():
        symbols, contexts = [], []
        for name in names:
            plane = trained.planes[name]
            weight = checkpoint.tensors[name]
            scales += (plane.scale - mx.quantize(weight, "mxfp4", "search").scale).tobytes()
            context, negative = _context(weight, plane.scale)
            code = np.stack([plane.data & 15, plane.data >> 4], -1).reshape(weight.shape)
            signed = (code & 7).astype(np.int8) * np.where(code & 8, -1, 1).astype(np.int8)
            symbols.append((np.where(negative, -signed, signed) + 7).astype(np.uint8).ravel())
            contexts.append(context.ravel())
        sections.append(_encode(np.concatenate(symbols), np.concatenate(contexts)))
    norms = b"".join(trained.norms[name].astype("<f4").tobytes() for name in _norms(checkpoint))
    sections += [zlib.compress(bytes(scales), 9), zlib.compress(norms, 9)]
    header = {
        "source_sha256": checkpoint.source_sha256,
        "result_sha256": _digest(checkpoint, trained),
        "sections": [len(section) for section in sections],
        "meta": trained.meta,
        "smoothing": trained.smoothing and trained.smoothing.to_json(),
    }
    encoded = json.dumps(header).encode("utf-8")
    body = b"".join([_MAGIC, struct.pack("<I", len(encoded)), encoded, *sections])
    with replacing(path) as file:
        file.write(body + hashlib.sha256(body).digest())


def apply_delta(path: Path, checkpoint: Checkpoint) -> TrainedBase:
    """Rebuild the trained base plane of ``checkpoint``, bit for bit as it was written.

    Raises RefusedError if the file is damaged or belongs to another checkpoint.
    """
    header, sections = _read(path)
    if header["source_sha256"] != checkpoint.source_sha256:
        raise RefusedError(
            f"{path} was trained from the weights with SHA-256 {header['source_sha256']}, "
            f"these have {checkpoint.source_sha256}; fetch the weights that its README names"
        )
    with parsing(path, "trained delta of these weights"):
        smoothing = header["smoothing"] and Smoothing.from_json(header["smoothing"])
        checkpoint = smooth(checkpoint, smoothing)
        trained = _rebuild(checkpoint, sections, header["meta"], smoothing)
    if _digest(checkpoint, trained) != header["result_sha256"]:
        raise RefusedError(
            f"{path} decodes to other weights than were written; report this with your numpy version"
        )
    return trained


def _read(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    content = read_file(path, _LIMIT)
    body, digest = content[:-32], content[-32:]
    if not content.startswith((_MAGIC, _UNSMOOTHED)):
        raise RefusedError(
            f"{path} is not a trained delta: its first bytes are {content[:8]!r}, not {_MAGIC!r}"
        )
    if hashlib.sha256(body).digest() != digest:
        raise RefusedError(f"{path} is damaged: its checksum does not match; fetch it again")
    with parsing(path, "trained delta"):
        (length,) = struct.unpack_from("<I", body, len(_MAGIC))
        place = len(_MAGIC) + 4 + length
        header = parse_json_object(body[len(_MAGIC) + 4 : place])
        if content.startswith(_UNSMOOTHED):
            header["smoothing"] = None
        sections = []
        for size in header["sections"]:
            if type(size) is not int or size < 0:
                raise ValueError(f"a section has the length {size!r}")
            sections.append(body[place : place + size])
            place += size
        if place != len(body) or not {"source_sha256", "result_sha256", "meta", "smoothing"} <= header.keys():
            raise ValueError("its header does not fit its length")
        return header, sections


def _rebuild(
    checkpoint: Checkpoint, sections: list[bytes], meta: dict[str, Any], smoothing: Smoothing | None
) -> TrainedBase:
    kinds = _kinds(checkpoint)
    if len(sections) != len(kinds) + 2:
        raise ValueError(f"{len(sections)} sections, the model asks for {len(kinds) + 2}")
    blocks = sum(checkpoint.tensors[name].size // BLOCK for names in kinds.values() for name in names)
    changes = np.frombuffer(_inflate(sections[-2], blocks), np.uint8)
    norm_count = sum(checkpoint.tensors[name].size for name in _norms(checkpoint))
    norm_values = np.frombuffer(_inflate(sections[-1], 4 * norm_count), "<f4").astype(np.float32)
    planes: dict[str, MXTensor] = {}
    for names, section in zip(kinds.values(), sections, strict=False):
        weights = [checkpoint.tensors[name] for name in names]
        scales, contexts, negatives = [], [], []
        for weight in weights:
            start = mx.quantize(weight, "mxfp4", "search").scale
            change, changes = _take(changes, start.shape)
            scales.append(start + change)
            context, negative = _context(weight, scales[-1])
            contexts.append(context.ravel())
            negatives.append(negative)
        symbols = _decode(section, np.concatenate(contexts))
        for name, scale, negative in zip(names, scales, negatives, strict=True):
            symbol, symbols = _take(symbols, negative.shape)
            signed = symbol.astype(np.int8) - np.int8(7)
            signed = np.where(negative, -signed, signed)
            code = np.abs(signed).astype(np.uint8) | np.where(signed < 0, 8, 0).astype(np.uint8)
            planes[name] = MXTensor("mxfp4", code[:, 0::2] | (code[:, 1::2] << 4), scale, "search")
    norms = {}
    for name in _norms(checkpoint):
        norms[name], norm_values = _take(norm_values, checkpoint.tensors[name].shape)
    return TrainedBase(planes, norms, meta, smoothing)


def _kinds(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """List the decoder's linear weights by what they do: their name after the layer's number."""
    kinds: dict[str, list[str]] = {}
    for name, shape in expected_tensors(checkpoint.config).items():
        if name.startswith("model.layers.") and len(shape) == 2:
            kinds.setdefault(name.split(".", 3)[3], []).append(name)
    return kinds


def _norms(checkpoint: Checkpoint) -> list[str]:
    return [name for name, shape in expected_tensors(checkpoint.config).items() if len(shape) == 1]


def _digest(checkpoint: Checkpoint, trained: TrainedBase) -> str:
    """Hash elements and scales of every plane, then every norm, each in order of execution."""
    digest = hashlib.sha256()
    for name in expected_tensors(checkpoint.config):
        if name in trained.planes:
            digest.update(trained.planes[name].data.tobytes())
            digest.update(trained.planes[name].scale.tobytes())
    for name in _norms(checkpoint):
        digest.update(trained.norms[name].astype("<f4").tobytes())
    return digest.hexdigest()


def _context(weight: NDArray[np.float32], scale: _Bytes) -> tuple[_Bytes, NDArray[np.bool_]]:
    """Return what the teacher's weight says about its trained element: size in 1/32 grid units, and sign.

    Every step is exact, so every machine finds the same.
    """
    if (scale == 255).any():
        raise ValueError("E8M0 scale 255 is NaN")
    blocks = np.abs(weight).reshape(*scale.shape, BLOCK)
    with np.errstate(over="ignore", under="ignore"):
        steps = np.ldexp(blocks, (127 + 5 - scale.astype(np.int32))[..., None])
    return np.minimum(steps, _CONTEXTS - 1).astype(np.uint8).reshape(weight.shape), weight < 0


def _take(values: NDArray[Any], shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Split off the leading values that fill ``shape``."""
    count = int(np.prod(shape))
    return values[:count].reshape(shape), values[count:]


def _inflate(section: bytes, size: int) -> bytes:
    """Decompress a section that must hold exactly ``size`` bytes; never more is unpacked."""
    inflater = zlib.decompressobj()
    content = inflater.decompress(section, size + 1)
    if len(content) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"a section does not hold {size} bytes")
    return content


def _frequencies(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Scale ``counts`` to frequencies [contexts, symbols] that add up to 2**_PRECISION, at least 1 for what
    occurs."""
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    frequency: NDArray[np.int64] = np.maximum((counts << _PRECISION) // total, counts > 0)
    frequency[np.arange(len(counts)), counts.argmax(1)] += (1 << _PRECISION) - frequency.sum(1)
    return frequency


def _steps(count: int) -> Iterator[slice]:
    return (slice(first, min(first + _LANES, count)) for first in range(0, count, _LANES))


def _encode(symbols: _Bytes, contexts: _Bytes) -> bytes:
    """Write frequency table, final states, then words in the order in which decoding asks for them."""
    key = contexts.astype(np.int64) * _SYMBOLS + symbols
    counts = np.bincount(key, minlength=_CONTEXTS * _SYMBOLS).reshape(_CONTEXTS, _SYMBOLS)
    frequency = _frequencies(counts)
    start = np.cumsum(frequency, 1) - frequency
    state = np.full(_LANES, _LOW, np.int64)
    words: list[NDArray[np.uint16]] = []
    for step in reversed(list(_steps(symbols.size))):
        f, c = frequency.ravel()[key[step]], start.ravel()[key[step]]
        x = state[: f.size]
        full = x >= f << (32 - _PRECISION)
        words.append(x[full].astype(np.uint16))
        x[full] >>= 16
        x[:] = (x // f << _PRECISION) + x % f + c
    stream = np.concatenate(words[::-1])
    return frequency.astype("<u2").tobytes() + state.astype("<u4").tobytes() + stream.astype("<u2").tobytes()


def _decode(section: bytes, contexts: _Bytes) -> _Bytes:
    """Undo ``_encode``. Raises ValueError if the section is not what it would have written."""
    table_size, state_size = 2 * _CONTEXTS * _SYMBOLS, 4 * _LANES
    frequency = np.frombuffer(section[:table_size], "<u2").astype(np.int64).reshape(_CONTEXTS, _SYMBOLS)
    state = np.frombuffer(section[table_size : table_size + state_size], "<u4").astype(np.int64)
    words = np.frombuffer(section[table_size + state_size :], "<u2").astype(np.int64)
    if (frequency.sum(1) != 1 << _PRECISION).any() or state.size != _LANES:
        raise ValueError("a frequency table does not add up")
    start = np.cumsum(frequency, 1) - frequency
    symbol_at = np.repeat(np.tile(np.arange(_SYMBOLS, dtype=np.uint8), _CONTEXTS), frequency.ravel())
    symbols = np.empty(contexts.size, np.uint8)
    place = 0
    for step in _steps(contexts.size):
        context = contexts[step].astype(np.int64)
        x = state[: context.size]
        slot = x & ((1 << _PRECISION) - 1)
        symbol = symbol_at[(context << _PRECISION) + slot]
        symbols[step] = symbol
        key = context * _SYMBOLS + symbol
        x[:] = frequency.ravel()[key] * (x >> _PRECISION) + slot - start.ravel()[key]
        low = np.flatnonzero(x < _LOW)
        x[low] = (x[low] << 16) | words[place : place + low.size]
        place += low.size
    if place != words.size or (state != _LOW).any():
        raise ValueError("a stream does not end where it began")
    return symbols
