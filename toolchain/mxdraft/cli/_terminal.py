"""Standard streams and Ctrl-C, as both command lines treat them (docs/cli.md)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mxdraft.errors import CapacityError, RefusedError, TransferError, UsageError

PROMPT_LIMIT = 16 << 20  # bytes; far above any context, so that an endless stream ends in an error


def reserve_standard_streams() -> None:
    """Make closed standard streams unusable ones, so that no other file takes their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if fd == 0 else os.O_RDONLY)


def open_stdin() -> BinaryIO:
    return open(0, "rb", closefd=False)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


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


def note(line: str) -> None:
    """Write a line to stderr. Losing it is no reason to stop."""
    with contextlib.suppress(OSError):
        write_all(2, printable(f"{line}\n"))


def printable(text: str) -> bytes:
    """``text`` as a terminal may get it, whoever wrote it: control characters, but line feed and tab, are
    spelled ``\\xNN``. Bytes that ``surrogateescape`` kept stay; half a surrogate pair is spelled, too."""
    spelled = re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]",
        lambda match: ascii(match[0])[1:-1].replace("\\r", "\\x0d"),
        text,
    )
    return spelled.encode("utf-8", "surrogateescape")


def read_text(text: str | None, path: str | None, stdin: str | None) -> bytes:
    """Read the prompt's bytes from exactly one of -p TEXT, -f FILE and -."""
    if stdin not in (None, "-"):
        raise UsageError(f"unexpected argument '{stdin}'")
    if [text, path, stdin].count(None) != 2:
        raise UsageError("give the text as exactly one of -p TEXT, -f FILE and -")
    if text is not None:
        return os.fsencode(text)
    name = "standard input" if path is None else path
    try:
        with open_stdin() if path is None else Path(path).open("rb") as file:
            data = file.read(PROMPT_LIMIT + 1)
    except FileNotFoundError as error:
        raise RefusedError(f"cannot read {name}: {error.strerror}") from error
    except OSError as error:
        raise TransferError(f"cannot read {name}: {error.strerror}") from error
    if len(data) > PROMPT_LIMIT:
        raise CapacityError(f"{name}: more than {PROMPT_LIMIT >> 20} MiB of text")
    return data


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
