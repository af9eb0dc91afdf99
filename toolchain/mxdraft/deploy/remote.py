"""One device over OpenSSH: the user's own ``ssh``, with the user's configuration, keys, agent and jump hosts.

All commands share one authenticated connection (ControlMaster), whose first command holds the device's lock.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from mxdraft.deploy.release import script
from mxdraft.errors import CapacityError, MxdraftError, NumericError, RefusedError, TransferError, UsageError

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
    """``host`` if ssh can take it for nothing else; raises UsageError."""
    if not re.fullmatch(
        r"(ssh://)?[^\s\x00-\x1f\x7f'\"`$;&|<>\\(){}*?!#-][^\s\x00-\x1f\x7f'\"`$;&|<>\\(){}*?!#]*", host
    ):
        raise UsageError(f"host {host!r}: expected [user@]name, as ssh takes it")
    return host


def check_dest(dest: str) -> str:
    """``dest`` if it is a path that needs no guessing; raises UsageError."""
    if (
        not dest
        or dest.startswith(("-", "~"))
        or re.search(r"[\x00-\x1f\x7f]", dest)
        or ".." in Path(dest).parts
    ):
        raise UsageError(f"dest {dest!r}: expected a path, absolute or below the home folder")
    return dest


class Device:
    """A host and the folder of its releases. As a context manager it holds the device's lock.

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
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holder is not None:
            assert self._holder.stdin is not None
            assert self._holder.stdout is not None
            self._holder.stdin.close()
            self._holder.stdout.close()
            self._holder.wait()
        self._folder.cleanup()

    def hold(self, manifest: str, service: bool) -> list[tuple[str, int]]:
        """Check the device, take its lock; returns (SHA-256, bytes that are there) of each file it lacks."""
        with tempfile.TemporaryFile() as said:
            self._holder = subprocess.Popen(
                [*self._ssh, "-o", "ControlMaster=yes", "--", self.host, "sh"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
            )
            assert self._holder.stdin is not None
            assert self._holder.stdout is not None
            _send(self._holder.stdin, self._program("hold", manifest, service))
            missing = []
            for line in self._holder.stdout:
                match line.decode("utf-8", "replace").split():
                    case ["missing", digest, have, *_]:
                        missing.append((digest, int(have)))
                    case ["ready"]:
                        said.seek(0)
                        self._pass_on(said.read())
                        return missing
            self._holder.stdin.close()
            code = self._holder.wait()
            said.seek(0)
            raise self._error(code, said.read())

    def upload(self, digest: str, source: BinaryIO, progress: Callable[[int], None]) -> None:
        """Append the rest of ``source`` to the file that the device keeps under ``digest``."""
        self._check_held()
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

    def run(self, action: str, manifest: str = "", service: bool = False) -> dict[str, str]:
        """Run an action of device.sh; its results by key. Raises what its exit code stands for."""
        if self._holder is not None:
            self._check_held()
        done = subprocess.run(
            [*self._ssh, "--", self.host, "sh"],
            input=self._program(action, manifest, service),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise self._error(done.returncode, done.stderr)
        self._pass_on(done.stderr)
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        return {key: value for key, _, value in (line.partition(" ") for line in lines)}

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

    def _check_held(self) -> None:
        if self._holder is None or self._holder.poll() is not None:
            raise TransferError(
                f"{self.host}: the connection broke; the current release is unchanged. Run the command again"
            )

    def _pass_on(self, stderr: bytes) -> None:
        for line in stderr.decode("utf-8", "replace").splitlines():
            if line.startswith("note: "):
                self._note(f"{self.host}: {line.removeprefix('note: ')}")

    def _error(self, code: int, stderr: bytes) -> MxdraftError:
        """The exception for a command that failed: device.sh's own words, else ssh's with a hint."""
        self._pass_on(stderr)
        text = stderr.decode("utf-8", "replace").strip()
        own = [line for line in text.splitlines() if line.startswith("error: ")]
        if own:
            return _ERRORS.get(code, TransferError)(f"{self.host}: {own[-1].removeprefix('error: ')}")
        hints = [
            hint.format(host=self.host, name=self.host.split("@")[-1])
            for sign, hint in _HINTS
            if sign in text
        ]
        last = text.splitlines()[-1] if text else f"ssh ended with {code}"
        return TransferError(f"{self.host}: {hints[0] if hints else 'the connection failed'} ({last})")


def _send(stream: IO[bytes], data: bytes) -> bool:
    """Write to an unbuffered pipe; False if the other side has ended, whose exit code will say why."""
    try:
        while data:
            data = data[stream.write(data) :]
    except BrokenPipeError:
        return False
    return True
