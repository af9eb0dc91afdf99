# SPDX-License-Identifier: Apache-2.0
"""Files: read whatever they are, written whole or not at all, hashed, cached.

download.py   downloads that go on where they stopped
npz.py        reading .npz files that may be missing, damaged or something else
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mxdraft.errors import CapacityError, MxdraftError, RefusedError, TransferError

_TEXT_LIMIT = 16 << 20  # bytes of a settings file
_TOML_LIMIT = 1 << 20  # bytes of what people write by hand
_TOML_DEPTH = 8
_MAX_DEPTH = 64  # of nested objects and arrays: everything that later walks over them does so by recursion
_REASON_LENGTH = 300  # characters: some parsers quote the whole input

# ---- reading ----


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. A directory, pipe or device, which might never end, is none.

    Raises RefusedError if it is not there, TransferError if it cannot be read.
    """

    def without_waiting(name: str, flags: int) -> int:  # for the writer of a pipe
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        file = open(path, "rb", opener=without_waiting)  # noqa: SIM115  (Path.open has no opener)
    except FileNotFoundError:
        raise RefusedError(f"{path}: no such file") from None
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL byte, or half a surrogate pair
        raise RefusedError(f"{str(path)!r} cannot be the name of a file") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TransferError(f"cannot read {path}: it is not a regular file")
    return file


def read_file(path: Path, limit: int = _TEXT_LIMIT) -> bytes:
    """All bytes of a regular file, which may have ``limit`` bytes. Raises as ``open_regular``."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise RefusedError(f"{path} is larger than {limit >> 20} MiB, the most for such a file")
        try:
            return file.read()
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror}") from error


def as_text(path: Path | str) -> str:
    """A path, or a part of one, as text that every file can hold: bytes that are not UTF-8 as ``\\xNN``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """``text`` with escapes for what could control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def parsing(name: Path | str, what: str) -> Iterator[None]:
    """Turn whatever the block raises into a RefusedError: ``name`` is not a ``what``, and the reason.

    The block parses bytes that are read already. What a parser raises for bytes that nobody foresaw is not
    foreseen either, so no list of exceptions is kept. Raises CapacityError if the memory does not suffice.
    """
    try:
        yield
    except RefusedError as error:
        raise RefusedError(f"{name}: {error}") from error
    except MxdraftError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{name}: there is not enough memory to read it") from error
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        article = "an" if what[0] in "aeio" else "a"
        raise RefusedError(f"{name} is not {article} {what}: {printable(reason[:_REASON_LENGTH])}") from error


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises ValueError if it is none, and for what JSON leaves open or a later step could not write again: an
    object that has a key twice, more than 64 levels, half a surrogate pair.
    """
    text = data.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if _deeper_than(value, _MAX_DEPTH):
        raise ValueError(f"its values are nested more than {_MAX_DEPTH} levels deep")
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def parse_json_object(data: bytes) -> dict[str, Any]:
    """As ``parse_json``, of a text that must be an object. Raises ValueError."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file, which is ``what``. Raises as ``read_file``; RefusedError if it is another,
    larger than 1 MiB, or nested deeper than 8."""
    data = read_file(path, _TOML_LIMIT)
    with parsing(path, what):
        try:
            table = tomllib.loads(data.decode("utf-8"))
        except RecursionError:
            raise ValueError("its values are nested too deeply") from None
        if _deeper_than(table, _TOML_DEPTH):
            raise ValueError(f"its values are nested too deeply, more than {_TOML_DEPTH} levels")
        return table


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {name!r} appears twice")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for values in inner for x in values]
        if not level:
            return False
    return True


# ---- writing ----


@contextmanager
def replacing(path: Path) -> Iterator[io.BufferedRandom]:
    """A temporary file next to ``path``, open for reading and writing; its path is its ``name``.

    Leaving the block without an exception flushes it to the disk and renames it to ``path``; what a symbolic
    or hard link there leads to stays as it is. With one it is removed, and ``path`` stays as it was. Files
    that a killed process left behind are removed. Raises TransferError if the system refuses, or if ``path``
    is there and no regular file.
    """
    try:
        with _temporary(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)  # noqa: PTH105
    except OSError as error:
        raise TransferError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _temporary(target: Path) -> Iterator[io.BufferedRandom]:
    """A file next to ``target``, with its permissions, which is removed at the end if it is still there.

    Its writer holds a lock on it, so whatever carries no lock has lost its writer.
    """
    mode = target.stat().st_mode if target.exists() else None
    stream = target.is_symlink() and str(target.readlink()).startswith("/proc/")  # as /dev/stdout is
    if stream or (mode is not None and not stat.S_ISREG(mode)):
        raise OSError(None, "it is not a regular file")
    prefix = f".{target.name[:40]}."  # short enough for the name to be no longer than a name may be
    with contextlib.suppress(OSError):
        for left in target.parent.iterdir():
            if left.name.startswith(prefix) and left.name.endswith(".part"):
                _remove_unless_locked(left)
    while True:
        path = target.with_name(f"{prefix}{os.urandom(6).hex()}.part")
        file = path.open("x+b")
        try:
            with contextlib.suppress(OSError):  # not every file system has locks; then nothing is cleaned up
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):  # taken for a leftover before it was locked
                continue
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            return
        finally:
            for end in (path.unlink, file.close):
                with contextlib.suppress(OSError):
                    end()


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError, MxdraftError), open_regular(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON. Raises TransferError as ``replacing`` does."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode("ascii") + b"\n")


def file_sha256(path: Path) -> str:
    """Hash a regular file with SHA-256, in hexadecimal. Raises as ``open_regular``."""
    with open_regular(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file ``path``, which is there only meanwhile. If another process holds it, calls
    ``waiting`` and waits. Raises OSError."""
    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):  # its holder, who is done, removed it
                continue
            try:
                yield
                return
            finally:
                path.unlink(missing_ok=True)


# ---- the cache ----


def default_cache() -> Path:
    """Return $MXDRAFT_CACHE, else mxdraft under $XDG_CACHE_HOME or ~/.cache.

    Of these two, only an absolute one counts (XDG Base Directory Specification). Raises TransferError if
    there is none.
    """
    own, shared, home = (os.environ.get(name, "") for name in ("MXDRAFT_CACHE", "XDG_CACHE_HOME", "HOME"))
    if own:
        return Path(own)
    if shared.startswith("/"):
        return Path(shared) / "mxdraft"
    if home.startswith("/"):
        return Path(home) / ".cache" / "mxdraft"
    raise TransferError("there is no place for a cache: set HOME or MXDRAFT_CACHE to a directory")
