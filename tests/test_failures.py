# SPDX-License-Identifier: Apache-2.0
"""Every n-th call of a libc function fails once: a documented exit code or status, with a message, the right
result or none, nothing leaked, and no file half-written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clib import REPOSITORY, compile_c
from mxdraft.ship.build import sources
from programs import TIMEOUT_S, Arg

GCC = shutil.which("gcc")
FAILING = REPOSITORY / "tests" / "fuzz" / "failing.c"
FAILING_FILES = REPOSITORY / "tests" / "c" / "failing_files.c"
# Most points of a function in a command; beyond, evenly spread ones. The system has many files to read.
MOST_POINTS = {"fopen": 12, "fread": 12, "fgets": 12}
MOST_POINTS_OF_OTHERS = 60
# What each function may say; those not named have no errno of interest.
ERRORS = {
    "open": [errno.EACCES, errno.EMFILE, errno.EINTR],
    "fopen": [errno.EMFILE],
    "read": [errno.EIO, errno.EINTR, errno.EAGAIN],
    "write": [errno.ENOSPC, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EFBIG],
    "fsync": [errno.EIO, errno.ENOSPC],
    "rename": [errno.ENOSPC, errno.EROFS],
    "mkdir": [errno.EROFS, errno.ENOSPC],
    "fflush": [errno.ENOSPC],
}
COMMANDS: dict[str, list[Arg]] = {
    "generate": ["generate", "-m", "{bundle}", "-f", "{text}", "-n", "4", "-t", "1", "--dump-tokens"],
    "chat": ["chat", "-m", "{bundle}", "-n", "3", "--draft", "off", "-t", "1", "--stats", "json"],
    "tokenize": ["tokenize", "-m", "{bundle}", "-"],
    "decode": ["tokenize", "-m", "{bundle}", "-p", "5 6 7 100", "--decode"],
    "verify": ["verify", "-m", "{bundle}", "--precision", "base", "-t", "2"],
    "bench": [
        *("bench", "-m", "{bundle}", "--prompt-tokens", "2", "-n", "2", "--repeat", "1", "-t", "1"),
        *("--json", "{out}/results.json"),
    ],
    "info": ["info", "-m", "{bundle}", "--cpu"],
}
DOCUMENTED = {0, 2, 3, 4, 5, 6}
ASAN = "exitcode=99:detect_leaks=0"  # a process that ends leaks nothing, and the search takes long


def functions() -> list[str]:
    """The functions that failing.c can make fail."""
    found = re.search(r"#define FAILING_CALLS\(X\)(.*?)\n\n", FAILING.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return re.findall(r"X\((\w+)\)", found[1])


def build(folder: Path, name: str, *files: Path) -> Path:
    if GCC is None:
        pytest.skip("gcc and its sanitizers are missing")
    wrap = [f"-Wl,--wrap={name}" for name in functions()]
    # Without fortified variants: read() must stay read().
    options = ["-O1", "-g", "-fsanitize=address", "-U_FORTIFY_SOURCE", *wrap]
    return compile_c([GCC], folder / name, *options, *files, FAILING, "-lm")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("failing"), "mxdraft", *sources("cli"))


class Runs:
    """Runs of one command, each in a folder of its own."""

    def __init__(self, program: Path, command: str, bundle: Path, folder: Path) -> None:
        self.program, self.name, self.bundle, self.folder = program, command, bundle, folder
        (folder / "text").write_bytes(b"hello there")

    def run(self, place: str, **env: str) -> tuple[subprocess.CompletedProcess[bytes], list[str]]:
        """Run the command; also returns the names of the files that are there afterwards."""
        out = self.folder / place
        (out / "cache").mkdir(parents=True)
        args = [
            str(arg).format(bundle=self.bundle, text=self.folder / "text", out=out)
            for arg in COMMANDS[self.name]
        ]
        done = subprocess.run(
            [self.program, *args],
            input=b"hi\nho\n",
            env=os.environ | {"MXDRAFT_CACHE": str(out / "cache" / "a"), "ASAN_OPTIONS": ASAN} | env,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        names = (path.name for path in out.rglob("*") if path.is_file())
        files = sorted(
            re.sub("^costs-[0-9a-f]{16}$", "costs", name) for name in names
        )  # by what /proc/cpuinfo says
        shutil.rmtree(out)
        return done, files

    def points(self) -> Iterator[tuple[str, int, int]]:
        """The (function, call, errno) to try, for the calls that a run makes."""
        counts = self.folder / "counts"
        self.run("counting", MXD_FAIL_COUNT=str(counts))
        for line in counts.read_text(encoding="ascii").splitlines():
            function, total = line.split()
            calls = range(1, int(total) + 1)
            step = -(-len(calls) // MOST_POINTS.get(function, MOST_POINTS_OF_OTHERS)) or 1
            for i, call in enumerate(calls[::step]):
                reasons = ERRORS.get(function, [errno.ENOMEM])
                yield function, call, reasons[i % len(reasons)]


def same_result(name: str, stdout: bytes) -> bytes:
    """What must not change: of info, not what depends on files of the system; of bench's table, nothing."""
    return {"info": re.sub(rb"(?m)^(threads|plan:) .*", b"", stdout), "bench": b""}.get(name, stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_call_that_fails_is_an_error_or_none(
    program: Path, bundle: Path, tmp_path: Path, command: str
) -> None:
    runs = Runs(program, command, bundle, tmp_path)
    good, files = runs.run("good")
    assert good.returncode == (5 if command == "verify" else 0), good.stderr  # the bundle has no digests

    def attempt(point: tuple[str, int, int]) -> str | None:
        """Return what is wrong with a run."""
        function, call, reason = point
        done, left = runs.run(f"{function}-{call}", MXD_FAIL=f"{function}:{call}:{reason}")
        if done.returncode == good.returncode:
            right = same_result(command, done.stdout) == same_result(command, good.stdout)
            right &= command != "bench" or left == files
        else:
            right = done.stderr.count(b"mxdraft: error: ") == 1 and "results.json" not in left
        if right and done.returncode in DOCUMENTED and set(left) <= set(files):
            return None
        return f"{function}, call {call}, {os.strerror(reason)}: {done.returncode}, {left}, {done.stderr!r}"

    points = [*runs.points()]
    with ThreadPoolExecutor(2) as pool:
        faults = [fault for fault in pool.map(attempt, points) if fault]
    assert not faults, "\n".join(faults)
    assert len(points) > 10


def test_every_call_of_the_library_that_fails_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    scenario = build(tmp_path, "nth_failure", *sources("library"), FAILING.with_name("nth_failure.c"))
    done = subprocess.run(
        [scenario, bundle, tmp_path / "cache"], capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr.decode("utf-8")
    table = dict(line.split(":") for line in done.stdout.decode("ascii").splitlines())
    assert {"malloc", "calloc", "mmap", "open", "fopen", "pthread_create"} <= table.keys()


def test_every_call_that_fails_while_the_toolchain_writes_leaves_whole_files(tmp_path: Path) -> None:
    if GCC is None:
        pytest.skip("gcc is missing")
    preloaded = tmp_path / "failing.so"
    (tmp_path / "files").mkdir()
    compile_c([GCC], preloaded, "-shared", "-fPIC", "-fvisibility=default", FAILING_FILES, "-ldl")
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "failing_writes.py", tmp_path / "files"],
        env=os.environ | {"LD_PRELOAD": str(preloaded)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ") for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} >= {"json", "bundle", "export", "corpus", "drafter", "delta"}
    assert {function for _, function, _ in lines} >= {"open64", "write", "fsync", "rename", "fchmod"}
    assert any(not counts.endswith(", 0 refused") for *_, counts in lines)
