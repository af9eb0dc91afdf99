# SPDX-License-Identifier: Apache-2.0
"""Compare what two checkouts print, byte for byte: for changes that must not change behaviour.

    python -m bench.compare_trees OLD NEW BUNDLE [BUNDLE …]

Both checkouts must be built (``make demo``). Every command below runs in both, with the C program and with
the Python one, on every bundle; standard output, standard error and exit code must agree. Times, memory and
what follows from them are masked, since they differ between two runs of the same program. Exits with 1 if
anything differs, and prints the first lines that do.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROMPT = "Count from one to ten, then say it again: one, two, three"
# Numbers that depend on the clock or on memory, in JSON and in the text form of the statistics.
MASKS = [
    (re.compile(r'"(\w+_s|\w+_per_s|gain|expected_gain|peak_rss_bytes)": [^,}]+'), r'"\1": *'),
    (re.compile(r"[\d.]+ (MiB of )[\d.]+( MiB available)"), r"*\1*\2"),
    (re.compile(r"[\d.]+ (tok/s|ms|MiB|GB/s|s|GB)\b"), r"* \1"),
    (re.compile(r"(gain|expected) [\d.]+"), r"\1 *"),
    (re.compile(r"^.*first run of this kind.*\n", re.MULTILINE), ""),
    (re.compile(r"(VmHWM|peak memory|resident|available)(:?) .*"), r"\1\2 *"),
]

GENERATE = ["generate", "-p", PROMPT, "-n", "40", "--ctx", "160", "--dump-tokens"]
COMMANDS: list[list[str]] = [
    ["--help"],
    *([name, "--help"] for name in ("generate", "chat", "tokenize", "verify", "bench", "info")),
    ["info", "--cpu"],
    ["info", "-m", "BUNDLE"],
    *(["verify", "-m", "BUNDLE", "--precision", precision] for precision in ("base", "full")),
    *(
        [*GENERATE, "-m", "BUNDLE", "--stats", stats, "--draft", "off", *options]
        for stats in ("json", "text")
        for options in (
            ["--precision", "base"],
            ["--precision", "full", "-t", "1"],
            ["--precision", "auto", "--core-fraction", "0.2", "--catch-up", "7"],
            ["--precision", "base", "--kv", "int8"],
            ["--precision", "base", "--kv", "mxfp4", "-t", "1"],
            ["--precision", "full", "--kv", "tiered", "--raw"],
            ["--precision", "base", "--temp", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed", "7"],
            ["--precision", "base", "--repeat-penalty", "1.2", "--min-p", "0.1", "--temp", "1"],
            ["--precision", "base", "--stop", " two", "--ignore-eos"],
        )
    ),
    *(
        [*GENERATE, "-m", "BUNDLE", "--stats", "none", "--draft", drafter, "--precision", precision]
        for drafter in ("auto", "ngram", "model")
        for precision in ("base", "full")
    ),
    ["tokenize", "-m", "BUNDLE", "-p", PROMPT],
    ["tokenize", "-m", "BUNDLE", "--chat", "-p", PROMPT],
    ["tokenize", "-m", "BUNDLE", "--decode", "-p", "5 6 7 300"],
    ["chat", "-m", "BUNDLE", "-n", "8", "--draft", "off", "--precision", "base", "--ctx", "160"],
    ["generate"],
    ["generate", "-m", "BUNDLE", "-p", "x", "--ctx", "1"],
    ["generate", "-m", "BUNDLE", "-p", PROMPT, "--ctx", "4"],
    ["generate", "-m", "BUNDLE", "-p", "x", "--kv", "none"],
    ["generate", "-m", "nowhere.mxb", "-p", "x"],
    ["generate", "-m", "BUNDLE", "-f", "/nowhere", "-n", "1"],
    ["nonsense"],
]


def mask(text: str) -> str:
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def run(tree: Path, program: str, command: list[str], bundle: Path) -> str:
    """Run a command in a checkout; return what it printed and its exit code, masked."""
    arguments = [str(bundle) if part == "BUNDLE" else part for part in command]
    environment = os.environ | {"MXDRAFT_CACHE": str(tree / "build" / "compare-cache"), "COLUMNS": "100"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(tree / program), *arguments],
        cwd=tree,
        env=environment,
        input="Hello\nAgain\n",
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    text = f"exit {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return mask(text.replace(str(bundle), "BUNDLE").replace(str(tree), "TREE"))


def differences(old: Path, new: Path, bundles: list[Path]) -> Iterator[tuple[str, list[str]]]:
    for program in ("build/host/mxdraft", ".venv/bin/mxdraft"):
        for command in COMMANDS:
            for bundle in bundles if "BUNDLE" in command else bundles[:1]:
                before, after = (run(tree, program, command, bundle) for tree in (old, new))
                name = f"{program} {' '.join(command)} [{bundle.name}]"
                lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new", "", "", 0)
                yield name, list(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    arguments = parser.parse_args()
    total = failed = 0
    for name, lines in differences(
        arguments.old.resolve(), arguments.new.resolve(), [path.resolve() for path in arguments.bundles]
    ):
        total += 1
        if lines:
            failed += 1
            print(f"DIFFERS: {name}", *lines[2:12], sep="\n  ", flush=True)
    print(f"{total} runs of each, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
