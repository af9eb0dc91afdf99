# SPDX-License-Identifier: Apache-2.0
"""hatchling's hook: compiles the C runtime into wheels, so that pip installs from sources anywhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RuntimeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts library and command line of a target, $MXDRAFT_WHEEL_TARGET or this machine, into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # a checkout uses what make builds
            return
        root = Path(self.root)
        sys.path.insert(0, str(root / "toolchain"))
        from mxdraft.ship.wheel import tag, wheel_outputs

        target = os.environ.get("MXDRAFT_WHEEL_TARGET", "host")
        build_data["pure_python"] = False
        build_data["tag"] = tag(target, root)
        for name, path in wheel_outputs(target, root).items():
            build_data["force_include"][str(path)] = f"mxdraft/_runtime/{name}"
