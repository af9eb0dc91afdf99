# SPDX-License-Identifier: Apache-2.0
"""One device over OpenSSH: the user's own ``ssh``, with the user's configuration, keys and jump hosts.

A deployment has one authenticated connection (ControlMaster). Its first command holds the device's lock,
proves and switches; uploads go beside it. If this side dies, the device ends what it is at and lets go of the
lock.
"""

from __future__ import annotations

import os
import re
import reprlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from types import TracebackType
from typing import IO, BinaryIO, Self

from mxdraft.errors import CapacityError, MxdraftError, NumericError, RefusedError, TransferError, UsageError
from mxdraft.ship.deploy.release import script

_CHUNK = 1 << 16
_OPTIONS = ("ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4")
_ERRORS: dict[int, type[MxdraftError]] = {
    2: UsageError,
    3: RefusedError,
    4: CapacityError,
    5: NumericError,
}
# What ssh says, and what to do about it.
_HINTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one known. If you set the device up anew: ssh-keygen -R {name}; "
        "if not, somebody may be in between",
    ),
    ("Host key verification failed", "its host key is not known yet: run ssh {host} once and compare it"),
    ("Permission denied", "it refused to log you in: check the user, or run ssh-copy-id {host}"),
    ("Could not resolve", "there is no host of this name: is the device on, and on this network?"),
    ("Connection refused", "nothing listens there: enable SSH on the device (raspi-config), check the port"),
    ("timed out", "no answer: is the device on, and on this network?"),
    ("No route to host", "no way there: is the device on, and on this network?"),
    ("No space left", "the device's disk is full: make room and run the command again"),
)


def check_host(host: str) -> str:
    """Return ``host`` if it can be neither an option nor more than one word, for ssh and for any command that
    its configuration runs; raises UsageError."""
    word = r"""[^\s'"`$;&|<>\\/(){}*?!#@-][^\s'"`$;&|<>\\/(){}*?!#@]*"""
    if not (len(host) <= 320 and host.isprintable() and re.fullmatch(rf"(ssh://)?({word}@)*{word}", host)):
        raise UsageError(f"host {reprlib.repr(host)}: expected [user@]name, as ssh takes it")
    return host


def check_dest(dest: str) -> str:
    """Return ``dest`` if it is a path that needs no guessing, and no folder that others share; raises
    UsageError."""
    parts = PurePosixPath(dest).parts
    if (
        not set(parts) - {"/", "//"}
        or dest.startswith(("-", "~"))
        or ".." in parts
        or len(dest) > 1024
        or not dest.isprintable()
    ):
        raise UsageError(
            f"dest {reprlib.repr(dest)}: expected a path, absolute or below the home folder, to a folder for "
            "deployments alone"
        )
    return dest


class Device:
    """A host and the folder of its releases. As a context manager it ends what ``hold`` began.

    ``note`` gets each line that the device has to say beside results and errors. ``ask`` False: ssh fails
    where it would ask for a password or a host key.
    """

    def __init__(self, host: str, dest: str, note: Callable[[str], None], ask: bool = True) -> None:
        self.host = check_host(host)
        self.dest = check_dest(dest)
        self._note = note
        self._folder = tempfile.TemporaryDirectory(prefix="mxd")
        options = [*_OPTIONS, "ControlPersist=no", f"ControlPath={self._folder.name}/ssh"]
        if not ask:
            options.append("BatchMode=yes")
        self._ssh = ["ssh", "-T", *(argument for option in options for argument in ("-o", option))]
        self._holder: _Holder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holder is not None:
            self._holder.close()
        self._folder.cleanup()

    def hold(self, manifest: str, service: bool) -> list[tuple[str, int]]:
        """Check the device, take its lock; returns (SHA-256, bytes that are there) of each file it lacks."""
        self._holder = _Holder([*self._ssh, "-o", "ControlMaster=yes", "--", self.host, "sh"])
        missing = []
        for line in self._order(self._program("hold", manifest, service)):
            found = re.fullmatch(r"missing ([0-9a-f]{64}) (\d{1,18}) .*", line)
            if found is None or f"\nfile {found[1]} " not in manifest:
                raise RefusedError(
                    f"{self.host}: unexpected answer '{line}': does its shell print something at login?"
                )
            missing.append((found[1], int(found[2])))
        return missing

    def upload(self, digest: str, source: BinaryIO, progress: Callable[[int], None]) -> None:
        """Append the rest of ``source`` to the file that the device keeps under ``digest``."""
        target = shlex.quote(f"{self.dest}/store/{digest}.part")
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [*self._ssh, "--", self.host, f"cat >> {target}"],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                bufsize=0,
            )
            assert process.stdin is not None
            try:
                while chunk := source.read(_CHUNK):
                    if not _send(process.stdin, chunk):
                        break
                    progress(len(chunk))
            finally:
                process.stdin.close()
                code = process.wait()
            if code:
                said.seek(0)
                raise self._error(code, said.read() or b"the upload broke off")

    def prove(self) -> dict[str, str]:
        """Check what was uploaded, and that it computes what the manifest says; needs ``hold`` before."""
        return _results(self._order(b"prove\n"))

    def switch(self) -> dict[str, str]:
        """Make the proved release the current one."""
        return _results(self._order(b"switch\n"))

    def run(self, action: str) -> dict[str, str]:
        """``rollback`` or ``status``."""
        done = subprocess.run(
            [*self._ssh, "--", self.host, "sh"],
            input=self._program(action, "", False),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise self._error(done.returncode, done.stderr)
        self._pass_on(done.stderr)
        return _results(_lines(done.stdout))

    def _order(self, order: bytes) -> list[str]:
        """The lines with which the holder answers; raises what its exit code stands for."""
        assert self._holder is not None
        lines, code = self._holder.order(order)
        stderr = self._holder.said()
        if code is not None:
            raise self._error(code, stderr)
        self._pass_on(stderr)
        return lines

    def _program(self, action: str, manifest: str, service: bool) -> bytes:
        variables = {
            "ACTION": action,
            "DEST": self.dest,
            "MANIFEST": manifest,
            "SERVICE": "yes" if service else "no",
            "NOW": str(int(time.time())),
        }
        assignments = "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items())
        return f"{assignments}set -- remote\n{script('device.sh')}".encode("utf-8", "surrogateescape")

    def _pass_on(self, stderr: bytes) -> None:
        for line in _lines(stderr):
            if line.startswith("note: "):
                self._note(f"{self.host}: {line.removeprefix('note: ')}")

    def _error(self, code: int, stderr: bytes) -> MxdraftError:
        """The exception for a command that failed: device.sh's own words, else ssh's with a hint."""
        self._pass_on(stderr)
        lines = _lines(stderr)
        own = [line for line in lines if line.startswith("error: ")]
        if own:
            return _ERRORS.get(code, TransferError)(f"{self.host}: {own[-1].removeprefix('error: ')}")
        name = self.host.split("@")[-1]
        hints = [text.format(host=self.host, name=name) for sign, text in _HINTS if sign in "\n".join(lines)]
        hint = hints[0] if hints else "the connection failed"
        return TransferError(f"{self.host}: {hint} ({lines[-1] if lines else f'ssh ended with {code}'})")


class _Holder:
    """The command that holds the device's lock and obeys orders, a line each."""

    def __init__(self, command: list[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._read = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def order(self, order: bytes) -> tuple[list[str], int | None]:
        """What it says up to ``done``, and None; or, if it ends before, its exit code."""
        _send(self._stdin, order)
        lines: list[str] = []
        for line in self._stdout:
            if line == b"done\n":
                return lines, None
            lines += _lines(line)
        self._stdin.close()
        return lines, self._process.wait() or 255  # an end without being asked to is none to be content with

    def said(self) -> bytes:
        """What is new on stderr. The process shares the file's position, so it must stay where it is."""
        data = os.pread(self._stderr.fileno(), 1 << 20, self._read)
        self._read += len(data)
        return data

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._process.wait()
        self._stderr.close()


def _lines(data: bytes) -> list[str]:
    """What a device said, with nothing in it that could control the terminal."""
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]


def _results(lines: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}


def _send(stream: IO[bytes], data: bytes) -> bool:
    """Write to an unbuffered pipe; False if the other side has ended, whose exit code will say why."""
    try:
        while data:
            data = data[stream.write(data) :]
    except BrokenPipeError:
        return False
    return True
