# SPDX-License-Identifier: Apache-2.0
"""Reading files that may be anything, and writing them whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mxdraft.cli._terminal import terminal_bytes
from mxdraft.errors import BundleError, CapacityError, MxdraftError, RefusedError, TransferError, UsageError
from mxdraft.files import (
    as_text,
    default_cache,
    locked,
    open_regular,
    parse_json,
    parse_json_object,
    parsing,
    read_file,
    read_toml,
    replacing,
    write_json,
)

# ---- reading ----


def special_files(folder: Path) -> list[Path]:
    """A pipe that nobody writes to, devices without an end, a folder."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "to_pipe").symlink_to("pipe")
    return [folder / "pipe", folder / "to_pipe", folder / "folder", Path("/dev/zero"), Path("/dev/null")]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for path in special_files(tmp_path):
        with pytest.raises(TransferError, match=r"not a regular file|directory") as error:
            open_regular(path)
        assert str(path) in str(error.value)
    (tmp_path / "file").write_bytes(b"x")
    for link in (os.symlink, os.link):
        link(tmp_path / "file", tmp_path / link.__name__)
        assert read_file(tmp_path / link.__name__) == b"x"


@pytest.mark.parametrize("name", ["none", "none/none", "loop", "n" * 300, "n/" * 3000, "a\0b", "\ud800"])
def test_what_cannot_be_there_is_refused_or_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((RefusedError, TransferError)):
        read_file(tmp_path / name)


def test_a_file_over_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert len(read_file(tmp_path / "file", 1 << 20)) == 1 << 20
    with pytest.raises(RefusedError, match="larger than"):
        read_file(tmp_path / "file", (1 << 20) - 1)
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(RefusedError, match="larger than 16 MiB"):
        read_file(tmp_path / "file")


class ForeignError(Exception):
    """What a parser might raise."""


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("bad"), RefusedError, "x is not a y: bad"),
        (KeyError("tokens"), RefusedError, "x is not a y: 'tokens' is missing"),
        (ForeignError(), RefusedError, "x is not a y: ForeignError"),
        (RecursionError("deep"), RefusedError, "x is not a y: deep"),
        (OSError(errno.EINVAL, "seek"), RefusedError, "x is not a y: "),
        (RuntimeError("r" * 10**6), RefusedError, "x is not a y: r{300}$"),
        (RefusedError("reason"), RefusedError, "^x: reason$"),
        (BundleError("SCHEDULE", "reason"), RefusedError, "^x: reason$"),
        (MemoryError(), CapacityError, "x: there is not enough memory"),
        (KeyboardInterrupt("k"), KeyboardInterrupt, "^k$"),
    ],
)
def test_whatever_a_parser_raises_is_a_refusal(
    raised: BaseException, kind: type[BaseException], message: str
) -> None:
    with pytest.raises(kind, match=message), parsing("x", "y"):
        raise raised


def test_other_refusals_of_a_block_stay_what_they_are() -> None:
    for error in (CapacityError("a"), TransferError("a"), UsageError("a")):
        with pytest.raises(MxdraftError) as raised, parsing("x", "y"):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"{'a': 1}", "double quotes"),
        (b"[" * 65 + b"]" * 65, "more than 64 levels"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
        (b'"\\ud800"', "surrogates"),
        (b'{"\\uDFFF": 1}', "surrogates"),
        (b"1" * 5000, "digits"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
    ],
)
def test_json_that_is_none_or_could_not_be_written_again(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_that_is_right() -> None:
    assert parse_json(b'"\\ud83d\\ude42"') == "🙂"
    assert parse_json(b"[" * 64 + b"]" * 64) is not None
    value = parse_json_object(b'{"a": [1, "\\u001b", 1e999]}')
    assert value == {"a": [1, "\x1b", float("inf")]}
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_json_object(b"[]")


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"a",
        b"a = " + b"[" * 100_000,
        b"a = " + b"{a = " * 100_000,
        b"a = " + b"[" * 70 + b"]" * 70,
        b"a." * 2000 + b"a = 1",
        b"[" + b"a." * 2000 + b"a]",
        b"a = 1\na = 2",
        b"a = " + b"1" * 5000,
    ],
)
def test_toml_that_is_none_or_nested(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(text)
    with pytest.raises(RefusedError, match=r"a\.toml is not a recipe: "):
        read_toml(tmp_path / "a.toml", "recipe")


# ---- writing ----


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    before = parts(tmp_path)

    def fail(error: Exception) -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(ForeignError):
        fail(ForeignError())
    with pytest.raises(TransferError, match=r"cannot write .*file: No space"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    assert parts(tmp_path) == before
    assert old is None or path.read_bytes() == old


def test_links_and_permissions_of_what_is_replaced(tmp_path: Path) -> None:
    store, backup = tmp_path / "store", tmp_path / "backup"
    store.write_bytes(b"somebody else's")
    store.chmod(0o640)
    (tmp_path / "link").symlink_to("store")
    backup.hardlink_to(store)
    for path in (tmp_path / "link", store):
        with replacing(path) as file:
            file.write(b"new")
        assert (path.read_bytes(), path.is_symlink()) == (b"new", False)
        assert backup.read_bytes() == b"somebody else's"
        assert path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "dangling").symlink_to("nowhere")
    write_json(tmp_path / "dangling", [1])
    assert parts(tmp_path) == ["backup", "dangling", "link", "store"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o666)])
def test_new_files_have_the_users_permissions(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == mode


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    for path in (*special_files(tmp_path), tmp_path / "stdout"):
        before = parts(tmp_path)
        with pytest.raises(TransferError, match=f"cannot write {path}: it is not a regular file"):
            write_json(path, {})
        assert parts(tmp_path) == before
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["n" * 255, "漢" * 85, "\udcff" * 200, ".", "x" * 256])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    if name == "." or len(name) > 255:
        with pytest.raises(TransferError):
            write_json(tmp_path / name, {})
    else:
        write_json(tmp_path / name, {})
        assert parts(tmp_path) == [name]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a", Path("/proc/a")):
        with pytest.raises(TransferError, match=f"cannot write {path}: "):
            write_json(path, {})


def test_leftovers_of_killed_writers_are_removed_and_no_others(tmp_path: Path) -> None:
    path, code = tmp_path / "file", "import os, signal, pathlib, sys; from mxdraft.files import replacing\n"
    code += "with replacing(pathlib.Path(sys.argv[1])) as file:\n    os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, path], check=False)
    (left,) = parts(tmp_path)
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / ".file.conf").write_bytes(b"")
    with replacing(path) as first:
        assert Path(first.name).name != left
        with replacing(path) as second:  # at the same time, as another process might
            second.write(b"second")
        first.write(b"first")
    assert parts(tmp_path) == [".file.conf", "file", "other"]
    assert path.read_bytes() == b"first"


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    texts = [bytes([i]) * 100_000 for i in range(8)]

    def write(text: bytes) -> None:
        for _ in range(10):
            with replacing(tmp_path / "file") as file:
                file.write(text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "file").exists():
            assert (tmp_path / "file").read_bytes() in texts
    for thread in threads:
        thread.join()
    assert parts(tmp_path) == ["file"]


# ---- locks ----


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    path, inside, waits = tmp_path / "lock", [], []

    def work(number: int) -> None:
        with locked(path, lambda: waits.append(number)):
            inside.append(number)
            time.sleep(0.01)
            assert inside[-1] == number
            inside.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside[::2] == inside[1::2]
    assert sorted(inside[::2]) == list(range(6))
    assert waits
    assert parts(tmp_path) == []


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"")  # what is left of it
    with locked(path, lambda: pytest.fail("nobody holds it")):
        assert path.exists()
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.05, held.close).start()
        told: list[bool] = []
        with locked(path, lambda: told.append(True)):
            assert told == [True]


# ---- the cache ----


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    for name in ("MXDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(TransferError, match="set HOME or MXDRAFT_CACHE"):
        default_cache()


# ---- terminals ----


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain ä 漢 🙂\tx\n", "plain ä 漢 🙂\tx\n".encode()),
        ("\x1b[31mred\x1b]0;title\x07", b"\\x1b[31mred\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f", b"over\\x0dwritten\\x08\\x7f"),
        ("\x9b31m\x85\0", b"\\x9b31m\\x85\\x00"),
        ("half \ud800 pair \udfff", b"half \\ud800 pair \\udfff"),
        (os.fsdecode(b"path \xff"), b"path \xff"),
    ],
)
def test_what_reaches_a_terminal_does_not_control_it(text: str, written: bytes) -> None:
    assert terminal_bytes(text) == written


def test_paths_become_text_that_can_be_written() -> None:
    assert as_text(Path(os.fsdecode(b"/a/b\xff.gguf"))) == "/a/b\\xff.gguf"
    assert as_text("漢 \x1b") == "漢 \x1b"


def test_a_limit_on_the_size_of_files_is_a_message(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, sys\n"
        "from mxdraft.errors import TransferError\n"
        "from mxdraft.files import replacing\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "        file.write(bytes(100_000))\n"
        "except TransferError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"cannot write {tmp_path / 'file'}: File too large\n", "")
    assert parts(tmp_path) == []
