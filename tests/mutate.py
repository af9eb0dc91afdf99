# SPDX-License-Identifier: Apache-2.0
"""Break the C code in many small ways, one at a time, and see that a test notices.

    python tests/mutate.py [FILE...]

applies each entry of mutations.toml (those of FILE) to a copy of the tree, builds library and command
line, and runs the entry's tests until one fails: fuzz/api.c for 200 engines, and files of pytest. `make
mutate` runs it. Results are kept in build/mutants: what was killed is not tried again. So a run that was
interrupted goes on where it was, and one after new tests tries the survivors. Entries that change nothing
say why; they are not run. Ends with 1 if less than 95 % are killed.
"""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tiny
from fuzzers import full_bundle
from mxdraft.export import export_model
from mxdraft.pack import pack

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutations.toml")
WORK = REPOSITORY / "build" / "mutants"
TREE = WORK / "tree"
GCC = ["gcc", "-std=c11", "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w"]
RESULTS = WORK / "results.json"
STATEFUL = "fuzz/api.c"
FUZZER = WORK / "objects" / "api.o"
LEAST_SCORE = 0.95
LONGEST_S = 300  # of tests that a mutant keeps from ending; that is noticed, too


@dataclasses.dataclass(frozen=True)
class Mutation:
    """``find``, once in the file, becomes ``replace``. ``equivalent``: why no test can notice, or ""."""

    file: str  # below runtime/
    tests: tuple[str, ...]  # below tests/
    find: str
    replace: str
    equivalent: str = ""

    @property
    def path(self) -> Path:
        return Path("runtime") / self.file

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((self.file, self.find, self.replace)).encode()).hexdigest()[:16]

    def apply(self, text: str) -> str:
        """The text of the file with the change; raises ValueError unless it can be made exactly once."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.file}: {self.find!r} is there {count} times")
        return text.replace(self.find, self.replace)


def read_table() -> list[Mutation]:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [
        Mutation(file, tuple(entry["tests"]), *change)
        for file, entry in table.items()
        for change in entry["mutations"]
    ]


# ---- building ----


def copy_tree() -> set[Path]:
    """Make TREE what git has or would add, and the bundle; returns what has changed in it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode("utf-8")
    names = {Path(name) for name in listed.split("\0") if (REPOSITORY / name).is_file()}
    there = {path.relative_to(TREE) for path in TREE.rglob("*") if path.is_file() and not path.is_symlink()}
    for name in there - names:
        if name.parts[0] != "build":
            (TREE / name).unlink()
    changed = (names - there) | {
        name for name in names & there if not filecmp.cmp(REPOSITORY / name, TREE / name, shallow=False)
    }
    for name in changed:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, TREE / name)
    if not (TREE / "build").exists():
        (TREE / "build" / "host").mkdir(parents=True)
        for path in (REPOSITORY / "build").glob("smollm2-135m*"):
            (TREE / "build" / path.name).symlink_to(path)
    return changed


def sources(*folders: str) -> list[Path]:
    return sorted(
        path.relative_to(TREE) for folder in folders for path in (TREE / "runtime" / folder).rglob("*.c")
    )


def compile_one(path: Path) -> subprocess.CompletedProcess[bytes]:
    command = [*GCC, "-D_GNU_SOURCE", "-Iruntime/include", "-c", str(path), "-o", str(object_of(path))]
    return subprocess.run(command, cwd=TREE, capture_output=True, check=False)


def object_of(path: Path) -> Path:
    return WORK / "objects" / ("_".join(path.parts[1:]) + ".o")


def is_old(path: Path) -> bool:
    made = object_of(path)
    return not made.exists() or made.stat().st_mtime < (TREE / path).stat().st_mtime


def link() -> None:
    """Make library and command line of the object files."""
    library, rest = sources("src", "kernels", "bench"), sources("cli", "serve")
    host = TREE / "build" / "host"
    shared, program = ["-shared", "-o", str(host / "libmxdraft.so")], ["-o", str(host / "mxdraft")]
    for files, options in ((library, shared), ([*library, *rest], program)):
        objects = [str(object_of(path)) for path in files]
        subprocess.run(["gcc", "-pthread", *objects, "-lm", *options], check=True)


def build_all(changed: set[Path]) -> None:
    """Compile what has changed, or all if a header has."""
    (WORK / "objects").mkdir(parents=True, exist_ok=True)
    files = sources("src", "kernels", "bench", "cli", "serve")
    if not any(path.suffix == ".h" for path in changed):
        files = [path for path in files if path in changed or is_old(path)]
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(compile_one, files):
            assert done.returncode == 0, done.stderr.decode("utf-8")


def make_fuzzer() -> None:
    """Compile fuzz/api.c and make the bundles that it takes."""
    subprocess.run(
        [*GCC, "-Iruntime/include", "-c", "tests/fuzz/api.c", "-o", str(FUZZER)], cwd=TREE, check=True
    )
    if not (WORK / "bundles").exists():
        (WORK / "bundles").mkdir()
        export_model(tiny.checkpoint(), WORK / "bundles")
        pack(WORK / "bundles", WORK / "bundles" / "t.mxb")
        full_bundle(WORK / "bundles" / "t.mxb", WORK / "bundles")


# ---- running ----


def fuzz_failure() -> str:
    """Run fuzz/api.c with the object files; returns what it found, or "" if that is nothing."""
    objects = [str(object_of(path)) for path in sources("src", "kernels", "bench")]
    program = str(WORK / "api")
    subprocess.run(["gcc", "-pthread", str(FUZZER), *objects, "-lm", "-o", program], check=True)
    command = [
        program,
        str(LONGEST_S),
        "--engines",
        "200",
        *map(str, sorted((WORK / "bundles").glob("*.mxb"))),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return "fuzz/api.c: no end"
    told = done.stderr.decode("utf-8", "replace").strip() or f"ended with {done.returncode}"
    return f"fuzz/api.c: {told[:80]}" if done.returncode else ""


def failure(tests: tuple[str, ...]) -> str:
    """Run tests of TREE; returns the first that failed, or why they did not end, or "" if all passed."""
    if tests == (STATEFUL,):
        return fuzz_failure()
    link()
    env = os.environ | {
        "PYTHONPATH": str(TREE / "toolchain"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MXDRAFT_LIBRARY": str(TREE / "build" / "host" / "libmxdraft.so"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += ["-k", "not nothing_reads"]  # these only run others once more, in a debug build
    process = subprocess.Popen(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=TREE,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=LONGEST_S)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with what the tests started
        process.communicate()
        return "no end"
    if process.returncode == 0:
        return ""
    failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"pytest ended with {process.returncode}"


def noticed_by(mutation: Mutation, tests: tuple[str, ...]) -> str:
    """Build and test one mutant; returns who noticed it, "" if nobody did. Leaves TREE as it was."""
    path = TREE / mutation.path
    text = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(text), encoding="utf-8")
    try:
        if compile_one(mutation.path).returncode:
            raise ValueError(f"{mutation.file}: {mutation.replace!r} does not compile")
        return failure(tests)
    finally:
        path.write_text(text, encoding="utf-8")
        compile_one(mutation.path)


def run(stage: str, tests_of: dict[Mutation, tuple[str, ...]], results: dict[str, str]) -> None:
    """Try the mutations that nobody has noticed yet, each with its tests."""
    left = {
        mutation: tests for mutation, tests in tests_of.items() if tests and not results.get(mutation.key)
    }
    if not left:
        return
    failed = failure(tuple(dict.fromkeys(test for tests in left.values() for test in tests)))
    if failed:  # then failing would say nothing
        raise SystemExit(f"without a mutation: {failed}")
    for number, (mutation, tests) in enumerate(left.items(), 1):
        start = time.monotonic()
        results[mutation.key] = noticed_by(mutation, tests)
        RESULTS.write_text(json.dumps(results, indent=1))
        place, seconds = f"{stage} [{number}/{len(left)}] {mutation.file}", time.monotonic() - start
        verdict = results[mutation.key] or "not noticed"
        print(f"{place}: {mutation.find!r}: {verdict} ({seconds:.0f} s)", flush=True)


def main() -> None:
    results: dict[str, str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    table = [mutation for mutation in read_table() if mutation.file in (sys.argv[1:] or [mutation.file])]
    runs = [mutation for mutation in table if not mutation.equivalent]
    if not all(results.get(mutation.key) for mutation in runs):
        build_all(copy_tree())
        make_fuzzer()
        run("fuzz", {mutation: tuple({STATEFUL} & {*mutation.tests}) for mutation in runs}, results)
        pytests = {m: tuple(test for test in m.tests if test != STATEFUL) for m in runs}
        run("tests", pytests, results)
    survivors = [mutation for mutation in runs if not results[mutation.key]]
    for mutation in survivors:
        print(f"survived: {mutation.file}: {mutation.find!r} -> {mutation.replace!r}")
    killed = len(runs) - len(survivors)
    print(f"{killed} of {len(runs)} killed ({killed / len(runs):.1%}), {len(table) - len(runs)} equivalent")
    sys.exit(killed < LEAST_SCORE * len(runs))


if __name__ == "__main__":
    main()
