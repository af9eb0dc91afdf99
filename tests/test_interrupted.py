# SPDX-License-Identifier: Apache-2.0
"""Killed, or failing, at any call that changes a file: what is found later is whole or refused, never another
thing; the next run succeeds, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clib import REPOSITORY, compile_c, native

# Half of an export takes a while: so many points, unless the fuzzers are given time.
POINTS = "all" if float(os.environ.get("MXDRAFT_FUZZ_SECONDS", "2")) > 9 else "12"
SCENARIOS = ["export", "drafter", "other drafter", "pack", "corpus", "fetch"]


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("preloaded") / "libfile_calls.so"
    source = REPOSITORY / "tests" / "c" / "file_calls.c"
    return compile_c(native("gnu.2.28"), library, "-fvisibility=default", "-shared", "-fPIC", source, "-ldl")


def interrupt(preloaded: Path, folder: Path, scenario: str, action: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "interrupted.py", scenario, folder, action, POINTS],
        env=os.environ
        | {"LD_PRELOAD": str(preloaded), "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    print(scenario, action, result)
    return result


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_call(preloaded: Path, tmp_path: Path, scenario: str) -> None:
    result = interrupt(preloaded, tmp_path, scenario, "kill")
    assert set(result["outcomes"]) <= {"killed, old", "killed, new", "killed, refused"}
    assert len(result["outcomes"]) > 1
    assert result["points"] > 5


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_any_call_fails(preloaded: Path, tmp_path: Path, scenario: str, error: str) -> None:
    """It ends with a TransferError, or did not need the call."""
    result = interrupt(preloaded, tmp_path, scenario, error)
    assert set(result["outcomes"]) <= {"failed, old", "failed, new", "failed, refused", "done, new"}
    assert any(outcome.startswith("failed") for outcome in result["outcomes"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_short_writes_write_everything(preloaded: Path, tmp_path: Path, scenario: str) -> None:
    interrupt(preloaded, tmp_path, scenario, "short")
