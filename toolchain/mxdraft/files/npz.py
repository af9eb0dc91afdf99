# SPDX-License-Identifier: Apache-2.0
"""Reads .npz files that may be missing, damaged or something else, and the token ids in them."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mxdraft.files import parsing, read_file

# Bytes of a file, and of all its arrays together: a compressed file of a few MiB can claim any size.
_LIMIT = 1 << 30


@contextmanager
def reading_npz(path: Path, what: str) -> Iterator[dict[str, NDArray[Any]]]:
    """Give the arrays of a file, which is ``what``, by name, for a block that makes something of them.


    Raises RefusedError if it is not an .npz, and for whatever the block raises because it is another one;
    TransferError if it cannot be read.
    """
    data = read_file(path, _LIMIT)
    with parsing(path, what):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            arrays = _read_members(archive)
        yield arrays


def documents(arrays: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Document i is ``tokens[offsets[i]:offsets[i + 1]]``. Raises KeyError, ValueError."""
    tokens, offsets = arrays["tokens"], arrays["offsets"]
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (tokens, offsets)):
        raise ValueError("its tokens and offsets are not lists of whole numbers")
    bounds = [int(offset) for offset in offsets]
    if not bounds or bounds[0] < 0 or bounds[-1] > tokens.size or bounds != sorted(bounds):
        raise ValueError(f"its offsets do not fit {tokens.size} tokens")
    return [tokens[a:b] for a, b in pairwise(bounds)]


def check_tokens(tokens: NDArray[Any], vocab: int) -> None:
    """Raise ValueError unless all tokens are inside a vocabulary of so many."""
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        outside = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"token {outside} is outside the vocabulary of {vocab}")


def _read_members(archive: zipfile.ZipFile) -> dict[str, NDArray[Any]]:
    members = archive.infolist()
    if sum(member.file_size for member in members) > _LIMIT:
        raise ValueError(f"its arrays take more than {_LIMIT >> 20} MiB")
    arrays: dict[str, NDArray[Any]] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in arrays:
            raise ValueError(f"its member {member.filename!r} is there twice, or no array")
        with archive.open(member) as file:
            arrays[name] = _read_array(name, file, member.file_size)
    return arrays


def _read_array(name: str, file: IO[bytes], size: int) -> NDArray[Any]:
    """An array in numpy's format 1.0 or 2.0, which must take ``size`` bytes with its header."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"array {name!r} is of format {version}")
    count = math.prod(shape)
    if dtype.hasobject or count < 0 or file.tell() + count * dtype.itemsize != size:
        raise ValueError(f"array {name!r}, {dtype} {shape}, does not take the {size} bytes that it has")
    array = np.empty(count, dtype)
    # On to the end, where the checksum is compared.
    if file.readinto(array.view(np.uint8)) != array.nbytes or file.read(1):  # type: ignore[attr-defined]
        raise ValueError(f"array {name!r} ends before its {size} bytes")
    return array.reshape(shape, order="F" if fortran_order else "C")


def read_windows(path: Path, context: int, vocab: int) -> NDArray[np.int64]:
    """Read token ids [count, context] of a teacher-text file (.npz with an array ``tokens``).

    The documents follow each other and are cut every ``context`` tokens. A window may span documents:
    teacher and student read the same, so what the student is asked for is still what the teacher says there.
    """
    with reading_npz(path, "teacher text (an .npz with an array 'tokens')") as arrays:
        tokens = arrays["tokens"].astype(np.int64)
        if tokens.ndim != 1 or tokens.size < context:
            raise ValueError(f"{tokens.size} tokens do not fill a window of {context}")
        check_tokens(tokens, vocab)
    return tokens[: tokens.size // context * context].reshape(-1, context)
