# SPDX-License-Identifier: Apache-2.0
"""What a Raspberry Pi should reach, on paper: the larger of memory time and compute time.

Compute time comes from the loops of the matrix kernels, found by running them under qemu and timed by
llvm-mca, and from the other instructions that a token executes. Needs qemu-aarch64, and llvm-mca and
llvm-objdump 16 or newer: older ones have no model of Neoverse N1, the Cortex-A76's sister.

Example: python -m bench.predict_pi build/rpi/mxdraft build/smollm2-135m.mxb \
             --write docs/performance.md
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mxdraft.bundle import Bundle
from mxdraft.bundle.format import MXFP4T
from mxdraft.bundle.tiles import BLOCK_BYTES
from mxdraft.files import replacing
from mxdraft.mx import Format
from mxdraft.ship.build import FLAGS, compiler
from mxdraft.ship.targets import load_target

from bench.count_instructions import decode, run_plugin

REPOSITORY = Path(__file__).parents[1]
BEGIN, END = "<!-- predict_pi.py: begin -->\n", "<!-- predict_pi.py: end -->\n"
TILES, BLOCKS = 4, 64  # of the product whose loops are looked at
WEIGHTS_OF_A_BLOCK = 16 * 32
CONTEXT = 25  # what count_instructions.py counts at
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 48)
TAUS = (1.5, 2.0, 2.5, 3.0, 4.0)
BLOCK_DRAFTER = 0.095  # of a target step, by bytes: two layers and a head of 8000 tokens, once a step

ASSUMPTIONS = (
    "All cores share the work evenly; reading and computing overlap; the loops find their operands in the",
    "first-level cache; other instructions run at the loops' rate, and as often as there are rows.",
)


@dataclass(frozen=True)
class Board:
    name: str
    qemu: str
    mca: str
    cores: int
    ghz: float
    gb_per_s: float
    source: str  # of the bandwidth


BOARDS = (
    Board("Pi 5", "cortex-a76", "neoverse-n1", 4, 2.4, 11.59, "4 threads reading, llama.cpp issue 26484"),
    Board("Pi 4", "cortex-a72", "cortex-a72", 4, 1.5, 5.5, "STREAM copy, sci-pi (read and written bytes)"),
    Board("Zero 2 W", "cortex-a53", "cortex-a53", 4, 1.0, 1.75, "no source found: middle of 1.5 to 2"),
)


@dataclass(frozen=True)
class Kernel:
    """What a unit of a kernel's work takes."""

    instructions: float
    cycles: float


def newest(tool: str) -> str:
    """Find the newest version of an LLVM tool, as Debian names it."""
    for version in range(30, 15, -1):
        path = shutil.which(f"{tool}-{version}")
        if path:
            return path
    sys.exit(f"{tool}-16 or newer is missing (Debian package llvm-19)")


FOLDER = TemporaryDirectory()  # of programs


@cache
def program(source: str) -> Path:
    """Build a program of this folder that runs one kernel, for armv8.0 with the levels' own instructions."""
    output = Path(FOLDER.name) / Path(source).stem
    sources = [
        *sorted((REPOSITORY / "runtime/kernels").rglob("*.c")),
        *(REPOSITORY / "runtime/src" / name for name in ("cpu.c", "status.c")),
        Path(__file__).with_name(source),
    ]
    command = [*compiler(load_target("rpi"), "cli"), *FLAGS, "-mno-outline-atomics", "-static"]
    subprocess.run([*command, *sources, "-lm", "-o", output], cwd=REPOSITORY, check=True)
    return output


def executions(cpu: str, source: str, *arguments: str | int) -> Counter[int]:
    """Count how often each instruction of a program, by address, was executed."""
    counts: Counter[int] = Counter()
    command = [str(program(source)), *map(str, arguments)]
    for line in run_plugin("hot_blocks.c", cpu, command).splitlines():
        if found := re.fullmatch(r"block ([0-9a-f]+) (\d+) (\d+)", line):
            start, instructions, count = int(found[1], 16), int(found[2]), int(found[3])
            counts.update(dict.fromkeys(range(start, start + 4 * instructions, 4), count))
    return counts


def hot_loops(cpu: str, units: int, source: str, *arguments: str | int) -> list[tuple[int, int, float]]:
    """Find the loops of a kernel: address, instructions, executions a unit of its work, where half or more.

    ``source``, ``arguments``: a program and its arguments but the last, how often the kernel is run.
    """
    one = executions(cpu, source, *arguments, 2)
    one.subtract(executions(cpu, source, *arguments, 1))  # what only prepares the kernel cancels out
    loops: list[tuple[int, int, float]] = []
    for address in sorted(a for a, count in one.items() if count >= units // 2):
        times = one[address] / units
        start, length, same = loops[-1] if loops else (0, 0, 0.0)
        if address == start + 4 * length and times == same:
            loops[-1] = (start, length + 1, same)
        else:
            loops.append((address, 1, times))
    return loops


def assembly(source: str, address: int, instructions: int) -> str:
    """Disassemble a program's loop; all of its branches go to its begin."""
    command = [newest("llvm-objdump"), "-d", "--no-show-raw-insn", "--mattr=+dotprod,+i8mm"]
    command += [f"--start-address={address}", f"--stop-address={address + 4 * instructions}"]
    command.append(str(program(source)))
    text = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    lines = re.findall(r"^\s*[0-9a-f]+:\s+(.+)$", text, re.MULTILINE)
    assert len(lines) == instructions
    return "begin:\n" + "\n".join(re.sub(r"0x[0-9a-f]+ <.*>", "begin", line) for line in lines) + "\n"


def cycles(mca: str, code: str) -> float:
    """Return the cycles of one iteration in the steady state."""

    def total(iterations: int) -> int:
        command = [newest("llvm-mca"), "-mtriple=aarch64", f"-mcpu={mca}", f"-iterations={iterations}"]
        if mca == "neoverse-n1":
            command.append("-mattr=+dotprod")
        done = subprocess.run(
            command, input=code, capture_output=True, text=True, encoding="utf-8", check=True
        )
        found = re.search(r"^Total Cycles:\s+(\d+)$", done.stdout, re.MULTILINE)
        assert found
        return int(found[1])

    return (total(300) - total(100)) / 200


def measure(board: Board, units: int, source: str, *arguments: str | int) -> Kernel:
    """Measure a unit of a kernel's work, as ``hot_loops`` takes it."""
    loops = hot_loops(board.qemu, units, source, *arguments)
    return Kernel(
        sum(length * times for _, length, times in loops),
        sum(cycles(board.mca, assembly(source, start, length)) * times for start, length, times in loops),
    )


@cache
def product(board: Board, kind: str, rows: int) -> Kernel:
    """Measure one block (16 weight rows of 32) times all activation rows."""
    return measure(board, TILES * BLOCKS, "one_product.c", kind, rows, TILES, BLOCKS)


class Prediction:
    """Seconds of a step of k rows, all with logits, for a board and a bundle's base precision."""

    def __init__(self, board: Board, binary: str, bundle: Path) -> None:
        opened = Bundle.open(bundle)
        matrices: dict[Format, int] = {"mxfp4": 0, "mxint8": 0}  # bytes
        for (section, name), tensor in opened.tensors.items():
            if section == "target.base" and tensor.dtype == MXFP4T:
                matrices["mxfp4"] += tensor.length
            elif name in ("lm_head.weight", "model.embed_tokens.weight"):
                matrices["mxint8"] = tensor.length  # of the head, which is the embedding unless it follows
        c = opened.config
        position = c.layers * 2 * c.kv_heads * c.head_dim * 2
        self.bytes = sum(matrices.values()) + CONTEXT * position
        self.board = board
        self.blocks = {kind: length // BLOCK_BYTES[kind] for kind, length in matrices.items()}
        one = {kind: product(board, kind, 1) for kind in self.blocks}
        loops = sum(self.blocks[kind] * one[kind].instructions for kind in one)
        self.instructions = decode(binary, str(bundle), board.qemu, "base")
        self.rest = self.instructions - loops  # attention, norms, quantizing, sampling: once a row
        self.ipc = loops / sum(self.blocks[kind] * one[kind].cycles for kind in one)

    def memory(self) -> float:
        return self.bytes / (self.board.gb_per_s * 1e9)

    def compute(self, rows: int) -> float:
        of_kernels = sum(n * product(self.board, kind, rows).cycles for kind, n in self.blocks.items())
        return (of_kernels + rows * self.rest / self.ipc) / (self.board.cores * self.board.ghz * 1e9)

    def step(self, rows: int) -> float:
        return max(self.memory(), self.compute(rows))

    def cost(self, rows: int) -> float:
        """Return the time of a step relative to one row."""
        return self.step(rows) / self.step(1)

    def hidden_rows(self) -> int:
        """Return the most rows, up to 16, whose compute time memory time hides; 0: not even one."""
        return max((rows for rows in range(1, 17) if self.compute(rows) <= self.memory()), default=0)


def table(*rows: list[str]) -> list[str]:
    """Return the lines of a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return ["", lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""]


def markdown(predictions: list[Prediction]) -> str:
    boards = [p.board for p in predictions]
    assumptions = [
        [
            b.name,
            f"{b.gb_per_s:g}: {b.source}",
            f"{b.cores} × {b.ghz:g}",
            b.mca,
            f"{p.instructions / 1e6:.1f}",
            f"{p.rest / 1e6:.1f}",
            f"{p.ipc:.2f}",
        ]
        for b, p in zip(boards, predictions, strict=True)
    ]

    def per_128(bytes_or_cycles: float) -> str:
        return f"{bytes_or_cycles * 128 / WEIGHTS_OF_A_BLOCK:.1f}"

    loops = [
        [
            b.name,
            *(" / ".join(per_128(product(b, kind, rows).cycles) for kind in p.blocks) for rows in (1, 4, 8)),
            " / ".join(per_128(BLOCK_BYTES[kind] / b.gb_per_s * b.ghz * b.cores) for kind in p.blocks),
        ]
        for b, p in zip(boards, predictions, strict=True)
    ]
    speeds = [
        [
            p.board.name,
            f"{1e3 * p.memory():.1f}",
            f"{1e3 * p.compute(1):.1f}",
            f"{1 / p.step(1):.0f}",
            str(p.hidden_rows()),
            *(f"{p.cost(rows):.2f}" for rows in WIDTHS),
        ]
        for p in predictions
    ]
    gains = [
        [
            p.board.name,
            str(rows),
            *(f"{tau / p.cost(rows):.2f} / {tau / (p.cost(rows) + BLOCK_DRAFTER):.2f}" for tau in TAUS),
        ]
        for p in predictions
        for rows in (4, 8)
    ]
    return "\n".join(
        [
            "Assumptions:",
            *table(
                [
                    "board",
                    "read bandwidth, GB/s",
                    "cores, GHz",
                    "llvm-mca model",
                    "instructions per token, M",
                    "of them outside the matrix loops",
                    "instructions per cycle",
                ],
                *assumptions,
            ),
            f"{predictions[0].bytes / 1e6:.1f} MB per token: base precision, context {CONTEXT}.",
            *ASSUMPTIONS,
            "",
            "Cycles for 128 weights (llvm-mca), MXFP4 layers / MXINT8 head:",
            *table(["board", "1 row", "4 rows", "8 rows", "reading them, in cycles of all cores"], *loops),
            "Predicted decode, and steps of several rows relative to one:",
            *table(
                ["board", "memory, ms", "compute, ms", "tok/s", "rows that memory time hides"]
                + [f"{rows} rows" for rows in WIDTHS],
                *speeds,
            ),
            "Predicted gain of speculation if a step yields τ tokens on average, with free drafts (n-grams)",
            f"/ with a drafter that costs {BLOCK_DRAFTER:.1%} of a step:",
            *table(["board", "rows verified", *(f"τ = {tau:g}" for tau in TAUS)], *gains),
        ]
    )


def replace_between_marks(path: Path, text: str) -> None:
    """Put the tables into a page, in place of those that were there."""
    page = path.read_text(encoding="utf-8")
    if not 0 <= page.find(BEGIN) < page.find(END):
        sys.exit(f"{path} has no lines {BEGIN.strip()} and {END.strip()}")
    with replacing(path) as file:
        file.write((page.partition(BEGIN)[0] + BEGIN + text + END + page.partition(END)[2]).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict speeds on Raspberry Pis.")
    parser.add_argument("binary", help="build/rpi/mxdraft")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--write", type=Path, help="Replace the tables between the marks of this page.")
    arguments = parser.parse_args()
    text = markdown([Prediction(board, arguments.binary, arguments.bundle) for board in BOARDS])
    if arguments.write is None:
        print(text, end="")
    else:
        replace_between_marks(arguments.write, text)


if __name__ == "__main__":
    main()
