# SPDX-License-Identifier: Apache-2.0
"""Compiles parts of the C runtime for tests, with the flags of the real build."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cffi
import numpy as np
from mxdraft.ship.build import FLAGS, sources
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[1]
RUNTIME = REPOSITORY / "runtime"
KERNELS = sorted((RUNTIME / "kernels").rglob("*.c"))


def zig(arch: str, libc: str = "musl") -> list[str]:
    """The command of ``mxdraft build`` for its own target files' cpu: armv8.0 on aarch64."""
    cpu = ["-mcpu=cortex_a53", "-mno-outline-atomics"] if arch == "aarch64" else ["-mcpu=baseline"]
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-{libc}", *cpu]


def native(libc: str) -> list[str]:
    return shlex.split(os.environ["CC"]) if "CC" in os.environ else zig(platform.machine(), libc)


def compile_c(command: list[str], output: Path, *arguments: str | Path) -> Path:
    """Run ``command`` with the build's flags, from the repository's root; returns ``output``."""
    full = [*command, *FLAGS, *map(str, arguments), "-o", str(output)]
    done = subprocess.run(full, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{shlex.join(full)}\n{done.stderr}"
    return output


def pass_in_debug_build(tests: str, chosen: str, folder: Path) -> None:
    """Run some tests with a library that writes NaN where nothing may read; none may fail or skip."""
    debug = compile_c(
        native("gnu.2.28"),
        folder / "libmxdraft.so",
        *("-DMXD_DEBUG", "-shared", "-fPIC"),
        *sources("library"),
        "-lm",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", chosen],
        env=os.environ | {"MXDRAFT_LIBRARY": str(debug)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def declarations(*headers: str) -> str:
    """What the public header and others of ``runtime/`` declare, as cffi reads it: preprocessed."""
    public = (RUNTIME / "include" / "mxdraft.h").read_text(encoding="utf-8")
    texts = [(RUNTIME / header).read_text(encoding="utf-8") for header in headers]
    merged = "\n".join([public.split("/* <cdef> */")[1].split("/* </cdef> */")[0], *texts])
    return subprocess.run(
        [*native("musl"), "-E", "-P", "-x", "c", "-"],
        input=re.sub(r"^#include .*", "", merged, flags=re.MULTILINE),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout


@cache
def library() -> tuple[Any, Any]:
    """(ffi, lib): the public MX codecs and what ``kernels.h`` declares, for this machine."""
    ffi = cffi.FFI()
    ffi.cdef(declarations("kernels/kernels.h"))
    files = [*KERNELS, RUNTIME / "src" / "codec.c", RUNTIME / "src" / "status.c"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "libkernels.so"
        compile_c(native("gnu.2.28"), path, "-fvisibility=default", "-shared", "-fPIC", *files, "-lm")
        return ffi, ffi.dlopen(str(path))  # stays mapped after the file is gone


def pointer(array: NDArray[Any], ctype: str) -> Any:
    """A C pointer to the data of a contiguous array, which must outlive it; ``ctype`` is its dtype in C."""
    dtype = {"float *": np.float32}.get(ctype) or np.dtype(ctype.removesuffix("_t *"))
    assert array.flags.c_contiguous
    assert array.dtype.itemsize == np.dtype(dtype).itemsize
    return library()[0].cast(ctype, array.ctypes.data)


@cache
def reference() -> Any:
    """The ``mxd_kernels`` table of the scalar reference."""
    ffi, lib = library()
    kernels = ffi.new("mxd_kernels *")
    lib.mxd_kernels_init_ref(kernels, ffi.new("mxd_kernel_names *"))
    return kernels
