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

_CACHE = "/var/cache/private/mxdraft"
_DEST = ("--host", "emulated-pi", "--dest", "/opt/mxdraft")
_URL = "http://127.0.0.1:8080/v1/completions"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, bundles: list[Path]) -> Iterator[EmulatedPi]:
    """A board with systemd and the service."""
    assert (IMAGE / "systemd.gz").exists(), "make emulated-pi makes the images"
    with EmulatedPi(tmp_path_factory.mktemp("board"), "cortex-a76", image="systemd") as board:
        code, _, stderr = _deploy(board, bundles[0], "--service")
        assert code == 0, stderr
        yield board


def _said(board: EmulatedPi, command: str) -> str:
    done = board.ssh(f"cd /tmp && {command}")
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _request(tokens: int, members: str = "") -> str:
    """A command that asks the service."""
    body = f'{{"prompt": "The", "max_tokens": {tokens}{members}}}'
    return f"wget -q -O - --post-data '{body}' {_URL}"


def _answer(board: EmulatedPi) -> str:
    text: str = json.loads(_said(board, _request(12)))["choices"][0]["text"]
    assert text, _said(board, "journalctl --no-pager | tail -n 30")
    return text


def _wait_until(board: EmulatedPi, command: str) -> None:
    deadline = time.monotonic() + 300
    while board.ssh(command).returncode:
        assert time.monotonic() < deadline, f"{command}: {_said(board, 'journalctl --no-pager | tail -n 30')}"


@emulated
def test_service_answers_and_measures_once(board: EmulatedPi) -> None:
    """As ``generate`` does, also after it was stopped, and after a flood of connections."""
    words = "generate -m /opt/mxdraft/current/model.mxb --raw -p The -n 12"
    expected = _said(board, f"/opt/mxdraft/current/mxdraft {words}")
    assert _answer(board) == expected
    _said(board, "for i in $(seq 100); do wget -q -O - http://127.0.0.1:8080/health || exit 1; done")
    _said(board, "systemctl stop mxdraft.service")
    assert _answer(board) == expected
    assert _said(board, "journalctl --no-pager -u mxdraft.service | grep -c measuring") == "1\n"
    assert _said(board, f"ls {_CACHE} | wc -l") == "1\n"


@emulated
def test_service_is_confined(board: EmulatedPi) -> None:
    assert _answer(board)
    status = dict(
        line.split(":\t", 1)
        for line in _said(board, "cat /proc/$(pidof mxdraft)/status").splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {_said(board, f"stat -c %u {_CACHE}").strip()}
    assert status["Uid"].split()[0] != "0"
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {status[key] for key in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    limits = "/sys/fs/cgroup/system.slice/mxdraft.service/memory"
    assert _said(board, f"cat {limits}.max {limits}.swap.max") == f"{640 << 20}\n0\n"
    root = "/proc/$(pidof mxdraft)/root"
    _said(board, f"! ls {root}/root/.ssh && ! touch {root}/etc/x && ! ls {root}/dev/vda")
    assert _said(board, "tail -n +3 /proc/$(pidof mxdraft)/net/dev | cut -d: -f1").split() == ["lo"]


@emulated
def test_service_that_died_answers_again(board: EmulatedPi) -> None:
    expected = _answer(board)
    _said(board, "kill -KILL $(pidof mxdraft)")
    assert _answer(board) == expected
    assert _said(board, "systemctl --failed --plain --no-legend") == ""


@emulated
def test_service_is_for_the_network_with_a_key(board: EmulatedPi) -> None:
    """As docs/deploy.md says."""
    drop_ins = {
        "mxdraft.socket.d": "[Socket]\\nListenStream=10.0.2.15:8080\\n",
        "mxdraft.service.d": "[Service]\\nLoadCredential=key:/etc/mxdraft.key\\n"
        'Environment="MXDRAFT_OPTIONS=--api-key-file %%d/key"\\n',
    }
    _said(board, "umask 077 && echo secret >/etc/mxdraft.key")
    for folder, text in drop_ins.items():
        path = f"/etc/systemd/system/{folder}"
        _said(board, f"mkdir -p {path} && printf '{text}' >{path}/network.conf")
    restart = "systemctl daemon-reload && systemctl stop mxdraft.service && systemctl restart mxdraft.socket"
    _said(board, restart)
    url = "http://10.0.2.15:8080/v1/models"
    _wait_until(board, f"wget -q -O - --header 'Authorization: Bearer secret' {url}")
    assert "401" in board.ssh(f"wget -q -O - {url}").stderr
    for folder in drop_ins:
        _said(board, f"rm -r /etc/systemd/system/{folder}")
    _said(board, restart)


@emulated
def test_rollback_while_the_service_generates(board: EmulatedPi, bundles: list[Path]) -> None:
    """A switch and a rollback break off what is being answered; the next answer is the other release's."""
    before = _answer(board)
    code, _, stderr = _deploy(board, bundles[1], "--service")
    assert code == 0, stderr
    assert _answer(board) != before
    long = _request(2000, ', "stream": true, "temperature": 2, "stop": ["\\u0001"]')
    _said(board, f"({long} >/tmp/stream 2>&1; echo ended >>/tmp/stream) >/dev/null 2>&1 &")
    _wait_until(board, "test -s /tmp/stream")
    code, _, stderr = mxdraft(board.environment, "rollback", *_DEST)
    assert code == 0, stderr
    _wait_until(board, "grep -q ended /tmp/stream")
    assert _answer(board) == before
    code, stdout, _ = mxdraft(board.environment, "status", *_DEST)
    assert (code, "service active\nhealth ok\n" in stdout) == (0, True)
