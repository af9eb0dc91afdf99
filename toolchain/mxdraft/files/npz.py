"""Reads .npz files that may be missing, damaged or something else, and the token ids in them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdraft.errors import RefusedError


@contextmanager
def reading_npz(path: Path, what: str) -> Iterator[dict[str, NDArray[Any]]]:
    """Give the arrays of a file, which is ``what``, by name.

    Raises RefusedError if it is not an .npz, and for what the block raises because it is another one:
    ValueError, KeyError, TypeError, AttributeError.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield dict(archive)
    except (
        *(OSError, EOFError, ValueError, KeyError, TypeError, AttributeError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise RefusedError(f"{path} is not a {what}: {error}") from error


def read_windows(path: Path, context: int, vocab: int) -> NDArray[np.int64]:
    """Read token ids [count, context] of a teacher-text file (.npz with an array ``tokens``).

    The documents follow each other and are cut every ``context`` tokens. A window may span documents:
    teacher and student read the same, so what the student is asked for is still what the teacher says there.
    """
    with reading_npz(path, "teacher text (an .npz with an array 'tokens')") as arrays:
        tokens = arrays["tokens"].astype(np.int64)
    count = tokens.size // context
    if tokens.ndim != 1 or count == 0:
        raise RefusedError(f"{path}: {tokens.size} tokens do not fill a window of {context}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise RefusedError(
            f"{path}: token {tokens.max()} is outside the vocabulary of {vocab}; wrong tokenizer?"
        )
    return tokens[: count * context].reshape(count, context)
