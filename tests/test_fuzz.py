# SPDX-License-Identifier: Apache-2.0
"""Short runs of the fuzzers in C, with red zones around all memory, and of the soak.

``make fuzz`` and ``make soak`` run them longer.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from clib import REPOSITORY, compile_c
from fuzzers import FUZZERS, Fuzzer, make_bundles, sources_of
from mxdraft.ship.build import sources

SECONDS = float(os.environ.get("MXDRAFT_FUZZ_SECONDS", "4"))
SOAK_SECONDS = os.environ.get("MXDRAFT_SOAK_SECONDS", "3")
SANITIZE = ["gcc", "-g", "-DMXD_DEBUG", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.fixture(scope="module")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_bundles(bundle, tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a fuzzer of ``tests/fuzz`` with the whole library, once."""
    folder = tmp_path_factory.mktemp("fuzz")

    @cache
    def build(name: str) -> Path:
        files = [f"tests/fuzz/{name}.c", *sources_of(name)]
        return compile_c(SANITIZE, folder / name, "-O1", *files, "-lm")

    return build


@pytest.mark.parametrize("fuzz", FUZZERS, ids=lambda fuzz: fuzz.name)
def test_fuzz(fuzz: Fuzzer, fuzzer: Callable[[str], Path], bundles: list[Path]) -> None:
    """A finding fails with its seed and the sanitizer's report."""
    command = fuzz.command(fuzzer(fuzz.program), SECONDS / 2, bundles)
    if fuzz.program == "api" and "MXDRAFT_FUZZ_SECONDS" not in os.environ:
        command[1:2] = ["60", "--engines", "200"]  # the same ones in every run
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"[1-9]", done.stdout)
    assert not re.search(r"\b(0 (accepted|refused)|(engines|reruns|requests) 0)\b", done.stdout)


def test_soak(bundles: list[Path], tmp_path: Path) -> None:
    command = ["gcc", *os.environ.get("MXDRAFT_SOAK_FLAGS", "").split()]
    program = compile_c(command, tmp_path / "soak", "-O1", "tests/c/soak.c", *sources("library"), "-lm")
    assert subprocess.run([program, SOAK_SECONDS, *bundles[:2]], cwd=REPOSITORY, check=False).returncode == 0
