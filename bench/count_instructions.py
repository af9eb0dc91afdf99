# SPDX-License-Identifier: Apache-2.0
"""Executed aarch64 instructions a token, counted under qemu-user: exact and repeatable, unlike time.

Example: python -m bench.count_instructions build/rpi/mxdraft build/smollm2-135m.mxb
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

CPUS = ("cortex-a53", "cortex-a76")  # without and with dot product instructions
TEXT = "Once upon a time there was a small computer that lived in a house by the sea. "


def run_plugin(source: str, cpu: str, command: list[str]) -> str:
    """Run an aarch64 program under a qemu plugin of this folder; returns what both wrote to stderr."""
    with TemporaryDirectory() as folder:
        plugin = Path(folder) / "libplugin.so"
        path = Path(__file__).with_name(source)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", path, "-o", plugin], check=True)
        emulator = ["qemu-aarch64", "-cpu", cpu, "-plugin", str(plugin)]
        done = subprocess.run(
            [*emulator, *command], capture_output=True, text=True, encoding="utf-8", check=True
        )
        return done.stderr


@cache
def count(binary: str, bundle: str, cpu: str, precision: str, prompt: str, tokens: int) -> int:
    """Count the instructions of a whole ``generate`` with one thread."""
    command = [binary, "generate", "-m", bundle, "--raw", "-p", prompt, "-n", str(tokens), "-t", "1"]
    command += ["--draft", "off", "--precision", precision, "--ignore-eos"]
    return int(run_plugin("icount.c", cpu, command).rsplit("instructions ", 1)[1])


def decode(*program: str) -> float:
    """Count the instructions of a decode step at a context of about 25; ``program``: binary, bundle, cpu,
    precision."""
    return (count(*program, TEXT, 5) - count(*program, TEXT, 1)) / 4


def prefill(*program: str) -> float:
    """Count the instructions of a row of a long prompt; ``program`` as for ``decode``."""

    def prompt_tokens(prompt: str) -> int:
        command = ["qemu-aarch64", program[0], "tokenize", "-m", program[1], "-p", prompt]
        return len(subprocess.run(command, capture_output=True, check=True).stdout.split())

    more = count(*program, TEXT * 3, 1) - count(*program, TEXT, 1)
    return more / (prompt_tokens(TEXT * 3) - prompt_tokens(TEXT))


def main(binary: str, bundle: str) -> None:
    print(f"{'cpu':<12}{'precision':<12}{'decode, M a token':>20}{'prefill, M a token':>20}")
    for cpu in CPUS:
        for precision in ("base", "full"):
            program = (binary, bundle, cpu, precision)
            cells = f"{decode(*program) / 1e6:>20.1f}{prefill(*program) / 1e6:>20.1f}"
            print(f"{cpu:<12}{precision:<12}{cells}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
