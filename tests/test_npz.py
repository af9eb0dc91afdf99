# SPDX-License-Identifier: Apache-2.0
"""Files of arrays: what is none, lies or would fill the memory is refused by every reader of them."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from mxdraft.bundle.ngrams import read_documents
from mxdraft.errors import RefusedError, TransferError
from mxdraft.files.npz import reading_npz
from mxdraft.measure.acceptance import _load as load_rollouts
from mxdraft.train.corpus import Corpus, Document
from mxdraft.train.drafter import load_drafter, save_drafter

CONFIG = tiny.checkpoint(layers=4).config
READERS: dict[str, Callable[[Path], object]] = {
    "documents": lambda path: read_documents(path, 500),
    "corpus": Corpus.load,
    "rollouts": lambda path: load_rollouts(path, [("chat", [5, 6], 0)], 0.0),
    "drafter": lambda path: load_drafter(path, CONFIG),
}
# What all readers but that of drafters take: one document of four tokens.
ARRAYS: dict[str, Any] = {
    "tokens": np.array([5, 6, 7, 8], np.uint16),
    "offsets": np.array([0, 4], np.int64),
    "answer_start": np.array([2], np.int64),
    "temp": np.array([0.5], np.float16),
    "document": np.array([3], np.int64),
    "dropped": np.array([1], np.int64),
    "temperature": np.array([0.0]),
}


def write(path: Path, arrays: dict[str, Any] | None = None, **changes: Any) -> Path:
    np.savez_compressed(path, allow_pickle=True, **(ARRAYS if arrays is None else arrays) | changes)
    return path


def member(data: bytes, name: str = "tokens.npy", **fields: Any) -> bytes:
    """A .npz with one member of these bytes; ``fields`` of its ZipInfo are changed behind the writing."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
        for field, value in fields.items():
            setattr(archive.filelist[0], field, value)
    return file.getvalue()


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def array(shape: str, descr: str = "'<u2'", data: bytes = b"") -> bytes:
    return member(npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}", data))


def whole() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **ARRAYS)
    return file.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


LIES: dict[str, bytes] = {
    "nothing": b"",
    "no archive": b"PK\3\4" + bytes(100),
    "an archive cut short": whole()[:-30],
    "an array alone": npy("{'descr': '<u2', 'fortran_order': False, 'shape': (0,), }"),
    "an empty archive": b"PK\5\6" + bytes(18),
    "an empty member": member(b""),
    "a member that is no array": member(b"hello, world"),
    "a member of another name": member(b"hello", "tokens"),
    "an encrypted member": member(npy("{}"), flag_bits=1),
    "an unknown compression": member(npy("{}"), compress_type=99),
    "a member larger than it is": member(npy("{}"), file_size=1 << 20),
    "a member of 3 GiB that is not": member(npy("{}"), file_size=3 << 30),
    "a damaged stream": flipped(whole(), 100),
    "a huge shape": array("(1000000000000,)"),
    "a shape of no number": array("(1 << 70,)"),
    "a shape beyond numbers": array(f"({1 << 70},)"),
    "a negative shape": array("(-1, -2)", data=bytes(4)),
    "a shape of many axes": array(f"({'1, ' * 100})", data=bytes(2)),
    "too much data": array("(1,)", data=bytes(4)),
    "too little data": array("(3,)", data=bytes(4)),
    "an object": array("(1,)", "'|O'", bytes(8)),
    "values without bytes": array("(1000000000000,)", "'|V0'"),
    "a nested type": array("(1,)", "[" * 300 + "]" * 300),
    "a type of no name": array("(1,)", "'<u3'", bytes(3)),
    "a header that is a program": member(npy("__import__('os').abort()")),
    "a header nested": member(npy("[" * 9000)),
    "a version of no array": member(npy("{}", version=b"\7\0")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path, reader: str, lie: str) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(LIES[lie])
    with pytest.raises(RefusedError, match=r"a\.npz is not a "):
        READERS[reader](path)


def test_the_truth_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    (ids,) = read_documents(path, 500)
    assert ids.tolist() == [5, 6, 7, 8]
    corpus = Corpus.load(path)
    assert corpus.dropped == {1}
    assert (corpus.documents[3].answer_start, corpus.documents[3].temperature) == (2, 0.5)
    (rollout,) = load_rollouts(path, [("chat", [5, 6], 0)], 0.0)  # type: ignore[misc]
    assert rollout.tokens.tolist() == [5, 6, 7, 8]
    drafter = tiny.drafter(CONFIG)
    save_drafter(tmp_path / "d.npz", drafter)
    assert load_drafter(tmp_path / "d.npz", CONFIG).feature_layers == drafter.feature_layers


@pytest.mark.parametrize(
    ("readers", "changes"),
    [
        (["documents", "corpus", "rollouts"], {"offsets": np.array([0, 5])}),
        (["documents", "corpus", "rollouts"], {"offsets": np.array([-1, 4])}),
        (["documents", "corpus", "rollouts"], {"offsets": np.array([3, 1])}),
        (["documents", "corpus", "rollouts"], {"offsets": np.array([0.0, 4.0])}),
        (["documents", "corpus", "rollouts"], {"offsets": np.array(4)}),
        (["documents"], {"offsets": np.array([0])}),
        (["documents", "corpus", "rollouts"], {"tokens": np.array([5.0, 6.0, 7.0, 8.0])}),
        (["documents", "corpus", "rollouts"], {"tokens": np.array([5, 6, 7, 1 << 16])}),
        (["documents", "corpus", "rollouts"], {"tokens": np.array([5, 6, 7, -1])}),
        (["documents", "corpus", "rollouts"], {"tokens": np.array([[5, 6, 7, 8]])}),
        (["documents", "corpus", "rollouts"], {"tokens": np.array(["5", "6", "7", "8"])}),
        (["documents"], {"tokens": np.array([5, 6, 7, 500])}),
        (["corpus"], {"answer_start": np.array([5])}),
        (["corpus"], {"answer_start": np.array([-1])}),
        (["corpus"], {"answer_start": np.array([0.5])}),
        (["corpus"], {"answer_start": np.array([1, 2])}),
        (["corpus"], {"temp": np.array(["hot"])}),
        (["corpus"], {"document": np.array([3, 4])}),
        (["corpus"], {"document": np.array([3.5])}),
        (["corpus"], {"dropped": np.array([[1]])}),
        (["rollouts"], {"temperature": np.array(["0"])}),
        (["rollouts"], {"temperature": np.array([[0.0]])}),
    ],
)
def test_documents_that_lie_are_refused(tmp_path: Path, readers: list[str], changes: dict[str, Any]) -> None:
    path = write(tmp_path / "a.npz", **changes)
    for reader in readers:
        with pytest.raises(RefusedError, match=r"a\.npz"):
            READERS[reader](path)


def test_a_document_twice_is_refused(tmp_path: Path) -> None:
    ids = np.array([1, 2], np.uint16)
    Corpus({1: Document(ids, 1, 0.0), 2: Document(ids, 0, 1.0)}).save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as arrays:
        write(tmp_path / "b.npz", dict(arrays), document=np.array([1, 1]))
    with pytest.raises(RefusedError, match="document 1 is there twice"):
        Corpus.load(tmp_path / "b.npz")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        {"feature_layers": []},
        {"feature_layers": [2, 1, 4]},
        {"feature_layers": [1, 2, 5]},
        {"feature_layers": [1, 2, 3, 4, 4]},
        {"feature_layers": list(range(1000))},
        {"feature_layers": [1e300, 2, 4]},
        {"feature_layers": ["x"]},
        {"feature_layers": None},
        {"calibration": []},
        {"calibration": [[1e300, 1.0]]},
        {"calibration": [[1.0, -1.0]]},
        {"calibration": [[1e-300, 1.0]]},
        {"calibration": [[float("nan"), 1.0]]},
        {"calibration": [[1.0]]},
        {"calibration": [[1.0, 1.0]] * 9},
        {"source_sha256": 1},
        {"meta": "x"},
    ],
)
def test_drafters_that_lie_are_refused(tmp_path: Path, header: Any) -> None:
    path = tmp_path / "d.npz"
    save_drafter(path, tiny.drafter(CONFIG))
    with np.load(path) as file:
        arrays = dict(file)
    truth = json.loads(arrays["header"].tobytes())
    raw = header if isinstance(header, bytes) else json.dumps(truth | header).encode()
    write(path, arrays, header=np.frombuffer(raw, np.uint8))
    with pytest.raises(RefusedError, match=r"d\.npz"):
        load_drafter(path, CONFIG)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(47, dtype=np.uint32),
        np.arange(48, dtype=np.uint32)[::-1],
        np.arange(48, dtype=np.uint32) + np.uint32(453),
        np.arange(48, dtype=np.int64),
        np.arange(48, dtype=np.float32),
        np.empty(0, np.uint32),
        np.array(5, np.uint32),
    ],
)
def test_drafters_with_wrong_tokens_are_refused(tmp_path: Path, ids: Any) -> None:
    path = tmp_path / "d.npz"
    save_drafter(path, tiny.drafter(CONFIG))
    with np.load(path) as file:
        write(path.with_name("e.npz"), dict(file), draft_ids=ids)
    with pytest.raises(RefusedError, match=r"e\.npz"):
        load_drafter(path.with_name("e.npz"), CONFIG)


def test_arrays_can_be_written_to(tmp_path: Path) -> None:
    """As torch asks for."""
    with reading_npz(write(tmp_path / "a.npz"), "file") as arrays:
        for values in arrays.values():
            assert values.flags.writeable


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(TransferError, match="cannot read"):
            Corpus.load(path)
    with pytest.raises(RefusedError, match="no such file"):
        Corpus.load(tmp_path / "none")


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Members that unpack to far more than the file has: said openly, and hidden behind a smaller size."""
    names = []
    for claimed in (4 << 30, 1 << 20):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            with archive.open("tokens.npy", "w", force_zip64=True) as bomb:
                bomb.write(npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({claimed},), }}"))
                for _ in range(64):
                    bomb.write(bytes(4 << 20))
            archive.filelist[0].file_size = claimed
        names.append(tmp_path / f"{claimed}.npz")
        names[-1].write_bytes(file.getvalue())
        assert names[-1].stat().st_size < 4 << 20
    code = (
        "import pathlib, resource, sys\n"
        "from mxdraft.errors import RefusedError\n"
        "from mxdraft.files.npz import reading_npz\n"
        "size = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        with reading_npz(pathlib.Path(name), 'file'): print('read')\n"
        "    except RefusedError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("refused\n" * 2, "")
