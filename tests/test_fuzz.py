# SPDX-License-Identifier: Apache-2.0
"""Short runs of the fuzzers in C, with red zones around all memory, and of the soak.

``make fuzz`` and ``make soak`` run them longer.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny
from clib import REPOSITORY, compile_c
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule
from mxdraft.ship.build import sources

SECONDS = float(os.environ.get("MXDRAFT_FUZZ_SECONDS", "4"))
SOAK_SECONDS = os.environ.get("MXDRAFT_SOAK_SECONDS", "3")
SANITIZE = ["gcc", "-g", "-DMXD_DEBUG", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.fixture(scope="module")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Fixture T, plain and with everything that a bundle may hold."""
    data = bundle.read_bytes()
    config = Bundle(data).config
    documents = [np.random.default_rng(1).integers(0, config.vocab, 200).tolist(), [5, 6, 7, 8] * 15]
    schedule = dataclasses.replace(
        Schedule.default(config.layers), core_fraction=0.3, catch_up=7, sinks=2, recent=32, core_tokens=0.2
    )
    data = tiny.with_schedule(tiny.with_ngrams(data, documents), schedule)
    full = tmp_path_factory.mktemp("full") / "full.mxb"
    full.write_bytes(tiny.with_drafter(data, tiny.drafter(config)))
    return [str(bundle), str(full)]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a fuzzer of ``tests/fuzz`` with the whole library, once."""
    folder = tmp_path_factory.mktemp("fuzz")

    @cache
    def build(name: str) -> Path:
        return compile_c(SANITIZE, folder / name, "-O1", f"tests/fuzz/{name}.c", *sources("library"), "-lm")

    return build


def run(command: list[str]) -> dict[str, int]:
    """What a fuzzer counted, by name. A finding fails with its seed and the sanitizer's report."""
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pairs = (part.rsplit(" ", 1) for part in done.stdout.replace("(", ", ").split(",") if part.strip())
    return {name.strip(): int(number) for name, number in pairs if number.strip().isdigit()}


def test_calls_in_any_order(fuzzer: Callable[[str], Path], bundles: list[str]) -> None:
    known = [] if "MXDRAFT_FUZZ_SECONDS" in os.environ else ["--engines", "200"]  # the same ones in every run
    counts = run([str(fuzzer("api")), str(60 if known else SECONDS), *known, *bundles])
    assert counts["engines"] > 0
    assert counts["reruns"] > 0


@pytest.mark.parametrize(
    ("program", "target"),
    [
        *(("inputs", target) for target in ("bundle", "text", "chat", "costs")),
        *(("structured", target) for target in ("json", "schema")),
    ],
)
def test_inputs(fuzzer: Callable[[str], Path], bundles: list[str], program: str, target: str) -> None:
    files = bundles if program == "inputs" else bundles[1:]
    done = subprocess.run(
        [str(fuzzer(program)), target, str(SECONDS / 2), *files],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"{target}: ")
    assert " 0 accepted" not in done.stdout
    assert " 0 refused" not in done.stdout


def test_http(tmp_path: Path) -> None:
    files = ["tests/fuzz/http.c", "runtime/serve/http.c"]
    counts = run([str(compile_c(SANITIZE, tmp_path / "http", "-O1", *files)), str(SECONDS / 4)])
    assert counts["requests"] > 0


def test_soak(bundles: list[str], tmp_path: Path) -> None:
    program = compile_c(["gcc"], tmp_path / "soak", "-O1", "tests/c/soak.c", *sources("library"), "-lm")
    assert subprocess.run([program, SOAK_SECONDS, *bundles], cwd=REPOSITORY, check=False).returncode == 0
