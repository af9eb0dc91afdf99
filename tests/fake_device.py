# SPDX-License-Identifier: Apache-2.0
"""Devices without a network: an ``ssh`` in front of PATH that runs commands in a folder of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tiny
from mxdraft.cli.bundle import _golden_digests
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.ship.build import build

# What a deployment uses of ssh. A file `ssh` in the device's folder is what ssh complains about.
_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
device=$FAKE_DEVICES/$2
[ -d "$device" ] || { echo "ssh: Could not resolve hostname $2: Name or service not known" >&2; exit 255; }
[ -e "$device/ssh" ] && { cat "$device/ssh" >&2; exit 255; }
shift 2
cd "$device/home"
exec env -i HOME="$device/home" PATH="$device/bin:/usr/bin:/bin" MXDRAFT_SYSROOT="$device/root" sh -c "$*"
"""


@dataclass(frozen=True)
class FakeDevice:
    """The folder of one device; ``stub`` puts a program in front of the device's own."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def dest(self) -> Path:
        return self.home / "mxdraft"

    @property
    def system(self) -> Path:
        """What the device's script takes for /."""
        return self.folder / "root"

    def stub(self, program: str, script: str) -> None:
        path = self.folder / "bin" / program
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def system_file(self, path: str, text: str) -> None:
        (self.system / path).write_text(text, encoding="utf-8")

    def repair(self) -> None:
        """Remove all stubs, and what ssh complains about."""
        for path in (self.folder / "bin").iterdir():
            path.unlink()
        (self.folder / "ssh").unlink(missing_ok=True)
        self.system_file("proc/meminfo", "MemAvailable: 900000 kB\n")
        self.system_file("proc/cpuinfo", "Features\t: fp asimd evtstrm crc32 cpuid\n")

    def release(self) -> str:
        return (self.dest / "current").readlink().name

    def generate(self) -> str:
        """What the current release continues a prompt with."""
        command = [self.dest / "current/mxdraft", "generate", "-m", self.dest / "current/model.mxb"]
        done = subprocess.run(
            [*command, "--raw", "-p", "The", "-n", "8", "--ignore-eos"],
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert done.stdout
        return done.stdout.decode("utf-8", "replace")


class FakeNetwork:
    """A folder of devices, and the environment in which ``ssh`` reaches them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ssh = folder / "host" / "ssh"
        ssh.parent.mkdir(parents=True)
        ssh.write_text(_SSH, encoding="utf-8")
        ssh.chmod(0o755)
        self.environment = {
            "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}",
            "FAKE_DEVICES": str(folder / "devices"),
        }

    def device(self, name: str = "pi@fake") -> FakeDevice:
        device = FakeDevice(self.folder / "devices" / name)
        for part in ("bin", "home", "root/proc"):
            (device.folder / part).mkdir(parents=True)
        device.repair()
        return device

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """``mxdraft`` with these arguments."""
        return subprocess.Popen(
            [sys.executable, "-m", "mxdraft.cli", *map(str, arguments)],
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=120)
        return process.returncode, stdout, stderr


def make_bundle(folder: Path, seed: int) -> Path:
    """Fixture T with golden digests."""
    build("host")  # the digests are to be those of today's runtime
    exports = folder / f"exports{seed}"
    export_model(tiny.checkpoint(seed), exports)
    pack(exports, folder / f"tiny{seed}.mxb", digest=_golden_digests)
    return folder / f"tiny{seed}.mxb"


def wait_for(path: Path) -> None:
    """Until a stub has said that it is reached."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)
