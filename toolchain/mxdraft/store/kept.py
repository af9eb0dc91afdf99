# SPDX-License-Identifier: Apache-2.0
"""The bundles of this machine, in the user's cache."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from mxdraft.bundle import Bundle
from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.files import default_cache, file_sha256, locked, replacing
from mxdraft.files.download import download, progress_bar
from mxdraft.store.index import NAME, Entry, check_version, digest_of

_COPY = 1 << 20


def folder() -> Path:
    """Return where bundles are kept. Raises TransferError if there is no cache."""
    return default_cache() / "bundles"


def path_of(name: str) -> Path:
    """Return the path that the bundle of a name has, whether or not it is there."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no bundle's name")
    return folder() / f"{name}.mxb"


def kept() -> dict[str, Path]:
    """List the bundles that are there, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.mxb")) if NAME.fullmatch(path.stem)}


def find(bundle: str) -> str:
    """Return the path of the bundle that -m names: a file, else one in the cache, else ``bundle`` itself."""
    if NAME.fullmatch(bundle) and not Path(bundle).exists():
        with contextlib.suppress(TransferError):
            if path_of(bundle).exists():
                return str(path_of(bundle))
    return bundle


def pull(entry: Entry, progress: bool = True) -> Path:
    """Get a bundle, unless it is there undamaged; returns its path.

    An interrupted download goes on where it stopped; of several calls at once one downloads, the others wait.
    Raises RefusedError if what arrives is not what the index says or no bundle, TransferError for network and
    disk.
    """
    check_version(entry)
    path = path_of(entry.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock"), lambda: _tell_of_waiting(progress)):
            if not (path.exists() and file_sha256(path) == entry.sha256):
                _get(entry, path, progress)
    except OSError as error:
        raise TransferError(
            f"{error}; the cache is {path.parent.parent}, $MXDRAFT_CACHE changes it"
        ) from error
    return path


def _tell_of_waiting(visible: bool) -> None:
    if visible:
        print("another process is getting this bundle; waiting for it", file=sys.stderr)


def _get(entry: Entry, path: Path, progress: bool) -> None:
    # Named after the digest: what was got of another version is not continued.
    parts = [path.with_name(f"{path.name}.{entry.sha256[:16]}.{i:03}.part") for i in range(len(entry.parts))]
    there = 0
    with progress_bar(entry.title, progress) as report:
        for url, part in zip(entry.parts, parts, strict=True):

            def tell(done: int, _: int | None, before: int = there) -> None:
                report(before + done, entry.size)

            download(url, part, url.rsplit("/", 1)[-1], entry.size - there, tell)
            there += part.stat().st_size
    digest = digest_of(parts)
    if there != entry.size or digest != entry.sha256:
        for part in parts:
            part.unlink()
        raise RefusedError(
            f"{entry.name} arrived with {there} bytes and SHA-256 {digest}, the index says {entry.size} and "
            f"{entry.sha256}; it was deleted. Pull it again; if that repeats, the index is wrong"
        )
    with replacing(path) as file:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_COPY):
                    file.write(chunk)
        file.flush()
        Bundle.open(Path(file.name))
    for part in parts:
        part.unlink()


def remove(name: str) -> list[Path]:
    """Delete a bundle and what is left of interrupted downloads. Raises RefusedError if nothing is there."""
    path = path_of(name)
    found = [each for each in (path, *path.parent.glob(f"{path.name}.*.part")) if each.exists()]
    if not found:
        raise RefusedError(f"{name}: no such bundle here; 'mxdraft list' tells which there are")
    for each in found:
        each.unlink()
    return found
