# SPDX-License-Identifier: Apache-2.0
"""A Python wheel of this package with the C library of a target inside (PEP 427, PEP 600).

hatchling makes the pure wheel that a checkout needs; this one is for machines without compiler, such as a Pi.
"""

from __future__ import annotations

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from mxdraft import __version__
from mxdraft.errors import RefusedError
from mxdraft.files import replacing
from mxdraft.ship.build import architecture, build
from mxdraft.ship.targets import OUTPUTS, REPOSITORY, load_target

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that ZIP knows: equal contents give equal wheels


def build_wheel(target_name: str) -> Path:
    """Build ``build/<target>/mxdraft-<version>-py3-none-manylinux_<glibc>_<arch>.whl``; returns its path."""
    target = load_target(target_name)
    library = next((path for path in build(target_name) if path.name == OUTPUTS["library"]), None)
    if library is None:
        raise RefusedError(f"target {target.name} has no library among its outputs, which a wheel needs")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tag = f"py3-none-manylinux_{target.glibc.replace('.', '_')}_{architecture(target)}"
    name = f"{project['name']}-{__version__}"
    package = REPOSITORY / "toolchain"
    members = {
        str(path.relative_to(package)): path.read_bytes()
        for path in sorted((package / "mxdraft").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    members["mxdraft/_runtime/mxdraft.h"] = (REPOSITORY / "runtime/include/mxdraft.h").read_bytes()
    members["mxdraft/_runtime/libmxdraft.so"] = library.read_bytes()
    scripts = "".join(f"{command} = {entry}\n" for command, entry in project["scripts"].items())
    wheel = f"Wheel-Version: 1.0\nGenerator: mxdraft\nRoot-Is-Purelib: false\nTag: {tag}\n"
    members[f"{name}.dist-info/METADATA"] = _metadata(project).encode("utf-8")
    members[f"{name}.dist-info/WHEEL"] = wheel.encode("utf-8")
    members[f"{name}.dist-info/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    record = f"{name}.dist-info/RECORD"
    members[record] = "".join([*map(_record_line, members, members.values()), f"{record},,\n"]).encode(
        "utf-8"
    )
    path = library.with_name(f"{name}-{tag}.whl")
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            info = zipfile.ZipInfo(member, _EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


def _metadata(project: dict[str, Any]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in requirements]
    return "\n".join(lines) + "\n"


def _record_line(member: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")
    return f"{member},sha256={digest},{len(data)}\n"
