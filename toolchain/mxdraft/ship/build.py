# SPDX-License-Identifier: Apache-2.0
"""Build the C runtime for a target: ``targets/*.toml`` + ``zig cc`` (PyPI's ziglang) -> ``build/<target>/``.

One compiler serves host and Pi, with no cross packages. ``CC`` in the environment replaces it for the host.
Builds are reproducible: no host-tuned flags, no paths and no times in the output. What zig links is audited
(mxdraft.ship.elf) before it gets its name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from mxdraft.errors import RefusedError
from mxdraft.ship.targets import ARCHITECTURES, OUTPUTS, REPOSITORY, Target, load_target

FLAGS = shlex.split(
    "-std=c11 -O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread -D_GNU_SOURCE "
    "-Wall -Wextra -Werror -Iruntime/include"
)


def build(
    name: str, out_dir: Path | None = None, repository: Path = REPOSITORY, streamline: Path | None = None
) -> list[Path]:
    """Build every output of a target unless it is up to date; returns their paths.

    ``streamline``: a folder with ARM's streamline_annotate.h and .c; the outputs then mark steps, passes and
    core tokens on Streamline's time line (docs/trace.md) and go to a folder of their own.

    Raises UsageError for an unknown target, RefusedError if the compiler or the audit finds a fault.
    """
    target = load_target(name, repository / "targets")
    out_dir = out_dir or repository / "build" / (f"{name}-streamline" if streamline else name)
    annotations = streamline and streamline.resolve()
    return [
        _build_output(target, kind, out_dir.resolve(), repository, annotations) for kind in target.outputs
    ]


def architecture(target: Target) -> str:
    """Return the CPU architecture that a target's outputs are for, as ``uname -m`` tells it."""
    arch = platform.machine() if target.arch == "host" else target.arch
    if arch not in ARCHITECTURES:
        raise RefusedError(f"this machine is {arch}: mxdraft builds on {' and '.join(ARCHITECTURES)}")
    return arch


def sources(kind: str, repository: Path = REPOSITORY) -> list[Path]:
    """List the C files of an output, relative to the repository, in a fixed order."""
    folders = ["src", "kernels", "bench", *(["cli", "serve"] if kind == "cli" else [])]
    found = [path for folder in folders for path in sorted((repository / "runtime" / folder).rglob("*.c"))]
    return [path.relative_to(repository) for path in found]


def link(command: list[str], objects: list[Path], output: Path, glibc: str, audited: bool) -> None:
    """Link and, with zig's linker, audit; ``output`` appears only if all went well."""
    linked = objects[0].with_name(output.name)
    link_map = _run([*command, *map(str, objects), "-lm", "-o", str(linked)], linked.parent)
    if audited:
        from mxdraft.ship.elf import audit

        audit(linked, link_map, glibc)
    linked.replace(output)


def compiler(target: Target, kind: str) -> list[str]:
    """Return the command of zig for a target. The library runs inside the system's Python, hence glibc; the
    command line is static musl, so that it runs on any system of its architecture."""
    arch = architecture(target)
    libc = "musl" if kind == "cli" else f"gnu.{target.glibc}"
    cpu = [] if target.cpu == "baseline" and arch == "aarch64" else [f"-mcpu={target.cpu}"]
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-{libc}", *cpu]


def _build_output(
    target: Target, kind: str, out_dir: Path, repository: Path, streamline: Path | None
) -> Path:
    output = out_dir / OUTPUTS[kind]
    own_compiler = shlex.split(os.environ.get("CC", "")) if target.arch == "host" else []
    command = own_compiler or compiler(target, kind)
    flags = [*FLAGS, *(["-fPIC"] if kind == "library" else [])]
    if architecture(target) == "aarch64":
        flags.append("-mno-outline-atomics")  # LSE atomics would crash a Cortex-A53 or A72
    # Collecting sections drops the helpers of zig's compiler-rt that hold LSE atomics, among much else.
    link_flags = ["-static" if kind == "cli" else "-shared", "-s", "-pthread", "-Wl,--gc-sections"]
    if not own_compiler:
        link_flags.append("-Wl,--print-map")
    files = sources(kind, repository)
    if streamline:
        flags += ["-DMXD_STREAMLINE", "-isystem", str(streamline)]
        files.append(streamline / "streamline_annotate.c")
        if not files[-1].is_file():
            raise RefusedError(f"{files[-1]}: no such file: give the folder with ARM's streamline_annotate.c")
    stamp = output.with_suffix(".stamp")
    fingerprint = _fingerprint([*command, *flags, *link_flags], files, repository)
    if output.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint:
        return output
    out_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out_dir) as work:

        def compile_one(path: Path) -> Path:
            made = Path(work) / f"{path.parent.name}_{path.stem}.o"
            foreign = ["-w"] if streamline in path.parents else []  # its warnings are not ours
            _run([*command, *flags, *foreign, "-c", str(path), "-o", str(made)], repository)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, files))
        link([*command, *link_flags], objects, output, target.glibc, audited=not own_compiler)
    stamp.write_text(fingerprint, encoding="utf-8")
    return output


def _fingerprint(command: list[str], files: list[Path], repository: Path) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    headers = sorted((repository / "runtime").rglob("*.h"))
    for path in [*files, *headers]:
        digest.update((repository / path).read_bytes())
    return digest.hexdigest()


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        error = RefusedError(f"the compiler failed: {shlex.join(command)}")
        error.add_note(done.stderr.strip())
        raise error
    return done.stdout
