# SPDX-License-Identifier: Apache-2.0
"""A Python wheel of this package with the C runtime of a target inside (PEP 427, PEP 600).

hatchling makes it; its hook (hatch_build.py) asks here what goes in. One target's wheel can so be made on
another machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from mxdraft.errors import RefusedError
from mxdraft.ship.build import architecture, build
from mxdraft.ship.targets import OUTPUTS, REPOSITORY, load_target


def tag(target_name: str, repository: Path = REPOSITORY) -> str:
    """Return the wheel's tag: any Python 3, the target's architecture, its glibc or a newer one."""
    target = load_target(target_name, repository / "targets")
    return f"py3-none-manylinux_{target.glibc.replace('.', '_')}_{architecture(target)}"


def wheel_outputs(target_name: str, repository: Path = REPOSITORY) -> dict[str, Path]:
    """Build what a wheel carries in ``mxdraft/_runtime``, by name: the library, and the command line for
    ``mxdraft serve``. Raises RefusedError if the target has no library."""
    found = {path.name: path for path in build(target_name, repository=repository)}
    if OUTPUTS["library"] not in found:
        raise RefusedError(f"target {target_name} has no library among its outputs, which a wheel needs")
    return found


def build_wheel(target_name: str) -> Path:
    """Build ``build/<target>/mxdraft-<version>-<tag>.whl``; returns its path."""
    from hatchling.builders.wheel import WheelBuilder

    wheel_outputs(target_name)  # where a fault has its own error
    before = os.environ.get("MXDRAFT_WHEEL_TARGET")
    os.environ["MXDRAFT_WHEEL_TARGET"] = target_name
    try:
        (path,) = WheelBuilder(str(REPOSITORY)).build(
            directory=str(REPOSITORY / "build" / target_name), versions=["standard"]
        )
    finally:
        if before is None:
            del os.environ["MXDRAFT_WHEEL_TARGET"]
        else:
            os.environ["MXDRAFT_WHEEL_TARGET"] = before
    return Path(path)
