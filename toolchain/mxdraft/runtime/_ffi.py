# SPDX-License-Identifier: Apache-2.0
"""Finds libmxdraft, declares it from the public header, and translates its errors, words and texts."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from cffi import FFI

from mxdraft import HEADER, __version__
from mxdraft.errors import (
    BundleError,
    CapacityError,
    MxdraftError,
    NumericError,
    RefusedError,
    TransferError,
    UsageError,
)

# In an installed wheel the library lies next to the header, in a checkout it is what was built for the host.
_LIBRARIES = (
    Path(__file__).parents[1] / "_runtime" / "libmxdraft.so",
    Path(__file__).parents[3] / "build" / "host" / "libmxdraft.so",
)

NO_TOKEN = 0xFFFFFFFF  # in place of a token id

_ERRORS: dict[str, type[MxdraftError]] = {
    "MXD_ERR_ARGUMENT": UsageError,
    "MXD_ERR_UNSUPPORTED": UsageError,
    "MXD_ERR_BUFFER": UsageError,
    "MXD_ERR_IO": TransferError,
    "MXD_ERR_MEMORY": CapacityError,
    "MXD_ERR_CONTEXT": CapacityError,
    "MXD_ERR_NUMERIC": NumericError,
    "MXD_ERR_MISMATCH": NumericError,
}


class Library:
    """The loaded C library: ``ffi`` (cffi, ABI mode), ``lib`` (the functions) and checked calls."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.ffi = ffi
        self.lib = lib

    def call(self, function: Any, *args: Any) -> None:
        """Call a function whose last parameter is ``mxd_error *``; raise what its status stands for."""
        error = self.ffi.new("mxd_error *")
        status = function(*args, error)
        if status != self.lib.MXD_OK:
            raise self.error(status, error)

    def error(self, status: int, error: Any) -> MxdraftError:
        """The exception for a status that is not MXD_OK."""
        name = self.ffi.typeof("mxd_status").elements.get(status, str(status))
        message = self.ffi.string(error.message).decode("utf-8", "surrogateescape")
        if name.startswith("MXD_BAD_"):
            return BundleError(name.removeprefix("MXD_BAD_"), message)
        return _ERRORS.get(name, MxdraftError)(message)


@functools.cache
def load() -> Library:
    """Load the library once: ``$MXDRAFT_LIBRARY``, else the installed package's own, else ``build/host``.

    Raises RefusedError if there is none, if it cannot be loaded, or if its version is not this package's.
    """
    path = _library_path()
    ffi = FFI()
    ffi.cdef(_declarations())
    try:
        lib = ffi.dlopen(str(path))
        version = ffi.string(lib.mxd_version()).decode("ascii")
    except (OSError, AttributeError) as error:
        raise RefusedError(f"cannot load {path}: {error}") from error
    if version != __version__:
        raise RefusedError(f"{path} is version {version}, this package is {__version__}; rebuild the library")
    return Library(ffi, lib)


def _library_path() -> Path:
    override = os.environ.get("MXDRAFT_LIBRARY")
    if override:
        return Path(override)
    for path in _LIBRARIES:
        if path.exists():
            return path
    raise RefusedError(
        "libmxdraft.so is not there: run `make build TARGET=host` in the repository, "
        "or name the file in $MXDRAFT_LIBRARY"
    )


def _declarations() -> str:
    """The part of the public header between its two cdef marks."""
    return HEADER.read_text(encoding="utf-8").split("/* <cdef> */")[1].split("/* </cdef> */")[0]


@functools.cache
def words(enum: str) -> tuple[Any, ...]:
    """The words of a public enum such as ``mxd_draft``, by value."""
    library = load()
    name = getattr(library.lib, f"{enum}_name")
    values = sorted(library.ffi.typeof(enum).elements)
    return tuple(library.ffi.string(name(value)).decode("ascii") for value in values)


def text_of(function: Any) -> str:
    """The text that a function (buffer, capacity) writes, which returns its length without the NUL."""
    ffi = load().ffi
    size = function(ffi.NULL, 0) + 1
    buffer = ffi.new("char[]", size)
    function(buffer, size)
    return str(ffi.string(buffer).decode("utf-8"))


def utf8(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def c_text(text: str | bytes) -> bytes:
    """For a NUL-terminated string. Raises UsageError if the text holds a NUL byte."""
    data = utf8(text)
    if b"\0" in data:
        raise UsageError(
            f"the text holds a NUL byte at offset {data.index(0)}: it cannot be in a message or stop string"
        )
    return data
