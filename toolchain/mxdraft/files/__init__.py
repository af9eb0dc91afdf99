"""Files: written whole or not at all, hashed, cached.

npz.py   reading .npz files that may be missing, damaged or something else
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mxdraft.errors import TransferError, UsageError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path`` for reading and writing; its path is its ``name``.

    Leaving the block without an exception flushes it to the disk and renames it to ``path``. With one it is
    removed, and ``path`` stays as it was. A link stays, and leads to the new file. A device or pipe is not
    replaced but written to. Raises TransferError if the system refuses.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise TransferError(f"cannot write {path}: {error.strerror}") from error
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".mxdraft-{secrets.token_hex(8)}.part")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
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
    """Return $MXDRAFT_CACHE, else mxdraft under $XDG_CACHE_HOME or $HOME/.cache.

    Of these two, only an absolute one counts (XDG Base Directory Specification). Raises UsageError if there
    is none.
    """
    own, shared, home = (os.environ.get(name, "") for name in ("MXDRAFT_CACHE", "XDG_CACHE_HOME", "HOME"))
    if own:
        return Path(own)
    if shared.startswith("/"):
        return Path(shared) / "mxdraft"
    if home.startswith("/"):
        return Path(home) / ".cache" / "mxdraft"
    raise UsageError("there is no place for a cache: set HOME or MXDRAFT_CACHE to a directory")
