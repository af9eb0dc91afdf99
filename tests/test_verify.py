# SPDX-License-Identifier: Apache-2.0
"""verify --full compares onnxruntime with the runtime: what agrees passes, what does not is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tiny
from mxdraft.errors import RefusedError
from mxdraft.export import OnnxRunner, export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model
from mxdraft.verify import compare as verify
from mxdraft.verify.compare import Parting, Result, compare_logits, packed_precisions, verify_precision
from mxdraft.verify.report import verification_page, verification_report


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T's ONNX files; next to their directory is the bundle, with right digests."""
    folder = tmp_path_factory.mktemp("verify") / "t"
    export_model(tiny.checkpoint(), folder)
    packed = command("pack", folder, "-o", folder.with_suffix(".mxb"))
    assert packed.returncode == 0, packed.stderr
    return folder


@pytest.fixture(scope="module")
def results(onnx: Path) -> dict[str, Result]:
    """The report of a quick comparison in this process."""
    found = {}
    with Model(onnx.with_suffix(".mxb")) as model:
        for precision in ("base", "full"):
            with Engine(model, threads=1, precision=precision) as engine:  # type: ignore[arg-type]
                found[precision] = verify_precision(engine, onnx, quick=True, note=lambda _: None)
    return found


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxdraft.cli", *map(str, args)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


# ---- what agrees ----


def test_command(onnx: Path, tmp_path: Path) -> None:
    bundle = onnx.with_suffix(".mxb")
    reports = ("--html", tmp_path / "r.html", "--json", tmp_path / "r.json")
    done = command("verify", "-m", bundle, "--full", "--quick", "-t", "1", *reports)
    assert done.returncode == 0, done.stderr
    assert "full: prompt 2/2" in done.stderr
    content = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert content["faults"] == []
    assert [result["precision"] for result in content["results"]] == ["base", "full"]
    for result in content["results"]:
        assert f"{result['precision']}: digest {result['digest']} is golden\n" in done.stdout
        assert [len(c["runtime"]) for c in result["continuations"]] == [8, 8]
        assert len(result["text"]["rms_by_position"]) == len(result["text"]["tokens"]) == 64
        assert result["text"]["max_abs"] > 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<h1>Verified</h1>" in page
    assert page.count("<rect ") == 2 * 64


@pytest.mark.parametrize("precision", ["base", "full"])
def test_both_are_as_close_as_int8_steps_let_them(results: dict[str, Result], precision: str) -> None:
    found = results[precision]
    assert found.faults() == []
    assert 0 < found.text.rms < 0.08
    assert found.text.agreement > 0.8


def test_whole_comparison(onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PROMPTS", verify.PROMPTS[:1])
    with Model(onnx.with_suffix(".mxb")) as model, Engine(model, threads=1, precision="full") as engine:
        result = verify_precision(engine, onnx, quick=False, note=lambda _: None)
    assert result.faults() == []
    assert len(result.text.tokens) == 256
    assert len(result.continuations[0].runtime) == 64
    assert len(result.continuations[0].differences) < 16


def test_steps_are_the_passes_of_a_text(onnx: Path) -> None:
    runner = OnnxRunner(onnx / "model.full.onnx")
    ids = list(range(40, 60))
    whole = runner.logits(ids)
    for rows in (1, 7):
        assert np.std(runner.logits(ids, rows) - whole) < verify.RMS_BOUND * whole.std()


# ---- what does not ----


def test_other_onnx_files_are_refused(onnx: Path, tmp_path: Path) -> None:
    bundle = onnx.with_suffix(".mxb")
    missing = command("verify", "-m", bundle, "--full", "--onnx", tmp_path / "none")
    assert missing.returncode == 3
    assert "give its directory with --onnx" in missing.stderr
    changed = shutil.copytree(onnx, tmp_path / "changed")
    with (changed / "model.onnx.data").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    done = command("verify", "-m", bundle, "--full", "--onnx", changed)
    assert (done.returncode, done.stdout) == (3, "")
    assert "model.onnx.data is not the file that the bundle was packed from" in done.stderr


@pytest.mark.parametrize(
    "provenance", ["", "[]", "{}", '{"sha256": 1}', '{"sha256": {"model.base.onnx": "0"}}']
)
def test_provenance_without_files_is_refused(onnx: Path, provenance: str) -> None:
    with pytest.raises(RefusedError, match="the bundle's provenance"):
        packed_precisions(provenance, onnx)


def test_base_alone(onnx: Path, tmp_path: Path) -> None:
    pack(onnx, tmp_path / "alone.mxb", residual=False)
    with Model(tmp_path / "alone.mxb") as model:
        assert packed_precisions(model.info.provenance, onnx) == ["base"]


def test_digest_that_differs_ends_with_5(onnx: Path, tmp_path: Path) -> None:
    pack(onnx, tmp_path / "t.mxb")  # its golden digests are zero
    report_path = tmp_path / "r.json"
    done = command(
        *("verify", "-m", tmp_path / "t.mxb", "--full", "--quick", "--onnx", onnx, "--precision", "full"),
        *("--json", report_path),
    )
    assert done.returncode == 5
    assert "full: digest" in done.stderr.splitlines()[-1]
    (fault,) = json.loads(report_path.read_text(encoding="utf-8"))["faults"]
    assert "differs from the bundle's golden one" in fault


@pytest.mark.parametrize("precision", ["base", "full"])
def test_another_computation_is_found(onnx: Path, tmp_path: Path, precision: str) -> None:
    """The graph of a model one of whose 28 matrices is negated, against the runtime on the right one."""
    checkpoint = tiny.checkpoint()
    name = "model.layers.2.self_attn.o_proj.weight"
    negated = {name: -checkpoint.tensors[name]}
    export_model(replace(checkpoint, tensors=checkpoint.tensors | negated), tmp_path)
    with (
        Model(onnx.with_suffix(".mxb")) as model,
        Engine(model, threads=1, precision=precision) as engine,  # type: ignore[arg-type]
    ):
        faults = verify_precision(engine, tmp_path, quick=True, note=lambda _: None).faults()
    assert any("text: RMS difference" in fault for fault in faults)
    assert any("text: margin" in fault for fault in faults)


def test_logit_errors_are_measured_where_they_are(onnx: Path) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    logits[:, 7] = 9
    changed = logits + np.float32([[0], [5], [0]])  # a shift of all logits changes no probability
    changed[2, 30] = 10
    with Model(onnx.with_suffix(".mxb")) as model:
        shifted = compare_logits(logits + np.float32(1), logits, logits, model, [3, 4, 5])
        assert shifted.rms < 1e-6
        assert shifted.max_abs == pytest.approx(1)
        found = compare_logits(changed, logits, logits, model, [3, 4, 5])
    assert found.onnx_rms == 0
    assert found.agreement == pytest.approx(2 / 3)
    assert found.largest_margin == pytest.approx(1 / changed[2].std(), rel=1e-4)
    error = 10 - logits[2, 30]
    expected = error * np.sqrt(1 / 500 - 1 / 500**2) / logits[2].std()
    assert found.rms_by_position == pytest.approx([0, 0, expected], abs=1e-4)
    assert (found.largest[0].position, found.largest[0].runtime) == (2, 10)
    assert found.max_abs == pytest.approx(error)


def test_faults(results: dict[str, Result]) -> None:
    good = results["full"]
    difference = Parting(3, 40, 41, margin=0.1, bound=0.2)

    def faults(**change: object) -> list[str]:
        return replace(good, **change).faults()  # type: ignore[arg-type]

    def parted(**change: float) -> list[str]:
        first, *others = good.continuations
        later = replace(difference, **change)  # type: ignore[arg-type]
        parted = replace(first, differences=[difference, later])
        return faults(continuations=[parted, *others])

    assert parted() == []
    nan = float("nan")
    for margin in (0.3, -0.1, nan):
        (fault,) = parted(margin=margin)
        assert "token 3 is 40, onnxruntime's 41" in fault
    for change in ({"rms": 0.1}, {"rms": nan}, {"largest_margin": 0.4}, {"largest_margin": nan}):
        assert len(faults(text=replace(good.text, **change))) == 1
    assert faults(digest_fault="other bits") == ["full: other bits"]


def test_page_is_whole_marks_the_token_and_escapes(results: dict[str, Result]) -> None:
    good = results["full"]
    parted = replace(
        good.continuations[0],
        prompt="<b>",
        text=["same ", "<one>", " rest"],
        onnx_token="<two>",
        differences=[Parting(1, 40, 41, margin=0.3, bound=0.2)],
    )
    page = verification_page(
        verification_report([replace(good, continuations=[parted])], [], "t.mxb", Path("t"))
    )
    assert "<h1>Not verified</h1>" in page
    assert "same <mark>&lt;one&gt;</mark> (onnxruntime: <mark>&lt;two&gt;</mark>) rest" in page
    links = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            links.extend(f"{tag} {name}" for name, _ in attrs if name in ("src", "href"))

    Links().feed(page)
    assert links == []


@pytest.mark.parametrize(
    "option", [["--quick"], ["--onnx", "x"], ["--weights", "x"], ["--html", "x"], ["--json", "x"]]
)
def test_options_need_full(onnx: Path, option: list[str]) -> None:
    done = command("verify", "-m", onnx.with_suffix(".mxb"), *option)
    assert (done.returncode, done.stdout) == (2, "")
    assert "need --full" in done.stderr
