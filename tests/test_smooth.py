# SPDX-License-Identifier: Apache-2.0
"""Smoothing leaves a model's function alone, helps its planes, and travels with what was made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from mxdraft import mx
from mxdraft.bundle import Bundle
from mxdraft.checkpoint import Checkpoint
from mxdraft.checkpoint.reference import Teacher
from mxdraft.checkpoint.smooth import Smoothing, measure, smooth
from mxdraft.cli import cli
from mxdraft.errors import RefusedError, UsageError
from mxdraft.export.graph import MODEL_FILES
from mxdraft.pack import pack
from mxdraft.train.delta import TrainedBase, apply_delta, write_delta


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The tiny model with some channels far larger than others, as real models have them."""
    plain = tiny.checkpoint()
    rng = np.random.default_rng(0)
    tensors = dict(plain.tensors)
    for name, weight in plain.tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = weight * np.exp2(rng.normal(0, 2, weight.shape)).astype(np.float32)
        elif name.endswith(("v_proj.weight", "up_proj.weight")):
            tensors[name] = weight * np.exp2(rng.normal(0, 1, (len(weight), 1))).astype(np.float32)
    return replace(plain, tensors=tensors)


@pytest.fixture(scope="module")
def windows(checkpoint: Checkpoint) -> np.ndarray:
    return np.random.default_rng(1).integers(0, checkpoint.config.vocab, (4, 48))


@pytest.fixture(scope="module")
def smoothing(checkpoint: Checkpoint, windows: np.ndarray) -> Smoothing:
    return measure(checkpoint, windows)


def test_the_teacher_says_the_same(checkpoint: Checkpoint, windows: np.ndarray, smoothing: Smoothing) -> None:
    """To f32 rounding, in a model whose heads share keys and values: that is where a factor can go astray."""
    assert checkpoint.config.heads > checkpoint.config.kv_heads > 1
    smoothed = smooth(checkpoint, smoothing)
    moved = [name for name, w in smoothed.tensors.items() if not np.array_equal(w, checkpoint.tensors[name])]
    assert len(moved) == 9 * checkpoint.config.layers
    for window in windows:
        before, after = Teacher(checkpoint).logits(window), Teacher(smoothed).logits(window)
        assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()


def test_channels_become_more_even(checkpoint: Checkpoint, windows: np.ndarray, smoothing: Smoothing) -> None:
    def spread(source: Checkpoint) -> dict[str, float]:
        """Standard deviation of log2 RMS over a product's input channels, mean over layers, by product."""
        squares: dict[str, list[np.ndarray]] = {}
        for window in windows:
            Teacher(source).hidden(window, lambda name, x: squares.setdefault(name, []).append(x * x))
        spreads: dict[str, list[float]] = {}
        for name in (name for name in squares if name.endswith("_proj")):  # the others are residual streams
            found = squares[name]
            log_rms = np.log2(np.concatenate(found).mean(axis=0)) / 2
            spreads.setdefault(name.split(".")[-1], []).append(float(log_rms.std()))
        return {kind: float(np.mean(values)) for kind, values in spreads.items()}

    before, after = spread(checkpoint), spread(smooth(checkpoint, smoothing))
    assert before.keys() == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    for kind, exponent in {"q_proj": 0.5, "o_proj": 0.3, "gate_proj": 0.5, "down_proj": 0.3}.items():
        assert after[kind] == pytest.approx((1 - exponent) * before[kind], rel=0.05)


def test_factors_are_eighths_of_an_octave_whose_mean_is_none(smoothing: Smoothing) -> None:
    assert smoothing.codes.dtype == np.int8
    assert np.abs(smoothing.codes).max() > 8
    assert abs(float(smoothing.codes.astype(float).mean())) < 0.1


def test_measuring_again_finds_the_same(
    checkpoint: Checkpoint, windows: np.ndarray, smoothing: Smoothing
) -> None:
    again = measure(checkpoint, windows.astype(np.uint16))
    assert np.array_equal(again.codes, smoothing.codes)
    assert (again.tokens, again.text_sha256) == (smoothing.tokens, smoothing.text_sha256)
    assert measure(checkpoint, windows[:2]).text_sha256 != smoothing.text_sha256


def test_a_silent_channel_gets_a_bounded_factor(checkpoint: Checkpoint, windows: np.ndarray) -> None:
    tensors = {name: weight.copy() for name, weight in checkpoint.tensors.items()}
    tensors["model.layers.0.input_layernorm.weight"][:5] = 0
    tensors["model.layers.1.mlp.up_proj.weight"][:] = 0  # all channels of a product silent
    silent = replace(checkpoint, tensors=tensors)
    smoothed = smooth(silent, measure(silent, windows))
    assert all(np.isfinite(weight).all() for weight in smoothed.tensors.values())
    before, after = Teacher(silent).logits(windows[0]), Teacher(smoothed).logits(windows[0])
    assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()


def test_json_brings_it_back(smoothing: Smoothing) -> None:
    again = Smoothing.from_json(json.loads(json.dumps(smoothing.to_json())))
    assert np.array_equal(again.codes, smoothing.codes)
    assert again.to_json() == smoothing.to_json()
    with pytest.raises(ValueError, match="do not inflate"):
        Smoothing.from_json(smoothing.to_json() | {"codes": "AAAA"})


def test_faults_are_named(checkpoint: Checkpoint, smoothing: Smoothing) -> None:
    with pytest.raises(RefusedError, match="do not fit a model that has"):
        smooth(checkpoint, replace(smoothing, codes=smoothing.codes[:-1]))
    with pytest.raises(UsageError, match="is empty"):
        measure(checkpoint, np.empty((0, 16), np.int64))


def test_a_delta_brings_its_smoothing(checkpoint: Checkpoint, smoothing: Smoothing, tmp_path: Path) -> None:
    smoothed = smooth(checkpoint, smoothing)
    planes = {
        name: mx.quantize(weight, "mxfp4", "search")
        for name, weight in smoothed.tensors.items()
        if name.startswith("model.layers.") and weight.ndim == 2
    }
    norms = {name: weight for name, weight in smoothed.tensors.items() if weight.ndim == 1}
    write_delta(tmp_path / "qat.delta", checkpoint, TrainedBase(planes, norms, {}, smoothing))
    again = apply_delta(tmp_path / "qat.delta", checkpoint)
    assert again.smoothing is not None
    assert np.array_equal(again.smoothing.codes, smoothing.codes)
    for name, plane in planes.items():
        assert np.array_equal(again.planes[name].data, plane.data), name
        assert np.array_equal(again.planes[name].scale, plane.scale), name


def test_export_smooths_by_a_text(
    checkpoint: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.save_huggingface(checkpoint, tmp_path / "weights")
    tokens = np.random.default_rng(2).integers(0, checkpoint.config.vocab, 2000).astype(np.uint16)
    np.savez(tmp_path / "text.npz", tokens=tokens)
    options = [str(tmp_path / "weights"), "--calibrate", str(tmp_path / "text.npz")]
    cli.main(["export", *options, "-o", str(tmp_path / "onnx")], standalone_mode=False)
    model = onnx.load(tmp_path / "onnx" / MODEL_FILES["full"])
    properties = {entry.key: entry.value for entry in model.metadata_props}
    recorded = Smoothing.from_json(json.loads(properties["mxdraft"])["smoothing"])
    name = "model.layers.0.input_layernorm.weight"
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    norm = onnx.numpy_helper.to_array(stored[name], str(tmp_path / "onnx"))
    assert np.array_equal(norm, smooth(checkpoint, recorded).tensors[name])
    assert not np.array_equal(norm, checkpoint.tensors[name])
    pack(tmp_path / "onnx", tmp_path / "t.mxb")
    assert Bundle.open(tmp_path / "t.mxb").provenance["smoothing"] == recorded.to_json()
    capfd.readouterr()
    cli.main(["inspect", str(tmp_path / "t.mxb")], standalone_mode=False)
    told = capfd.readouterr().out
    assert recorded.text_sha256 in told
    assert recorded.to_json()["codes"] not in told
    with pytest.raises(UsageError, match="give one of the two"):
        cli.main(
            ["export", *options, "--delta", "qat.delta", "-o", str(tmp_path / "onnx")], standalone_mode=False
        )
