# SPDX-License-Identifier: Apache-2.0
"""The comparison with llama.cpp: turns, ratios, report and plot; llama.cpp itself is a fake (fake_llama)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner
from mxdraft.errors import RefusedError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Model

from bench.peers.__main__ import first_turns, main, run
from bench.peers.compare import OURS, THEIRS, Generation, Workload, measure, plot, ratios, table
from bench.peers.ours import Ours
from bench.peers.theirs import Theirs

FAKE = Path(__file__).with_name("fake_llama")
PYTHON = Path(sys.executable)
SMALL = Workload(prefill=20, prompt=10, decode=5, sequences=3, steps=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Weights (any bytes: only the fake reads them) and a bundle that says it was made of them."""
    folder = tmp_path_factory.mktemp("source")
    weights = folder / "weights.gguf"
    weights.write_bytes(b"the weights")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    export_model(dataclasses.replace(tiny.checkpoint(), source_sha256=digest), folder)
    pack(folder, folder / "t.mxb")
    return weights, folder / "t.mxb"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))


class Recorder:
    """A peer that notes its calls and is faster each time."""

    def __init__(self, name: str, calls: list[tuple[str, str]], speed: float) -> None:
        self.name, self.calls, self.speed = name, calls, speed

    def _call(self, measure: str) -> float:
        self.calls.append((self.name, measure))
        self.speed += 1
        return self.speed

    def prefill(self, ids: list[int]) -> float:
        assert len(ids) == SMALL.prefill
        return self._call("prefill")

    def decode(self, ids: list[int], tokens: int) -> float:
        assert (len(ids), tokens) == (SMALL.prompt, SMALL.decode)
        return self._call("decode")

    def batch(self, ids: list[int], sequences: int, steps: int) -> float:
        assert (len(ids), sequences, steps) == (SMALL.prompt, SMALL.sequences, SMALL.steps)
        return self._call("batch")

    def generate(self, ids: list[int], tokens: int, drafts: bool) -> Generation:
        raise AssertionError((ids, tokens, drafts))


def test_both_take_turns_and_the_first_round_is_dropped() -> None:
    calls: list[tuple[str, str]] = []
    peers = {OURS: Recorder(OURS, calls, 100), THEIRS: Recorder(THEIRS, calls, 0)}
    samples = measure(peers, SMALL, 50, repeat=2)
    assert list(samples) == ["prefill", "decode", "batch3"]
    for i in range(0, len(calls), 2):
        assert {calls[i][0], calls[i + 1][0]} == {OURS, THEIRS}
        assert calls[i][1] == calls[i + 1][1]
    firsts = [calls[i][0] for i in range(0, len(calls), 6)]
    assert firsts == [THEIRS, OURS, THEIRS]
    assert samples["prefill"] == {OURS: [104, 107], THEIRS: [4, 7]}
    assert ratios(samples)["prefill"] == 105.5 / 5.5
    assert f"{105.5 / 5.5:.2f}" in table(samples)


def test_report(source: tuple[Path, Path], fake: None, tmp_path: Path) -> None:  # noqa: ARG001
    weights, bundle = source
    prompts = tmp_path / "prompts.jsonl"
    records = [{"task": task, "turns": ["Hello there", "no"]} for task in ("chat", "qa", "chat")]
    prompts.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    report, samples = run(bundle, weights, PYTHON, tmp_path, "base", 1, 2, prompts, "chat", 40, work=SMALL)
    assert json.loads(json.dumps(report)) == report
    assert report["ratios"] == ratios(samples)
    assert set(report["ratios"]) == {"prefill", "decode", "batch3"}
    assert Workload().sequences == 48  # what the documented key batch48 comes from
    for of_peer in report["tok_per_s"].values():
        for values in of_peer.values():
            assert 0 < values["min"] <= values["median"] <= values["max"]
            assert len(values["samples"]) == 2
    assert report["threads"] == 1
    assert report["machine"]["cpus"] >= 1
    assert report["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert report["versions"][THEIRS] == {
        "llama-cpp-python": "0.0-fake",
        "system": "FAKE = 1",
        "format": "Q4_0",
        "quantized_bytes": weights.stat().st_size // 2,
    }
    assert (tmp_path / "llama.cpp.log").read_text(encoding="utf-8").startswith("warning")
    generated = report["prompts"]
    assert list(generated) == [OURS, f"{OURS} drafting", THEIRS, f"{THEIRS} n-gram"]
    assert generated[OURS]["tokens"] == generated[f"{OURS} drafting"]["tokens"]
    assert generated[THEIRS]["tokens"] == generated[f"{THEIRS} n-gram"]["tokens"] == 2 * 39
    assert generated[THEIRS]["tokens_per_step"] == 1 < generated[f"{THEIRS} n-gram"]["tokens_per_step"]


def test_full_precision_is_compared_with_q8_0(source: tuple[Path, Path], fake: None, tmp_path: Path) -> None:  # noqa: ARG001
    weights, bundle = source
    report, _ = run(bundle, weights, PYTHON, tmp_path, "full", 1, 1, None, "chat", 8, work=SMALL)
    assert report["precision"] == "full"
    assert report["versions"][THEIRS]["format"] == "Q8_0"
    assert report["versions"][THEIRS]["quantized_bytes"] == weights.stat().st_size  # the fake halves for Q4_0
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["q8_0.gguf"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    samples = {name: {OURS: [3.0, 4.0], THEIRS: [2.0, 2.5]} for name in ("prefill", "decode", "batch48")}
    plot(samples, "a machine", tmp_path / f"peers{suffix}")
    data = (tmp_path / f"peers{suffix}").read_bytes()
    assert data.startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[suffix])


def test_drafts_change_the_steps_and_not_the_tokens(fake: None, tmp_path: Path) -> None:  # noqa: ARG001
    (tmp_path / "weights").write_bytes(b"the weights")
    with Theirs(PYTHON, tmp_path / "weights", tmp_path, "Q4_0", 1, 200) as theirs:
        for prompt in ([1, 2, 3], list(range(20)), [5] * 9):
            plain = theirs.generate(prompt, 60, drafts=False)
            drafted = theirs.generate(prompt, 60, drafts=True)
            assert drafted.tokens == plain.tokens
            assert len(plain.tokens) == plain.steps == 59
            assert drafted.steps < plain.steps


def test_ours_measures_what_it_says(source: tuple[Path, Path]) -> None:
    with Model(source[1]) as model:
        ours = Ours(model, "base", 1, 100)
        ids = list(range(10))
        assert ours.prefill(ids) > 0
        assert ours.decode(ids, 5) > 0
        first, again = (ours.batch(ids, 3, 4) for _ in range(2))
        assert first > 0
        assert again > 0
        lengths = [len(sequence.tokens) for sequence in ours._batch]
        assert lengths == [10 + 5] * 3
        made = ours.generate(ids, 8, drafts=False)
        assert len(made.tokens) == made.steps <= 7


def test_weights_of_another_bundle_are_refused(
    bundle: Path,
    source: tuple[Path, Path],
    fake: None,  # noqa: ARG001
    tmp_path: Path,
) -> None:
    with pytest.raises(RefusedError, match="was not made of"):
        run(bundle, source[0], PYTHON, tmp_path, "base", 1, 1, None, "chat", 8, work=SMALL)


def test_faults_of_the_peer_are_told(fake: None, tmp_path: Path) -> None:  # noqa: ARG001
    (tmp_path / "weights").write_bytes(b"broken")
    with pytest.raises(RefusedError, match=r"(?s)ended in open .*not a GGUF file"):
        Theirs(PYTHON, tmp_path / "weights", tmp_path, "Q4_0", 1, 200)


def test_missing_environment_is_a_refusal(source: tuple[Path, Path], tmp_path: Path) -> None:
    options: list[Any] = ["-m", source[1], "--weights", source[0], "--directory", tmp_path]
    done = CliRunner().invoke(main, [*map(str, options), "--peer", str(tmp_path / "python")])
    assert done.exit_code == 3
    assert "`make bench-peers` makes" in done.stderr


@pytest.mark.parametrize("text", ["{", '{"task": "chat"}', '{"task": "chat", "turns": []}', '{"task": "qa"}'])
def test_prompts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompts").write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError, match="prompts"):
        first_turns(tmp_path / "prompts", "chat")
