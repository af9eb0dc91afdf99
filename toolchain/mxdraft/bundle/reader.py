# SPDX-License-Identifier: Apache-2.0
"""Reads a bundle (runtime/BUNDLE.md); its twin in C is runtime/src/bundle.c.

Reading checks everything and refuses with the verdict that the C reader gives. It checks in the same order,
for that decides the verdict of a file with several faults: header; section table, entry by entry; end of
file; checksums; config; tensor directory, entry by entry, then overlaps, duplicates and scales; required
tensors, of the residual plane each with its reach; provenance; tokenizer; chat; golden; drafter; n-grams;
schedule. A required section that is missing is refused where it would be read.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle.chat import read_chat
from mxdraft.bundle.format import (
    ALIGNMENT,
    CONFIG,
    DRAFT_CONFIG,
    DRAFT_TARGET,
    F32,
    FORMATS,
    FUSED,
    GOLDEN,
    HEADER,
    MAGIC,
    MAX_DEPTHS,
    MAX_FEATURES,
    MXFP4T,
    MXINT8T,
    SECTION_ENTRY,
    TENSOR_ALIGNMENT,
    TENSOR_ENTRY,
    U32,
    VERSION,
    DraftConfig,
    Golden,
    Section,
    TensorEntry,
    TensorSpec,
    align,
    draft_dimensions,
    required_draft_tensors,
    required_tensors,
    tensor_nbytes,
)
from mxdraft.bundle.ngrams import check_ngrams
from mxdraft.bundle.schedule import Schedule
from mxdraft.bundle.tiles import BLOCK_BYTES, TILE_ROWS, from_tiles
from mxdraft.bundle.tokenizer import read_tokenizer
from mxdraft.checkpoint import Dimensions, check_dimensions
from mxdraft.errors import BundleError, RefusedError, TransferError
from mxdraft.files import open_regular, parse_json_object, parsing
from mxdraft.mx import BLOCK, RESIDUAL_REACH, MXTensor, Rule

_MAX_SECTIONS = 64
_MAX_TENSORS = 1 << 20
_MAX_DIMENSION = 1 << 24  # rows x columns x 4 bytes stay far below 2**64
_DRAFT_SECTIONS = ("draft.config", "draft.tensors", "draft.weights")

Bytes: TypeAlias = NDArray[np.uint8]


class Bundle:
    """A bundle that passed every check. Arrays it gives are views of the file.

    ``sections`` by name; ``config``; ``tensors`` by (section, name); ``golden``, None if the bundle has none;
    ``schedule``, the defaults if it has none.
    """

    def __init__(self, file: bytes | Bytes) -> None:
        """Check the bytes of a whole file. Raises BundleError with the verdict."""
        self._file: Bytes = np.frombuffer(file, np.uint8)
        sections = _read_section_table(self._file)
        self.sections = {section.name: section for section in sections}
        self.config = _read_config(self._required("target.config"))
        self._required("target.shared")
        self._required("target.base")
        self.tensors: dict[tuple[str, str], TensorEntry] = {}
        self._read_tensors("target.tensors", sections, (F32, MXFP4T, MXINT8T))
        self._check_required_tensors()
        _check(not (self._required("provenance") == 0).any(), "SECTION", "provenance holds a NUL byte")
        self._check_text()
        self.golden = _read_golden(self.section("golden"), self.config) if "golden" in self else None
        self.draft = self._read_drafter(sections) if any(name in self for name in _DRAFT_SECTIONS) else None
        if "draft.ngrams" in self:
            check_ngrams(self.section("draft.ngrams").tobytes(), self.config.vocab)
        self.schedule = (
            Schedule.unpack(self.section("schedule").tobytes(), self.config.layers)
            if "schedule" in self
            else Schedule.default(self.config.layers)
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a bundle file read-only.

        Raises BundleError with the verdict, TransferError if the file cannot be read.
        """
        try:
            with open_regular(path) as file:
                data = np.memmap(file, np.uint8, "r") if file.seek(0, 2) else b""
        except RefusedError:
            raise BundleError("MISSING", f"{path}: no such bundle") from None
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror}") from error
        try:
            with parsing(path, "bundle"):
                return cls(data)
        except RefusedError as error:
            if isinstance(error.__cause__, BundleError):
                message = f"{error}; pack or copy the bundle again"
                raise BundleError(error.__cause__.verdict, message) from None
            raise

    def __contains__(self, section: str) -> bool:
        return section in self.sections

    def section(self, name: str) -> Bytes:
        """The bytes of a section. Raises KeyError if the bundle has none of that name."""
        section = self.sections[name]
        return self._file[section.offset : section.offset + section.length]

    def get(self, section: str, name: str) -> MXTensor | NDArray[np.float32] | NDArray[np.uint32]:
        """A tensor [rows, columns] in row order. Raises KeyError if it is not there."""
        entry = self.tensors[section, name]
        data = self._tensor_bytes(section, entry)
        if entry.dtype in (F32, U32):
            return data.view("<f4" if entry.dtype == F32 else "<u4").reshape(entry.rows, entry.columns)
        rule: Rule = (
            "search" if entry.dtype == MXFP4T and self.provenance.get("rule") == "search" else "floor"
        )
        return from_tiles(data, FORMATS[entry.dtype], entry.rows, entry.columns, rule)

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the weights came from and what made the file. Raises RefusedError unless it is a JSON
        object."""
        return parse_provenance(self.section("provenance").tobytes())

    def _required(self, name: str) -> Bytes:
        _check(name in self, "SECTION", f"section {name} is missing")
        return self.section(name)

    def _tensor_bytes(self, section: str, entry: TensorEntry) -> Bytes:
        return self.section(section)[entry.offset : entry.offset + entry.length]

    def _scales(self, section: str, name: str) -> Bytes:
        """Return the scale codes [blocks, 16] of a tensor in tile order, padding rows included."""
        entry = self.tensors[section, name]
        blocks = self._tensor_bytes(section, entry).reshape(-1, BLOCK_BYTES[FORMATS[entry.dtype]])
        return blocks[:, :TILE_ROWS]

    def _read_tensors(self, directory: str, sections: Sequence[Section], dtypes: tuple[int, ...]) -> None:
        """Read a tensor directory into ``tensors``, and check the scales of what it lists."""
        for entry in _read_tensor_directory(self._required(directory).tobytes(), sections, dtypes):
            section = sections[entry.section].name
            self.tensors[section, entry.name] = entry
            if entry.dtype in FORMATS:
                nan = (self._scales(section, entry.name) == 255).any()
                _check(not nan, "SCALE", f"tensor {entry.name} in {section} has a scale of 255 (NaN)")

    def _check_required_tensors(self) -> None:
        for section in ("target.shared", "target.base", "target.residual"):
            if section in self:
                separate_head = (section, "lm_head.weight") in self.tensors
                self._require(section, required_tensors(self.config, section, separate_head))

    def _require(self, section: str, tensors: Iterable[TensorSpec]) -> None:
        for name, dtype, shape in tensors:
            where = f"tensor {name} in {section}"
            _check((section, name) in self.tensors, "TENSOR", f"{where} is missing")
            entry = self.tensors[section, name]
            _check(entry.dtype == dtype, "DTYPE", f"{where} has dtype {entry.dtype}, not {dtype}")
            _check(entry.shape == shape, "SHAPE", f"{where} is {entry.shape}, the config asks for {shape}")
            if section == "target.residual" and dtype == MXFP4T:
                self._check_reach(name)

    def _check_reach(self, name: str) -> None:
        """Check that the residual plane of a tensor and its base plane make up one int8 operand."""
        base, residual = (self._scales(section, name) for section in ("target.base", "target.residual"))
        reach = base.astype(np.int16) - residual
        _check(
            ((reach >= 0) & (reach <= RESIDUAL_REACH)).all(),
            "SCALE",
            f"tensor {name} in target.residual has a scale out of its base's reach",
        )

    def _read_drafter(self, sections: Sequence[Section]) -> DraftConfig:
        for name in _DRAFT_SECTIONS:
            self._required(name)
        crcs = tuple(self.sections[name].crc for name in DRAFT_TARGET)
        draft = _read_draft_config(self.section("draft.config"), self.config, crcs)
        known = set(self.tensors)
        self._read_tensors("draft.tensors", sections, (F32, MXFP4T, MXINT8T, U32))
        for section, name in self.tensors.keys() - known:
            _check(section == "draft.weights", "TENSOR", f"tensor {name} of the drafter is in {section}")
        self._require(
            "draft.weights", required_draft_tensors(self.config, len(draft.feature_layers), draft.vocab)
        )
        ids = self.get("draft.weights", "draft_ids")
        assert isinstance(ids, np.ndarray)
        _check_draft_ids(ids[0], self.config.vocab)
        return draft

    def _check_text(self) -> None:
        read_tokenizer(self._required("tokenizer").tobytes(), self.config.vocab)
        if "chat" in self:
            read_chat(self.section("chat").tobytes(), self.config.vocab)


def parse_provenance(data: bytes | str) -> dict[str, Any]:
    """What a bundle says about its origin, from its section or as ``ModelInfo`` has it.

    Raises RefusedError unless that is a JSON object.
    """
    with parsing("the bundle's provenance", "JSON object"):
        return parse_json_object(data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape"))


def _check(ok: bool | np.bool, verdict: str, message: str) -> None:
    if not ok:
        raise BundleError(verdict, message)


def _read_section_table(file: Bytes) -> list[Section]:
    head = file[: HEADER.size].tobytes()
    _check(head != b"" and head[:8] == MAGIC[: len(head)], "MAGIC", "not a bundle: the first bytes differ")
    _check(len(head) == HEADER.size, "LENGTH", f"{len(head)} bytes are too few for a header")
    _, version, count, length, crc, reserved = HEADER.unpack(head)
    _check(version == VERSION, "VERSION", f"bundle version {version}; this reader knows {VERSION}")
    _check(length == file.size, "LENGTH", f"the header says {length} bytes, the file has {file.size}")
    _check(1 <= count <= _MAX_SECTIONS, "HEADER", f"{count} sections; 1 to {_MAX_SECTIONS} are allowed")
    _check(not any(reserved), "HEADER", "reserved bytes of the header are not zero")
    table = file[HEADER.size : HEADER.size + count * SECTION_ENTRY.size].tobytes()
    _check(len(table) == count * SECTION_ENTRY.size, "RANGE", f"the table of {count} sections is cut short")
    _check(zlib.crc32(table) == crc, "HEADER", "the section table differs from its checksum")

    sections: list[Section] = []
    end = ALIGNMENT
    for index, (raw, offset, size, section_crc, zero) in enumerate(SECTION_ENTRY.iter_unpack(table)):
        name = _read_name(raw, r"[a-z0-9._]+", f"section {index}")
        _check(all(s.name != name for s in sections), "NAME", f"section {name} appears twice")
        expected = align(end, ALIGNMENT)
        _check(offset == expected, "RANGE", f"section {name} is at {offset}, must be at {expected}")
        end = offset + size
        _check(
            size > 0 and end <= length, "RANGE", f"section {name} has {size} bytes at {offset} of {length}"
        )
        _check(not any(zero), "HEADER", f"reserved bytes of section {name} are not zero")
        sections.append(Section(name, offset, size, section_crc))
    _check(end == length, "RANGE", f"the last section ends at {end}, the file at {length}")
    for section in sections:
        data = file[section.offset : section.offset + section.length].data
        _check(
            zlib.crc32(data) == section.crc, "CHECKSUM", f"section {section.name} differs from its checksum"
        )
    return sections


def _read_config(data: Bytes) -> Dimensions:
    _check(data.size == CONFIG.size, "CONFIG", f"target.config has {data.size} bytes, not {CONFIG.size}")
    *fields, reserved = CONFIG.unpack(data.data)
    _check(not any(reserved), "CONFIG", "reserved bytes of target.config are not zero")
    config = Dimensions(*fields)
    try:
        check_dimensions(config)
    except RefusedError as error:
        raise BundleError("CONFIG", str(error)) from None
    return config


def _read_draft_config(data: Bytes, config: Dimensions, target_crcs: tuple[int, ...]) -> DraftConfig:
    size = DRAFT_CONFIG.size
    _check(data.size == size, "DRAFT", f"draft.config has {data.size} bytes, not {size}")
    architecture, *fields, reserved = DRAFT_CONFIG.unpack(data.data)
    _check(architecture == FUSED, "DRAFT", f"drafter architecture {architecture}; this reader knows {FUSED}")
    _check(not any(reserved), "DRAFT", "reserved bytes of draft.config are not zero")
    dimensions, (features, *layers), (vocab, depths) = fields[:6], fields[6:11], fields[11:13]
    crcs, temperatures, odds = fields[13:16], fields[16:24], fields[24:]
    _check(
        dimensions == draft_dimensions(config), "DRAFT", "the drafter has other dimensions than the target"
    )
    _check(tuple(crcs) == target_crcs, "DRAFT", "the drafter belongs to another target; pack both together")
    _check(1 <= features <= MAX_FEATURES, "DRAFT", f"the drafter reads {features} residual streams")
    used = layers[:features]
    in_order = all(a < b for a, b in pairwise([0, *used])) and used[-1] <= config.layers
    _check(in_order and not any(layers[features:]), "DRAFT", f"the drafter reads after layers {layers}")
    vocab_ok = vocab % TILE_ROWS == 0 and TILE_ROWS <= vocab <= min(65536, config.vocab)
    _check(vocab_ok, "DRAFT", f"the drafter has {vocab} tokens to choose from")
    _check(1 <= depths <= MAX_DEPTHS, "DRAFT", f"the drafter is calibrated for {depths} depths")
    for name, values in {"temperature": temperatures, "odds": odds}.items():
        # Zero bytes after them: -0.0 is refused.
        unused = struct.pack(f"<{MAX_DEPTHS - depths}f", *values[depths:])
        sensible = all(math.isfinite(v) and v > 0 for v in values[:depths]) and not any(unused)
        _check(sensible, "DRAFT", f"the drafter's {name} values are {values}")
    calibration = tuple(zip(temperatures[:depths], odds[:depths], strict=True))
    return DraftConfig(tuple(used), vocab, calibration, (crcs[0], crcs[1], crcs[2]))


def check_draft(draft: DraftConfig, ids: NDArray[Any], config: Dimensions) -> None:
    """Raise BundleError DRAFT unless a bundle with a target of ``config`` can hold this drafter."""
    try:
        data = draft.pack(config)
    except (struct.error, OverflowError, ValueError) as error:
        raise BundleError("DRAFT", f"the drafter's settings do not fit draft.config: {error}") from error
    _read_draft_config(np.frombuffer(data, np.uint8), config, draft.target_crcs)
    _check_draft_ids(ids, config.vocab)


def _check_draft_ids(ids: NDArray[Any], vocab: int) -> None:
    ascending = ids[-1] < vocab and (ids[:-1] < ids[1:]).all()
    _check(ascending, "DRAFT", f"draft_ids do not ascend below the vocabulary of {vocab}")


def _read_tensor_directory(
    data: bytes, sections: Sequence[Section], dtypes: tuple[int, ...]
) -> list[TensorEntry]:
    count, remainder = divmod(len(data), TENSOR_ENTRY.size)
    _check(remainder == 0 and count <= _MAX_TENSORS, "TENSOR", f"a tensor directory has {len(data)} bytes")
    entries: list[TensorEntry] = []
    for index, (raw, *fields, reserved) in enumerate(TENSOR_ENTRY.iter_unpack(data)):
        entry = TensorEntry(_read_name(raw, r"[A-Za-z0-9._-]+", f"tensor {index}"), *fields)
        where = f"tensor {entry.name}"
        _check(entry.dtype in dtypes, "DTYPE", f"{where} has dtype {entry.dtype}")
        _check(entry.section < len(sections), "TENSOR", f"{where} is in section {entry.section}")
        in_range = 1 <= entry.rows <= _MAX_DIMENSION and 1 <= entry.columns <= _MAX_DIMENSION
        whole_blocks = entry.dtype not in FORMATS or entry.columns % BLOCK == 0
        _check(in_range and whole_blocks, "TENSOR", f"{where} is {entry.rows} x {entry.columns}")
        expected = tensor_nbytes(entry.dtype, entry.rows, entry.columns)
        _check(entry.length == expected, "TENSOR", f"{where} has {entry.length} bytes, not {expected}")
        _check(entry.offset % TENSOR_ALIGNMENT == 0, "TENSOR", f"{where} is at {entry.offset}, unaligned")
        room = sections[entry.section].length
        _check(
            entry.offset + entry.length <= room, "TENSOR", f"{where} ends after its section's {room} bytes"
        )
        _check(not any(reserved), "HEADER", f"reserved bytes of {where} are not zero")
        entries.append(entry)
    for a, b in pairwise(sorted(entries, key=lambda entry: (entry.section, entry.offset))):
        apart = a.section != b.section or a.offset + a.length <= b.offset
        _check(apart, "TENSOR", f"tensors {a.name} and {b.name} overlap in section {a.section}")
    for a, b in pairwise(sorted(entries, key=lambda entry: (entry.section, entry.name))):
        apart = (a.section, a.name) != (b.section, b.name)
        _check(apart, "NAME", f"tensor {a.name} appears twice in section {a.section}")
    return entries


def _read_golden(data: Bytes, config: Dimensions) -> Golden:
    _check(data.size >= GOLDEN.size, "GOLDEN", f"golden has only {data.size} bytes")
    count, greedy, base_digest, full_digest = GOLDEN.unpack_from(data.data)
    counts_ok = 1 <= count <= 64 and 1 <= greedy <= 64
    _check(counts_ok, "GOLDEN", f"{count} golden prompts, {greedy} greedy tokens; 1 to 64 are allowed")
    prompts: list[tuple[int, ...]] = []
    position = GOLDEN.size
    for index in range(count):
        where = f"golden prompt {index}"
        _check(position + 4 <= data.size, "GOLDEN", f"{where} is missing")
        length = int.from_bytes(data[position : position + 4].tobytes(), "little")
        end = position + 4 + 4 * length
        _check(1 <= length <= 4096 and end <= data.size, "GOLDEN", f"{where} has {length} tokens")
        fits = length + greedy <= config.max_positions
        _check(fits, "GOLDEN", f"{where} and its greedy tokens exceed {config.max_positions} positions")
        ids = tuple(data[position + 4 : end].view("<u4").tolist())
        _check(max(ids) < config.vocab, "GOLDEN", f"{where} has token {max(ids)} of {config.vocab}")
        prompts.append(ids)
        position = end
    _check(position == data.size, "GOLDEN", f"golden has {data.size - position} bytes too many")
    return Golden(tuple(prompts), greedy, base_digest, full_digest)


def _read_name(raw: bytes, pattern: str, what: str) -> str:
    """The name in a NUL-padded field, which must hold at least one NUL."""
    name, nul, padding = raw.partition(b"\0")
    valid = nul and not any(padding) and re.fullmatch(pattern.encode("ascii"), name)
    _check(bool(valid), "NAME", f"{what} has the invalid name {raw!r}")
    return name.decode("ascii")
