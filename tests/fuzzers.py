# SPDX-License-Identifier: Apache-2.0
"""The fuzzers in C: what each is built of, its inputs, and the files of the runtime that it is for.

    python tests/fuzzers.py SECONDS

runs each for so long in a build that counts, and prints the lines and branches of those files that it
reached, as gcov tells them. `make fuzz-coverage` runs it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny
from clib import REPOSITORY
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule
from mxdraft.checkpoint.tokenizer import PreTokenizer
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.ship.build import FLAGS, sources

COUNTING = ["gcc", *FLAGS, "-O0", "--coverage", "-DMXD_DEBUG"]


@dataclasses.dataclass(frozen=True)
class Fuzzer:
    """A target of one of the programs in ``tests/fuzz``. ``reads``: what it is for, below ``runtime/``."""

    program: str
    target: str  # "": the program has one
    reads: str
    bundles: tuple[int, ...] = (0, 1)  # of make_bundles()

    @property
    def name(self) -> str:
        return self.target or self.program

    def command(self, program: Path, seconds: float, bundles: list[Path]) -> list[str]:
        target = [self.target] if self.target else []
        return [str(program), *target, str(seconds), *(str(bundles[i]) for i in self.bundles)]


_PRE_TOKENIZERS: tuple[PreTokenizer, ...] = ("gpt2", "llama3", "qwen2")  # T's own is the fourth
FUZZERS = (
    Fuzzer(
        "api", "", "src/sequence.c src/step.c src/precision.c src/speculate.c src/kv.c src/teacher_forcing.c"
    ),
    Fuzzer("inputs", "bundle", "src/bundle.c src/bundle_sections.c src/tokenizer_section.c src/model.c"),
    Fuzzer("inputs", "text", "src/tokenizer.c src/pretoken.c src/utf8.c", (1, 2, 3, 4)),
    Fuzzer("inputs", "chat", "src/chat.c"),
    Fuzzer("inputs", "costs", "src/costs.c"),
    Fuzzer("structured", "json", "src/json.c src/json_write.c", ()),
    Fuzzer(
        "structured",
        "schema",
        "src/schema.c src/schema_text.c src/schema_tools.c src/schema_values.c src/automaton.c src/grammar.c",
        (1,),
    ),
    Fuzzer("http", "", "serve/http.c", ()),
    Fuzzer("arguments", "", "cli/options.c", ()),
)


def sources_of(program: str) -> list[Path]:
    """The C files that a program is linked with, relative to the repository."""
    if program == "http":
        return [Path("runtime/serve/http.c")]
    if program == "arguments":
        return [
            Path("runtime") / part
            for part in ("cli/options.c", "cli/terminal.c", "src/names.c", "src/status.c")
        ]
    return sources("library")


def make_bundles(plain: Path, folder: Path) -> list[Path]:
    """Fixture T, ``plain``; T with everything that a bundle may hold; small ones with other tokenizers."""
    bundles = [plain, full_bundle(plain, folder)]
    for pre_tokenizer in _PRE_TOKENIZERS:
        small = tiny.checkpoint(pre_tokenizer=pre_tokenizer, layers=1, hidden=32, ffn=32, heads=1, kv_heads=1)
        export_model(small, folder / pre_tokenizer)
        bundles.append(folder / f"{pre_tokenizer}.mxb")
        pack(folder / pre_tokenizer, bundles[-1])
    return bundles


def full_bundle(plain: Path, folder: Path) -> Path:
    data = plain.read_bytes()
    config = Bundle(data).config
    documents = [np.random.default_rng(1).integers(0, config.vocab, 200).tolist(), [5, 6, 7, 8] * 15]
    schedule = dataclasses.replace(
        Schedule.default(config.layers), core_fraction=0.3, catch_up=7, sinks=2, recent=32, core_tokens=0.2
    )
    data = tiny.with_schedule(tiny.with_ngrams(data, documents), schedule)
    full = folder / "full.mxb"
    full.write_bytes(tiny.with_drafter(data, tiny.drafter(config)))
    return full


# ---- coverage ----


def compile_counting(folder: Path, files: list[Path]) -> dict[Path, Path]:
    """Object files of ``files`` in ``folder``, by source, that count what runs."""

    def compile_one(path: Path) -> tuple[Path, Path]:
        made = folder / f"{path.parent.name}_{path.stem}.o"
        subprocess.run([*COUNTING, "-c", str(path), "-o", str(made)], cwd=REPOSITORY, check=True)
        return path, made

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(compile_one, files))


def reached(path: Path, made: Path) -> tuple[int, int, int, int]:
    """Lines run, lines, branches taken, branches of a file."""
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(made)]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    lines = next(file["lines"] for file in json.loads(text)["files"] if file["file"] == str(path))
    taken = [branch["count"] for line in lines for branch in line["branches"]]
    return sum(line["count"] > 0 for line in lines), len(lines), sum(n > 0 for n in taken), len(taken)


def main() -> None:
    seconds = float(sys.argv[1])
    with TemporaryDirectory() as name:
        folder = Path(name)
        export_model(tiny.checkpoint(), folder)
        pack(folder, folder / "t.mxb")
        bundles = make_bundles(folder / "t.mxb", folder)
        programs = sorted({fuzzer.program for fuzzer in FUZZERS})
        own = [Path(f"tests/fuzz/{program}.c") for program in programs]
        made = compile_counting(folder, [*sources("cli"), *own])
        print(f"{'target':10} {'lines':>14} {'branches':>14}")
        for fuzzer in FUZZERS:
            program = folder / fuzzer.program
            files = [Path(f"tests/fuzz/{fuzzer.program}.c"), *sources_of(fuzzer.program)]
            parts = [made[path] for path in files]
            subprocess.run(["gcc", "--coverage", "-pthread", *parts, "-lm", "-o", program], check=True)
            for counts in folder.glob("*.gcda"):
                counts.unlink()
            command = fuzzer.command(program, seconds, bundles)
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            paths = [Path("runtime") / part for part in fuzzer.reads.split()]
            counted = [reached(path, made[path]) for path in paths]
            sums = [sum(column) for column in zip(*counted, strict=True)]
            lines, branches = (f"{a}/{b} {100 * a // b:3} %" for a, b in (sums[:2], sums[2:]))
            print(f"{fuzzer.name:10} {lines:>14} {branches:>14}  {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
