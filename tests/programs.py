# SPDX-License-Identifier: Apache-2.0
"""Both command lines, and how tests run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = (sys.executable, "-m", "mxdraft.cli")
C = (os.environ.get("MXDRAFT_CLI", str(ROOT / "build" / "host" / "mxdraft")),)
BOTH = pytest.mark.parametrize("program", [C, PYTHON], ids=["c", "python"])
TIMEOUT_S = 120

Arg = str | bytes | Path


def run(program: Sequence[str], *args: Arg, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a program; ``options`` are those of subprocess.run. Without any, stdin is /dev/null."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    env = os.environ | options.pop("env", {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": TIMEOUT_S} | options
    return subprocess.run([*program, *args], env=env, check=False, **options)


def limited(limit: str, program: Sequence[str]) -> list[str]:
    """The program under a limit of the shell's ulimit, or with a redirection such as ``<&-``."""
    if limit[0] == "-":
        return ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *program]
    return ["sh", "-c", f'exec "$@" {limit}', "sh", *program]


def errors(result: subprocess.CompletedProcess[bytes]) -> list[bytes]:
    return [line for line in result.stderr.splitlines() if line.startswith(b"mxdraft: error: ")]
