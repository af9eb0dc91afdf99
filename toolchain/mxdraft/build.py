"""Build the C runtime for a target: ``targets/*.toml`` + ``zig cc`` (PyPI package ziglang) -> ``build/<target>/``.

One compiler serves host and Pi, with no cross packages. ``CC`` in the environment replaces it for the host.
Builds are reproducible: no host-tuned flags, no paths and no times in the output.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from mxdraft.errors import RefusedError, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("x86_64", "aarch64")
OUTPUTS = {"cli": "mxdraft", "library": "libmxdraft.so"}
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread", "-D_GNU_SOURCE", "-Iruntime/include"]


@dataclass(frozen=True)
class Target:
    """One file of ``targets/``. ``arch``: host, x86_64 or aarch64; ``cpu``: what every instruction outside the
    dispatched kernels may assume (zig's -mcpu); ``outputs``: of cli, library."""

    name: str
    description: str
    arch: str
    cpu: str
    outputs: tuple[str, ...]


def load_target(name: str, folder: Path = REPOSITORY / "targets") -> Target:
    """Read ``targets/<name>.toml``; refuses unknown names, keys and values with what is allowed."""
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise UsageError(f"unknown target '{name}' (known: {known})")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(f"{path}: {error}") from error
    allowed = [f.name for f in fields(Target) if f.name != "name"]
    for key in values.keys() ^ set(allowed):
        problem = "missing" if key in allowed else "unknown"
        raise RefusedError(f"{path}: {problem} key '{key}' (allowed: {', '.join(allowed)})")
    if values["arch"] not in ("host", *ARCHITECTURES):
        raise RefusedError(f"{path}: arch '{values['arch']}' (allowed: host, {', '.join(ARCHITECTURES)})")
    if not values["outputs"] or not set(values["outputs"]) <= OUTPUTS.keys():
        raise RefusedError(f"{path}: outputs {values['outputs']} (allowed: {', '.join(OUTPUTS)})")
    return Target(name, values["description"], values["arch"], values["cpu"], tuple(values["outputs"]))


def build(name: str, out_dir: Path | None = None) -> list[Path]:
    """Build every output of a target unless it is up to date; returns their paths."""
    target = load_target(name)
    out_dir = out_dir or REPOSITORY / "build" / name
    arch = platform.machine() if target.arch == "host" else target.arch
    if arch not in ARCHITECTURES:
        raise RefusedError(f"this machine is {arch}: mxdraft builds on {' and '.join(ARCHITECTURES)}")
    return [_build_output(target, arch, kind, out_dir) for kind in target.outputs]


def sources(kind: str) -> list[Path]:
    """The C files of an output, relative to the repository, in a fixed order."""
    folders = ["src", "kernels", *(["cli"] if kind == "cli" else [])]
    found = [path for folder in folders for path in sorted((REPOSITORY / "runtime" / folder).glob("*.c"))]
    return [path.relative_to(REPOSITORY) for path in found]


def _compiler(target: Target, arch: str, kind: str) -> list[str]:
    """The command that compiles and links. The library runs inside the system's Python, hence glibc; the command line
    is static musl, so that it runs on any system of its architecture."""
    if target.arch == "host" and "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    libc = "musl" if kind == "cli" else "gnu.2.28"
    cpu = [] if target.cpu == "baseline" and arch == "aarch64" else [f"-mcpu={target.cpu}"]
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-{libc}", *cpu]


def _build_output(target: Target, arch: str, kind: str, out_dir: Path) -> Path:
    output = out_dir / OUTPUTS[kind]
    command = _compiler(target, arch, kind)
    flags = [*FLAGS]
    if arch == "aarch64":
        flags.append("-mno-outline-atomics")  # LSE atomics would crash a Cortex-A53 or A72
    link = ["-static", "-s"] if kind == "cli" else ["-shared", "-s"]
    if kind == "library":
        flags.append("-fPIC")
    files = sources(kind)
    stamp = output.with_suffix(".stamp")
    fingerprint = _fingerprint([*command, *flags, *link], files)
    if output.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint:
        return output
    out_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out_dir) as work:

        def compile_one(path: Path) -> str:
            obj = str(Path(work) / f"{path.parent.name}_{path.stem}.o")
            _run([*command, *flags, "-c", str(path), "-o", obj])
            return obj

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, files))
        linked = Path(work) / output.name
        _run([*command, *link, "-pthread", *objects, "-lm", "-o", str(linked)])
        linked.replace(output)
    stamp.write_text(fingerprint, encoding="utf-8")
    return output


def _fingerprint(command: list[str], files: list[Path]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    headers = sorted((REPOSITORY / "runtime").rglob("*.h"))
    for path in [*files, *headers]:
        digest.update((REPOSITORY / path).read_bytes())
    return digest.hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise RefusedError(f"the compiler failed:\n{shlex.join(command)}\n{done.stderr.strip()}")
