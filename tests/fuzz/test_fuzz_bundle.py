# SPDX-License-Identifier: Apache-2.0
"""Mutated bundles, checksums mended: both readers give the same verdict, and no other end than a verdict."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny
from fuzzing import finding, fuzz, mutated, mutated_json, randoms
from malformed import build, patch, sections_of
from mxdraft.bundle import Bundle
from mxdraft.bundle.chat import read_chat
from mxdraft.bundle.format import DRAFT_TARGET, HEADER, SECTION_ENTRY
from mxdraft.bundle.schedule import Schedule
from mxdraft.bundle.tokenizer import read_tokenizer
from mxdraft.errors import BundleError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Model

CHECKPOINT = tiny.checkpoint(layers=2, hidden=32, ffn=32, heads=1, kv_heads=1)
WEIGHTS = {"target.shared", "target.base", "target.residual", "draft.weights"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small bundle with every section there is."""
    folder = tmp_path_factory.mktemp("fuzz")
    export_model(CHECKPOINT, folder)
    pack(folder, folder / "a.mxb")
    bundle = (folder / "a.mxb").read_bytes()
    bundle = tiny.with_ngrams(bundle, [[5, 6, 7, 8] * 15, [9, 5, 6, 9, 5, 6]])
    bundle = tiny.with_schedule(bundle, Schedule.default(2))
    return tiny.with_drafter(bundle, tiny.drafter(Bundle(bundle).config, feature_layers=(1, 2)))


def lie(rng: random.Random, good: bytes) -> bytes:
    """A changed bundle whose checksums are right, so that the change is read and not refused at once."""
    if rng.random() < 0.15:
        return _changed_table(rng, good)
    sections = sections_of(good)
    light = [name for name in sections if name not in WEIGHTS]
    name = rng.choice(light if rng.random() < 0.9 else sorted(WEIGHTS))
    if rng.random() < 0.05:
        del sections[name]
    elif rng.random() < 0.05:
        items = list(sections.items())
        rng.shuffle(items)
        sections = dict(items)
    else:
        sections[name] = mutated(rng, sections[name], same_length=rng.random() < 0.7) or b"\0"
    if name in DRAFT_TARGET and name in sections and rng.random() < 0.8:
        at, crc = 56 + 4 * DRAFT_TARGET.index(name), struct.pack("<I", zlib.crc32(sections[name]))
        sections["draft.config"] = patch(sections["draft.config"], at, crc)
    return build(sections)


def _changed_table(rng: random.Random, good: bytes) -> bytes:
    count = int.from_bytes(good[12:16], "little")
    end = HEADER.size + count * SECTION_ENTRY.size
    changed = bytearray(good)
    changed[8:end] = mutated(rng, good[8:end], same_length=True)
    if rng.random() < 0.9:
        count = min(int.from_bytes(changed[12:16], "little"), 64)
        table = changed[HEADER.size : HEADER.size + count * SECTION_ENTRY.size]
        changed[24:28] = struct.pack("<I", zlib.crc32(table))
    return bytes(changed)


def use(data: bytes) -> None:
    """Read a bundle and all that it holds."""
    bundle = Bundle(data)
    for section, name in bundle.tensors:
        bundle.get(section, name)


def test_bundles(good: bytes) -> None:
    fuzz("bundle", lambda rng: lie(rng, good), Bundle)


def test_bundles_that_are_used(good: bytes) -> None:
    def damaged(rng: random.Random) -> bytes:
        sections = sections_of(good)
        return build(sections | {"provenance": mutated_json(rng, Bundle(good).provenance) or b"x"})

    fuzz("bundle in use", damaged, use)


def test_both_readers_give_the_same_verdict(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mxb"
    verdicts: dict[str, int] = {}
    for number, rng in enumerate(randoms("bundle, twice")):
        data = lie(rng, good)
        path.write_bytes(data)
        with finding(f"bundle, twice {number}", data):
            python, c = _verdict(partial(Bundle, data)), _verdict(lambda: Model(path).close())
            assert python == c
        verdicts[python] = verdicts.get(python, 0) + 1
    print(f"bundle, twice: {verdicts}")
    assert len(verdicts) > 3


def _verdict(read: Callable[[], object]) -> str:
    try:
        read()
    except BundleError as error:
        return error.verdict
    return "accepted"


def test_unused_numbers_of_a_drafter_are_bytes_of_zero(good: bytes) -> None:
    """What the two readers once disagreed about: -0.0 equals zero, but is none."""
    sections = sections_of(good)
    config = sections["draft.config"]
    for at in (68 + 4 * 2, 68 + 4 * 7, 100 + 4 * 2, 100 + 4 * 7):
        lied = build(sections | {"draft.config": patch(config, at + 3, b"\x80")})
        assert _verdict(partial(Bundle, lied)) == "DRAFT"


@pytest.mark.parametrize("name", ["tokenizer", "chat", "schedule"])
def test_sections_alone(good: bytes, name: str) -> None:
    section = sections_of(good)[name]
    readers = {
        "tokenizer": lambda data: read_tokenizer(data, 500),
        "chat": lambda data: read_chat(data, 500),
        "schedule": lambda data: Schedule.unpack(data, 2),
    }
    fuzz(f"section {name}", lambda rng: mutated(rng, section, same_length=rng.random() < 0.9), readers[name])
