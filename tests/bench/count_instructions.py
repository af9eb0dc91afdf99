"""Executed aarch64 instructions a token, counted under qemu-user: exact and repeatable, unlike time.

Example: python tests/bench/count_instructions.py build/rpi/mxdraft build/smollm2-135m.mxb
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

CPUS = ("cortex-a53", "cortex-a76")  # without and with dot product instructions
TEXT = "Once upon a time there was a small computer that lived in a house by the sea. "


def main(binary: str, bundle: str) -> None:
    with TemporaryDirectory() as folder:
        plugin = Path(folder) / "libicount.so"
        source = Path(__file__).with_name("icount.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", plugin], check=True)

        def count(cpu: str, precision: str, prompt: str, tokens: int) -> int:
            command = [binary, "generate", "-m", bundle, "--raw", "-p", prompt, "-n", str(tokens), "-t", "1"]
            command += ["--precision", precision, "--ignore-eos"]
            done = subprocess.run(
                ["qemu-aarch64", "-cpu", cpu, "-plugin", str(plugin), *command],
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=True,
            )
            return int(done.stderr.rsplit("instructions ", 1)[1])

        def prompt_tokens(prompt: str) -> int:
            command = ["qemu-aarch64", binary, "tokenize", "-m", bundle, "-p", prompt]
            return len(subprocess.run(command, capture_output=True, check=True).stdout.split())

        short, long = TEXT, TEXT * 3
        rows = prompt_tokens(long) - prompt_tokens(short)
        print(f"{'cpu':<12}{'precision':<12}{'decode, M a token':>20}{'prefill, M a token':>20}")
        for cpu in CPUS:
            for precision in ("base", "full"):
                one = count(cpu, precision, short, 1)
                decode = (count(cpu, precision, short, 5) - one) / 4
                prefill = (count(cpu, precision, long, 1) - one) / rows
                print(f"{cpu:<12}{precision:<12}{decode / 1e6:>20.1f}{prefill / 1e6:>20.1f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
