# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cffi
import pytest
import tiny
from clib import KERNELS, REPOSITORY, RUNTIME, compile_c, declarations, native
from mxdraft.export import export_model
from mxdraft.pack import pack


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the tests' own, for what programs measure. textlib.py looks for weights in the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXDRAFT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T as a bundle: both planes, golden vectors without digests."""
    folder = tmp_path_factory.mktemp("bundle")
    export_model(tiny.checkpoint(), folder)
    pack(folder, folder / "t.mxb")
    return folder / "t.mxb"


@pytest.fixture(scope="session")
def internals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(ffi, lib): private functions of the runtime, those of ``sampler.h``, ``machine.h`` and ``kernels.h``.

    In this library the process may run on the CPUs that ``allow_cpus()`` was told last.
    """
    ffi = cffi.FFI()
    ffi.cdef(declarations("kernels/kernels.h", "src/sampler.h", "src/machine.h"))
    ffi.cdef("void allow_cpus(uint64_t first, uint64_t second);  /* masks of 64 CPUs each */")
    library = compile_c(
        native("gnu.2.28"),
        tmp_path_factory.mktemp("internals") / "libinternals.so",
        *("-fvisibility=default", "-shared", "-fPIC", "-Dsched_getaffinity=test_sched_getaffinity"),
        *(RUNTIME / "src" / name for name in ("sampler.c", "machine.c", "status.c")),
        *KERNELS,
        REPOSITORY / "tests" / "c" / "affinity.c",
        "-lm",
    )
    return ffi, ffi.dlopen(str(library))
