# SPDX-License-Identifier: Apache-2.0
"""Writes a bundle: sections one after another, tensors laid out within them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from numpy.typing import NDArray

from mxdraft.bundle.format import (
    ALIGNMENT,
    HEADER,
    MAGIC,
    SECTION_ENTRY,
    TENSOR_ALIGNMENT,
    VERSION,
    Section,
    TensorEntry,
    TensorSpec,
    align,
    tensor_nbytes,
)
from mxdraft.bundle.tiles import to_tiles
from mxdraft.mx import MXTensor


class BundleWriter:
    """Writes sections, in the order they are added, into a file that is open for writing (see
    ``mxdraft.files.replacing``)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sections: list[Section] = []

    def add(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Append a section made of the chunks' bytes."""
        offset = align(self._end, ALIGNMENT)
        self._file.seek(offset)
        crc = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            self._file.write(chunk)
        self._sections.append(Section(name, offset, self._file.tell() - offset, crc))

    def add_tensors(
        self,
        directory: str,
        sections: Mapping[str, Iterable[TensorSpec]],
        values: Callable[[str, TensorEntry], MXTensor | NDArray[Any]],
    ) -> None:
        """Append the tensor directory ``directory``, then each of ``sections`` with its tensors.

        ``values(section, entry)`` returns what a tensor holds: quantized, float32 or uint32.
        """
        first = len(self._sections) + 1
        laid_out = {
            section: list(_lay_out(tensors, number))
            for number, (section, tensors) in enumerate(sections.items(), first)
        }
        self.add(directory, [entry.pack() for entries in laid_out.values() for entry in entries])
        for section, entries in laid_out.items():
            self.add(section, _chunks(entries, (values(section, entry) for entry in entries)))

    @property
    def sections(self) -> dict[str, Section]:
        """What was added so far, by name."""
        return {section.name: section for section in self._sections}

    def replace(self, name: str, data: bytes) -> None:
        """Overwrite a section that was added, with as many bytes; ``seal`` must follow."""
        index = next(i for i, section in enumerate(self._sections) if section.name == name)
        section = self._sections[index]
        if len(data) != section.length:
            raise ValueError(f"section {name} has {section.length} bytes, not {len(data)}")
        self._file.seek(section.offset)
        self._file.write(data)
        self._sections[index] = replace(section, crc=zlib.crc32(data))

    def seal(self) -> None:
        """Write header and section table: now the file is a whole bundle."""
        table = b"".join(
            SECTION_ENTRY.pack(s.name.encode("ascii"), s.offset, s.length, s.crc, bytes(12))
            for s in self._sections
        )
        header = HEADER.pack(MAGIC, VERSION, len(self._sections), self._end, zlib.crc32(table), bytes(36))
        self._file.seek(0)
        self._file.write(header + table)
        self._file.flush()

    @property
    def _end(self) -> int:
        return self._sections[-1].offset + self._sections[-1].length if self._sections else ALIGNMENT


def _lay_out(tensors: Iterable[TensorSpec], section: int) -> Iterator[TensorEntry]:
    """Place the tensors of section number ``section``; yields the directory's entries."""
    end = 0
    for name, dtype, (rows, columns) in tensors:
        offset, length = align(end, TENSOR_ALIGNMENT), tensor_nbytes(dtype, rows, columns)
        yield TensorEntry(name, dtype, section, rows, columns, offset, length)
        end = offset + length


def _chunks(
    entries: Sequence[TensorEntry], values: Iterable[MXTensor | NDArray[Any]]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a section: each tensor at its place."""
    end = 0
    for entry, tensor in zip(entries, values, strict=True):
        yield bytes(entry.offset - end)
        yield to_tiles(tensor).data if isinstance(tensor, MXTensor) else tensor.data
        end = entry.offset + entry.length
