# SPDX-License-Identifier: Apache-2.0
"""Each kind of file that the toolchain writes, with the n-th call of each function failing, for all n.

    LD_PRELOAD=LIBRARY python failing_writes.py FOLDER        LIBRARY: of tests/c/failing_files.c

A failure is a refusal with the reason, or nothing at all; each file is the old one or the whole new one, and
none is left over. Prints a table: what is written, function, points, refusals.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tiny
from mxdraft import mx
from mxdraft.errors import TransferError
from mxdraft.export import export_model
from mxdraft.files import replacing, write_json
from mxdraft.pack import pack
from mxdraft.train.corpus import Corpus, Document
from mxdraft.train.delta import TrainedBase, write_delta
from mxdraft.train.drafter import save_drafter

ERRORS = {
    "open64": [errno.EACCES, errno.EMFILE, errno.EINTR],
    "write": [errno.ENOSPC, errno.EIO, errno.EINTR, errno.EFBIG],
    "fsync": [errno.EIO, errno.ENOSPC, errno.EINTR],
    "rename": [errno.EROFS, errno.ENOSPC],
    "fchmod": [errno.EPERM],
    "mkdir": [errno.EROFS, errno.ENOSPC],
    "ftruncate64": [errno.EIO],
}
C = ctypes.CDLL(None)
C.failing_calls.restype = ctypes.c_ulong


def choose(name: str, call: int = 0, reason: int = 0) -> None:
    C.failing_choose(name.encode("ascii"), ctypes.c_ulong(call), reason)


def counts() -> Iterator[tuple[str, int]]:
    """What was called since ``choose``, and how often."""
    name = ctypes.c_char_p()
    for i in range(100):
        calls = C.failing_calls(i, ctypes.byref(name))
        if name.value is None:
            return
        yield name.value.decode("ascii"), calls


def writers(folder: Path) -> dict[str, Callable[[Path], object]]:
    """What writes files into a folder, by name."""
    small = tiny.checkpoint(layers=1, hidden=32, ffn=32, heads=1, kv_heads=1)
    drafter = tiny.drafter(small.config, feature_layers=(1,))
    export_model(small, folder / "export")
    matrices = [name for name, tensor in small.tensors.items() if "layers" in name and tensor.ndim == 2]
    planes = {name: mx.quantize(small.tensors[name], "mxfp4", "search") for name in matrices}
    norms = {name: tensor for name, tensor in small.tensors.items() if tensor.ndim == 1}
    corpus = Corpus({i: Document(np.arange(9, dtype=np.uint16), i, 0.5) for i in range(3)}, {7})

    def in_pieces(out: Path) -> None:
        with replacing(out / "a.bin") as file:
            for _ in range(5):
                file.write(bytes(100_000))
            file.truncate(450_000)

    return {
        "pieces": in_pieces,
        "json": lambda out: write_json(out / "a.json", list(range(9999))),
        "bundle": lambda out: pack(folder / "export", out / "a.mxb"),
        "export": lambda out: export_model(small, out, drafter=drafter),
        "corpus": lambda out: corpus.save(out / "a.npz"),
        "drafter": lambda out: save_drafter(out / "a.npz", drafter),
        "delta": lambda out: write_delta(out / "a.delta", small, TrainedBase(planes, norms, {"steps": 1})),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def attempt(
    write: Callable[[Path], object], out: Path, good: dict[str, bytes], point: tuple[str, int, int]
) -> bool:
    """Write over old files with one call failing; returns whether that was refused."""
    for path in out.iterdir():
        path.unlink()
    for name in good:
        (out / name).write_bytes(b"old")
    choose(*point)
    reason = ""
    try:
        write(out)
    except TransferError as error:
        reason = str(error)
    finally:
        choose("")
    found = contents(out)
    wrong = [name for name, data in found.items() if data not in (good.get(name), b"old")]
    assert not wrong, (point, wrong)
    assert os.strerror(point[2]) in reason if reason else found == good, (point, reason)
    return bool(reason)


def main() -> None:
    folder = Path(sys.argv[1])
    out = folder / "out"
    for name, write in writers(folder).items():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        write(out)
        good = contents(out)
        choose("")
        write(out)  # over what is there, as all that follow
        for function, calls in list(counts()):
            points = [(function, call + 1, reason) for call in range(calls) for reason in ERRORS[function]]
            refusals = sum(attempt(write, out, good, point) for point in points)
            if points:
                print(f"{name}: {function}: {len(points)} points, {refusals} refused")


if __name__ == "__main__":
    main()
