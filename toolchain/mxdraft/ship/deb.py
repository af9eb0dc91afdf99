# SPDX-License-Identifier: Apache-2.0
"""A Debian package (deb(5)) of a target's static command line. It needs no other package."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import tarfile
from email.utils import formatdate
from pathlib import Path

from mxdraft import __version__
from mxdraft.errors import RefusedError
from mxdraft.files import replacing
from mxdraft.ship.build import architecture, build
from mxdraft.ship.manual import completions, man_page, read_commands
from mxdraft.ship.targets import OUTPUTS, REPOSITORY, load_target

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_EPOCH = 1764547200  # 2025-12-01: equal contents give equal packages
_VERSION = f"{__version__}-1"
_OVERRIDES = b"""\
mxdraft: statically-linked-binary [usr/bin/mxdraft]
mxdraft: bogus-mail-host Maintainer mxdraft@localhost
mxdraft: bogus-mail-host-in-debian-changelog mxdraft@localhost *
mxdraft: initial-upload-closes-no-bugs [usr/share/doc/mxdraft/changelog.Debian.gz:1]
"""
_DESCRIPTION = """\
Description: exact, fast text generation with small language models
 A runtime for small language models on boards such as a Raspberry Pi: one
 static program with kernels for each CPU, that gives the same bits on every
 machine, thread count and batch. It generates text from a bundle, one file,
 and serves it over HTTP as OpenAI's and Ollama's programs expect.
"""


def build_deb(target_name: str) -> Path:
    """Build ``build/<target>/mxdraft_<version>_<architecture>.deb``; returns its path.

    Raises RefusedError if the target has no command line.
    """
    target = load_target(target_name)
    program = next((path for path in build(target_name) if path.name == OUTPUTS["cli"]), None)
    if program is None:
        raise RefusedError(
            f"target {target_name} has no command line among its outputs, which a package needs"
        )
    host = next(
        path for path in build("host") if path.name == OUTPUTS["cli"]
    )  # the same help, and it runs here
    overview, commands = read_commands(host)
    shells = completions(commands)
    files = {
        "usr/bin/mxdraft": program.read_bytes(),
        "usr/share/bash-completion/completions/mxdraft": shells["bash"].encode(),
        "usr/share/doc/mxdraft/changelog.Debian.gz": _gzipped(_changelog().encode()),
        "usr/share/doc/mxdraft/changelog.gz": _gzipped((REPOSITORY / "CHANGELOG.md").read_bytes()),
        "usr/share/doc/mxdraft/copyright": _copyright().encode(),
        "usr/share/fish/vendor_completions.d/mxdraft.fish": shells["fish"].encode(),
        "usr/share/lintian/overrides/mxdraft": _OVERRIDES,
        "usr/share/man/man1/mxdraft.1.gz": _gzipped(man_page(overview, commands).encode()),
        "usr/share/zsh/vendor-completions/_mxdraft": shells["zsh"].encode(),
    }
    kind = _ARCHITECTURES[architecture(target)]
    sums = "".join(f"{hashlib.md5(data).hexdigest()}  {name}\n" for name, data in files.items())
    control = (
        f"Package: mxdraft\nVersion: {_VERSION}\nArchitecture: {kind}\nMaintainer: {_maintainer()}\n"
        f"Installed-Size: {sum(map(len, files.values())) // 1024 + 1}\nSection: science\nPriority: optional\n"
        f"{_DESCRIPTION}"
    )
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": _tar({"control": control.encode(), "md5sums": sums.encode()}),
        "data.tar.xz": _tar(files),
    }
    path = program.with_name(f"mxdraft_{_VERSION}_{kind}.deb")
    with replacing(path) as file:
        file.write(b"!<arch>\n")
        for name, data in members.items():
            file.write(f"{name:<16}{_EPOCH:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode("ascii"))
            file.write(data + b"\n" * (len(data) % 2))
    return path


def _tar(files: dict[str, bytes]) -> bytes:
    """Pack files, with the folders above them, that belong to root."""
    folders = {str(folder) for name in files for folder in Path(name).parents}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(folders | files.keys()):
            info = tarfile.TarInfo("./" if name == "." else f"./{name}")
            info.mtime, info.uname, info.gname = _EPOCH, "root", "root"
            if name in folders:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                info.size, info.mode = len(files[name]), 0o755 if name.startswith("usr/bin/") else 0o644
                archive.addfile(info, io.BytesIO(files[name]))
    return lzma.compress(buffer.getvalue())


def _gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def _maintainer() -> str:
    """Return who packages, as Debian's own tools find it."""
    return f"{os.environ.get('DEBFULLNAME', 'mxdraft')} <{os.environ.get('DEBEMAIL', 'mxdraft@localhost')}>"


def _changelog() -> str:
    date = formatdate(_EPOCH, usegmt=True).replace("GMT", "+0000")
    return (
        f"mxdraft ({_VERSION}) unstable; urgency=medium\n\n  * Made by mxdraft build --deb.\n\n"
        f" -- {_maintainer()}  {date}\n"
    )


def _copyright() -> str:
    return (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        "Upstream-Name: mxdraft\n\n"
        "Files: *\nCopyright: 2026 the authors of mxdraft\nLicense: Apache-2.0\n"
        " On Debian systems the licence is in /usr/share/common-licenses/Apache-2.0.\n"
    )
