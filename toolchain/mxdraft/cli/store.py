# SPDX-License-Identifier: Apache-2.0
"""pull, list, rm and index: ready bundles."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

import click

from mxdraft.cli._options import PATH, whole
from mxdraft.cli._terminal import print_line
from mxdraft.errors import UsageError
from mxdraft.store.index import Entry, read_index, write_index
from mxdraft.store.kept import kept, remove
from mxdraft.store.kept import pull as get

_index_option = click.option(
    "--index", metavar="URL|PATH", help="Where the bundles are listed; default: $MXDRAFT_INDEX."
)


@click.command(epilog="Example: mxdraft pull smollm2-135m --index https://pi.example/bundles/index.toml")
@click.argument("name", metavar="NAME|URL")
@_index_option
@click.option("--sha256", metavar="HEX", help="With a URL: the SHA-256 that the bundle must have.")
@click.option("--size", type=whole(1, 1 << 40), help="With a URL: its bytes.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def pull(name: str, index: str | None, sha256: str | None, size: int | None, no_progress: bool) -> None:
    """Get a bundle, check it, keep it in the cache, and print its path; then -m NAME finds it."""
    print_line(get(_entry(name, index, sha256, size), progress=not no_progress))


def _entry(name: str, index: str | None, sha256: str | None, size: int | None) -> Entry:
    if "://" in name:
        if sha256 is None or size is None:
            raise UsageError("a URL needs --sha256 and --size: what arrives is checked before it is used")
        stem = urllib.parse.urlsplit(name).path.rsplit("/", 1)[-1].removesuffix(".mxb").lower()
        return Entry(stem, stem, "", "0.0.0", size, sha256.lower(), (name,))
    if sha256 is not None or size is not None:
        raise UsageError("--sha256 and --size are for a URL; a name has them from its index")
    known = read_index(_index(index))
    if name not in known:
        raise UsageError(
            f"bundle {name!r} is not in the index; known are: {', '.join(sorted(known)) or 'none'}"
        )
    return known[name]


def _index(given: str | None) -> str:
    where = given or os.environ.get("MXDRAFT_INDEX")
    if not where:
        raise UsageError("where are the bundles listed? give --index or set MXDRAFT_INDEX")
    return where


@click.command(epilog="Example: mxdraft list --index /media/usb")
@_index_option
def list(index: str | None) -> None:
    """List the bundles in the cache and, with an index, those that can be pulled."""
    here = kept()
    for name, path in here.items():
        print_line(f"{name} {path.stat().st_size} {path}")
    if index or os.environ.get("MXDRAFT_INDEX"):
        for name, entry in sorted(read_index(_index(index)).items()):
            if name not in here:
                print_line(f"{name} {entry.size} to pull: {entry.title}, {entry.licence}")


@click.command(epilog="Example: mxdraft rm smollm2-135m")
@click.argument("name")
def rm(name: str) -> None:
    """Remove a bundle from the cache, and print what was deleted."""
    for path in remove(name):
        print_line(path)


@click.command(epilog="Example: mxdraft index build/smollm2-135m.mxb -o public --licence Apache-2.0")
@click.argument("bundles", type=PATH, nargs=-1, required=True)
@click.option("-o", "directory", metavar="DIR", type=PATH, required=True, help="Directory to put them into.")
@click.option("--licence", metavar="NAME", required=True, help="Of the weights.")
@click.option("--title", metavar="TEXT", help="What to call it; default: its name.")
@click.option("--split", type=whole(1, 1 << 40), help="Most bytes of a file; default: no limit.")
def index(
    bundles: tuple[Path, ...], directory: Path, licence: str, title: str | None, split: int | None
) -> None:
    """Copy bundles into a directory that a static file server can serve, with an index for pull."""
    for path in write_index(directory, bundles, licence, title, split or 0):
        print_line(path)
