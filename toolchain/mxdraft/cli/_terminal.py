# SPDX-License-Identifier: Apache-2.0
"""Standard streams, signals and messages, as both command lines treat them (docs/cli.md)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import termios
import threading
from collections.abc import Iterator
from typing import Any

from mxdraft.errors import CapacityError, RefusedError, TransferError, UsageError

TEXT_LIMIT = 16 << 20  # bytes; far above any context, so that an endless stream ends in an error
_READ_BYTES = 65536
_FULL_LINE = 4095  # bytes of a line that a terminal keeps


def reserve_standard_streams() -> None:
    """Make closed standard streams unusable ones, so that no other file takes their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if fd == 0 else os.O_RDONLY)


def _wait(fd: int, events: int) -> None:
    poll = select.poll()
    poll.register(fd, events)
    poll.poll()


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, however long that takes. Raises OSError."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            _wait(fd, select.POLLOUT)


def emit(data: bytes) -> None:
    """Write to stdout at once. A closed pipe ends the process quietly with 141, as SIGPIPE would."""
    try:
        write_all(1, data)
    except BrokenPipeError:
        os._exit(141)
    except OSError as error:
        raise TransferError(f"cannot write to standard output: {error.strerror}") from error


def print_line(text: object) -> None:
    """Write a line to stdout; a path in it may hold what is not UTF-8."""
    emit(f"{text}\n".encode("utf-8", "surrogateescape"))


def tell(data: bytes) -> None:
    """Write to stderr at once. Losing that is no reason to stop."""
    with contextlib.suppress(OSError):
        write_all(2, data)


def note(line: str) -> None:
    """Write a line to stderr, as ``tell`` does."""
    tell(terminal_bytes(f"{line}\n"))


def printable(text: str) -> str:
    """Return a text from a file or command line with control characters as \\xNN."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def terminal_bytes(text: str) -> bytes:
    """``text`` as a terminal may get it, whoever wrote it: control characters, but line feed and tab, are
    spelled ``\\xNN``. Bytes that ``surrogateescape`` kept stay; half a surrogate pair is spelled, too."""
    spelled = re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]",
        lambda match: ascii(match[0])[1:-1].replace("\\r", "\\x0d"),
        text,
    )
    return spelled.encode("utf-8", "surrogateescape")


class Output(io.RawIOBase):
    """Standard output for what click prints: written at once, with the outcomes of ``emit``."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        emit(bytes(data))
        return len(data)


class LineLostError(CapacityError):
    """The terminal cut this line; the next one may be whole."""


def _read_some(fd: int, name: str, held: int) -> bytes:
    """Read once, waiting if the stream does not block; ``held``: bytes of the same text read before.

    A terminal in line mode keeps the first 4,095 bytes of a line and drops the others without a word. Raises
    LineLostError for a line that long, TransferError if reading fails, CapacityError beyond TEXT_LIMIT.
    """
    while True:
        try:
            data = os.read(fd, _READ_BYTES)
            break
        except BlockingIOError:
            _wait(fd, select.POLLIN)
        except OSError as error:
            raise TransferError(f"cannot read {name}: {error.strerror}") from error
    if held + len(data) > TEXT_LIMIT:
        raise CapacityError(f"{name}: more than {TEXT_LIMIT >> 20} MiB of text")
    if (
        len(data.removesuffix(b"\n")) >= _FULL_LINE
        and os.isatty(fd)
        and termios.tcgetattr(fd)[3] & termios.ICANON
    ):
        raise LineLostError(
            f"{name}: the terminal cuts a line after {_FULL_LINE} bytes: "
            "give long text with -f FILE or through a pipe"
        )
    return data


def _read_stream(fd: int, name: str) -> bytes:
    text = bytearray()
    while data := _read_some(fd, name, len(text)):
        text += data
    return bytes(text)


class LineReader:
    """Standard input by lines."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ended = False

    def read(self) -> bytes | None:
        """Read the next line without its end, None at the end of input. Raises as ``_read_some`` does."""
        searched = 0
        while (end := self._text.find(b"\n", searched)) < 0 and not self._ended:
            searched = len(self._text)
            try:
                data = _read_some(0, "standard input", searched)
            except LineLostError:
                self._text.clear()
                raise
            self._ended = not data
            self._text += data
        if not self._text:
            return None
        taken = len(self._text) if end < 0 else end + 1
        line = bytes(self._text[:taken])
        del self._text[:taken]
        return line.removesuffix(b"\n").rstrip(b"\r")


def read_text(text: str | None, path: str | None, stdin: str | None) -> bytes:
    """Read the prompt's bytes from exactly one of -p TEXT, -f FILE and -."""
    if stdin not in (None, "-"):
        raise UsageError(f"unexpected argument '{stdin}'")
    if [text, path, stdin].count(None) != 2:
        raise UsageError("give the text as exactly one of -p TEXT, -f FILE and -")
    if text is not None:
        return os.fsencode(text)
    if path is None:
        return _read_stream(0, "standard input")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _read_stream(fd, path)
    finally:
        os.close(fd)


class Interrupt:
    """Ctrl-C: ends the process with 130 at once, except that the first one inside ``deferred`` is only noted.

    Python's handler, which notes it, has to wait for a running C call; so a thread does the ending.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGINT, self._note)
        signal.set_wakeup_fd(wakeup)
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        yield
        self._deferred = self.requested  # the thread may be late for a first Ctrl-C that is noted already

    def _note(self, *_: object) -> None:
        self.requested = True

    def _watch(self) -> None:
        first = True
        while os.read(self._signals, 1):
            if not (first and self._deferred):
                os._exit(130)
            first = False
