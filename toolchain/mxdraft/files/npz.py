"""Reads .npz files that may be missing, damaged or something else."""

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
