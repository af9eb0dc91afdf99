# SPDX-License-Identifier: Apache-2.0
"""Deployments to devices behind a stubbed ssh: what goes right, and every way to go wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
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


# ---- what goes wrong: the folder is somebody else's ----


def _tree(folder: Path) -> dict[str, str]:
    """Everything in a folder: kind, and content or where a link points to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            what = f"link {path.readlink()}"
        elif path.is_file():
            what = f"file {hashlib.sha256(path.read_bytes()).hexdigest()}"
        else:
            what = "folder" if path.is_dir() else "other"
        found[str(path.relative_to(folder))] = what
    return found


def _put(path: Path, text: str = "precious") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _people_s_releases(folder: Path) -> None:
    for name in ("20260101", "20260201", "my documents"):
        _put(folder / "releases" / name / "precious.txt")
    _put(folder / "store/family-photo.jpg")
    (folder / "current").symlink_to(folder / "releases/20260201")


def _relative_current(folder: Path) -> None:
    _put(folder / "releases/0123456789abcdef/manifest", f"file {'0' * 64} 1 mxdraft\n")
    (folder / "current").symlink_to("releases/0123456789abcdef")


def _named_by_content(folder: Path) -> None:
    _put(folder / "store" / ("0" * 64))
    (folder / "releases").mkdir()


def _manifest_alone(folder: Path) -> None:
    text = f"file {'0' * 64} 1 mxdraft\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    _put(folder / "releases" / name / "manifest", text)
    (folder / "current").symlink_to(f"releases/{name}")


FOREIGN: dict[str, Callable[[Path], None]] = {
    "releases": _people_s_releases,
    "a file": lambda folder: _put(folder / "thesis.tex"),
    "a hidden file": lambda folder: _put(folder / ".profile"),
    "current to no release": _relative_current,
    "a store by content": _named_by_content,
    "a manifest without links": _manifest_alone,
    "a marker of others": lambda folder: _put(folder / "mxdraft-deployment"),
    "a folder as marker": lambda folder: (folder / "mxdraft-deployment").mkdir(parents=True),
    "a name with escapes": lambda folder: _put(folder / "\x1b[2J\n\x9b"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_folder_stays_as_it_is(
    network: FakeNetwork, device: FakeDevice, releases: list[Release], tmp_path: Path, what: str
) -> None:
    FOREIGN[what](device.home / "app")
    before = _tree(device.home)
    with pytest.raises(RefusedError, match=r"no deployment made .*/app, and it is not empty") as caught:
        ship(device, releases[0], dest="app")
    assert str(caught.value).isprintable()
    done = _install(device, _unpacked(releases[0], tmp_path / "archive"), "--dest", "app")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.rstrip("\n").isprintable()
    for command in ("rollback", "status"):
        code, stdout, stderr = network.run(command, "--host", device.name, "--dest", "app")
        assert (code, stdout, "nothing is deployed" in stderr) == (3, "", True), stderr
    assert _tree(device.home) == before


def test_home_and_root_are_no_place(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(device.home)
    for dest in (".", str(device.home), f"{device.home}/./", str(tmp_path / "link"), "/", "/."):
        done = _install(device, _unpacked(releases[0], tmp_path / "archive"), "--dest", dest)
        assert (done.returncode, "deployments alone" in done.stderr) == (2, True), done.stderr
    assert list(device.home.iterdir()) == []


@pytest.mark.parametrize("dest", ["~", "~/x", "../x", "a/../b", "a/..", "a\x1b[2J"])
def test_bad_dest_of_an_archive(
    device: FakeDevice, releases: list[Release], tmp_path: Path, dest: str
) -> None:
    done = _install(device, _unpacked(releases[0], tmp_path / "archive"), "--dest", dest)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --dest ")
    assert done.stderr.rstrip("\n").isprintable()
    assert list(device.home.iterdir()) == []


def test_without_a_home(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    archive = _unpacked(releases[0], tmp_path / "archive")
    done = _install(device, archive, home=None)
    assert (done.returncode, "give an absolute path" in done.stderr) == (2, True), done.stderr
    assert _install(device, archive, "--dest", str(tmp_path / "there"), home=None).returncode == 0


def test_only_what_was_made_is_deleted(deployed: FakeDevice, releases: list[Release]) -> None:
    stranger = "0123456789abcdef"
    precious = [
        deployed.dest / "notes.txt",
        deployed.dest / "store/family-photo.jpg",
        deployed.dest / "store" / ("0" * 64) / "in a folder",
        deployed.dest / "releases/20260101/precious.txt",
        deployed.dest / "releases" / stranger / "manifest",
        deployed.dest / "releases" / f"{deployed.release()}.new" / "precious.txt",
    ]
    for path in precious:
        _put(path)
    (deployed.dest / "store" / ("1" * 64)).symlink_to("family-photo.jpg")
    first = deployed.release()
    ship(deployed, releases[1])
    ship(deployed, releases[2])
    for path in precious:
        assert path.read_text(encoding="utf-8") == "precious"
    assert (deployed.dest / "store" / ("1" * 64)).is_symlink()
    names = {path.name for path in (deployed.dest / "releases").iterdir()}
    assert first not in names or (deployed.dest / "releases" / first / "mxdraft").exists()
    kept = {deployed.release(), _other_release(deployed), stranger, "20260101", f"{first}.new"}
    assert names - {first} == kept


def test_release_with_somebodys_file(deployed: FakeDevice, releases: list[Release]) -> None:
    first = deployed.release()
    _put(deployed.dest / "releases" / first / "mine")
    ship(deployed, releases[1])
    notes: list[str] = []
    ship(deployed, releases[2], notes=notes)
    assert (deployed.dest / "releases" / f"{first}.new/mine").read_text(encoding="utf-8") == "precious"
    assert any("files that no deployment made" in note for note in notes)


def test_installation_without_marker_is_taken_over(
    network: FakeNetwork, deployed: FakeDevice, releases: list[Release]
) -> None:
    """As versions before the marker left it."""
    marker = deployed.dest / "mxdraft-deployment"
    ship(deployed, releases[1])
    marker.unlink()
    for command in ("status", "rollback", "rollback"):
        code, _, stderr = network.run(command, "--host", deployed.name)
        assert code == 0, stderr
    assert not marker.exists()
    ship(deployed, releases[2])
    assert marker.read_text(encoding="utf-8").startswith("mxdraft deploy made this folder.\n")
    assert len(list((deployed.dest / "releases").iterdir())) == 2


def _change_manifest(device: FakeDevice) -> None:
    with (device.dest / "current/manifest").open("a", encoding="utf-8") as file:
        file.write("file x y z\n")


def _change_link(device: FakeDevice) -> None:
    (device.dest / "current/mxdraft").unlink()
    (device.dest / "current/mxdraft").symlink_to("/bin/sh")


def _copy_release(device: FakeDevice) -> None:
    (device.dest / "current").rename(device.dest / "link")
    shutil.copytree(device.dest / "link", device.dest / "current", symlinks=True)


@pytest.mark.parametrize("change", [_change_manifest, _change_link, _copy_release])
def test_without_marker_evidence_is_strict(
    deployed: FakeDevice, releases: list[Release], change: Callable[[FakeDevice], None]
) -> None:
    (deployed.dest / "mxdraft-deployment").unlink()
    change(deployed)
    before = _tree(deployed.home)
    with pytest.raises(RefusedError, match="no deployment made"):
        ship(deployed, releases[1])
    assert _tree(deployed.home) == before


@pytest.mark.parametrize("name", ["mxdraft-deployment.new", "lock", "log", "unit", "store", "releases"])
def test_links_in_the_folder_are_refused(deployed: FakeDevice, releases: list[Release], name: str) -> None:
    path = deployed.dest / name
    target = deployed.home / "target"
    if path.exists():
        path.rename(target)
    else:
        _put(target)
    path.symlink_to(target)
    before = _tree(deployed.home)
    with pytest.raises(RefusedError, match=f"/{name} is a link to elsewhere instead of a"):
        ship(deployed, releases[1])
    assert _tree(deployed.home) == before


@pytest.mark.parametrize("name", ["current", "previous", "current.new"])
@pytest.mark.parametrize("kind", ["file", "folder", "link to elsewhere"])
def test_other_things_than_links_are_refused(
    deployed: FakeDevice, releases: list[Release], name: str, kind: str
) -> None:
    path = deployed.dest / name
    path.unlink(missing_ok=True)
    if kind == "file":
        _put(path)
    elif kind == "folder":
        _put(path / "x")
    else:
        path.symlink_to("/srv")
    before = _tree(deployed.home)
    with pytest.raises(RefusedError, match=f"/{name} is a {kind} instead of a link"):
        ship(deployed, releases[1])
    assert _tree(deployed.home) == before


def test_dest_that_is_a_link(device: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    link, disk = device.home / "mxdraft", tmp_path / "disk"
    link.symlink_to(disk)
    with pytest.raises(RefusedError, match="a link to what is no folder"):
        ship(device, releases[0])
    _put(disk / "photo.jpg")
    with pytest.raises(RefusedError, match="no deployment made"):
        ship(device, releases[0])
    (disk / "photo.jpg").unlink()
    ship(device, releases[0])
    assert link.is_symlink()
    assert (disk / "current/mxdraft").exists()


def test_dest_that_is_no_folder(device: FakeDevice, releases: list[Release]) -> None:
    _put(device.home / "file")
    os.mkfifo(device.home / "fifo")
    for name in ("file", "fifo"):
        with pytest.raises(RefusedError, match=f"/{name} is not a folder: choose another --dest"):
            ship(device, releases[0], dest=name)


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root needs setpriv")
@pytest.mark.parametrize(("mode", "message"), [(0o555, "cannot write to"), (0o700, "cannot read")])
def test_folder_of_another_user(releases: list[Release], mode: int, message: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        Path(name).chmod(0o755)
        network = FakeNetwork(Path(name))
        device = network.device()
        archive = _unpacked(releases[0], Path(name) / "archive")
        dest = Path(name) / "dest"
        dest.mkdir()
        user: tuple[str, ...] = ()
        if os.geteuid() == 0:
            user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        elif mode == 0o700:
            mode = 0  # there is no other user to be
        dest.chmod(mode)
        done = _install(device, archive, "--dest", str(dest), prefix=user)
        dest.chmod(0o755)
        assert (done.returncode, done.stdout) == (6, "")
        assert message in done.stderr
        assert list(dest.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"file {'0' * 64} 1 ../../.profile",
        f"file {'0' * 64} 1 .x",
        f"file ../../{'0' * 58} 1 mxdraft",
        f"file {'0' * 64} x mxdraft",
    ],
)
def test_manifest_that_names_other_places(device: FakeDevice, releases: list[Release], line: str) -> None:
    manifest = re.sub("(?m)^file .*\n?", "", releases[0].manifest) + line
    with pytest.raises(RefusedError, match="the manifest is damaged"):
        ship(device, dataclasses.replace(releases[0], manifest=manifest))
    assert list(device.home.iterdir()) == []


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
        ship(deployed, _with_file(releases[1], "mxdraft", f"#!/bin/sh\n{script}\n".encode()))
    assert deployed.release() == before
    deployed.generate()


def _with_file(release: Release, name: str, content: bytes) -> Release:
    """``release`` with another file ``name``."""
    digest = hashlib.sha256(content).hexdigest()
    files = {key: value for key, value in release.files.items() if value[0] != name}
    files[digest] = (name, content)
    line = f"file {digest} {len(content)} {name}"
    return Release(re.sub(f"(?m)^file .* {name}$", line, release.manifest), files)


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


def test_host_is_killed_before_the_folder_is_marked(
    network: FakeNetwork, device: FakeDevice, bundles: list[Path], releases: list[Release]
) -> None:
    device.stub("mv", f'case $2 in */mxdraft-deployment) {_PAUSE} ;; esac; exec /bin/mv "$@"')
    process = network.start("deploy", "--target", "host", "--host", device.name, "-m", bundles[0])
    wait_for(device.home / "reached")
    process.kill()
    process.communicate()
    assert _tree(device.dest).keys() == {"mxdraft-deployment.new"}
    (device.home / "go").touch()
    device.repair()
    ship_when_free(device, releases[0])
    device.generate()


def ship_when_free(device: FakeDevice, release: Release) -> None:
    """Deploy as soon as the device has noticed that the host before is dead."""
    lock = device.dest / "lock"
    wait_for(lock)
    subprocess.run(["flock", "-w", "30", lock, "true"], check=True)
    ship(device, release)


# What changes something on the device, each of which is one step.
_STEPS = ("cat", "chmod", "cp", "ln", "mkdir", "mv", "rm", "rmdir", "sync")


def _count_steps(device: FakeDevice, fatal: int) -> None:
    """Let SIGKILL end the whole installation instead of step number ``fatal``, counted from 1."""
    counter = device.folder / "steps"
    counter.write_text("0\n", encoding="utf-8")
    for tool in _STEPS:
        device.stub(
            tool,
            f"read n <{counter}; n=$((n + 1)); echo $n >{counter}\n"
            f'[ $n != {fatal} ] || kill -KILL 0\nexec {shutil.which(tool, path="/usr/bin:/bin")} "$@"',
        )


def _miniature(number: int) -> Release:
    """A release like any other, except that its runtime is a script and its bundle a line."""
    program = f"""#!/bin/sh
case $1 in verify) echo {number:064x} ;; *) echo 'generated_tokens: {number}' >&2 ;; esac
"""
    files = {"mxdraft": program, "model.mxb": f"{number}\n", "mxdraft.socket": "[Socket]\n"}
    contents = {
        hashlib.sha256(text.encode()).hexdigest(): (name, text.encode()) for name, text in files.items()
    }
    facts = {
        "version": "0",
        "target": "host",
        "arch": platform.machine(),
        "bundle": "model.mxb",
        "threads": "1",
        "ctx": "1",
        "precision": "auto",
        "memory_kib": "1",
        "digest": f"{number:064x}",
        "prompt": "x",
        "tokens": str(number),
    }
    lines = [f"{key} {value}" for key, value in facts.items()]
    lines += [f"file {digest} {len(content)} {name}" for digest, (name, content) in contents.items()]
    return Release("\n".join(lines), dict(contents))


def _is_whole(device: FakeDevice, name: str) -> bool:
    """Link ``name`` leads to a release with all the files of its manifest, or is not there."""
    link = device.dest / name
    if not link.is_symlink():
        return not link.exists()
    manifest = (link / "manifest").read_text(encoding="utf-8")
    files = re.findall("(?m)^file (.*) .* (.*)$", manifest)
    digests = [hashlib.sha256((link / file).read_bytes()).hexdigest() for _, file in files]
    return digests == [digest for digest, _ in files] and bool(files)


@pytest.mark.parametrize("before", [0, 2], ids=["first deployment", "third deployment"])
def test_device_is_killed_at_every_step(network: FakeNetwork, tmp_path: Path, before: int) -> None:
    archives = [_unpacked(_miniature(number), tmp_path / f"archive{number}") for number in range(before + 1)]
    wanted = {"mxdraft-deployment", "current", "releases", "store", "lock"}
    fatal, finished = 0, False
    while not finished:
        fatal += 1
        device = network.device(f"pi{fatal}")
        for archive in archives[:-1]:
            assert _install(device, archive).returncode == 0
        if before:
            _put(device.dest / "store/family-photo.jpg")
        _count_steps(device, fatal)
        done = _install(device, archives[-1])
        finished = done.returncode == 0
        assert finished or done.returncode == -signal.SIGKILL, done.stderr
        assert _is_whole(device, "current"), fatal
        assert _is_whole(device, "previous"), fatal
        device.repair()
        done = _install(device, archives[-1])
        assert done.returncode == 0, (fatal, done.stderr)
        assert _is_whole(device, "current"), fatal
        assert _is_whole(device, "previous"), fatal
        assert {path.name for path in device.dest.iterdir()} - {"previous"} == wanted, fatal
        assert len(list((device.dest / "releases").iterdir())) == (2 if before else 1), fatal
        stored = {path.name for path in (device.dest / "store").iterdir()}
        assert len(stored - {"family-photo.jpg"}) == (5 if before else 3), fatal
        assert ("family-photo.jpg" in stored) == (before > 0)
        shutil.rmtree(device.folder)
    assert fatal > 20


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


@pytest.fixture
def systemd(device: FakeDevice) -> FakeDevice:
    """A device with account ``pi`` and systemd, whose commands only leave a line in the log ``sudo``."""
    device.stub("id", "case $1 in -un) echo pi ;; *) echo 1000 ;; esac")
    device.stub(
        "sudo", f'shift; echo "$@" >>{device.folder}/sudo; case $1 in systemctl) ;; *) exec "$@" ;; esac'
    )
    device.stub("chown", "")
    device.stub("systemctl", "echo active")
    return device


def _said(device: FakeDevice) -> list[str]:
    """What systemctl was told since the last time."""
    log = device.folder / "sudo"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("systemctl ")]
    log.write_text("", encoding="utf-8")
    return [line.removeprefix("systemctl ") for line in lines]


def test_service(systemd: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    dest = str(tmp_path / "opt")
    ship(systemd, releases[0], service=True, dest=dest)
    units = {path.name: path.read_text(encoding="utf-8") for path in systemd.system.glob("etc/*/**/mxdraft*")}
    assert units.keys() == {"mxdraft.socket", "mxdraft.service"}
    program = f"ExecStart={dest}/current/mxdraft serve -m {dest}/current/model.mxb -t 0 --ctx 256"
    assert program in units["mxdraft.service"]
    assert not any("@DEST@" in text for text in units.values())
    assert _said(systemd)[-3:] == [
        "stop mxdraft.service",  # or its socket could not change
        "restart mxdraft.socket",
        "try-restart mxdraft.service",
    ]


def test_a_switch_restarts_the_service_of_its_folder(
    systemd: FakeDevice, releases: list[Release], tmp_path: Path
) -> None:
    """Also if the units stay as they are: a deployment without --service, a rollback."""
    dest, notes = str(tmp_path / "opt"), list[str]()
    ship(systemd, releases[0], service=True, dest=dest)
    _said(systemd)
    ship(systemd, releases[1], dest=dest)
    assert _said(systemd) == ["try-restart mxdraft.service"]
    with Device(systemd.name, dest, notes.append, ask=False) as connected:
        connected.run("rollback")
    assert _said(systemd) == ["try-restart mxdraft.service"]
    ship(systemd, releases[0], dest=str(tmp_path / "other"))
    assert _said(systemd) == []
    systemd.stub("sudo", "exit 1")
    ship(systemd, releases[2], dest=dest, notes=notes)
    assert any("goes on with the release before" in note for note in notes)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('echo \'{"status":"ok"}\'', "ok"),
        ("echo 'connection refused' >&2; exit 7", "no answer: connection refused"),
    ],
)
def test_status_asks_the_service(
    systemd: FakeDevice, releases: list[Release], tmp_path: Path, answer: str, expected: str
) -> None:
    dest = str(tmp_path / "opt")
    ship(systemd, releases[0], service=True, dest=dest)
    systemd.stub("curl", f"case $* in *http://127.0.0.1:8080/health) {answer} ;; esac")
    with Device(systemd.name, dest, lambda _: None, ask=False) as connected:
        found = connected.run("status")
    assert (found["service"], found["health"]) == ("active", expected)


def test_no_sudo_copies_nothing(systemd: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    systemd.stub("sudo", "echo sudo: a password is required >&2; exit 1")
    with pytest.raises(RefusedError, match="needs root, and sudo asks for a password"):
        ship(systemd, releases[0], service=True, dest=str(tmp_path / "opt"))
    assert not (tmp_path / "opt").exists()


def test_systemd_refuses(systemd: FakeDevice, releases: list[Release], tmp_path: Path) -> None:
    dest = tmp_path / "opt"
    ship(systemd, releases[0], service=True, dest=str(dest))
    before = (dest / "current").readlink()
    unit = systemd.system / "etc/systemd/system/mxdraft.service"
    text = unit.read_text(encoding="utf-8")
    other = _with_file(releases[1], "mxdraft.service", text.replace("10s", "7s").encode())
    systemd.stub("sudo", 'shift; case $1 in systemctl) exit 1 ;; *) exec "$@" ;; esac')
    with pytest.raises(TransferError, match="systemd refused"):
        ship(systemd, other, service=True, dest=str(dest))
    assert (dest / "current").readlink() == before
    assert unit.read_text(encoding="utf-8") == text, "the service before has lost its unit"


@pytest.mark.parametrize("unit", ["systemd/system/mxdraft.socket", "systemd/system/mxdraft.service"])
@pytest.mark.parametrize("masked", [False, True])
def test_units_of_others_are_refused(
    systemd: FakeDevice, releases: list[Release], tmp_path: Path, unit: str, masked: bool
) -> None:
    path = systemd.system / "etc" / unit
    path.parent.mkdir(parents=True)
    if masked:
        path.symlink_to("/dev/null")
    else:
        path.write_text("somebody's\n", encoding="utf-8")
    before = _tree(systemd.system)
    with pytest.raises(RefusedError, match=f"{path} is there, and no deployment wrote it"):
        ship(systemd, releases[0], service=True, dest=str(tmp_path / "opt"))
    assert _tree(systemd.system) == before
    assert not (tmp_path / "opt").exists()


def test_kernel_without_memory_limits_is_a_note(
    systemd: FakeDevice, releases: list[Release], tmp_path: Path
) -> None:
    for enabled in (0, 1):
        systemd.system_file("proc/cgroups", f"#name\thierarchy\tnum\tenabled\nmemory\t0\t1\t{enabled}\n")
        notes: list[str] = []
        ship(systemd, releases[0], service=True, dest=str(tmp_path / "opt"), notes=notes)
        assert any("cgroup_enable=memory" in note for note in notes) == (not enabled)


@pytest.mark.parametrize(
    ("dest", "message"), [("/home/pi/x", "cannot read /home/pi/x"), ("/opt/a b", "only letters")]
)
def test_dest_that_no_service_can_use(
    systemd: FakeDevice, releases: list[Release], dest: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ship(systemd, releases[0], service=True, dest=dest)


def test_socket_stays_up_on_loopback(releases: list[Release]) -> None:
    settings = _settings(_units(releases[0])["mxdraft.socket"])
    assert settings == {
        "Description": ["mxdraft: a language model's HTTP API"],
        "ListenStream": ["127.0.0.1:8080"],
        "TriggerLimitIntervalSec": ["0"],  # any other limit, once hit, stops the socket for good
        "WantedBy": ["sockets.target"],
    }


def test_unit_limits(releases: list[Release]) -> None:
    settings = _settings(_units(releases[0])["mxdraft.service"])
    expected = {
        "Restart": "on-failure",
        "RestartSec": "10s",
        "StartLimitIntervalSec": "0",
        "TimeoutStopSec": "5s",
        "MemoryMax": "2048M",
        "MemorySwapMax": "0",
        "CPUAffinity": "0-63",
        "DynamicUser": "yes",
        "User": "mxdraft-serve",
        "CacheDirectory": "mxdraft",
        "PrivateNetwork": "yes",
        "RestrictAddressFamilies": "none",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "CapabilityBoundingSet": "",
        "NoNewPrivileges": "yes",
        "MemoryDenyWriteExecute": "yes",
        "SystemCallArchitectures": "native",
    }
    assert {key: settings[key] for key in expected} == {key: [value] for key, value in expected.items()}
    assert settings["Environment"] == ["MXDRAFT_OPTIONS=", "MXDRAFT_CACHE=%C/mxdraft"]
    assert settings["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]


def _settings(unit: str) -> dict[str, list[str]]:
    """The values of each key of a unit."""
    settings: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def _units(release: Release) -> dict[str, str]:
    contents = {name: content for name, content in release.files.values() if name in UNITS}
    return {name: content.decode() for name, content in contents.items() if isinstance(content, bytes)}


def _write_units(release: Release, folder: Path) -> None:
    for name, text in _units(release).items():
        local = text.replace("@DEST@/current/mxdraft", "/bin/true").replace("@DEST@", "/opt/mxdraft")
        (folder / name).write_text(local, encoding="utf-8")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_sandbox(releases: list[Release], tmp_path: Path) -> None:
    _write_units(releases[0], tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", tmp_path / "mxdraft.service"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd 250")
    exposure = re.search(r"Overall exposure level .*: ([0-9.]+) ", done.stdout)
    assert exposure is not None, done.stderr
    assert float(exposure[1]) <= 1.5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_valid(releases: list[Release], tmp_path: Path) -> None:
    _write_units(releases[0], tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "mxdraft.socket", tmp_path / "mxdraft.service"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:/usr/lib/systemd/system"},
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "mxdraft" in line]
    assert ours == []


# ---- archive ----


def _unpacked(release: Release, folder: Path) -> Path:
    """``folder``, with an archive of ``release`` unpacked into it."""
    if not folder.exists():
        write_archive(release, folder.name, folder.with_suffix(".tar.gz"))
        _extract(folder.with_suffix(".tar.gz"))
    return folder


def _extract(path: Path) -> None:
    """Unpack an archive next to it."""
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in the first releases of 3.11
        archive.extractall(path.parent)


def _install(
    device: FakeDevice, folder: Path, *arguments: str, home: str | None = "", prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run install.sh on ``device``, behind ``prefix``; ``home`` None is a device without $HOME."""
    return subprocess.run(
        [*prefix, "sh", folder / "install.sh", *arguments],
        env=({} if home is None else {"HOME": str(device.home)})
        | {
            "PATH": f"{device.folder}/bin:/usr/bin:/bin",
            "MXDRAFT_SYSROOT": str(device.system),
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        start_new_session=True,
    )


def test_archive(network: FakeNetwork, deployed: FakeDevice, bundles: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    code, stdout, stderr = network.run("deploy", "--target", "host", "-m", bundles[1], "-o", path)
    assert (code, stdout) == (0, f"{path}\n"), stderr
    words = deployed.generate()
    _extract(path)
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
    ("text", "message"),
    [
        ("x", ""),
        ("host = 1", r"expected \[\[host\]\] tables"),
        ("host = [1]", r"\[\[host\]\] number 1: is not a table"),
        ("host = [[{}]]", "number 1: is not a table"),
        ("[host]\nhost = 'a'", r"expected \[\[host\]\] tables"),
        ("hosts = []", "nothing else; unknown: hosts"),
        ('"\\u001b[2J" = 1', r"nothing else; unknown: \\x1b\[2J"),
        ("[[host]]\nhost = 'a'\nport = 22", "unknown: port"),
        ('[[host]]\nhost = "a"\n"\\u001b]0;x\\u0007\\n" = 22', r"unknown: \\x1b\]0;x\\x07\\n$"),
        ("[[host]]\ntarget = 'rpi'", "number 1: needs host"),
        ("[[host]]\nhost = 1979-05-27", "number 1: needs host"),
        ("[[host]]\nhost = 'a'\n[[host]]\nhost = '-oProxyCommand=x'", "number 2: .*expected"),
        ('[[host]]\nhost = "a\\u009b2J"', r"host 'a\\x9b2J': expected"),
        ('[[host]]\nhost = "a"\ndest = "\\u001b[2J"', r"dest '\\x1b\[2J': expected"),
        ("[[host]]\nhost = 'a'\ndest = '.'", "number 1: dest '.': expected"),
        ("[[host]]\nhost = 'a'\ntarget = '../rpi'", "number 1: unknown target '../rpi'"),
        ("[[host]]\nhost = 'a'\n[[host]]\nhost = 'a'", "each once"),
        ("host = []", "at least one"),
        ("host = [" + "{host = 'a'}, " * 1025 + "]", "at most 1024"),
        ("host = " + "[" * 100_000, "nested too deeply"),
        ("[[host]]\nhost" + ".a" * 5_000 + " = 1", "nested too deeply"),
        ("host = " + "9" * 5_000, "limit"),
        ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
    ],
)
def test_bad_hosts_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts.toml").write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError, match=f"hosts.toml.*{message}") as caught:
        read_hosts(tmp_path / "hosts.toml", "rpi", "mxdraft")
    assert str(caught.value).isprintable()


def test_hosts_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    with pytest.raises(RefusedError, match=r"hosts\.toml: no such file"):
        read_hosts(path, "rpi", "mxdraft")
    path.write_bytes(b"\xff")
    with pytest.raises(RefusedError, match=r"hosts\.toml is not a list of hosts: .*codec can't decode"):
        read_hosts(path, "rpi", "mxdraft")


def test_escapes_in_a_hosts_file_do_not_reach_the_terminal(
    network: FakeNetwork, bundles: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "hosts.toml"
    for line in (
        'host = "\\u001b[2J"',
        'host = "a"\n"\\u001b[2J" = 1',
        'host = "a"\ndest = "\\u009b[2J"',
        'host = "a"\ntarget = "\\u001b[2J"',
    ):
        path.write_text(f"[[host]]\n{line}", encoding="utf-8")
        code, stdout, stderr = network.run("deploy", "--target", "host", "-m", bundles[0], "--hosts", path)
        assert (code, stdout, "[2J" in stderr) == (3, "", True), stderr
        assert stderr.replace("\n", "").isprintable()


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
    "host",
    [
        "pi@raspberrypi.local",
        "10.0.0.7",
        "pi@fe80::1%eth0",
        "ssh://pi@host:2222",
        "ssh://pi@[::1]:22",
        "my_pi",
        "a-b@c-d",
        "pi@corp.example@gate",
        "a" * 320,
    ],
)
def test_good_hosts(host: str) -> None:
    assert check_host(host) == host


@pytest.mark.parametrize(
    "host",
    [
        *("", "-oProxyCommand=x", "a b", "a\nb", "a;reboot", "$(x)", "a`b`", "a'b", 'a"b', "pi@\x00"),
        *("pi@-oProxyCommand=x", "ssh://-oProxyCommand=x", "ssh://pi@-x", "pi@", "@host", "ssh://", "a\n"),
        *("\x1b[2J", "a\x9b2J", "a\u202eb", "a\udc80", "a\u00a0b", "a" * 321),
    ],
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
    assert not any(part.startswith("-") for part in host.removeprefix("ssh://").split("@"))
    assert not set(host) & set(" \t\r\n\x00'\"`$;&|<>\\(){}")
    assert host.isprintable()


@pytest.mark.parametrize(
    "dest",
    [
        *("", ".", "./", "/", "//", "/.", "~", "~/x", "-x", "a\nb", "a\n", "../x", "a/../../b", "a/.."),
        *("\x1b[2J", "a\x9b2J", "a\u202eb", "a\udc80", "a" * 1025),
    ],
)
def test_bad_dest(dest: str) -> None:
    with pytest.raises(UsageError, match="expected a path") as caught:
        check_dest(dest)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("dest", ["a", "./a", "/a", "/opt/mxdraft/", 'it\'s $(a) "x" & | ;', "ä", "a" * 1024])
def test_good_dest(dest: str) -> None:
    assert check_dest(dest) == dest


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


def test_memory_limit_has_room_for_more_than_the_plan(
    bundles: list[Path], releases: list[Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the service's MemoryMax, and a process is more than its plan."""
    from mxdraft.ship.deploy import release
    from mxdraft.ship.targets import load_target

    target = load_target("host")
    found = re.search("(?m)^memory_kib (.*)$", releases[0].manifest)
    assert found is not None
    plan_mib = -(-int(found[1]) // 1024)
    for beside, fits in ((0, False), (15, False), (16, True)):
        run = dataclasses.replace(target.run, memory_mib=plan_mib + beside)
        monkeypatch.setattr(release, "load_target", lambda _, run=run: dataclasses.replace(target, run=run))
        if fits:
            prepare("host", bundles[0])
        else:
            with pytest.raises(CapacityError, match="raise memory_mib"):
                prepare("host", bundles[0])


def test_bundle_that_this_machine_cannot_verify(tmp_path: Path, bundles: list[Path]) -> None:
    from mxdraft.pack import pack

    pack(bundles[0].parent / "exports0", tmp_path / "zero.mxb")  # no digest: zeros
    with pytest.raises(NumericError, match="pack the bundle again"):
        prepare("host", tmp_path / "zero.mxb")
