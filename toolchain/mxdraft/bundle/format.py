# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a bundle mean: structs, data types, and the tensors that each section must hold.

The format is runtime/BUNDLE.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import TypeAlias

from mxdraft.bundle.tiles import tiled_nbytes
from mxdraft.checkpoint import Dimensions, layer_tensors
from mxdraft.mx import Format

MAGIC = b"\x89MXB\r\n\x1a\n"
VERSION = 2
ALIGNMENT = 65536
TENSOR_ALIGNMENT = 64

HEADER = struct.Struct("<8sIIQI36s")  # magic, version, section count, file length, table CRC, reserved
SECTION_ENTRY = struct.Struct("<32sQQI12s")  # name, offset, length, CRC, reserved
CONFIG = struct.Struct("<8If28s")  # Dimensions, reserved
TENSOR_ENTRY = struct.Struct("<80sIIQQQQ8s")  # name, dtype, section, rows, columns, offset, length, reserved
GOLDEN = struct.Struct("<II32s32s")  # prompts, greedy tokens, digest of base, digest of full
# architecture; hidden, heads, kv_heads, head_dim, ffn, vocab; features, their layers; draft vocabulary;
# depths; checksums of what it belongs to; inverse temperatures, odds; reserved
DRAFT_CONFIG = struct.Struct("<I6I5III3I8f8f28s")

FUSED = 1  # the one drafter architecture
MAX_FEATURES, MAX_DEPTHS = 4, 8
DRAFT_TARGET = ("target.shared", "target.base", "tokenizer")  # what a drafter belongs to


class DType(IntEnum):
    """How the values of a tensor are stored."""

    F32 = 1
    MXFP4T = 2
    MXINT8T = 3
    U32 = 4


F32, MXFP4T, MXINT8T, U32 = DType
FORMATS: dict[int, Format] = {MXFP4T: "mxfp4", MXINT8T: "mxint8"}  # of the data types in tile order

Shape: TypeAlias = tuple[int, int]
TensorSpec: TypeAlias = tuple[str, DType, Shape]  # name, data type, shape


@dataclass(frozen=True)
class Section:
    """One entry of the section table."""

    name: str
    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class TensorEntry:
    """One entry of a tensor directory; ``section``: its number in the section table."""

    name: str
    dtype: int
    section: int
    rows: int
    columns: int
    offset: int
    length: int

    @property
    def shape(self) -> Shape:
        return self.rows, self.columns

    def pack(self) -> bytes:
        name, *numbers = astuple(self)
        return TENSOR_ENTRY.pack(name.encode("ascii"), *numbers, bytes(8))


@dataclass(frozen=True)
class DraftConfig:
    """What ``draft.config`` says besides the dimensions, which are the target's.

    ``feature_layers``: the layers of the target after which the drafter reads its residual stream; ``vocab``:
    tokens of the draft vocabulary; ``calibration``: inverse temperature and odds of each draft depth;
    ``target_crcs``: of the sections ``DRAFT_TARGET``.
    """

    feature_layers: tuple[int, ...]
    vocab: int
    calibration: tuple[tuple[float, float], ...]
    target_crcs: tuple[int, int, int]

    def pack(self, config: Dimensions) -> bytes:
        temperatures, odds = zip(*self.calibration, strict=True)
        return DRAFT_CONFIG.pack(
            FUSED,
            *draft_dimensions(config),
            len(self.feature_layers),
            *_padded(self.feature_layers, MAX_FEATURES),
            self.vocab,
            len(self.calibration),
            *self.target_crcs,
            *_padded(temperatures, MAX_DEPTHS),
            *_padded(odds, MAX_DEPTHS),
            bytes(28),
        )


@dataclass(frozen=True)
class Golden:
    """Self-test vectors. Digests are 32 bytes; ``full_digest`` is zero in a bundle without residual plane."""

    prompts: tuple[tuple[int, ...], ...]
    greedy: int
    base_digest: bytes
    full_digest: bytes


def config_section(config: Dimensions) -> bytes:
    """Return the bytes of ``target.config``."""
    return CONFIG.pack(*(getattr(config, field.name) for field in fields(Dimensions)), bytes(28))


def golden_section(
    prompts: Sequence[Sequence[int]], greedy: int, base_digest: bytes, full_digest: bytes
) -> bytes:
    """Return the bytes of ``golden``."""
    counted = [struct.pack(f"<I{len(ids)}I", len(ids), *ids) for ids in prompts]
    return GOLDEN.pack(len(prompts), greedy, base_digest, full_digest) + b"".join(counted)


def required_tensors(config: Dimensions, section: str, separate_head: bool = False) -> Iterator[TensorSpec]:
    """List the tensors that a ``target.`` section must hold, in the order of storage.

    ``separate_head``: the head is not the embedding.
    """
    c = config
    if section == "target.shared":
        yield "model.embed_tokens.weight", MXINT8T, (c.vocab, c.hidden)
        if separate_head:
            yield "lm_head.weight", MXINT8T, (c.vocab, c.hidden)
        yield "rope.cos", F32, (c.max_positions, c.head_dim // 2)
        yield "rope.sin", F32, (c.max_positions, c.head_dim // 2)
        return
    for layer in range(c.layers):
        yield from _layer_tensors(c, layer)
    yield "model.norm.weight", F32, (1, c.hidden)


def required_draft_tensors(config: Dimensions, features: int, vocab: int) -> Iterator[TensorSpec]:
    """List the tensors of a drafter that reads ``features`` residual streams and chooses from ``vocab``
    tokens, in the order of storage."""
    hidden = config.hidden
    for i in range(features):
        yield f"feature_norm.{i}.weight", F32, (1, hidden)
    yield "feature_proj.weight", MXFP4T, (hidden, features * hidden)
    yield "embed_norm.weight", F32, (1, hidden)
    yield "state_norm.weight", F32, (1, hidden)
    yield "input_proj.weight", MXFP4T, (hidden, 2 * hidden)
    yield from _layer_tensors(config, 0)
    yield "model.norm.weight", F32, (1, hidden)
    yield "draft_ids", U32, (1, vocab)


def draft_dimensions(config: Dimensions) -> list[int]:
    """List the dimensions that ``draft.config`` repeats from the target's."""
    c = config
    return [c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn, c.vocab]


def tensor_nbytes(dtype: int, rows: int, columns: int) -> int:
    """Return the bytes that a tensor takes in its section."""
    return tiled_nbytes(FORMATS[dtype], rows, columns) if dtype in FORMATS else 4 * rows * columns


def align(offset: int, alignment: int) -> int:
    """Return the first multiple of ``alignment`` from ``offset`` on."""
    return -(-offset // alignment) * alignment


def _layer_tensors(config: Dimensions, layer: int) -> Iterator[TensorSpec]:
    """Matrices, then norms."""
    shapes = layer_tensors(config, layer)
    yield from ((name, MXFP4T, (shape[0], shape[1])) for name, shape in shapes.items() if len(shape) == 2)
    yield from ((name, F32, (1, shape[0])) for name, shape in shapes.items() if len(shape) == 1)


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0] * (length - len(values))]
