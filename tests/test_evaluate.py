# SPDX-License-Identifier: Apache-2.0
"""``mxdraft evaluate quality`` compared with plain definitions, and the teacher that it compares with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import tiny
from mxdraft.checkpoint import load_checkpoint
from mxdraft.checkpoint.reference import Teacher
from mxdraft.export import export_model
from mxdraft.measure.quality import Quality, log_softmax, score_windows
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline

IDS = np.random.default_rng(0).integers(3, 500, 40)


def test_sums_are_the_definitions() -> None:
    rng = np.random.default_rng(1)
    teacher, student = (rng.standard_normal((5, 7)).astype(np.float32) for _ in range(2))
    targets = np.array([6, 0, 3, 3])
    quality = Quality()
    quality.add(log_softmax(teacher), log_softmax(student), targets)
    p, q = (np.exp(x.astype(np.float64)) for x in (teacher, student))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    report = quality.report()
    np.testing.assert_allclose(report["kl"], (p * np.log(p / q)).sum() / 5)
    assert report["agreement"] == np.mean(p.argmax(1) == q.argmax(1))
    np.testing.assert_allclose(report["perplexity"], np.prod(q[np.arange(4), targets]) ** (-1 / 4))


def test_windows_start_from_nothing_and_the_teacher_is_its_own_measure() -> None:
    seen = []

    def uniform(window: np.ndarray) -> np.ndarray:
        seen.append(window.tolist())
        return np.zeros((len(window), 500), np.float32)

    *_, sums = score_windows(uniform, {"same": uniform}, IDS, 16)
    assert seen[::2] == seen[1::2] == [IDS[:16].tolist(), IDS[16:32].tolist(), IDS[32:].tolist()]
    assert sums["same"].report() == sums["teacher"].report()
    assert sums["teacher"].report()["kl"] == 0
    np.testing.assert_allclose(sums["teacher"].report()["perplexity"], 500)


def test_teacher_is_what_full_precision_comes_close_to(bundle: Path) -> None:
    teacher = Teacher(tiny.checkpoint()).logits(IDS)
    error = {}
    with Model(bundle) as model:
        for precision in ("base", "full"):
            with Engine(model, threads=1, precision=precision) as engine, Timeline(engine) as sequence:
                error[precision] = np.sqrt(((sequence.logits(IDS) - teacher) ** 2).mean()) / teacher.std()
    assert error["full"] < 0.15 < error["base"]


def test_command(tmp_path: Path) -> None:
    tiny.save_huggingface(tiny.checkpoint(), tmp_path / "weights")
    export_model(load_checkpoint(tmp_path / "weights"), tmp_path / "onnx")
    pack(tmp_path / "onnx", tmp_path / "t.mxb")
    (tmp_path / "text").write_text("the cat sat on the mat and then " * 20, encoding="utf-8")
    command = [sys.executable, "-m", "mxdraft.cli", "evaluate", "quality", "-m", str(tmp_path / "t.mxb")]
    command += [
        "--text",
        str(tmp_path / "text"),
        "--tokens",
        "48",
        "--ctx",
        "32",
        "--json",
        str(tmp_path / "j"),
    ]
    done = subprocess.run([*command, "--source", str(tmp_path / "weights")], capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b" tokens: ")) == (0, 2)
    results = json.loads((tmp_path / "j").read_text(encoding="utf-8"))["results"]
    assert results["full"]["kl"] < results["base"]["kl"]
    assert results["teacher"]["kl"] == 0
    assert [r["positions"] for r in results.values()] == [48, 48, 48]

    tiny.save_huggingface(tiny.checkpoint(seed=1), tmp_path / "other")
    done = subprocess.run([*command, "--source", str(tmp_path / "other")], capture_output=True, check=False)
    assert done.returncode == 3
    assert b"made of other weights" in done.stderr
