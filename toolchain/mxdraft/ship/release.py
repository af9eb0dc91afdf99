# SPDX-License-Identifier: Apache-2.0
"""All that a release hands out, in one folder: source distribution, wheels, Debian packages, a list of their
SHA-256 and a list of what is in them (CycloneDX 1.6). Equal sources give equal bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mxdraft import __version__
from mxdraft.errors import RefusedError
from mxdraft.files import file_sha256, read_toml, replacing
from mxdraft.ship.build import architecture
from mxdraft.ship.deb import build_deb
from mxdraft.ship.targets import REPOSITORY, load_target
from mxdraft.ship.wheel import build_wheel

SUMS_FILE = "SHA256SUMS"
SBOM_FILE = "mxdraft.cdx.json"

_TARGETS = {"host": "x86_64", "rpi": "aarch64"}  # and the architecture each has to be for


def build_release(folder: Path) -> list[Path]:
    """Make a release in ``folder``; returns its files, ``SHA256SUMS`` last.

    Raises RefusedError on a machine that is not x86-64, where the target host would be another one.
    """
    from hatchling.builders.sdist import SdistBuilder

    for name, expected in _TARGETS.items():
        if (found := architecture(load_target(name))) != expected:
            raise RefusedError(f"target {name} is {found}, a release needs {expected}: make it on x86-64")
    folder.mkdir(parents=True, exist_ok=True)
    (source,) = SdistBuilder(str(REPOSITORY)).build(directory=str(folder), versions=["standard"])
    built = [make(name) for name in _TARGETS for make in (build_wheel, build_deb)]
    files = [Path(source), *(_copy(path, folder) for path in built)]
    files.append(_write(folder / SBOM_FILE, json.dumps(bill_of_materials(files), indent=2) + "\n"))
    sums = "".join(f"{file_sha256(path)}  {path.name}\n" for path in sorted(files))
    return [*files, _write(folder / SUMS_FILE, sums)]


def bill_of_materials(files: list[Path]) -> dict[str, object]:
    """Return a CycloneDX 1.6 document: the files with their SHA-256, and what they contain or need.

    It has neither time nor serial number, so that equal files have equal documents.
    """
    project = read_toml(REPOSITORY / "pyproject.toml", "project")
    needed = project["project"]["dependencies"]
    (compiler,) = (each for each in project["build-system"]["requires"] if each.startswith("ziglang=="))
    zig_version = compiler.removeprefix("ziglang==")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "mxdraft",
                "version": __version__,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            *(
                {
                    "type": "file",
                    "name": path.name,
                    "hashes": [{"alg": "SHA-256", "content": file_sha256(path)}],
                }
                for path in files
            ),
            {
                "type": "library",
                "name": "musl",
                "description": f"inside the static command line, as ziglang {zig_version} brings it",
                "licenses": [{"license": {"id": "MIT"}}],
            },
            *(
                {
                    "type": "library",
                    "name": name,
                    "purl": f"pkg:pypi/{name}",
                    "description": f"the wheel needs {requirement}; not inside",
                }
                for requirement in needed
                for name in re.findall(r"^[\w.-]+", requirement)
            ),
        ],
    }


def _copy(path: Path, folder: Path) -> Path:
    with replacing(folder / path.name) as file:
        file.write(path.read_bytes())
    return folder / path.name


def _write(path: Path, text: str) -> Path:
    with replacing(path) as file:
        file.write(text.encode())
    return path
