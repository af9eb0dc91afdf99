# SPDX-License-Identifier: Apache-2.0
"""Downloads that go on where they stopped."""

from __future__ import annotations

import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.response import addinfourl

from mxdraft.errors import RefusedError, TransferError

_CHUNK = 1 << 20
_TIMEOUT_S = 60
SCHEMES = ("http", "https", "file")

# Called with (bytes there, bytes in all or None).
Report = Callable[[int, int | None], None]


class _StaysOnTheNetwork(urllib.request.HTTPRedirectHandler):
    """Follows redirections to http and https only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.startswith(("http://", "https://")):
            raise RefusedError(f"{req.full_url} sends on to {newurl}, which is no web address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def open_url(request: urllib.request.Request | str, context: ssl.SSLContext | None = None) -> addinfourl:
    """Open an http, https or file URL for reading."""
    handlers = [_StaysOnTheNetwork(), urllib.request.HTTPSHandler(context=context)]
    opened: addinfourl = urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S)
    return opened


def download(
    url: str,
    part: Path,
    name: str,
    most_bytes: int,
    report: Report,
    otherwise: str = "",
    context: ssl.SSLContext | None = None,
) -> None:
    """Append to ``part`` what it lacks of ``name``, the file at ``url``. A broken connection is taken up
    again for as long as every try brings something.

    Raises TransferError if it ends, with what else to do (``otherwise``); ``part`` stays. Raises RefusedError
    for more than ``most_bytes``; then ``part`` goes.
    """
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _receive(url, context, part, before, most_bytes, report)
            break
        except RefusedError:
            part.unlink(missing_ok=True)
            raise
        except Exception as error:  # a server may answer anything, which its readers did not foresee
            after = part.stat().st_size if part.exists() else 0
            if after <= before:
                raise TransferError(
                    f"downloading {name}: {error}. {after} bytes are kept: run the command again to go on. "
                    f"{otherwise}".rstrip()
                ) from error


def _receive(
    url: str, context: ssl.SSLContext | None, part: Path, offset: int, most_bytes: int, report: Report
) -> None:
    """Append what follows ``offset`` to ``part``, or write it anew if the server sends everything.

    Raises RefusedError for more than ``most_bytes``, anything else for what the server does wrong.
    """
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        response = open_url(request, context)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing follows: it is all there, and the digest says whether rightly
                return
            raise
    if response.status != 206:
        offset = 0
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
        response.close()
        if offset == 0:
            raise ConnectionError("the server sends a part that was not asked for")
        _receive(url, context, part, 0, most_bytes, report)  # it does not know ranges, whatever it says
        return
    with response:
        length = response.headers.get("Content-Length", "")
        total = offset + int(length) if re.fullmatch(r"[0-9]{1,15}", length) else None
        with part.open("ab" if offset else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                offset += len(chunk)
                if offset > most_bytes:
                    raise RefusedError(
                        f"{url} has more than {most_bytes} bytes, the most that it should have"
                    )
                report(offset, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and offset != total:
        raise ConnectionError(f"the connection ended after {offset} of {total} bytes")


@contextmanager
def progress_bar(title: str, visible: bool) -> Iterator[Report]:
    """Show on stderr how far a download is: a bar where rich is installed, else a line."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ModuleNotFoundError:
        with _progress_line(title, visible and sys.stderr.isatty()) as report:
            yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _progress_line(title: str, visible: bool) -> Iterator[Report]:
    def report(done: int, total: int | None) -> None:
        if visible:
            of = "" if total is None else f" of {total / 1e6:.1f}"
            print(f"\r{title}: {done / 1e6:.1f}{of} MB", end="", file=sys.stderr, flush=True)

    yield report
    if visible:
        print(file=sys.stderr)
