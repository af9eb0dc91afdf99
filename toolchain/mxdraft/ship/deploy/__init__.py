# SPDX-License-Identifier: Apache-2.0
"""Deploy: ship a bundle and the runtime to devices, prove there that they compute the host's bits, switch.

release.py   what is shipped, and what it must compute
remote.py    one device over OpenSSH
device.sh    the device's half: checks, proof, switch, rollback
archive.py   the same without a network: a .tar.gz with device.sh as install.sh
fleet.py     many devices: canary first, some at a time, stop at the first failure
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mxdraft.ship.deploy.release import Release
from mxdraft.ship.deploy.remote import Device

# Opens a progress display: (title, bytes in all) -> context manager of a function that is told of each step.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def deploy(
    device: Device, release: Release, service: bool, note: Callable[[str], None], progress: Progress
) -> dict[str, Any]:
    """Ship, prove and switch one device; returns the report. An exception leaves the old release current."""
    with device:
        note(f"{device.host}: checking the device")
        missing = device.hold(release.manifest, service)
        uploaded = sum(_upload(device, release, digest, have, progress) for digest, have in missing)
        note(f"{device.host}: verifying there")
        proof = device.prove()
        switched = device.switch()
    return {"host": device.host, "uploaded_bytes": uploaded} | proof | switched


def _upload(device: Device, release: Release, digest: str, have: int, progress: Progress) -> int:
    name, content = release.files[digest]
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    with (
        io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source,
        progress(name, size) as advance,
    ):
        source.seek(have)
        advance(have)
        device.upload(digest, source, advance)
    return size - have
