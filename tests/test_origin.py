# SPDX-License-Identifier: Apache-2.0
"""calibrate and evaluate origin on fixture T: numbers are what their names say, and a schedule comes out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule
from mxdraft.cli import cli
from mxdraft.errors import RefusedError
from mxdraft.export import export_model
from mxdraft.measure.origin import evaluate as origin
from mxdraft.measure.origin import memory as origin_memory
from mxdraft.measure.origin.compute import Batch, having_read
from mxdraft.measure.origin.precision import measure_rules, record_flips
from mxdraft.measure.origin.together import measure_together
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline

TEXT = [i * 31 % 497 + 3 for i in range(150)]
DOCUMENTS = [np.arange(i, i + 40) * 7 % 497 + 3 for i in range(0, 180, 30)]


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T with room for the measurements' contexts."""
    folder = tmp_path_factory.mktemp("origin")
    export_model(tiny.checkpoint(max_positions=1024), folder)
    pack(folder, folder / "t.mxb")
    return folder / "t.mxb"


@pytest.fixture
def model(long_bundle: Path) -> Iterator[Model]:
    with Model(long_bundle) as opened:
        yield opened


def quiet(_: str) -> None:
    pass


def test_a_trace_is_of_the_rows_that_base_precision_computed(model: Model) -> None:
    trace = record_flips(model, DOCUMENTS, 1, quiet)
    assert trace.signals.shape == (len(trace.flip), 3)
    assert 100 < len(trace.flip) <= sum(map(len, DOCUMENTS))
    assert ((trace.signals >= 0) & (trace.signals <= 1)).all()
    assert (trace.signals.std(axis=0) > 0).all()  # attention and history tell something, too
    assert trace.signals[:, 0] == pytest.approx(np.exp(-trace.margin), rel=1e-5)
    assert 0.05 < trace.flip.mean() < 0.95


def test_rules_are_what_they_are_called(model: Model) -> None:
    schedule = Schedule.default(4)
    trace = record_flips(model, DOCUMENTS, 1, quiet)
    settings: list[Any] = [
        ("calibrated", 0.0, 4),
        ("calibrated", 0.1, 4),
        ("calibrated", 1.0, 4),
        ("random", 0.2, 4),
        ("oracle", 1.0, 4),
        ("margin", 0.2, 4),
    ]
    found = measure_rules(model, DOCUMENTS, settings, schedule, trace, 1, quiet)
    never, some, all_core, chance, oracle, margin = found["rules"]
    assert never["core"] == 0
    assert never["due"] == pytest.approx(0.25, abs=0.01)
    assert (all_core["agreement"], all_core["repaired"]) == (1, 1)
    assert all_core["kl"] == pytest.approx(0, abs=1e-5)
    assert 0.02 < some["core"] < 0.2
    for rule in (chance, margin):
        assert 0.08 < rule["core"] < 0.32
    assert oracle["agreement"] > max(chance["agreement"], never["agreement"])
    base = found["base"]
    for rule in found["rules"]:
        assert rule["repaired"] == pytest.approx(1 - (1 - rule["agreement"]) / (1 - base["agreement"]))
        read = (1 - rule["due"]) * base["bytes_of_full"] + rule["core"] + rule["due"]
        assert rule["bytes_of_full"] == pytest.approx(read)


def test_bytes_of_a_token_are_those_that_the_runtime_counts(model: Model) -> None:
    from mxdraft.measure.origin.precision import weight_bytes

    base, full = weight_bytes(Bundle.open(Path(model.info.path)))
    for precision, expected in (("base", base), ("full", full)):
        with (
            Engine(model, ctx=64, threads=1, precision=precision, draft="off") as engine,  # type: ignore[arg-type]
            Timeline(engine, max_tokens=11, ignore_eos=True) as sequence,
        ):
            for _ in sequence.generate([5]):
                pass
            assert sequence.stats["bytes_read"] / 10 == pytest.approx(expected, rel=0.05)  # and the KV cache


def test_calibrate_writes_a_schedule_that_packs(
    long_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(tiny.CORPUS * 2, encoding="utf-8")
    out, plot = tmp_path / "schedule.toml", tmp_path / "fit.png"
    asked = ["-m", str(long_bundle), "--text", str(text), "--tokens", "2048", "-t", "1"]
    cli.main(["calibrate", *asked, "-o", str(out), "--plot", str(plot)], standalone_mode=False)
    assert "AUC" in capfd.readouterr().out
    schedule = Schedule.read(out, 4)
    assert schedule.precision.alpha != 1
    assert schedule.memory == Schedule.default(4).memory  # only precision is fitted
    assert plot.read_bytes().startswith(b"\x89PNG")
    pack(long_bundle.parent, tmp_path / "scheduled.mxb", schedule=out)
    assert Bundle.open(tmp_path / "scheduled.mxb").schedule.pack() == schedule.pack()
    # Each threshold is exceeded by the share of rows that it stands for.
    with Model(long_bundle) as model:
        documents = origin.read_text(model, text, 2048)
        fitted = [document for i, document in enumerate(documents) if i % 3 != 2]
        trace = record_flips(model, fitted, 1, quiet)
    above = origin.score(schedule.precision, trace) > schedule.thresholds[4]
    assert above.mean() == pytest.approx(0.2, abs=0.02)


def test_too_little_text_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(RefusedError, match="no text"):
        origin.read_text(model, tmp_path / "empty.txt", 100)
    with pytest.raises(RefusedError, match="too little text"):
        origin.calibrate(model, DOCUMENTS[:2], Schedule.default(4), 1, quiet)


def test_evaluate_origin_reports_every_resource(
    long_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(origin, "PROMPTS", [f"{i} boats" for i in range(48)])
    with (
        Model(long_bundle) as model,
        Engine(model, ctx=512, threads=1, precision="base", max_seqs=48) as engine,
    ):
        asked_for = [model.chat([("user", prompt)]) for prompt in origin.PROMPTS]
        answers = Batch(engine, asked_for, 48, 24).run()
        said = [ids + made for ids, made in zip(asked_for, answers, strict=True)]
    known = tmp_path / "known.mxb"  # a table that often knows what comes
    known.write_bytes(tiny.with_ngrams(long_bundle.read_bytes(), [ids for ids in said for _ in range(2)]))
    out, plot = tmp_path / "origin.json", tmp_path / "origin.png"
    asked = ["-m", str(known), "--quick", "-t", "1", "--json", str(out), "--plot", str(plot)]
    cli.main(["evaluate", "origin", *asked], standalone_mode=False)
    found = json.loads(out.read_text(encoding="utf-8"))
    (at_20,) = (
        rule
        for rule in found["precision"]["rules"]
        if (rule["control"], rule["fraction"], rule["catch_up"]) == ("calibrated", 0.2, 16)
    )
    missing = [1 - found["precision"]["base"]["agreement"], 1 - at_20["agreement"]]
    assert found["precision"]["repaired_at_20pct"] == pytest.approx(1 - missing[1] / missing[0])
    assert set(found["batch48"]) == {"acceptance", "of_none", "of_fixed"}
    assert 4 < found["memory"]["tiered_bits_per_value"] < 8.3
    assert 0 <= found["identification"]["accuracy"] <= 1
    assert 0 < found["identification"]["us_per_step"] < 1e6
    together = found["together"]["512"]
    assert set(together) == set(found["compute"]) == {"1", "48"}
    assert set(together["1"]) == {"full", "compute", "precision", "memory", "all"}
    assert together["48"]["memory"]["tokens_per_step"] == together["48"]["full"]["of_full"] == 1
    cache = found["memory"]["contexts"]["512"]
    assert set(cache) == {"f16", "int8", "tiered", "recency"}
    assert cache["f16"]["kl"] == cache["f16"]["acceptance_less_f16"] == 0 < cache["tiered"]["kl"]
    assert set(found["memory"]["speed"]["512"]) == {"f16", "int8", "mxfp4", "tiered"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "repaired" in capfd.readouterr().out


def test_answers_after_a_copied_text_are_those_after_the_text(model: Model) -> None:
    text, questions = TEXT[:70], [TEXT[i : i + 5] for i in range(3)]
    options: dict[str, Any] = {"precision": "base", "draft": "ngram", "kv": "tiered", "max_rows": 64}
    with Engine(model, ctx=128, threads=1, max_seqs=4, **options) as engine:
        with having_read(engine, text) as shared:
            found = Batch(engine, questions, 3, 9, begin=shared).run()
            assert shared.tokens == text
        for question, made in zip(questions, found, strict=True):
            with Timeline(engine, max_tokens=9, ignore_eos=True) as sequence:
                for _ in sequence.generate(text + question):
                    pass
                assert sequence.tokens[75:] == made


def test_a_context_without_enough_text_is_left_out(model: Model) -> None:
    told: list[str] = []
    found = measure_together(
        model, TEXT, [TEXT[:5]] * 3, (128, 900, 64), (1, 3), 8, threads=1, progress=told.append
    )
    assert list(found) == ["128", "64"]
    assert [line for line in told if "left out" in line] == [
        f"context 900 left out: the text has {len(TEXT)} tokens, 887 were needed"
    ]
    for by_places in found.values():
        assert set(by_places) == {"1", "3"}
        for by_name in by_places.values():
            assert by_name["full"]["of_full"] == by_name["memory"]["tokens_per_step"] == 1
            assert all(row["tok_per_s"] > 0 for row in by_name.values())


def test_a_context_that_the_model_does_not_have_is_left_out(model: Model) -> None:
    told: list[str] = []
    text = TEXT * 20
    together = measure_together(model, text, [TEXT[:5]], (2048,), (1,), 8, 1, told.append)
    assert told == ["context 2048 left out: the model has 1024 positions"]
    memory = origin_memory.measure_caches(Path(model.info.path), text, (2048,), threads=1)
    assert together == memory == origin_memory.measure_cache_speed(model, text, (2048,), threads=1) == {}


def test_acceptance_is_that_of_drafts_after_the_text(
    long_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_memory, "TAIL", 40)
    with (
        Model(long_bundle) as opened,
        Engine(opened, ctx=150, threads=1, draft="off") as engine,
        Timeline(engine, ignore_eos=True) as sequence,
    ):
        for _ in sequence.generate(TEXT[1:61]):
            pass
        ids = sequence.tokens
    path = tmp_path / "known.mxb"  # a table that knows what the model writes next
    path.write_bytes(tiny.with_ngrams(long_bundle.read_bytes(), [np.array(ids)] * 2))
    reported: list[Any] = []
    found = origin_memory.measure_caches(
        path, ids, (150, 800), 1, threads=1, only=("mxfp4",), report=lambda *row: reported.append(row)
    )
    assert reported == [("150", name, row) for name, row in found["150"].items()]
    assert set(found) == {"150"}
    shares: dict[str, list[float]] = {"f16": [], "mxfp4": []}
    for kv, of_kv in shares.items():
        verified = accepted = 0
        with Model(path) as opened:
            for at in range(114, 150, 4):
                with (
                    Engine(opened, ctx=150, threads=1, draft_min=3, draft_max=3, kv=kv) as engine,  # type: ignore[arg-type]
                    Timeline(engine, ignore_eos=True) as sequence,
                ):
                    sequence.prompt(ids[:at])
                    while len(sequence.tokens) == at:
                        engine.step([sequence])
                    engine.step([sequence])
                    drafts = [draft for draft in sequence.drafts if draft.verified]
                    verified += len(drafts)
                    accepted += sum(draft.accepted for draft in drafts)
                    of_kv.append(sum(draft.accepted for draft in drafts) / max(len(drafts), 1))
        assert found["150"][kv]["acceptance"] == accepted / verified > 0
    difference = np.subtract(shares["mxfp4"], shares["f16"])
    assert found["150"]["mxfp4"]["acceptance_less_f16"] == pytest.approx(difference.mean())
    assert difference.any()


def test_another_schedule_leaves_the_rest_of_a_bundle_as_it_is(long_bundle: Path) -> None:
    """Also where later sections are referred to by index, as a drafter's are."""
    good = tiny.with_schedule(long_bundle.read_bytes(), Schedule.default(4))
    path = long_bundle.parent / "drafting.mxb"
    path.write_bytes(tiny.with_drafter(good, tiny.drafter(Bundle(good).config)))
    other = dataclasses.replace(Schedule.default(4), recent=96)
    with origin_memory._opened(path, Bundle.open(path), other) as model:
        opened = Bundle.open(Path(model.info.path))
        assert model.info.has_drafter
        assert opened.schedule == Schedule.unpack(other.pack(), 4)
        assert list(opened.sections) == list(Bundle.open(path).sections)
