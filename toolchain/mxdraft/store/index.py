# SPDX-License-Identifier: Apache-2.0
"""An index of bundles: a TOML file, on a static file server or in a directory.

One table for each bundle, by name:

    [smollm2-135m]
    title = "SmolLM2-135M-Instruct"
    licence = "Apache-2.0"
    minimum_version = "0.1.0"   # of mxdraft
    size = 149588608            # bytes, of the whole
    sha256 = "..."              # of the whole
    parts = ["smollm2-135m.mxb"]

``parts`` are the files that make up the bundle, one after another, relative to the index.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
import urllib.error
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxdraft import __version__
from mxdraft.bundle import Bundle
from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.files import file_sha256, parsing, read_file, replacing
from mxdraft.files.download import SCHEMES, open_url

INDEX_FILE = "index.toml"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

_INDEX_LIMIT = 1 << 20  # bytes
_PART = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_BYTES = 1 << 40
_COPY = 1 << 20


@dataclass(frozen=True)
class Entry:
    """What an index says of a bundle. ``parts``: URLs."""

    name: str
    title: str
    licence: str
    minimum_version: str
    size: int
    sha256: str
    parts: tuple[str, ...]


def read_index(where: str) -> dict[str, Entry]:
    """Read the index at a URL, in a file, or in a directory that has an ``index.toml``.

    Raises RefusedError if it is none, TransferError if it cannot be read.
    """
    base = _address(where)
    if base.startswith("file:"):
        data = read_file(Path(urllib.parse.unquote(urllib.parse.urlsplit(base).path)), _INDEX_LIMIT)
    else:
        try:
            with open_url(base) as response:
                data = response.read(_INDEX_LIMIT + 1)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot read {base}: {error}") from error
        if len(data) > _INDEX_LIMIT:
            raise RefusedError(f"{base} is larger than {_INDEX_LIMIT >> 20} MiB, the most for an index")
    with parsing(where, "index of bundles"):
        tables = tomllib.loads(data.decode("utf-8"))
        return {name: _entry(name, table, base) for name, table in tables.items()}


def _address(where: str) -> str:
    """Return the URL of an index file."""
    if urllib.parse.urlsplit(where).scheme in SCHEMES:
        return where
    path = Path(where)
    return (path / INDEX_FILE if path.is_dir() else path).absolute().as_uri()


def _entry(name: str, table: object, base: str) -> Entry:
    """Check one table. Raises ValueError or KeyError with what is wrong."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: small letters, digits, '.', '_' and '-' make one")
    if not isinstance(table, dict):
        raise ValueError(f"{name} is no table")
    for key, kind in {
        "title": str,
        "licence": str,
        "minimum_version": str,
        "size": int,
        "sha256": str,
    }.items():
        if type(table.get(key)) is not kind:
            raise ValueError(f"{name}: {key} is not there, or no {kind.__name__}")
    parts = table.get("parts")
    if (
        not isinstance(parts, list)
        or not parts
        or not all(type(p) is str and _PART.fullmatch(p) for p in parts)
    ):
        raise ValueError(f"{name}: parts is not a list of names of files next to the index")
    if not 0 < table["size"] <= _MOST_BYTES:
        raise ValueError(f"{name}: size {table['size']} is none")
    if not re.fullmatch("[0-9a-f]{64}", table["sha256"]):
        raise ValueError(f"{name}: sha256 is not 64 hex digits")
    _numbers(table["minimum_version"])
    known = {key: table[key] for key in ("title", "licence", "minimum_version", "size", "sha256")}
    return Entry(name, **known, parts=tuple(urllib.parse.urljoin(base, part) for part in parts))


def check_version(entry: Entry) -> None:
    """Raise RefusedError if the bundle needs a newer mxdraft."""
    if _numbers(entry.minimum_version) > _numbers(__version__):
        raise RefusedError(
            f"{entry.name} needs mxdraft {entry.minimum_version} or newer, this is {__version__}: upgrade"
        )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version)
    if not found:
        raise ValueError(f"version {version!r} is not three numbers")
    return tuple(map(int, found.groups()))


def write_index(
    directory: Path, bundles: Sequence[Path], licence: str, title: str | None, split: int
) -> list[Path]:
    """Put ``bundles`` and their index into ``directory``; returns the files written, the index last.

    A bundle is named after its file. ``split``: most bytes of a file, 0 for no limit. Entries of an index
    that is there stay. Raises UsageError for a name that is none, BundleError for a file that is no bundle.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index = directory / INDEX_FILE
    tables: dict[str, dict[str, object]] = {}
    if index.exists():
        with parsing(index, "index of bundles"):
            tables = tomllib.loads(read_file(index, _INDEX_LIMIT).decode("utf-8"))
    written = []
    for bundle in bundles:
        name = bundle.stem
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{bundle}: rename it: small letters, digits, '.', '_' and '-' make a bundle's name"
            )
        Bundle.open(bundle)
        parts = _copy(bundle, directory, name, split)
        written += parts
        tables[name] = {
            "title": title or name,
            "licence": licence,
            "minimum_version": __version__,
            "size": bundle.stat().st_size,
            "sha256": file_sha256(bundle),
            "parts": [part.name for part in parts],
        }
    with replacing(index) as file:
        for name, table in sorted(tables.items()):
            file.write(f"[{_toml(name)}]\n".encode())
            file.writelines(f"{key} = {_toml(value)}\n".encode() for key, value in table.items())
            file.write(b"\n")
    return [*written, index]


def _copy(bundle: Path, directory: Path, name: str, split: int) -> list[Path]:
    size = bundle.stat().st_size
    count = -(-size // split) if split else 1
    paths = [directory / (f"{name}.mxb" if count == 1 else f"{name}.mxb.{i:03}") for i in range(count)]
    with bundle.open("rb") as source:
        for path in paths:
            left = min(split, size) if split else size
            with replacing(path) as file:
                while left > 0 and (chunk := source.read(min(left, _COPY))):
                    file.write(chunk)
                    left -= len(chunk)
    return paths


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = "".join(c if c >= " " and c not in '"\\\x7f' else f"\\u{ord(c):04x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def digest_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of files one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_COPY):
                digest.update(chunk)
    return digest.hexdigest()
