"""Files: written whole or not at all, hashed, cached.

npz.py   reading .npz files that may be missing, damaged or something else
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mxdraft.errors import TransferError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path`` for reading and writing; its path is its ``name``.

    Leaving the block without an exception flushes it to the disk and renames it to ``path``. With one it is
    removed, and ``path`` stays as it was. Raises TransferError if the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise TransferError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON. Raises TransferError as ``replacing`` does."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode("ascii") + b"\n")


def file_sha256(path: Path) -> str:
    """Hash a file with SHA-256, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def default_cache() -> Path:
    """Return $MXDRAFT_CACHE, else mxdraft under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("MXDRAFT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "mxdraft"
