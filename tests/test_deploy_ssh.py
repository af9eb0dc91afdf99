# SPDX-License-Identifier: Apache-2.0
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
from clib import compile_c, zig
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
    assert (IMAGE / "systemd.gz").exists(), "make emulated-pi makes the images"
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

    # Somebody else's folder, and the home folder, stay as they are.
    pi.ssh("mkdir -p app/store && echo precious >app/store/photo.jpg")
    for dest, expected in (("app", 3), ("/root", 2), ("/root/./", 2)):
        code, _, stderr = _deploy(pi, bundles[1], "--dest", dest)
        assert code == expected, stderr
    assert pi.ssh("find app -type f").stdout == "app/store/photo.jpg\n"

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


# ---- the service on a board with systemd ----

_SOCKET = "/run/mxdraft.sock"
# A member of the group, and an account that is none.
_MEMBER = "/usr/bin/setpriv --reuid=1000 --regid=1000 --groups=$(grep ^mxdraft: /etc/group | cut -d: -f3)"
_STRANGER = "/usr/bin/setpriv --reuid=1001 --regid=1001 --clear-groups"
_TALK = f"./talk {_SOCKET}"
_CACHE = "/var/cache/private/mxdraft"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, bundles: list[Path]) -> Iterator[EmulatedPi]:
    """A board with systemd and the service, and the program ``talk`` in /tmp."""
    assert (IMAGE / "systemd.gz").exists(), "make emulated-pi makes the images"
    folder = tmp_path_factory.mktemp("board")
    talk = compile_c(zig("aarch64"), folder / "talk", "tests/c/talk.c")
    with EmulatedPi(folder, "cortex-a76", image="systemd") as board:
        with talk.open("rb") as program:
            board.ssh("cat >/tmp/talk && chmod 755 /tmp/talk", stdin=program)
        code, _, stderr = _deploy(board, bundles[0], "--service")
        assert code == 0, stderr
        yield board


def _said(board: EmulatedPi, command: str) -> str:
    done = board.ssh(f"cd /tmp && {command}")
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _converse(board: EmulatedPi) -> str:
    answer = _said(board, f"echo hello | {_MEMBER} {_TALK}")
    assert answer, _said(board, "journalctl --no-pager | tail -n 30")
    return answer


def _hold_a_place(board: EmulatedPi) -> None:
    """Begin a conversation in which nobody says anything, and leave it open."""
    _said(board, f"(sleep 1000 | {_MEMBER} {_TALK}) >/dev/null 2>&1 &")
    _wait_until(board, "pidof mxdraft")


def _wait_until(board: EmulatedPi, command: str) -> None:
    deadline = time.monotonic() + 300
    while board.ssh(command).returncode:
        assert time.monotonic() < deadline, f"{command}: {_said(board, 'journalctl --no-pager | tail -n 30')}"


def _hang_up(board: EmulatedPi) -> None:
    board.ssh("killall sleep")
    _wait_until(board, "! pidof mxdraft")


@emulated
def test_service_is_for_the_group(board: EmulatedPi) -> None:
    assert _converse(board)
    done = board.ssh(f"cd /tmp && echo hello | {_STRANGER} {_TALK}")
    assert (done.returncode, done.stdout, "Permission denied" in done.stderr) == (1, "", True)


@emulated
def test_service_measures_once(board: EmulatedPi) -> None:
    assert _converse(board) == _converse(board)
    assert _said(board, "journalctl --no-pager | grep -c measuring") == "1\n"
    assert _said(board, f"ls {_CACHE} | wc -l") == "1\n"


@emulated
def test_service_is_confined(board: EmulatedPi) -> None:
    _hold_a_place(board)
    status = dict(
        line.split(":\t", 1)
        for line in _said(board, "cat /proc/$(pidof mxdraft)/status").splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {_said(board, f"stat -c %u {_CACHE}").strip()}
    assert status["Uid"].split()[0] not in ("0", "1000", "1001")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {status[key] for key in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    limits = "/sys/fs/cgroup/system.slice/system-mxdraft.slice/*/memory"
    assert _said(board, f"cat {limits}.max {limits}.swap.max") == f"{640 << 20}\n0\n"
    root = "/proc/$(pidof mxdraft)/root"
    _said(board, f"! ls {root}/root/.ssh && ! touch {root}/etc/x && ! ls {root}/dev/vda")
    _hang_up(board)


@emulated
def test_socket_survives_a_flood(board: EmulatedPi) -> None:
    """Twenty connections in ten seconds once were enough to stop the socket until it was started again."""
    _hold_a_place(board)
    flood = f"{_MEMBER} sh -c 'for i in $(seq 100); do {_TALK} </dev/null >/dev/null 2>&1; done'"
    _said(board, f"{flood}; systemctl is-active mxdraft.socket")
    assert int(_said(board, "systemctl show -P NRefused mxdraft.socket")) >= 100
    _hang_up(board)
    assert _converse(board)


@emulated
def test_nobody_holds_the_place_for_good(board: EmulatedPi) -> None:
    folder = "/run/systemd/system/mxdraft@.service.d"
    _said(board, f"mkdir -p {folder} && printf '[Service]\\nRuntimeMaxSec=5s\\n' >{folder}/short.conf")
    _said(board, "systemctl daemon-reload")
    _hold_a_place(board)
    _wait_until(board, "! pidof mxdraft")
    assert "reached runtime time limit" in _said(board, "journalctl --no-pager | tail -n 30")
    _said(board, f"rm -r {folder} && systemctl daemon-reload && killall sleep")
    assert _converse(board)
    assert _said(board, "systemctl --failed --plain --no-legend") == ""


@emulated
def test_service_after_a_rollback(board: EmulatedPi, bundles: list[Path]) -> None:
    """A switch and a rollback take effect with the next conversation."""
    before = _converse(board)
    code, _, stderr = _deploy(board, bundles[1], "--service")
    assert code == 0, stderr
    assert _converse(board) != before
    host = ("--host", "emulated-pi", "--dest", "/opt/mxdraft")
    code, _, stderr = mxdraft(board.environment, "rollback", *host)
    assert code == 0, stderr
    assert _converse(board) == before
    code, stdout, _ = mxdraft(board.environment, "status", *host)
    assert (code, "service active\n" in stdout) == (0, True)
