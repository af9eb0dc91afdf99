"""Deployments through real SSH: a server on loopback, and (``make test-deploy``) an emulated Raspberry Pi."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated_pi import IMAGE, EmulatedPi, free_port, ssh_environment
from fake_device import make_bundle
from mxdraft.ship.targets import REPOSITORY

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [make_bundle(folder, seed) for seed in range(2)]


def mxdraft(environment: dict[str, str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "mxdraft.cli", *map(str, arguments)],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# ---- OpenSSH's server on loopback ----


@dataclass(frozen=True)
class Server:
    """An account of this machine behind SSH, with a folder to deploy to."""

    folder: Path
    port: int
    environment: dict[str, str]

    def deploy(self, bundle: Path) -> tuple[int, str, str]:
        dest = self.folder / "dest"
        return mxdraft(
            self.environment, "deploy", "--target", "host", "--host", "board", "-m", bundle, "--dest", dest
        )

    def new_key(self, name: str) -> str:
        """Make ``name`` and ``name.pub`` in the folder; returns the public key."""
        path = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        return path.with_suffix(".pub").read_text(encoding="utf-8").split()[1]

    def start(self) -> subprocess.Popen[bytes]:
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where a server of root confines its children
        server = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", self.folder / "sshd_config"], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return server
            assert server.poll() is None, "sshd ended"
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if SSHD is None:
        pytest.skip("needs sshd (openssh-server)")
    port = free_port()
    server = Server(tmp_path, port, ssh_environment(tmp_path, "board", port, tmp_path / "key"))
    server.new_key("host_key")
    server.new_key("key")
    settings = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": tmp_path / "host_key",
        "AuthorizedKeysFile": tmp_path / "key.pub",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "StrictModes": "no",
        "PidFile": "none",
    }
    lines = [f"{key} {value}\n" for key, value in settings.items()]
    (tmp_path / "sshd_config").write_text("".join(lines), encoding="utf-8")
    running = server.start()
    yield server
    running.kill()
    running.wait()


def test_openssh(server: Server, bundles: list[Path]) -> None:
    code, stdout, stderr = server.deploy(bundles[0])
    assert (code, "deployed" in stdout) == (0, True), stderr
    code, _, stderr = server.deploy(bundles[1])
    assert code == 0, stderr
    dest = server.folder / "dest"
    code, stdout, stderr = mxdraft(server.environment, "rollback", "--host", "board", "--dest", dest)
    assert code == 0, stderr
    code, stdout, _ = mxdraft(server.environment, "status", "--host", "board", "--dest", dest)
    assert (code, "bundle tiny0.mxb\n" in stdout) == (0, True)


def test_host_key_changed(server: Server, bundles: list[Path]) -> None:
    assert server.deploy(bundles[0])[0] == 0
    known = server.folder / "known_hosts"
    name, kind, _ = known.read_text(encoding="utf-8").split()[:3]
    known.write_text(f"{name} {kind} {server.new_key('other')}\n", encoding="utf-8")
    code, stdout, stderr = server.deploy(bundles[1])
    assert (code, stdout) == (6, "")
    assert "its host key is not the one known" in stderr
    assert "tiny0.mxb" in (server.folder / "dest/current/manifest").read_text(encoding="utf-8")


def test_wrong_login(server: Server, bundles: list[Path]) -> None:
    (server.folder / "key.pub").write_text("", encoding="utf-8")
    code, stdout, stderr = server.deploy(bundles[0])
    assert (code, stdout, "ssh-copy-id board" in stderr) == (6, "", True), stderr


@pytest.mark.skipif(SSHD is None, reason="needs the OpenSSH client")
def test_nothing_listens(bundles: list[Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        host = f"ssh://127.0.0.1:{taken.getsockname()[1]}"
        code, stdout, stderr = mxdraft({}, "deploy", "--target", "host", "--host", host, "-m", bundles[0])
    assert (code, stdout, "enable SSH on the device" in stderr) == (6, "", True), stderr


# ---- the emulated Pi ----

emulated = pytest.mark.skipif("MXDRAFT_EMULATED_PI" not in os.environ, reason="make test-deploy runs it")


@pytest.fixture(scope="module", params=["cortex-a53", "cortex-a76"])
def pi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedPi]:
    assert (IMAGE / "initrd.gz").exists(), "make emulated-pi makes the image"
    with EmulatedPi(tmp_path_factory.mktemp("pi"), cpu=request.param) as board:
        yield board


def _generate(pi: EmulatedPi) -> str:
    words = "generate -m mxdraft/current/model.mxb --raw -p The -n 8 --ignore-eos"
    done = pi.ssh(f"mxdraft/current/mxdraft {words}")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


def _deploy(pi: EmulatedPi, bundle: Path, *arguments: object) -> tuple[int, str, str]:
    host = ("--target", "rpi", "--host", "emulated-pi")
    return mxdraft(pi.environment, "deploy", *host, "-m", bundle, *arguments)


@emulated
def test_emulated_pi(pi: EmulatedPi, bundles: list[Path], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, stdout, stderr = _deploy(pi, bundles[0], "--json", report)
    assert (code, "deployed" in stdout) == (0, True), stderr
    (first,) = json.loads(report.read_text(encoding="utf-8"))
    code, digest, _ = mxdraft({}, "verify", "-m", bundles[0])
    assert (code, digest) == (0, f"{first['digest']}\n")
    words = _generate(pi)

    # A full disk, in the preflight and behind it: the old release goes on.
    pi.ssh("dd if=/dev/zero of=/root/filler bs=1M")
    code, _, stderr = _deploy(pi, bundles[1])
    assert (code, "MiB are free" in stderr) == (4, True), stderr
    assert _generate(pi) == words
    pi.ssh("rm /root/filler")

    # So it does if the host is killed while it sends.
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mxdraft.cli",
            "deploy",
            "--target",
            "rpi",
            "--host",
            "emulated-pi",
            "-m",
            bundles[1],
        ],
        env=os.environ | pi.environment,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while pi.ssh("ls mxdraft/store/*.part").returncode and process.poll() is None:
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    assert _generate(pi) == words

    code, _, stderr = _deploy(pi, bundles[1])
    while "another deployment" in stderr and time.monotonic() < deadline + 120:  # it has not noticed yet
        code, _, stderr = _deploy(pi, bundles[1])
    assert code == 0, stderr
    assert _generate(pi) != words
    code, _, stderr = mxdraft(pi.environment, "rollback", "--host", "emulated-pi")
    assert code == 0, stderr
    assert _generate(pi) == words


@emulated
@pytest.mark.parametrize("pi", ["cortex-a76"], indirect=True)
def test_emulated_pi_with_the_real_model(pi: EmulatedPi) -> None:
    bundle = REPOSITORY / "build" / "smollm2-135m.mxb"
    if not bundle.exists():
        pytest.skip("needs build/smollm2-135m.mxb (make demo)")
    code, stdout, stderr = _deploy(pi, bundle)
    assert (code, "deployed" in stdout) == (0, True), stderr
