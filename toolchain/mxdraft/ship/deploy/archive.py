# SPDX-License-Identifier: Apache-2.0
"""A deployment to carry by hand: one .tar.gz with everything, and device.sh as its install.sh."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from mxdraft.files import replacing
from mxdraft.ship.deploy.release import Release, script


def write_archive(release: Release, folder: str, path: Path) -> None:
    """Write ``path``; all its members lie in ``folder``. Equal releases give equal bytes."""
    members: dict[str, Path | bytes] = {
        "install.sh": script("device.sh").encode("utf-8"),
        "manifest": f"{release.manifest}\n".encode(),
        **dict(release.files.values()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as file,
        # Weights hardly compress, so take the fastest level.
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, content in sorted(members.items()):
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size = source.seek(0, io.SEEK_END)
                info.mode = 0o755 if name in ("install.sh", "mxdraft") else 0o644
                source.seek(0)
                archive.addfile(info, source)
