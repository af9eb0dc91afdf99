"""Deployments to devices behind a stubbed ssh: what goes right, and every way to go wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_device import FakeDevice, FakeNetwork, make_bundle, wait_for
from hypothesis import given
from hypothesis import strategies as st
from mxdraft.errors import CapacityError, MxdraftError, NumericError, RefusedError, TransferError, UsageError
from mxdraft.ship.deploy import deploy
from mxdraft.ship.deploy.archive import write_archive
from mxdraft.ship.deploy.fleet import read_hosts
from mxdraft.ship.deploy.release import UNITS, Release, prepare
from mxdraft.ship.deploy.remote import Device, check_dest, check_host

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock (util-linux)")

BUNDLE_BYTES = 1_000_000  # less than a bundle, far more than everything else


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [make_bundle(folder, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def releases(bundles: list[Path]) -> list[Release]:
    return [prepare("host", bundle) for bundle in bundles]


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    network = FakeNetwork(tmp_path)
    for name, value in network.environment.items():
        monkeypatch.setenv(name, value)
    return network


@pytest.fixture
def device(network: FakeNetwork) -> FakeDevice:
    return network.device()


@pytest.fixture
def deployed(device: FakeDevice, releases: list[Release]) -> FakeDevice:
    """A device with a release, which any failure has to leave as it is."""
    ship(device, releases[0])
    return device


@contextmanager
def no_progress(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _bytes: None


def ship(
    device: FakeDevice,
    release: Release,
    service: bool = False,
    dest: str = "mxdraft",
    notes: list[str] | None = None,
) -> dict[str, object]:
    note = [].append if notes is None else notes.append
    return deploy(Device(device.name, dest, note, ask=False), release, service, note, no_progress)


# ---- what goes right ----


def test_command_line(network: FakeNetwork, device: FakeDevice, bundles: list[Path], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("deploy", "--target", "host", "--host", device.name, "-m", bundles[0], "--json", report)
    code, stdout, stderr = network.run(*arguments)
    assert (code, "deployed" in stdout, "verifying there" in stderr) == (0, True, True), stderr
    (first,) = json.loads(report.read_text(encoding="utf-8"))
    assert first["uploaded_bytes"] > BUNDLE_BYTES
    assert first["digest"] in re.findall(
        "[0-9a-f]{64}", (device.dest / "current/manifest").read_text(encoding="utf-8")
    )
    assert float(first["decode_tok_per_s"]) > 0
    assert first["release"] == device.release()
    device.generate()

    code, stdout, _ = network.run("status", "--host", device.name)
    assert code == 0
    assert f"release {first['release']}\n" in stdout
    assert "bundle tiny0.mxb\n" in stdout

    code, stdout, stderr = network.run("rollback", "--host", device.name)
    assert (code, stdout) == (3, "")
    assert "no release before" in stderr

    (device.dest / "store" / (device.dest / "current/model.mxb").readlink().name).unlink()
    code, stdout, stderr = network.run("status", "--host", device.name)
    assert (code, stdout) == (3, "")
    assert "incomplete: deploy again" in stderr


def test_second_deployment_moves_no_weights(deployed: FakeDevice, releases: list[Release]) -> None:
    assert ship(deployed, releases[0])["uploaded_bytes"] == 0
    changed = dataclasses.replace(
        releases[0], manifest=releases[0].manifest.replace("tiny0.mxb", "renamed.mxb")
    )
    before = deployed.release()
    assert ship(deployed, changed)["uploaded_bytes"] == 0
    assert deployed.release() != before


def test_rollback_and_clean(network: FakeNetwork, deployed: FakeDevice, releases: list[Release]) -> None:
    words = [deployed.generate()]
    ids = [deployed.release()]
    for release in releases[1:]:
        ship(deployed, release)
        words.append(deployed.generate())
        ids.append(deployed.release())
    assert len(set(words)) == 3
    kept = {path.name for path in (deployed.dest / "releases").iterdir()}
    assert kept == set(ids[1:])  # the current and the one before
    stored = {path.name for path in (deployed.dest / "store").iterdir()}
    assert stored == set(releases[1].files) | set(releases[2].files)

    code, stdout, stderr = network.run("rollback", "--host", deployed.name)
    assert code == 0, stderr
    assert f"release {ids[1]}\n" in stdout
    assert deployed.generate() == words[1]
    network.run("rollback", "--host", deployed.name)
    assert deployed.generate() == words[2]


def test_rollback_proves_first(network: FakeNetwork, deployed: FakeDevice, releases: list[Release]) -> None:
    ship(deployed, releases[1])
    words = deployed.generate()
    with (deployed.dest / "releases").joinpath(_other_release(deployed), "model.mxb").open("r+b") as file:
        file.seek(200_000)
        file.write(b"\xff" * 100)
    code, _, stderr = network.run("rollback", "--host", deployed.name)
    assert code == 3
    assert "wrong SHA-256" in stderr
    assert deployed.generate() == words


def _other_release(device: FakeDevice) -> str:
    return (device.dest / "previous").readlink().name


def test_names_with_blanks_and_quotes(device: FakeDevice, releases: list[Release]) -> None:
    dest = 'it\'s $(a) "folder" & more'
    ship(device, releases[0], dest=dest)
    assert (device.home / dest / "current/mxdraft").exists()


def test_wrong_clock_is_a_note(device: FakeDevice, releases: list[Release]) -> None:
    device.stub("date", 'case $1 in +%s) echo 1000 ;; *) exec /usr/bin/date "$@" ;; esac')
    notes: list[str] = []
    ship(device, releases[0], notes=notes)
    assert any("clock" in note for note in notes)


# ---- what goes wrong: the device is not fit ----

Fault = Callable[[FakeDevice], None]


def _uploading(script: str) -> str:
    """``cat`` that does something else when it receives an upload."""
    return f'case $(readlink /proc/$$/fd/1) in *.part) {script} ;; *) exec /bin/cat "$@" ;; esac'


def _full_while_uploading(device: FakeDevice) -> None:
    device.stub("cat", _uploading("exec /bin/cat >/dev/full"))


def _damaging(device: FakeDevice) -> None:
    device.stub("cat", _uploading("exec tr '\\000' '\\001'"))


def _busy(device: FakeDevice) -> None:
    device.stub("flock", "exit 1")


FAULTS: dict[str, tuple[Fault, type[MxdraftError], str]] = {
    "32-bit userland": (
        lambda d: d.stub("getconf", "echo 32"),
        RefusedError,
        "32-bit userland: install the 64-bit",
    ),
    "other machine": (
        lambda d: d.stub("uname", "echo riscv64"),
        RefusedError,
        "riscv64.* choose another --target",
    ),
    "disk full": (
        lambda d: d.stub("df", "printf 'H\\n/dev/x 100 100 100 100%% /\\n'"),
        CapacityError,
        "MiB of disk .* 0 MiB are free",
    ),
    "disk full while uploading": (_full_while_uploading, TransferError, "disk is full: make room"),
    "no memory": (
        lambda d: d.system_file("proc/meminfo", "MemAvailable: 1024 kB\n"),
        CapacityError,
        "needs . MiB of memory, 1 MiB are available",
    ),
    "wrong checksum": (_damaging, RefusedError, "wrong SHA-256.*run the command again"),
    "busy": (_busy, TransferError, "another deployment to .* is running"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_leaves_the_old_release(deployed: FakeDevice, releases: list[Release], fault: str) -> None:
    before, words = deployed.release(), deployed.generate()
    break_device, error, message = FAULTS[fault]
    break_device(deployed)
    with pytest.raises(error, match=f"^{deployed.name}: .*{message}"):
        ship(deployed, releases[1])
    deployed.repair()
    assert (deployed.release(), deployed.generate()) == (before, words)
    ship(deployed, releases[1])
    assert deployed.generate() != words


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R fake",
        ),
        ("Host key verification failed.", "run ssh pi@fake once"),
        ("pi@fake: Permission denied (publickey).", "ssh-copy-id pi@fake"),
        ("ssh: connect to host fake port 22: Connection refused", "enable SSH"),
        ("ssh: connect to host fake port 22: Connection timed out", "is the device on"),
        ("Connection closed by remote host", r"connection failed \(Connection closed"),
        ("", "ssh ended with 255"),
    ],
)
def test_ssh_fails(device: FakeDevice, releases: list[Release], says: str, message: str) -> None:
    (device.folder / "ssh").write_text(says, encoding="utf-8")
    with pytest.raises(TransferError, match=message):
        ship(device, releases[0])


@pytest.mark.parametrize("line", ["welcome to this board", f"missing {'0' * 64} 0 x", "missing x 0 x"])
def test_unexpected_answer(device: FakeDevice, releases: list[Release], line: str) -> None:
    device.stub("sh", f"echo '{line}'; exec /bin/sh")
    with pytest.raises(RefusedError, match="unexpected answer"):
        ship(device, releases[0])


def test_answers_cannot_control_the_terminal(device: FakeDevice, releases: list[Release]) -> None:
    (device.folder / "ssh").write_text("\x1b[2J\x07 gone", encoding="utf-8")
    with pytest.raises(TransferError, match=r"\(\?\[2J\? gone\)"):
        ship(device, releases[0])


def test_refusal_copies_nothing(device: FakeDevice, releases: list[Release]) -> None:
    device.stub("getconf", "echo 32")
    with pytest.raises(RefusedError):
        ship(device, releases[0])
    assert list(device.home.iterdir()) == []


def test_32_bit_kernel(device: FakeDevice, releases: list[Release]) -> None:
    device.stub("uname", "echo armv7l")
    manifest = re.sub("(?m)^arch .*", "arch aarch64", releases[0].manifest)
    with pytest.raises(RefusedError, match=r"32-bit kernel \(armv7l\): install the 64-bit Raspberry Pi OS"):
        ship(device, dataclasses.replace(releases[0], manifest=manifest))


def test_missing_cpu_feature(device: FakeDevice, releases: list[Release]) -> None:
    release = dataclasses.replace(releases[0], manifest=f"{releases[0].manifest}\nfeatures asimddp")
    with pytest.raises(RefusedError, match="lacks asimddp"):
        ship(device, release)
    device.system_file("proc/cpuinfo", "Features\t: fp asimd asimddp\n")
    ship(device, release)


def test_unwritable_dest(device: FakeDevice, releases: list[Release]) -> None:
    (device.home / "file").touch()
    with pytest.raises(TransferError, match=r"cannot write to .*/file/x: choose another --dest"):
        ship(device, releases[0], dest="file/x")


# ---- what goes wrong: the proof ----


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("digest", "0" * 64, "computes other bits than the host: digest"),
        ("tokens", "1 2 3", "generates other tokens"),
    ],
)
def test_other_results(
    deployed: FakeDevice, releases: list[Release], key: str, value: str, message: str
) -> None:
    before = deployed.release()
    manifest = re.sub(f"(?m)^{key} .*", f"{key} {value}", releases[1].manifest)
    with pytest.raises(NumericError, match=message):
        ship(deployed, dataclasses.replace(releases[1], manifest=manifest))
    assert deployed.release() == before
    deployed.generate()


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("kill -ILL $$", RefusedError, "illegal instruction"),
        ("kill -KILL $$", CapacityError, "killed, most likely for want of memory"),
        ("echo mxdraft: error: no room >&2; exit 4", CapacityError, "verify on the device: no room"),
        ("exit 1", NumericError, "verify on the device ended with 1"),
    ],
)
def test_runtime_fails(
    deployed: FakeDevice, releases: list[Release], script: str, error: type[MxdraftError], message: str
) -> None:
    before = deployed.release()
    with pytest.raises(error, match=message):
        ship(deployed, _with_runtime(releases[1], f"#!/bin/sh\n{script}\n".encode()))
    assert deployed.release() == before
    deployed.generate()


def _with_runtime(release: Release, program: bytes) -> Release:
    import hashlib

    digest = hashlib.sha256(program).hexdigest()
    old = next(key for key, (name, _) in release.files.items() if name == "mxdraft")
    files = {key: value for key, value in release.files.items() if key != old} | {
        digest: ("mxdraft", program)
    }
    manifest = re.sub("(?m)^file .* mxdraft$", f"file {digest} {len(program)} mxdraft", release.manifest)
    return Release(manifest, files)


# ---- killed ----

# Says that it is reached, and waits to be let go.
_PAUSE = 'touch "$HOME/reached"; while [ ! -e "$HOME/go" ]; do sleep 0.05; done'


@pytest.mark.parametrize(
    ("stage", "program", "script"),
    [
        ("upload", "cat", _uploading(f"head -c 600000; {_PAUSE}")),
        ("check", "sha256sum", f'{_PAUSE}; exec /usr/bin/sha256sum "$@"'),
        ("verify", "wc", f'case $1 in -w) {_PAUSE} ;; esac; exec /usr/bin/wc "$@"'),
        ("switch", "mv", f'case $3 in *current) {_PAUSE} ;; esac; exec /bin/mv "$@"'),
    ],
    ids=["upload", "check", "verify", "switch"],
)
def test_host_is_killed(
    network: FakeNetwork, deployed: FakeDevice, bundles: list[Path], stage: str, program: str, script: str
) -> None:
    before, words = deployed.release(), deployed.generate()
    deployed.stub(program, script)
    process = network.start("deploy", "--target", "host", "--host", deployed.name, "-m", bundles[1])
    wait_for(deployed.home / "reached")
    process.kill()
    assert (deployed.release(), deployed.generate()) == (before, words)

    # The device ends what it is at, and only then lets go of the lock.
    (deployed.home / "go").touch()
    subprocess.run(["flock", "-w", "30", deployed.dest / "lock", "true"], check=True)
    process.communicate()
    deployed.repair()
    assert deployed.generate() == words or stage == "switch"  # by then it has been proved
    report = network.folder / "report.json"
    arguments = ("deploy", "--target", "host", "--host", deployed.name, "-m", bundles[1], "--json", report)
    code, _, stderr = network.run(*arguments)
    assert code == 0, stderr
    (again,) = json.loads(report.read_text(encoding="utf-8"))
    size = bundles[1].stat().st_size
    assert again["uploaded_bytes"] < (size - 500_000 if stage == "upload" else 1), (
        "it does not go on from there"
    )
    assert deployed.generate() != words


@pytest.mark.parametrize(
    ("program", "case"),
    [("ln", '"$3" = */current.new'), ("mv", '"$3" = */current'), ("mv", '"$3" = */previous')],
)
def test_device_dies_while_switching(
    deployed: FakeDevice, releases: list[Release], program: str, case: str
) -> None:
    before, words = deployed.release(), deployed.generate()
    pattern = case.split(" = ")[1]
    deployed.stub(
        program, f'case $3 in {pattern}) kill -9 $PPID; exit 1 ;; *) exec /bin/{program} "$@" ;; esac'
    )
    with pytest.raises(TransferError):
        ship(deployed, releases[1])
    assert (deployed.release(), deployed.generate()) == (before, words)
    deployed.repair()
    ship(deployed, releases[1])
    assert deployed.generate() != words


def test_two_at_once(
    network: FakeNetwork, deployed: FakeDevice, bundles: list[Path], releases: list[Release]
) -> None:
    deployed.stub("cat", _uploading(_PAUSE))
    first = network.start("deploy", "--target", "host", "--host", deployed.name, "-m", bundles[1])
    wait_for(deployed.home / "reached")
    code, stdout, stderr = network.run(
        "deploy", "--target", "host", "--host", deployed.name, "-m", bundles[2]
    )
    assert (code, stdout) == (6, "")
    assert "another deployment" in stderr
    first.kill()
    (deployed.home / "go").touch()
    first.communicate()
    deployed.repair()
    ship(deployed, releases[2])  # nothing stale holds the lock


# ---- service ----


def test_service(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    log = tmp_path / "log"
    device.stub("id", "echo 1000")
    device.stub(
        "sudo", f'shift; echo "$@" >>{log}; case $1 in cp) cat "$2" >>{log} ;; chown | mkdir) "$@" ;; esac'
    )
    device.stub("chown", "")
    device.stub("systemctl", "echo inactive")
    dest = str(tmp_path / "opt")
    ship(device, releases[0], service=True, dest=dest)
    said = log.read_text(encoding="utf-8")
    assert f"ExecStart={dest}/current/mxdraft chat -m {dest}/current/model.mxb -t 0 --ctx 256" in said
    assert "systemctl restart mxdraft.socket" in said
    assert "@DEST@" not in said


def test_no_sudo_copies_nothing(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    device.stub("id", "echo 1000")
    device.stub("systemctl", "")
    device.stub("sudo", "echo sudo: a password is required >&2; exit 1")
    with pytest.raises(RefusedError, match="needs root, and sudo asks for a password"):
        ship(device, releases[0], service=True, dest=str(tmp_path / "opt"))
    assert not (tmp_path / "opt").exists()


def test_systemd_refuses(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    dest = tmp_path / "opt"
    ship(device, releases[0], dest=str(dest))
    before = (dest / "current").readlink()
    device.stub("id", "echo 1000")
    device.stub("sudo", 'shift; [ "$1" != systemctl ]')
    device.stub("systemctl", "exit 1")
    with pytest.raises(TransferError, match="systemd refused"):
        ship(device, releases[1], service=True, dest=str(dest))
    assert (dest / "current").readlink() == before


@pytest.mark.parametrize(
    ("dest", "message"), [("/home/pi/x", "cannot read /home/pi/x"), ("/opt/a b", "only letters")]
)
def test_dest_that_no_service_can_use(
    device: FakeDevice, releases: list[Release], dest: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ship(device, releases[0], service=True, dest=dest)


def test_unit_limits(releases: list[Release]) -> None:
    units = _units(releases[0])
    service = units["mxdraft@.service"]
    for line in (
        "MemoryMax=2048M",
        "CPUAffinity=0-63",
        "DynamicUser=yes",
        "PrivateNetwork=yes",
        "Restart=no",
    ):
        assert f"\n{line}\n" in service
    assert "\nMaxConnections=4\n" in units["mxdraft.socket"]


def _units(release: Release) -> dict[str, str]:
    contents = {name: content for name, content in release.files.values() if name in UNITS}
    return {name: content.decode() for name, content in contents.items() if isinstance(content, bytes)}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_valid(releases: list[Release], tmp_path: Path) -> None:
    for name, text in _units(releases[0]).items():
        local = text.replace("@DEST@/current/mxdraft", "/bin/true").replace("@DEST@", "/opt/mxdraft")
        (tmp_path / name).write_text(local, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "mxdraft.socket", tmp_path / "mxdraft@.service"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:/usr/lib/systemd/system"},
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "mxdraft" in line]
    assert ours == []


# ---- archive ----


def _install(device: FakeDevice, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", folder / "install.sh", *arguments],
        env={
            "HOME": str(device.home),
            "PATH": f"{device.folder}/bin:/usr/bin:/bin",
            "MXDRAFT_SYSROOT": str(device.folder / "root"),
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_archive(network: FakeNetwork, deployed: FakeDevice, bundles: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    code, stdout, stderr = network.run("deploy", "--target", "host", "-m", bundles[1], "-o", path)
    assert (code, stdout) == (0, f"{path}\n"), stderr
    words = deployed.generate()
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in the first releases of 3.11
        archive.extractall(tmp_path)
    folder = tmp_path / "mxdraft-host"

    with (folder / "model.mxb").open("r+b") as file:
        file.seek(300_000)
        kept = file.read(10)
        file.seek(300_000)
        file.write(b"\xee" * 10)
    done = _install(deployed, folder)
    assert (done.returncode, "wrong SHA-256" in done.stderr) == (3, True)
    assert deployed.generate() == words

    with (folder / "model.mxb").open("r+b") as file:
        file.seek(300_000)
        file.write(kept)
    deployed.stub("getconf", "echo 32")
    assert _install(deployed, folder).returncode == 3
    deployed.repair()
    done = _install(deployed, folder)
    assert done.returncode == 0, done.stderr
    assert f"try: {deployed.dest}/current/mxdraft chat" in done.stdout
    assert deployed.generate() != words
    assert _install(deployed, folder, "--dest").returncode == 2
    assert _install(deployed, folder, "elsewhere").returncode == 2
    assert _install(deployed, folder, "--dest", "other").returncode == 0
    assert (deployed.home / "other/current/model.mxb").exists()


def test_archives_are_equal(releases: list[Release], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_archive(releases[0], "mxdraft-host", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- fleet ----


def _fleet(network: FakeNetwork, tmp_path: Path, names: list[str], text: str = "") -> Path:
    for name in names:
        network.device(name)
    path = tmp_path / "hosts.toml"
    path.write_text(text or "".join(f'[[host]]\nhost = "{name}"\n' for name in names), encoding="utf-8")
    return path


def test_fleet_stops_at_the_first_failure(network: FakeNetwork, bundles: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("ansible")
    hosts = _fleet(network, tmp_path, ["canary", "good", "bad", "late"])
    FakeDevice(tmp_path / "devices/bad").stub("getconf", "echo 32")
    report = tmp_path / "report.json"
    arguments = (
        "deploy",
        "--target",
        "host",
        "-m",
        bundles[0],
        "--hosts",
        hosts,
        "--parallel",
        "2",
        "--json",
        report,
    )
    code, stdout, stderr = network.run(*arguments)
    assert code == 3, stderr
    reports = {entry["host"]: entry for entry in json.loads(report.read_text(encoding="utf-8"))}
    assert {name: entry["code"] for name, entry in reports.items()} == {
        "canary": 0,
        "good": 0,
        "bad": 3,
        "late": None,
    }
    assert "32-bit userland" in reports["bad"]["error"]
    assert reports["late"]["error"] == "not started"
    assert reports["canary"]["digest"] == reports["good"]["digest"]
    assert stdout.count("deployed") == 2
    FakeDevice(tmp_path / "devices/good").generate()
    assert list((tmp_path / "devices/late/home").iterdir()) == []


def test_canary_goes_first_and_alone(network: FakeNetwork, bundles: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("ansible")
    _fleet(network, tmp_path, ["canary", "other"])
    (tmp_path / "devices/canary/ssh").write_text("Connection refused", encoding="utf-8")
    code, stdout, stderr = network.run(
        "deploy", "--target", "host", "-m", bundles[0], "--host", "canary", "--host", "other"
    )
    assert code == 6, stderr
    assert "not started" in stdout
    assert list((tmp_path / "devices/other/home").iterdir()) == []


def test_fleet_without_ssh(network: FakeNetwork, bundles: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("ansible")
    network.environment["PATH"] = str(tmp_path)
    code, stdout, stderr = network.run(
        "deploy", "--target", "host", "-m", bundles[0], "--host", "a", "--host", "b"
    )
    assert (code, "'ssh'" in stdout) == (6, True), stderr


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x", RefusedError, "hosts.toml: "),
        ("host = 1", RefusedError, r"expected \[\[host\]\] tables"),
        ("[[host]]\nhost = 'a'\nport = 22", RefusedError, "unknown: port"),
        ("[[host]]\ntarget = 'rpi'", RefusedError, "number 1: needs host"),
        ("[[host]]\nhost = '-oProxyCommand=x'", UsageError, "expected"),
        ("[[host]]\nhost = 'a'\n[[host]]\nhost = 'a'", UsageError, "each once"),
        ("host = []", UsageError, "at least one"),
    ],
)
def test_bad_hosts_file(tmp_path: Path, text: str, error: type[MxdraftError], message: str) -> None:
    (tmp_path / "hosts.toml").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        read_hosts(tmp_path / "hosts.toml", "rpi", "mxdraft")


def test_hosts_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(
        '[[host]]\nhost = "pi@a"\n[[host]]\nhost = "b"\ntarget = "rpi5"\ndest = "/x"\n', encoding="utf-8"
    )
    first, second = read_hosts(path, "rpi", "mxdraft")
    assert (first.host, first.target, first.dest) == ("pi@a", "rpi", "mxdraft")
    assert (second.host, second.target, second.dest) == ("b", "rpi5", "/x")


# ---- arguments ----


@pytest.mark.parametrize(
    "host", ["pi@raspberrypi.local", "10.0.0.7", "pi@fe80::1%eth0", "ssh://pi@host:2222", "my_pi"]
)
def test_good_hosts(host: str) -> None:
    assert check_host(host) == host


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=x", "a b", "a\nb", "a;reboot", "$(x)", "a`b`", "a'b", "pi@\x00"]
)
def test_bad_hosts(host: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        check_host(host)


@given(st.text())
def test_host_is_one_harmless_word(text: str) -> None:
    try:
        host = check_host(text)
    except UsageError:
        return
    assert not host.startswith("-")
    assert not set(host) & set(" \t\r\n\x00'\"`$;&|<>\\(){}")


@pytest.mark.parametrize("dest", ["", "~/x", "-x", "a\nb", "../x", "a/../../b"])
def test_bad_dest(dest: str) -> None:
    with pytest.raises(UsageError, match="expected a path"):
        check_dest(dest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "a", "--hosts", "b"), "either --host or --hosts"),
        (("--host", "a", "-o", "b"), "-o is for an archive"),
        (("--host", "-a"), "expected"),
        (("--host", "a", "--dest", "~"), "expected a path"),
    ],
)
def test_bad_arguments(
    network: FakeNetwork, bundles: list[Path], arguments: tuple[str, ...], message: str
) -> None:
    code, stdout, stderr = network.run("deploy", "--target", "host", "-m", bundles[0], *arguments)
    assert (code, stdout, message in stderr) == (2, "", True), stderr


def test_bundle_too_large_for_the_target(bundles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from mxdraft.ship.deploy import release
    from mxdraft.ship.targets import load_target

    target = load_target("host")
    for key in ("kv_mib", "memory_mib"):
        small = dataclasses.replace(target, run=dataclasses.replace(target.run, **{key: 0}))
        monkeypatch.setattr(release, "load_target", lambda _name, small=small: small)
        with pytest.raises(CapacityError, match=f"raise {key} in targets/host.toml"):
            prepare("host", bundles[0])


def test_bundle_that_this_machine_cannot_verify(tmp_path: Path, bundles: list[Path]) -> None:
    from mxdraft.pack import pack

    pack(bundles[0].parent / "exports0", tmp_path / "zero.mxb")  # no digest: zeros
    with pytest.raises(NumericError, match="pack the bundle again"):
        prepare("host", tmp_path / "zero.mxb")
