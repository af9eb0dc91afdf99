# SPDX-License-Identifier: Apache-2.0
"""A Raspberry Pi to deploy to: qemu-system-aarch64, a Debian arm64 kernel, busybox and a real SSH server.

``python tests/emulated_pi.py`` makes two images from Debian packages, once, in build/emulated-pi/: in
``initrd`` there is only busybox, in ``systemd`` the first process is systemd. ``EmulatedPi`` boots one. Its
disk is its memory, so every boot is a fresh board. Needs a Debian-like host with qemu-system-arm, cpio and
openssh-client.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

IMAGE = Path(__file__).resolve().parents[1] / "build" / "emulated-pi"
TOOLS = ("apt-get", "apt-cache", "dpkg", "cpio", "qemu-system-aarch64", "ssh", "ssh-keygen")
PACKAGES = (
    *("busybox-static", "dropbear-bin", "libc6", "libcrypt1"),
    *("libgmp10", "libtomcrypt1", "libtommath1", "util-linux", "zlib1g"),
)
SYSTEMD_PACKAGES = (
    *("libacl1", "libapparmor1", "libaudit1", "libblkid1", "libcap-ng0", "libcap2", "libgcrypt20"),
    *("libgpg-error0", "libip4tc2", "libkmod2", "liblz4-1", "liblzma5", "libmount1", "libpam0g"),
    *("libpcre2-8-0", "libseccomp2", "libselinux1", "libssl3", "libsystemd-shared", "libzstd1", "systemd"),
)
# In the order in which the kernel must load them.
MODULES = ("virtio_mmio", "failover", "net_failover", "virtio_net")

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /tmp /run
mount -t devpts pts /dev/pts
mount -t tmpfs -o size=70%,mode=700 home /root
mkdir -m 700 /root/.ssh
cp /key.pub /root/.ssh/authorized_keys
chmod 600 /root/.ssh/authorized_keys
for module in {modules}; do insmod /modules/$module.ko; done
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
dropbear -R -s -E
while :; do sleep 1000; done
"""
# systemd confines services with mount namespaces, which need another root than the kernel's first.
SYSTEMD_INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox insmod /modules/$module.ko; done
/bin/busybox mount -t tmpfs -o size=70%,mode=755 root /new
for folder in bin lib sbin usr etc var opt root; do /bin/busybox cp -a /$folder /new/; done
/bin/busybox mkdir -m 700 /new/root/.ssh
/bin/busybox cp /key.pub /new/root/.ssh/authorized_keys
for folder in proc sys dev run tmp; do /bin/busybox mkdir /new/$folder; done
/bin/busybox --install -s /new/bin 2>/dev/null # leaves what is there
/bin/busybox umount /proc /sys
exec /bin/busybox switch_root /new /lib/systemd/systemd
"""
SYSTEMD_UNITS = {
    "default.target": """[Unit]
Requires=basic.target
Wants=network-up.service dropbear.service
After=basic.target
""",
    "network-up.service": """[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/busybox ip link set eth0 up
ExecStart=/bin/busybox ip addr add 10.0.2.15/24 dev eth0
""",
    "dropbear.service": """[Unit]
After=network-up.service
[Service]
ExecStart=/usr/sbin/dropbear -R -s -F -E
""",
}
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:19000::::::\n",
    "etc/shells": "/bin/sh\n",
}


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def make_images() -> None:
    """Download the packages (70 MB) and put kernel, both images and a key pair into IMAGE."""
    if (IMAGE / "initrd.gz").exists() and (IMAGE / "systemd.gz").exists():
        return
    if missing_tools():
        sys.exit(
            f"emulated-pi: missing {', '.join(missing_tools())}: install qemu-system-arm cpio openssh-client"
        )
    shutil.rmtree(IMAGE, ignore_errors=True)
    packages = _download(IMAGE / "packages")
    unpacked = IMAGE / "unpacked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", IMAGE / "key"], check=True)
    for name, make_root in (("initrd", _make_root), ("systemd", _make_systemd_root)):
        for package in packages:
            if name == "systemd" or package.name.split("_")[0] not in SYSTEMD_PACKAGES:
                subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        make_root(unpacked, IMAGE / name)
        names = subprocess.run(["find", "."], cwd=IMAGE / name, check=True, capture_output=True).stdout
        archive = subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"],
            cwd=IMAGE / name,
            input=names,
            check=True,
            capture_output=True,
        ).stdout
        (IMAGE / "image.part").write_bytes(gzip.compress(archive, 1))
        (IMAGE / "image.part").replace(IMAGE / f"{name}.gz")
        shutil.rmtree(IMAGE / name)
    (kernel,) = (unpacked / "boot").glob("vmlinuz-*")
    kernel.replace(IMAGE / "vmlinuz")
    for folder in ("packages", "unpacked"):
        shutil.rmtree(IMAGE / folder)


def _download(folder: Path) -> list[Path]:
    """Packages for arm64, from an apt with a state of its own."""
    for part in ("state/lists/partial", "cache/archives/partial", "debs"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
        "Dir::State::status": folder / "status",
    }
    options = [argument for key, value in settings.items() for argument in ("-o", f"{key}={value}")]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    depends = subprocess.run(
        ["apt-cache", *options, "depends", "linux-image-arm64"],
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
    kernel = re.findall(r"Depends: (linux-image-\S+)", depends)
    subprocess.run(
        ["apt-get", "-qq", *options, "download", *kernel, *PACKAGES, *SYSTEMD_PACKAGES],
        cwd=folder / "debs",
        check=True,
    )
    return sorted((folder / "debs").glob("*.deb"))


def _make_root(unpacked: Path, root: Path) -> None:
    for folder in (
        "bin",
        "lib",
        "modules",
        "proc",
        "sys",
        "dev",
        "etc/dropbear",
        "root/.ssh",
        "home/pi/.ssh",
        "tmp",
    ):
        (root / folder).mkdir(parents=True)
    shutil.copy2(unpacked / "bin/busybox", root / "bin/busybox")
    shutil.copy2(unpacked / "usr/sbin/dropbear", root / "bin/dropbear")
    shutil.copy2(unpacked / "usr/bin/flock", root / "bin/flock")  # Debian's busybox has none
    shutil.copy2(IMAGE / "key.pub", root / "key.pub")
    for library in unpacked.rglob("*.so*"):
        if library.parent.name == "aarch64-linux-gnu" or library.parent == unpacked / "lib":
            shutil.copy2(library, root / "lib" / library.name)
    _finish_root(unpacked, root, INIT)


def _make_systemd_root(unpacked: Path, root: Path) -> None:
    for folder in (
        *("usr/bin", "usr/lib", "usr/sbin", "etc/dropbear", "etc/systemd/system", "modules", "proc", "sys"),
        *("dev", "new", "opt", "root", "var/cache", "var/lib", "var/log"),
    ):
        (root / folder).mkdir(parents=True)
    for folder in ("bin", "lib", "sbin"):
        (root / folder).symlink_to(f"usr/{folder}")
        for source in (unpacked / folder, unpacked / "usr" / folder):
            shutil.copytree(
                source,
                root / "usr" / folder,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("modules", "firmware", "gconv"),
            )
    shutil.copytree(unpacked / "etc", root / "etc", symlinks=True, dirs_exist_ok=True)
    shutil.copy2(IMAGE / "key.pub", root / "key.pub")
    for name, text in SYSTEMD_UNITS.items():
        (root / "etc/systemd/system" / name).write_text(text, encoding="utf-8")
    (root / "etc/machine-id").write_text("0" * 31 + "1\n", encoding="utf-8")
    _finish_root(unpacked, root, SYSTEMD_INIT)


def _finish_root(unpacked: Path, root: Path, init: str) -> None:
    for module in MODULES:
        (found,) = unpacked.rglob(f"{module}.ko")
        shutil.copy2(found, root / "modules" / found.name)
    for name, text in ACCOUNTS.items():
        (root / name).write_text(text, encoding="utf-8")
    (root / "init").write_text(init.format(modules=" ".join(MODULES)), encoding="utf-8")
    (root / "init").chmod(0o755)


def ssh_environment(folder: Path, name: str, port: int, key: Path) -> dict[str, str]:
    """An environment whose ``ssh`` knows host ``name``: port ``port`` of this machine.

    ssh reads the configuration in the account's home, whatever $HOME says; so one that reads another stands
    in front of it.
    """
    settings = {
        "HostName": "127.0.0.1",
        "Port": port,
        "IdentityFile": key,
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": folder / "known_hosts",
    }
    lines = [f"Host {name}", *(f" {key} {value}" for key, value in settings.items())]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n', encoding="utf-8"
    )
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EmulatedPi:
    """A running board. With ``environment``, ``ssh`` knows it as host ``emulated-pi``."""

    def __init__(self, folder: Path, cpu: str, memory_mib: int = 1024, image: str = "initrd") -> None:
        port = free_port()
        self.log = folder / "serial.log"
        self.environment = ssh_environment(folder, "emulated-pi", port, IMAGE / "key")
        self._command = [
            *("qemu-system-aarch64", "-M", "virt", "-cpu", cpu, "-smp", "2", "-m", str(memory_mib)),
            *("-kernel", str(IMAGE / "vmlinuz"), "-initrd", str(IMAGE / f"{image}.gz")),
            *("-append", "console=ttyAMA0 quiet rdinit=/init", "-nographic", "-monitor", "none"),
            *("-serial", f"file:{self.log}", "-device", "virtio-net-device,netdev=n0"),
            *("-netdev", f"user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"),
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while self.ssh("true").returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(
                    f"the board does not answer: {self.log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ssh(
        self, command: str, stdin: BinaryIO | int = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the board."""
        return subprocess.run(
            ["ssh", "-o", "ConnectTimeout=10", "emulated-pi", command],
            env=os.environ | self.environment,
            stdin=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )


if __name__ == "__main__":
    make_images()
    print(IMAGE)
