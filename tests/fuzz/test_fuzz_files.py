# SPDX-License-Identifier: Apache-2.0
"""Mutated files of every kind that the toolchain reads: taken or refused."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from clib import REPOSITORY
from fuzzing import WORDS, fuzz, mutated, mutated_json
from mxdraft import mx
from mxdraft.bundle import parse_provenance
from mxdraft.bundle.chat import chat_pieces, chat_section
from mxdraft.bundle.ngrams import read_documents
from mxdraft.bundle.schedule import Schedule
from mxdraft.checkpoint import Checkpoint, load_checkpoint, tokenizer_json
from mxdraft.export import export_model
from mxdraft.files import read_toml
from mxdraft.measure.acceptance import read_prompts
from mxdraft.pack import pack
from mxdraft.ship.deploy.fleet import read_hosts
from mxdraft.ship.targets import load_target
from mxdraft.train.corpus import Corpus, Document
from mxdraft.train.delta import TrainedBase, apply_delta, write_delta
from mxdraft.train.drafter import load_drafter, save_drafter
from test_checkpoint import save_gguf


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return tiny.checkpoint(layers=1, hidden=32, ffn=32, heads=1, kv_heads=1)


def through(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of bytes out of a reader of files."""

    def reader(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return reader


# ---- checkpoints ----


def use_checkpoint(path: Path) -> None:
    """Load weights, and write what an export would write of them as text."""
    checkpoint = load_checkpoint(path)
    json.dumps(checkpoint.source)
    tokenizer_json(checkpoint.tokenizer).encode("utf-8")
    (checkpoint.chat_template or "").encode("utf-8")


def test_gguf(small: Checkpoint, tmp_path: Path) -> None:
    data = save_gguf(small, tmp_path / "good.gguf").read_bytes()
    header = data.index(b"blk.0.attn_q.weight") + 400

    def damaged(rng: random.Random) -> bytes:
        changed = mutated(rng, data[:header], same_length=rng.random() < 0.8)
        return changed + data[header:]

    fuzz("gguf", damaged, through(tmp_path / "a.gguf", use_checkpoint))


def test_safetensors(small: Checkpoint, tmp_path: Path) -> None:
    tiny.save_huggingface(small, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]

    def damaged(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutated(rng, data)
        text = mutated_json(rng, header)
        return len(text).to_bytes(8, "little") + text + rest

    def read(data: bytes) -> None:
        path.write_bytes(data)
        use_checkpoint(tmp_path / "m")

    fuzz("safetensors", damaged, read)


@pytest.mark.parametrize("name", ["config", "tokenizer", "tokenizer_config", "generation_config", "index"])
def test_huggingface_json(small: Checkpoint, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    tiny.save_huggingface(small, folder, shards=2 if name == "index" else 1)
    file = folder / {"index": "model.safetensors.index.json"}.get(name, f"{name}.json")
    extra: dict[str, dict[str, Any]] = {
        "generation_config": {"eos_token_id": [0, 2], "bos_token_id": 1, "temperature": 0.7},
        "config": {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 10000.0}},
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "bos_token": {"content": "<|im_start|>"},
            "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "lstrip": False}},
        },
    }
    good = (json.loads(file.read_bytes()) if file.exists() else {}) | extra.get(name, {})

    def read(data: bytes) -> None:
        file.write_bytes(data)
        use_checkpoint(folder)

    fuzz(f"huggingface {name}", lambda rng: mutated_json(rng, good), read)


# ---- arrays ----


def test_drafters(small: Checkpoint, tmp_path: Path) -> None:
    save_drafter(tmp_path / "good.npz", tiny.drafter(small.config, feature_layers=(1,)))
    arrays = _arrays(tmp_path / "good.npz")
    header = json.loads(arrays["header"].tobytes())

    def damaged(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            text = mutated_json(rng, header)
            return _npz(rng, arrays | {"header": np.frombuffer(text, np.uint8)}, change=False)
        return _npz(rng, arrays)

    fuzz("drafter", damaged, through(tmp_path / "a.npz", lambda path: load_drafter(path, small.config)))


@pytest.mark.parametrize("reader", ["documents", "corpus"])
def test_texts(tmp_path: Path, reader: str) -> None:
    ids = np.arange(40, dtype=np.uint16)
    Corpus({i: Document(ids[: 9 + i], i, 0.5) for i in range(3)}, {7}).save(tmp_path / "good.npz")
    arrays = _arrays(tmp_path / "good.npz")
    read = {"documents": lambda path: read_documents(path, 500), "corpus": Corpus.load}[reader]
    fuzz(f"text as {reader}", lambda rng: _npz(rng, arrays), through(tmp_path / "a.npz", read))


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


def _npz(rng: random.Random, arrays: dict[str, Any], change: bool = True) -> bytes:
    """A file of these arrays: one of them another one or damaged, or the file itself."""
    file = io.BytesIO()
    compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    damaged = rng.choice([None, *arrays]) if change else None
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            values = _other(rng, array) if name == damaged and rng.random() < 0.5 else array
            np.save(member, values, allow_pickle=True)
            data = member.getvalue()
            if name == damaged and rng.random() < 0.5:
                data = mutated(rng, data)
            archive.writestr(f"{name}.npy", data)
        if change and rng.random() < 0.2:
            field = rng.choice(("file_size", "flag_bits", "compress_type", "header_offset", "CRC"))
            setattr(rng.choice(archive.filelist), field, rng.choice((0, 1, 8, 9, 99, 1 << 15)))
    data = file.getvalue()
    return mutated(rng, data) if change and damaged is None else data


def _other(rng: random.Random, array: Any) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return array.astype(rng.choice((np.float32, np.int8, np.int64, np.uint64, "U3", object)))
    if kind == 1:
        return array[rng.randrange(array.shape[0] + 1) :] if array.ndim else array
    if kind == 2:
        return array[..., None]
    if kind == 3:
        return np.array(rng.choice((0, 1.5, "x", float("nan"))))
    if kind == 4:
        return -array.astype(np.float64)
    return np.concatenate([array, array]) if array.ndim else array


def test_deltas(small: Checkpoint, tmp_path: Path) -> None:
    names = [
        name for name, tensor in small.tensors.items() if name.startswith("model.layers") and tensor.ndim == 2
    ]
    planes = {name: mx.quantize(small.tensors[name], "mxfp4", "search") for name in names}
    norms = {name: tensor for name, tensor in small.tensors.items() if tensor.ndim == 1}
    write_delta(tmp_path / "good.delta", small, TrainedBase(planes, norms, {"steps": 1}))
    body = (tmp_path / "good.delta").read_bytes()[:-32]
    length = int.from_bytes(body[8:12], "little")
    header = json.loads(body[12 : 12 + length])

    def damaged(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            text = mutated_json(rng, header)
            changed = body[:8] + len(text).to_bytes(4, "little") + text + body[12 + length :]
        else:
            changed = mutated(rng, body, same_length=rng.random() < 0.5)
        return changed + hashlib.sha256(changed).digest()

    fuzz("delta", damaged, through(tmp_path / "a.delta", lambda path: apply_delta(path, small)))


# ---- texts ----


def test_schedules(tmp_path: Path) -> None:
    good = Schedule.default(4).toml().encode("utf-8")

    def read(path: Path) -> None:
        schedule = Schedule.read(path, 4)
        assert Schedule.unpack(schedule.pack(), 4).toml()

    fuzz("schedule", lambda rng: mutated(rng, good), through(tmp_path / "a.toml", read))


def test_toml(tmp_path: Path) -> None:
    good = b'a = 1\nb.c = [1, {d = \'x\'}]\n[t.u]\ne = 2020-01-01\n[[v]]\nf = """\\u00e9\n"""\n'
    read = through(tmp_path / "a.toml", lambda path: json.dumps(read_toml(path, "file"), default=str))
    fuzz("toml", lambda rng: mutated(rng, good), read)


def test_targets(tmp_path: Path) -> None:
    good = (REPOSITORY / "targets" / "rpi5.toml").read_bytes()

    def read(data: bytes) -> None:
        (tmp_path / "t.toml").write_bytes(data)
        target = load_target("t", tmp_path)
        assert 0 < target.service.parallel + target.service.parked <= 64
        assert (target.run.threads or target.service.cores) > 0

    fuzz("target", lambda rng: mutated(rng, good), read)


def test_hosts(tmp_path: Path) -> None:
    good = b'[[host]]\nhost = "pi@a.example"\n[[host]]\nhost = "b"\ntarget = "rpi5"\ndest = "/opt/x"\n'

    def read(path: Path) -> None:
        for host in read_hosts(path, "rpi", "/srv"):
            assert not set("\0\n\x1b'\"$`") & set(host.host)
            assert host.dest.isprintable()

    fuzz("hosts", lambda rng: mutated(rng, good), through(tmp_path / "hosts.toml", read))


def test_prompts(tmp_path: Path) -> None:
    lines = [{"id": i, "task": f"t{i % 2}", "turns": [f"Ask {i}\u2028", "more"]} for i in range(4)]

    def damaged(rng: random.Random) -> bytes:
        texts = [json.dumps(line, ensure_ascii=False).encode("utf-8") for line in lines]
        texts[rng.randrange(4)] = mutated_json(rng, lines[0])
        return rng.choice((b"\n", b"\n", b"\n\n", b"\r\n")).join(texts)

    def read(path: Path) -> None:
        for prompt in read_prompts(path, 1):
            (prompt.task + prompt.text).encode("utf-8")

    fuzz("prompts", damaged, through(tmp_path / "a.jsonl", read))


def test_provenance() -> None:
    good = {
        "source": "x",
        "sha256": {"model.onnx.data": "0" * 64},
        "recipe": {"steps": [1, 2.5]},
        "drafter": None,
    }

    def read(data: bytes) -> None:
        json.dumps(parse_provenance(data), indent=1)

    def as_text(data: bytes) -> None:
        parse_provenance(data.decode("utf-8", "surrogateescape"))

    fuzz("provenance", lambda rng: mutated_json(rng, good), read)
    fuzz("provenance as text", lambda rng: mutated_json(rng, good), as_text)


def test_chat_templates() -> None:
    spec = tiny.tokenizer()
    pieces = [
        *(b"{% for m in messages %}", b"{{ m.content }}", b"{{ m.role }}", b"{% endfor %}", b"<|im_end|>"),
        *(b"{{ 'x' * 10**9 }}", b"{% for i in range(99999) %}", b"{{ loop.index }}", b"{% set x = [1] %}"),
        *(b"{% if m.role == 'user' %}", b"{{ '\\ud800' }}", b"{{ m.content.__class__ }}"),
        *(b"{{ raise_exception('x') }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        *WORDS,
    ]

    def template(rng: random.Random) -> str:
        if rng.random() < 0.5:
            data = mutated(rng, tiny.CHAT_TEMPLATE.encode("utf-8"))
        else:
            data = b"".join(rng.choice(pieces) for _ in range(rng.randrange(1, 8)))
        return data.decode("utf-8", "replace")

    fuzz("chat template", template, lambda text: chat_section(chat_pieces(text, spec)), one_kind=True)


# ---- exports ----


def test_exports(small: Checkpoint, tmp_path: Path) -> None:
    """One file of an export is damaged, and the manifest is of the damaged one."""
    export_model(small, tmp_path / "o", drafter=tiny.drafter(small.config, feature_layers=(1,)))
    names = [path.name for path in (tmp_path / "o").iterdir() if path.name != "export.json"]
    good = {name: (tmp_path / "o" / name).read_bytes() for name in names}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in good.items()}

    def damaged(rng: random.Random) -> tuple[str, bytes, bytes]:
        name = rng.choice([name for name in names if not name.endswith(".data")] * 3 + names)
        if name.endswith(".json"):
            data = mutated_json(rng, json.loads(good[name]))
        else:
            data = mutated(rng, good[name])
        manifest = digests | {name: hashlib.sha256(data).hexdigest()}
        text = mutated_json(rng, manifest) if rng.random() < 0.1 else json.dumps(manifest).encode("utf-8")
        return name, data, text

    def read(export: tuple[str, bytes, bytes]) -> None:
        name, data, manifest = export
        (tmp_path / "o" / name).write_bytes(data)
        (tmp_path / "o" / "export.json").write_bytes(manifest)
        try:
            pack(tmp_path / "o", tmp_path / "a.mxb")
        finally:
            (tmp_path / "o" / name).write_bytes(good[name])

    fuzz("export", damaged, read, one_kind=True)
