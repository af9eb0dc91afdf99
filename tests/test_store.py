# SPDX-License-Identifier: Apache-2.0
"""pull, list, rm and index: from a directory and from a server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mxdraft.errors import BundleError, RefusedError, TransferError, UsageError
from mxdraft.files import file_sha256
from mxdraft.ship.build import build
from mxdraft.store.index import read_index, write_index
from mxdraft.store.kept import find, kept, path_of, pull, remove


@dataclass
class Server:
    """Serves a directory; ``drops``: after how many bytes to hang up, for each of the next answers;
    ``redirect``: where every request is sent on to; ``length``: what it says of each body."""

    url: str = ""
    ranges: bool = True
    redirect: str = ""
    length: int | None = None
    drops: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MXDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MXDRAFT_INDEX", raising=False)
    return tmp_path / "cache" / "bundles"


@pytest.fixture
def public(bundle: Path, tmp_path: Path) -> Path:
    """A directory with an index of fixture T, whole and in parts."""
    for name, split in (("tiny", 0), ("parts", 300_000)):
        copy = tmp_path / f"{name}.mxb"
        copy.write_bytes(bundle.read_bytes())
        write_index(tmp_path / "public", [copy], "Apache-2.0", 'Tiny "T" \\ \n', split)
    return tmp_path / "public"


@pytest.fixture
def server(public: Path) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = public / self.path.rsplit("/", 1)[-1]
            if state.redirect and path.suffix != ".toml":
                self.send_response(302)
                self.send_header("Location", state.redirect)
                self.end_headers()
                return
            if not path.is_file():
                self.send_error(404)
                return
            body = path.read_bytes()
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            state.starts.append(start)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header(
                "Content-Length", str(len(body) - start if state.length is None else state.length)
            )
            self.end_headers()
            keep = state.drops.pop(0) if state.drops and path.suffix != ".toml" else len(body)
            self.wfile.write(body[start : start + keep])

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/some/index.toml"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def command(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxdraft.cli", *map(str, args)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


# ---- what works ----


def test_an_index_says_what_is_there(public: Path, bundle: Path) -> None:
    index = read_index(str(public))
    assert read_index(str(public / "index.toml")) == index
    assert list(index) == ["parts", "tiny"]
    size = bundle.stat().st_size
    for entry in index.values():
        assert (entry.size, entry.sha256) == (size, file_sha256(bundle))
        assert (entry.title, entry.licence) == ('Tiny "T" \\ \n', "Apache-2.0")
    assert len(index["parts"].parts) == -(-size // 300_000) > 1
    assert sorted(p.name for p in public.iterdir())[0] == "index.toml"


@pytest.mark.parametrize("name", ["tiny", "parts"])
@pytest.mark.parametrize("remote", [False, True])
def test_pulled_bundles_are_the_ones_that_were_indexed(
    public: Path, server: Server, bundle: Path, cache: Path, name: str, remote: bool
) -> None:
    entry = read_index(server.url if remote else str(public))[name]
    path = pull(entry, progress=False)
    assert path == cache / f"{name}.mxb" == path_of(name)
    assert path.read_bytes() == bundle.read_bytes()
    assert kept() == {name: path}
    assert [each.name for each in cache.iterdir()] == [path.name]
    server.starts.clear()
    assert pull(entry, progress=False) == path
    assert server.starts == []
    path.write_bytes(b"damaged")
    assert pull(entry, progress=False).read_bytes() == bundle.read_bytes()
    assert remove(name) == [path]
    assert kept() == {}


def test_both_command_lines_find_it_by_name(public: Path, bundle: Path, tmp_path: Path) -> None:
    done = command("pull", "tiny", MXDRAFT_INDEX=str(public))
    assert (done.returncode, done.stdout) == (0, f"{path_of('tiny')}\n")
    listed = command("list", "--index", public).stdout.splitlines()
    assert listed[0] == f"tiny {bundle.stat().st_size} {path_of('tiny')}"
    assert listed[1].startswith(f"parts {bundle.stat().st_size} to pull: Tiny")
    for program in ([str(build("host")[0])], [sys.executable, "-m", "mxdraft.cli"]):
        texts = []
        for name in ("tiny", str(bundle)):
            call = [*program, "generate", "-m", name, "--raw", "-p", "The", "-n", "8", "-t", "1"]
            found = subprocess.run(call, capture_output=True, cwd=tmp_path / "public", check=True)
            texts.append(found.stdout)
        assert texts[0] == texts[1] != b""
        missing = subprocess.run(
            [*program, "info", "-m", "nonesuch"], capture_output=True, cwd=tmp_path, check=False
        )
        assert missing.returncode == 3
        assert b"nonesuch" in missing.stderr
    (tmp_path / "tiny").write_bytes(b"a file comes first")
    found = subprocess.run(
        [str(build("host")[0]), "info", "-m", "tiny"], capture_output=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 3
    assert command("rm", "tiny").stdout == f"{path_of('tiny')}\n"
    assert command("rm", "tiny").returncode == 3


def test_a_url_has_its_hash_with_it(server: Server, public: Path, bundle: Path) -> None:
    url = server.url.replace("index.toml", "tiny.mxb")
    size, digest = str(bundle.stat().st_size), file_sha256(bundle)
    assert command("pull", url).returncode == 2
    assert command("pull", url, "--sha256", digest, "--size", size).stdout == f"{path_of('tiny')}\n"
    assert command("pull", "tiny", "--index", public, "--sha256", digest).returncode == 2
    remove("tiny")
    assert command("pull", url, "--sha256", "0" * 64, "--size", size).returncode == 3


# ---- what goes wrong on the way ----


def test_a_broken_download_goes_on(server: Server, bundle: Path) -> None:
    entry = read_index(server.url)["tiny"]
    server.starts.clear()
    server.drops = [100_000, 50_000]
    assert pull(entry, progress=False).read_bytes() == bundle.read_bytes()
    assert server.starts == [0, 100_000, 150_000]


def test_what_came_is_kept_for_the_next_call(server: Server, bundle: Path, cache: Path) -> None:
    entry = read_index(server.url)["parts"]
    server.drops = [300_000, 40_000, 0]
    with pytest.raises(TransferError, match="40000 bytes are kept: run the command again"):
        pull(entry, progress=False)
    assert kept() == {}
    assert sorted(each.stat().st_size for each in cache.iterdir()) == [40_000, 300_000]
    server.starts.clear()
    assert pull(entry, progress=False).read_bytes() == bundle.read_bytes()
    assert server.starts[0] == 40_000
    assert len(list(cache.iterdir())) == 1


def test_leftovers_of_a_download_are_removed_with_their_name(server: Server, cache: Path) -> None:
    server.drops = [1000, 0]
    with pytest.raises(TransferError):
        pull(read_index(server.url)["tiny"], progress=False)
    assert len(remove("tiny")) == 1
    assert list(cache.iterdir()) == []


def test_servers_without_ranges(server: Server, bundle: Path) -> None:
    server.ranges = False
    server.drops = [100_000, 150_000]
    entry = read_index(server.url)["tiny"]
    assert pull(entry, progress=False).read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("change", ["other bytes", "shorter", "longer"])
def test_another_file_than_the_index_says(
    server: Server, public: Path, cache: Path, bundle: Path, change: str
) -> None:
    entry = read_index(server.url)["tiny"]
    data = bytearray(bundle.read_bytes())
    data[-1] ^= 1
    changed = {"other bytes": bytes(data), "shorter": bytes(data[:-1]), "longer": bytes(data) + b"x"}[change]
    (public / "tiny.mxb").write_bytes(changed)
    with pytest.raises(RefusedError, match=r"it was deleted|the most that it should have"):
        pull(entry, progress=False)
    assert list(cache.iterdir()) == []


def test_right_hash_of_what_is_no_bundle(public: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mxb"
    other.write_bytes(b"no bundle")
    with pytest.raises(BundleError):
        write_index(public, [other], "none", None, 0)
    text = (public / "index.toml").read_text(encoding="utf-8")
    (public / "other.mxb").write_bytes(b"no bundle")
    text += (
        '[other]\ntitle = "x"\nlicence = "x"\nminimum_version = "0.0.1"\nsize = 9\nparts = ["other.mxb"]\n'
    )
    text += f'sha256 = "{file_sha256(other)}"\n'
    (public / "index.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BundleError):
        pull(read_index(str(public))["other"], progress=False)
    assert kept() == {}


def test_redirections_stay_on_the_web(server: Server) -> None:
    entry = read_index(server.url)["tiny"]
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x"):
        server.redirect = target
        with pytest.raises((RefusedError, TransferError), match=r"no web address|not allowed"):
            pull(entry, progress=False)


def test_a_bundle_for_a_newer_version_is_not_got(server: Server, public: Path) -> None:
    path = public / "index.toml"
    path.write_text(path.read_text(encoding="utf-8").replace('"0.1.0"', '"99.0.0"'), encoding="utf-8")
    entry = read_index(server.url)["tiny"]
    server.starts.clear()
    with pytest.raises(RefusedError, match=r"needs mxdraft 99\.0\.0 or newer"):
        pull(entry, progress=False)
    assert server.starts == []


def test_indexes_that_are_none(server: Server, public: Path, tmp_path: Path) -> None:
    good = (public / "index.toml").read_text(encoding="utf-8")
    assert tomllib.loads(good)
    path = tmp_path / "bad.toml"
    for before, after in (
        ('["tiny"]', '["../tiny"]'),
        ('["tiny"]', '["Tiny"]'),
        ('["tiny.mxb"]', '["../tiny.mxb"]'),
        ('["tiny.mxb"]', '["http://127.0.0.1/tiny.mxb"]'),
        ('["tiny.mxb"]', "[]"),
        ('["tiny.mxb"]', "[1]"),
        ('["tiny.mxb"]', '"tiny.mxb"'),
        ('minimum_version = "0.1.0"', 'minimum_version = "0.1"'),
        ('licence = "Apache-2.0"', "licence = 1"),
        ("size = ", "size = -"),
        ("size = ", "weight = "),
        ('sha256 = "', 'sha256 = "x'),
        ("size = ", "size == "),
    ):
        assert before in good
        path.write_text(good.replace(before, after), encoding="utf-8")
        with pytest.raises(RefusedError, match="index of bundles"):
            read_index(str(path))
    with pytest.raises(RefusedError, match="no such file"):
        read_index(str(tmp_path / "none"))
    with pytest.raises(TransferError, match="404"):
        read_index(server.url.replace("index.toml", "none.toml"))
    (public / "big.toml").write_bytes(b"#" * (2 << 20))
    for where in (str(public / "big.toml"), server.url.replace("index.toml", "big.toml")):
        with pytest.raises(RefusedError, match="is larger than 1 MiB"):
            read_index(where)


def test_names_that_are_none(tmp_path: Path) -> None:
    for name in ("", ".", "..", "../x", "a/b", "A", "-x", "x" * 65, "x\n"):
        with pytest.raises(UsageError):
            path_of(name)
        assert find(name) == name
    upper = tmp_path / "Upper.mxb"
    upper.write_bytes(b"")
    with pytest.raises(UsageError, match="rename it"):
        write_index(tmp_path / "p", [upper], "none", None, 0)
    done = command("pull", "tiny")
    assert (done.returncode, "MXDRAFT_INDEX" in done.stderr) == (2, True)
