# SPDX-License-Identifier: Apache-2.0
"""The trained delta comes back bit for bit, is small, and is refused when damaged or misapplied."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mxdraft import mx
from mxdraft.checkpoint import Checkpoint, ModelConfig, TokenizerSpec, expected_tensors
from mxdraft.errors import RefusedError
from mxdraft.train.delta import TrainedBase, apply_delta, write_delta

CONFIG = ModelConfig(
    hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=64, max_positions=64,
    rms_eps=1e-5, rope_theta=1e4, tied=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(0, 0.2, s).astype(np.float32) for n, s in expected_tensors(CONFIG).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][0, :32] = 0
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e30
    tokenizer = TokenizerSpec([chr(i + 32) for i in range(64)], [], [], None, [], "gpt2")
    return Checkpoint(CONFIG, tensors, tokenizer, None, "made by the test", "ab" * 32)


@pytest.fixture(scope="module")
def trained(checkpoint: Checkpoint) -> TrainedBase:
    """The checkpoint's planes with a twentieth of the weights moved, so that some exponents change too."""
    rng = np.random.default_rng(1)
    planes = {}
    for name, weight in checkpoint.tensors.items():
        if name.startswith("model.layers.") and weight.ndim == 2:
            moved = rng.normal(0, 0.2, weight.shape) * (rng.random(weight.shape) < 0.05)
            planes[name] = mx.quantize(weight + moved.astype(np.float32), "mxfp4", "search")
    norms = {name: weight * 1.5 for name, weight in checkpoint.tensors.items() if weight.ndim == 1}
    return TrainedBase(planes, norms, {"note": "ä"})


@pytest.fixture
def delta(tmp_path: Path, checkpoint: Checkpoint, trained: TrainedBase) -> Path:
    path = tmp_path / "qat.delta"
    write_delta(path, checkpoint, trained)
    return path


def test_comes_back_bit_for_bit(delta: Path, checkpoint: Checkpoint, trained: TrainedBase) -> None:
    again = apply_delta(delta, checkpoint)
    assert again.planes.keys() == trained.planes.keys()
    for name, plane in trained.planes.items():
        assert np.array_equal(again.planes[name].data, plane.data), name
        assert np.array_equal(again.planes[name].scale, plane.scale), name
    assert again.norms.keys() == trained.norms.keys()
    assert all(np.array_equal(again.norms[name], norm) for name, norm in trained.norms.items())
    assert again.meta == trained.meta


def test_the_same_base_gives_the_same_file(
    delta: Path, tmp_path: Path, checkpoint: Checkpoint, trained: TrainedBase
) -> None:
    write_delta(tmp_path / "again", checkpoint, trained)
    assert delta.read_bytes() == (tmp_path / "again").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "qat.delta"]


def test_costs_little_more_than_its_entropy(delta: Path, trained: TrainedBase) -> None:
    weights = sum(plane.data.size * 2 for plane in trained.planes.values())
    fixed = 7 * (2 * 256 * 15 + 4 * 16384)  # a table and the coder's states for each of the seven kinds
    # 5 % moved: .29 bit to say which, at most 4 bits to say where to.
    assert delta.stat().st_size < fixed + weights * (0.29 + 0.05 * 4) / 8 + 20_000


def test_format_1_is_read_as_unsmoothed(delta: Path, checkpoint: Checkpoint, trained: TrainedBase) -> None:
    body = delta.read_bytes()[:-32]
    (length,) = struct.unpack_from("<I", body, 8)
    header = json.loads(body[12 : 12 + length])
    assert header.pop("smoothing") is None
    encoded = json.dumps(header).encode("utf-8")
    old = b"".join([b"MXQDELT1", struct.pack("<I", len(encoded)), encoded, body[12 + length :]])
    delta.write_bytes(old + hashlib.sha256(old).digest())
    again = apply_delta(delta, checkpoint)
    assert again.smoothing is None
    assert all(np.array_equal(again.planes[n].data, plane.data) for n, plane in trained.planes.items())


def test_another_checkpoint_is_refused(delta: Path, checkpoint: Checkpoint) -> None:
    other = replace(checkpoint, source_sha256="cd" * 32)
    with pytest.raises(RefusedError, match=r"trained from the weights with SHA-256 abab.*these have cdcd"):
        apply_delta(delta, other)
    liar = replace(checkpoint, tensors={n: w * np.float32(1.01) for n, w in checkpoint.tensors.items()})
    with pytest.raises(
        RefusedError, match=r"qat\.delta (is not a trained delta of these|decodes to other weights)"
    ):
        apply_delta(delta, liar)


def test_damage_is_refused(delta: Path, checkpoint: Checkpoint) -> None:
    content = delta.read_bytes()
    for place in (0, 9, 40, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        delta.write_bytes(damaged)
        with pytest.raises(RefusedError):
            apply_delta(delta, checkpoint)
    for size in (0, 7, 44, len(content) - 1):
        delta.write_bytes(content[:size])
        with pytest.raises(RefusedError):
            apply_delta(delta, checkpoint)
    with pytest.raises(RefusedError, match="missing"):
        apply_delta(delta.with_name("missing"), checkpoint)


def test_lies_under_a_right_checksum_are_refused(delta: Path, checkpoint: Checkpoint) -> None:
    """A file whose checksum is right but whose content is not: every part is changed or cut in turn."""
    body = delta.read_bytes()[:-32]
    (length,) = struct.unpack_from("<I", body, 8)
    header, payload = json.loads(body[12 : 12 + length]), body[12 + length :]
    edges = np.cumsum([0, *header["sections"]])
    sections = [payload[a:b] for a, b in itertools.pairwise(edges)]

    def refuse(header: object, sections: list[bytes]) -> None:
        encoded = json.dumps(header).encode("utf-8")
        lie = b"".join([body[:8], struct.pack("<I", len(encoded)), encoded, *sections])
        delta.write_bytes(lie + hashlib.sha256(lie).digest())
        with pytest.raises(RefusedError):
            apply_delta(delta, checkpoint)

    for i, section in enumerate(sections):
        for bad in (b"", section[:-2], section + b"\0\0", section[:100] + b"\xff\xff" + section[102:]):
            changed = [*sections[:i], bad, *sections[i + 1 :]]
            refuse({**header, "sections": [len(s) for s in changed]}, changed)
    refuse({**header, "sections": header["sections"][:-1]}, sections[:-1])
    refuse({**header, "sections": [-1, *header["sections"]]}, sections)
    refuse({**header, "sections": "none"}, sections)
    refuse({**header, "source_sha256": None}, sections)
    refuse([], sections)
