# SPDX-License-Identifier: Apache-2.0
"""What a file says reaches terminals, pages and programs as text, never as a command to them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from malformed import build, sections_of
from mxdraft.bundle import Bundle, parse_provenance
from mxdraft.errors import RefusedError
from mxdraft.measure.plot import plot_acceptance
from mxdraft.runtime import Model
from mxdraft.verify.compare import packed_precisions
from mxdraft.verify.report import verification_page

EVIL = "\x1b[2J\x1b]0;owned\x07\r\x08\x9b31m\x7f"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PROVENANCE = {
    "hostile": json.dumps({"source": EVIL, EVIL: 1}, ensure_ascii=False).encode(),
    "spelled": json.dumps({"source": EVIL}).encode(),
    "half a surrogate pair": b'{"source": "\\ud800"}',
    "no UTF-8": b'{"source": "\xff\xfe"}',
    "no JSON": b"{",
    "no object": b"[1]",
    "nested": b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
    "nested deep": b"[" * 200_000,
    "a key twice": b'{"source": 1, "source": 2}',
    "a large number": b'{"a": ' + b"1" * 10_000 + b"}",
}
SOUND = ("hostile", "spelled")


@pytest.fixture(params=PROVENANCE)
def hostile(bundle: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A bundle whose provenance is hostile, which no reader refuses as a whole."""
    path = tmp_path / "hostile.mxb"
    sections = sections_of(bundle.read_bytes())
    path.write_bytes(build(sections | {"provenance": PROVENANCE[request.param]}))
    return request.param, path


def run(*args: str | Path, code: int = 0) -> tuple[str, str]:
    """Output and messages of a command, which ends with ``code`` and controls no terminal."""
    done = subprocess.run([sys.executable, "-m", "mxdraft.cli", *args], capture_output=True, check=False)
    out, err = (stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr))
    assert done.returncode == code, err
    assert "Traceback" not in err
    assert CONTROL.search(out) is None
    assert CONTROL.search(err) is None
    return out, err


def test_commands_that_show_a_provenance(hostile: tuple[str, Path]) -> None:
    name, path = hostile
    assert "provenance " in run("info", "-m", path)[0]
    for form in ([], ["--json"]):
        out, err = run("inspect", path, *form, code=0 if name in SOUND else 3)
        assert name in SOUND or "the bundle's provenance is not a JSON object: " in err
        if name in SOUND and form:
            assert json.loads(out)["provenance"]["source"] == EVIL


def test_readers_of_a_provenance(hostile: tuple[str, Path]) -> None:
    name, path = hostile
    bundle = Bundle.open(path)
    with Model(path) as model:
        text = model.info.provenance
        for read in (lambda: bundle.provenance, lambda: parse_provenance(text)):
            if name in SOUND:
                assert read()["source"] == EVIL
            else:
                with pytest.raises(RefusedError, match="provenance is not a JSON object"):
                    read()
        with pytest.raises(RefusedError, match="provenance"):
            packed_precisions(text, path.parent)


def test_messages_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / f"evil{EVIL}\nmxdraft: error: all is well.mxb"
    _, err = run("inspect", path, code=3)
    assert err.count("\n") == 1
    assert "\\x1b[2J" in err


def result(text: str) -> dict[str, Any]:
    difference = {"position": 0, "runtime_token": 1, "onnx_token": 2, "margin": 0.1, "bound": 0.2}
    texts = [text, text, text]
    return {
        "precision": "base",
        "digest": text,
        "digest_fault": text,
        "continuations": [
            {"prompt": text, "runtime": [1], "text": texts, "onnx_token": text, "differences": [difference]}
        ],
        "text": {"tokens": [text], "rms": 0.0, "rms_by_position": [0.0], "onnx_rms": 0.0, "max_abs": 0.0}
        | {"agreement": 1.0, "largest_margin": 0.0}
        | {"largest": [{"position": 0, "token": text, "logit_of": text, "runtime": 0.0, "onnx": 0.0}]},
    }


def test_a_page_shows_hostile_text_as_text() -> None:
    evil = '<script>alert(1)</script>\' onload="x" & \udcff \ud800'
    page = verification_page(
        {
            "bundle": evil,
            "onnx": evil,
            "versions": {"mxdraft": evil, "onnxruntime": evil},
            "bounds": {"rms": 0.1, "margin": 0.1},
            "faults": [evil],
            "links": [
                {"name": evil, "compared": evil, "value": 0.0, "bound": 0.1, "fault": fault}
                for fault in (evil, "")
            ],
            "results": [result(evil)],
        }
    )
    assert "<script" not in page
    assert 'onload="' not in page
    assert page.count("&lt;script&gt;") > 10
    page.encode("utf-8")


def test_names_of_tasks_are_no_formulas(tmp_path: Path) -> None:
    measures = {"tau": {"1": 1.5, "2": 1.7}, "alpha_everywhere": 0.5}
    methods = dict.fromkeys(("drafter", "lookup", "union"), measures)
    groups = dict.fromkeys(("all", "$\\frac{$", "a $x$ b"), methods)
    points = [[{"confidence": 0.5, "accepted": 0.5, "count": 20}]]
    plot_acceptance({"$\\nonesuch$": groups}, {"$": points}, tmp_path / "a.svg")
    assert "nonesuch" in (tmp_path / "a.svg").read_text(encoding="utf-8")
