# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: which rows get full precision, what that makes of them, and that only the preceding tokens
decide it. (That drafts do not: test_speculation.py.)"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from malformed import build, patch, sections_of
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import FRACTIONS, Schedule
from mxdraft.errors import NumericError, UsageError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline, TokenRecord

MIXED: dict[str, Any] = {"core_fraction": 0.1, "catch_up": 4, "draft": "off"}
TEXT = random.Random(1).choices(range(3, 500), k=60)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as opened:
        yield opened


def logits(engine: Engine, ids: list[int], rule: Any = None, pieces: int = 1) -> np.ndarray[Any, Any]:
    with Timeline(engine) as sequence:
        sequence.decide_core_with(rule)
        return np.concatenate([sequence.logits(part) for part in np.array_split(ids, pieces)])


def generate(engine: Engine, ids: list[int], rule: Any = None, **sampling: Any) -> list[int]:
    with Timeline(engine, max_tokens=24, ignore_eos=True, **sampling) as sequence:
        sequence.decide_core_with(rule)
        for _ in sequence.generate(ids):
            pass
        return sequence.tokens


# ---- what the passes compute ----


def test_a_look_at_every_row_is_full_precision(model: Model) -> None:
    with Engine(model, precision="full", draft="off") as full, Engine(model, **MIXED) as mixed:
        assert (logits(mixed, TEXT, lambda _: True) == logits(full, TEXT)).all()
        always = generate(mixed, TEXT[:5], lambda _: True, temperature=0.8, seed=3)
        assert always == generate(full, TEXT[:5], temperature=0.8, seed=3)


def test_rows_before_the_first_look_are_base_precision(model: Model) -> None:
    with Engine(model, precision="base", draft="off") as base, Engine(model, **MIXED) as mixed:
        expected = logits(base, TEXT)
        seen: list[int] = []

        def never(row: TokenRecord) -> bool:
            seen.append(row.position)
            return False

        got = logits(mixed, TEXT, never)
        assert (got[:3] == expected[:3]).all()
        assert not (got[3] == expected[3]).all()  # the fourth is due
        assert not (got[4] == expected[4]).all()  # and left other keys and values
        # Every fourth row has no base token, for it is computed at full precision at once.
        assert seen == [position for position in range(1, len(TEXT) + 1) if position % 4]


def test_a_look_repairs_the_rows_before_it(model: Model) -> None:
    """After a full-precision pass all keys and values are at full precision, as after a prompt."""
    with Engine(model, **MIXED) as mixed, Engine(model, precision="full", draft="off") as full:
        wanted = logits(full, TEXT)
        got = logits(mixed, TEXT[:20], lambda row: row.position in (2, 3, 7, 10, 11))
        for row in (1, 2, 6, 9, 10, 14, 18):  # looked at, the last two as due
            assert (got[row] == wanted[row]).all(), row
        for row in (3, 4, 5, 7, 8):
            assert not (got[row] == wanted[row]).all(), row


def test_records_tell_what_was_known(model: Model) -> None:
    asked: dict[int, TokenRecord] = {}

    def rule(row: TokenRecord) -> bool:
        asked[row.position] = row
        return row.position % 3 == 0

    with Engine(model, precision="base", draft="off") as base, Engine(model, **MIXED) as mixed:
        with Timeline(mixed, max_tokens=20, ignore_eos=True) as sequence:
            sequence.decide_core_with(rule)
            records = []
            for _ in sequence.generate(TEXT[:4]):
                records += sequence.records
            tokens = sequence.tokens
            stats = sequence.stats
        assert [record.token for record in records] == tokens[4:]
        assert [record.position for record in records] == list(range(4, 24))
        assert records[0].look == "all"
        for record in records[1:]:
            if record.position not in asked:
                assert (record.look, record.base_token) == ("due", None)
                continue
            known = asked[record.position]
            assert record.look == ("core" if record.position % 3 == 0 else "none")
            assert record.base_token == known.token
            assert record.margin == known.margin >= 0
            assert record.confidence == pytest.approx(np.exp(-record.margin), rel=1e-6)
            assert 0 <= record.history <= 1
        looks = [record.look for record in records]
        assert stats["core_fraction"]["precision"] == pytest.approx(looks.count("core") / 20, abs=1e-4)
        assert stats["due"] == looks.count("due")
        # The margin is that of the two largest logits.
        expected = np.sort(logits(base, TEXT), axis=1)
        with Timeline(base, max_tokens=4, ignore_eos=True) as sequence:
            sequence.prompt(TEXT)
            base.step([sequence])
            assert sequence.records[0].margin == expected[-1][-1] - expected[-1][-2]


# ---- what decides ----


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_threads_and_chunks_change_nothing(model: Model, threads: int, rows: int) -> None:
    with (
        Engine(model, threads=1, max_rows=64, **MIXED) as one,
        Engine(model, threads=threads, max_rows=rows, **MIXED) as other,
    ):
        expected = logits(one, TEXT)
        for pieces in (1, 5, len(TEXT)):
            assert (logits(other, TEXT, pieces=pieces) == expected).all()
        for sampling in ({}, {"temperature": 1.0, "seed": 5}):
            assert generate(one, TEXT[:9], **sampling) == generate(other, TEXT[:9], **sampling)


def test_sequences_that_share_looks_are_as_alone(model: Model) -> None:
    """They wait for each other, and for prompts that come later."""
    prompts = [TEXT[i : i + 3 + i % 5] for i in range(20)]
    with Engine(model, ctx=64, **MIXED) as engine:
        alone = [generate(engine, prompt) for prompt in prompts]
    with Engine(model, ctx=64, max_seqs=20, max_rows=24, threads=2, **MIXED) as engine:
        running: list[Timeline] = []
        idle = 0
        while len(running) < 20 or any(sequence.stop == "none" for sequence in running):
            if len(running) < 20:
                running.append(Timeline(engine, max_tokens=24, ignore_eos=True))
                running[-1].prompt(prompts[len(running) - 1])
            engine.step(running)
            idle += sum(sequence.stop == "none" and not sequence.output for sequence in running)
        assert [sequence.tokens for sequence in running] == alone
    assert idle > 0


def test_nobody_waits_for_others_for_long(model: Model) -> None:
    """One sequence whose every row is core, and one that has no core row and nothing due."""
    options: dict[str, Any] = {**MIXED, "catch_up": 32}
    with (
        Engine(model, ctx=64, max_seqs=2, **options) as engine,
        Timeline(engine, max_tokens=8, ignore_eos=True) as core,
        Timeline(engine, max_tokens=31, ignore_eos=True) as plain,
    ):
        core.decide_core_with(lambda _: True)
        plain.decide_core_with(lambda _: False)
        core.prompt(TEXT[:3])
        plain.prompt(TEXT[3:6])
        waits = []
        while core.stop == "none":
            waits.append(0)
            engine.step([core, plain])
            while not core.output:
                waits[-1] += 1
                engine.step([core, plain])
        assert plain.stop == "none"  # it ran all the while
        assert waits[0] == 0
        assert set(waits[1:]) == {3}


def test_second_prompts_and_truncation_leave_nothing_behind(model: Model) -> None:
    with Engine(model, ctx=128, **MIXED) as engine:
        with Timeline(engine, max_tokens=10, ignore_eos=True) as sequence:
            for _ in sequence.generate(TEXT[:6]):
                pass
            for _ in sequence.generate(TEXT[6:9]):
                pass
            sequence.truncate(12)
            kept = sequence.tokens
            for _ in sequence.generate(TEXT[9:13]):
                pass
            after = sequence.tokens
        with Timeline(engine, max_tokens=10, ignore_eos=True) as sequence:
            for _ in sequence.generate(kept + TEXT[9:13]):
                pass
            assert sequence.tokens == after


def test_kept_tokens_are_as_a_prompt(model: Model) -> None:
    """Even rows that were at base precision when they were cut off."""
    with Engine(model, ctx=128, **MIXED) as engine:
        with Timeline(engine, max_tokens=10, ignore_eos=True) as sequence:
            for _ in sequence.generate(TEXT[:6]):
                pass
            sequence.truncate(14)
            kept = sequence.tokens
            after = sequence.logits(TEXT[:9])
        with Timeline(engine, max_tokens=1, ignore_eos=True) as sequence:
            for _ in sequence.generate(kept):
                pass
            sequence.truncate(len(kept))
            assert (sequence.logits(TEXT[:9]) == after).all()


def test_truncating_a_queued_prompt_keeps_what_was_decided(model: Model) -> None:
    """The threshold moved with rows before the prompt; cutting queued tokens takes nothing of it back."""

    def text(model: Model, cut: bool) -> list[float]:
        with (
            Engine(model, ctx=128, **MIXED) as engine,
            Timeline(engine, max_tokens=30, ignore_eos=True) as sequence,
        ):
            for _ in sequence.generate(TEXT[:6]):
                pass
            sequence.prompt(TEXT[6:12] + TEXT[:6] if cut else TEXT[6:12])
            if cut:
                sequence.truncate(len(sequence.tokens) - 6)
            thresholds: list[float] = []
            while sequence.stop == "none":
                engine.step([sequence])
                thresholds += [record.threshold for record in sequence.records]
            return [*sequence.tokens, *thresholds]

    assert text(model, cut=True) == text(model, cut=False)


def test_a_prompt_ends_waiting(model: Model) -> None:
    with (
        Engine(model, ctx=64, max_seqs=2, **MIXED | {"catch_up": 32}) as engine,
        Timeline(engine, ignore_eos=True) as waiting,
        Timeline(engine, ignore_eos=True) as other,
    ):
        waiting.decide_core_with(lambda _: True)
        other.decide_core_with(lambda _: False)
        waiting.prompt(TEXT[:3])
        other.prompt(TEXT[3:6])
        engine.step([waiting, other])
        assert waiting.output
        engine.step([waiting, other])
        assert not waiting.output
        waiting.prompt(TEXT[6:9])
        engine.step([waiting, other])
        (record,) = waiting.records
        assert (record.look, record.base_token) == ("all", None)


def test_a_copy_waits_as_the_original(model: Model) -> None:
    with (
        Engine(model, ctx=64, max_seqs=3, **MIXED | {"catch_up": 32}) as engine,
        Timeline(engine, ignore_eos=True) as waiting,
        Timeline(engine, ignore_eos=True) as other,
    ):
        waiting.decide_core_with(lambda _: True)
        other.decide_core_with(lambda _: False)
        waiting.prompt(TEXT[:3])
        other.prompt(TEXT[3:6])
        for _ in range(3):
            engine.step([waiting, other])
        assert not waiting.output
        with Timeline(engine, ignore_eos=True, copy_of=waiting) as copy:
            copy.decide_core_with(lambda _: False)  # it is decided already

            def steps_until_output(sequence: Timeline) -> int:
                for count in range(1, 9):
                    engine.step([sequence, other])
                    if sequence.output:
                        return count
                raise AssertionError("it waits for ever")

            assert steps_until_output(copy) == steps_until_output(waiting)
            assert copy.output == waiting.output
            assert copy.records == waiting.records
            assert copy.records[0].look == "core"


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_a_copy_catches_up_as_the_original(model: Model, fraction: float) -> None:
    """Whenever the copy is made, even between full-precision passes that have no room for all rows."""
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    with (
        Engine(
            model, ctx=64, max_seqs=2, max_rows=3, **MIXED | {"catch_up": 16, "core_fraction": fraction}
        ) as engine,
        Timeline(engine, ignore_eos=True, **sampling) as original,
    ):
        expected = generate(engine, TEXT[:6], **sampling)
        original.prompt(TEXT[:6])
        while len(original.tokens) < len(expected):
            engine.step([original])
            with Timeline(engine, ignore_eos=True, copy_of=original, **sampling) as copy:
                while len(copy.tokens) < len(expected):
                    engine.step([copy])
                assert copy.tokens == expected


def _loud_at_full(folder: Path, loud: int | None) -> Path:
    """Fixture T whose full precision, unlike base, makes infinities of one token's embedding."""
    checkpoint = tiny.checkpoint(tied=False)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].copy()
    embedding[:, 5] = 0
    if loud is not None:
        embedding[loud, 5] = np.abs(embedding[loud, :32]).max() / 2  # its block's scale stays
    tensors = checkpoint.tensors | {"model.embed_tokens.weight": embedding}
    folder.mkdir()
    export_model(dataclasses.replace(checkpoint, tensors=tensors), folder)
    pack(folder, folder / "t.mxb")
    sections = sections_of((folder / "t.mxb").read_bytes())
    entry = Bundle.open(folder / "t.mxb").tensors["target.residual", "model.layers.0.input_layernorm.weight"]
    huge = np.array(3e38, "<f4").tobytes()
    sections["target.residual"] = patch(sections["target.residual"], entry.offset + 4 * 5, huge)
    (folder / "loud.mxb").write_bytes(build(sections))
    return folder / "loud.mxb"


def test_what_base_precision_made_stands_if_full_precision_fails(tmp_path: Path) -> None:
    """The step that commits it succeeds; the next one reports the fault, and so does the one after."""

    def text(opened: Model, rule: Any, coming: list[int]) -> Iterator[list[int]]:
        options = {**MIXED, "catch_up": 32, "draft": "ngram", "draft_min": 3, "draft_max": 3}
        with (
            Engine(opened, **options) as engine,
            Timeline(engine, max_tokens=12, ignore_eos=True) as sequence,
        ):
            sequence.decide_core_with(rule)
            sequence.draft_with(lambda ids, most: coming[len(ids) :][:most])
            sequence.prompt(TEXT[:4])
            while sequence.stop == "none":
                engine.step([sequence])
                yield sequence.output

    def at_base(opened: Model) -> list[int]:
        return TEXT[:4] + [token for made in text(opened, lambda _: False, []) for token in made]

    with Model(_loud_at_full(tmp_path / "a", None)) as opened:
        silent = at_base(opened)
    at = next(i for i in range(6, 12) if silent[i] not in silent[:i])
    with Model(_loud_at_full(tmp_path / "b", silent[at])) as opened:
        expected = at_base(opened)
        assert expected[: at + 1] == silent[: at + 1]
        steps = text(opened, lambda row: row.position == at + 2, expected)
        made = TEXT[:4]
        with pytest.raises(NumericError, match=f"at position {at}"):
            made.extend(token for output in steps for token in output)
        assert made == expected[: at + 2]  # the row after the loud one is core


def test_everything_on_depends_on_the_tokens_alone(bundle: Path, tmp_path: Path) -> None:
    """Mixed precision over a tiered cache whose tiers change several times, with every drafter, thread count
    and chunk size; after a truncation it is as if the cut tokens had never been."""
    path = scheduled(bundle, tmp_path, recent=32, core_tokens=0.2)
    options: dict[str, Any] = {**MIXED, "ctx": 224, "kv": "tiered"}
    prompt = TEXT + TEXT[::-1]
    with Model(path) as model:

        def text(rows: int = 64, threads: int = 1, cut: bool = False, **other: Any) -> list[int]:
            with (
                Engine(model, threads=threads, max_rows=rows, **options | other) as engine,
                Timeline(engine, max_tokens=90, ignore_eos=True, temperature=1.0, seed=4) as sequence,
            ):
                if cut:
                    for _ in sequence.generate(prompt[:70]):
                        pass
                    sequence.truncate(70)
                for _ in sequence.generate(prompt[70:] if cut else prompt):
                    pass
                assert sequence.stats["core_fraction"]["precision"] > 0
                assert (sequence.cache.far > 0) == ("kv" not in other)
                return sequence.tokens

        expected = text()
        assert expected != text(kv="f16")
        assert expected == text(rows=5) == text(threads=3) == text(cut=True)
        assert expected == text(draft="ngram", draft_min=4) == text(draft="auto", threads=2, draft_min=2)


# ---- how many ----


def scheduled(bundle: Path, folder: Path, **changes: Any) -> Path:
    good = bundle.read_bytes()
    schedule = dataclasses.replace(Schedule.default(Bundle(good).config.layers), **changes)
    path = folder / "scheduled.mxb"
    path.write_bytes(build(sections_of(good) | {"schedule": schedule.pack()}))
    return path


def test_precision_is_the_bundles_or_the_callers(bundle: Path, model: Model, tmp_path: Path) -> None:
    with Engine(model) as plain, Engine(model, core_fraction=1) as all_core:
        assert plain.plan.precision == all_core.plan.precision == "full"
    assert model.plan(core_fraction=0.9).precision == "full"  # it reads fewer bytes than so many full passes
    assert model.plan(**MIXED).precision == "auto"  # type: ignore[arg-type]
    with Model(scheduled(bundle, tmp_path, core_fraction=0.05, catch_up=8)) as ready:
        assert ready.plan().precision == "auto"
        assert ready.plan(core_fraction=1).precision == "full"
        assert ready.plan(precision="base").precision == "base"
        with Engine(ready) as engine:  # the golden digests are of the planes
            assert engine.verify().digest == Engine(ready, precision="full").verify().digest


def test_weights_and_thresholds_of_the_schedule_decide(bundle: Path, tmp_path: Path) -> None:
    """About the fraction asked for is core if the thresholds are the quantiles of the scores."""
    scores: list[float] = []
    with Model(bundle) as model, Engine(model, **MIXED) as engine:
        logits(engine, TEXT, lambda row: scores.append(row.confidence) or False)  # type: ignore[func-returns-value]
    blend = {"alpha": -2.0, "beta": 0.0, "gamma": 0.0, "bias": 1.0}
    thresholds = tuple(float(np.quantile(1 - 2 * np.array(scores), 1 - f)) for f in FRACTIONS)
    path = scheduled(
        bundle,
        tmp_path,
        precision=Schedule.default(4).precision._replace(**blend),
        thresholds=thresholds,
    )
    with Model(path) as model:
        for fraction in (0.0, 0.05, 0.15):
            threshold = Schedule.unpack(Bundle.open(path).section("schedule").tobytes(), 4).threshold(
                fraction
            )
            with Engine(model, core_fraction=fraction, catch_up=8, draft="off") as engine:
                assert engine.plan.precision == "auto"
                with Timeline(engine, max_tokens=100, ignore_eos=True) as sequence:
                    records = []
                    for _ in sequence.generate(TEXT[:2]):
                        records += sequence.records
            asked = [record for record in records if record.base_token is not None]
            for record in asked:
                assert record.score == pytest.approx(1 - 2 * record.confidence, abs=1e-6)
                assert (record.look == "core") == (record.score > record.threshold)
            # Each row moves the threshold by a tenth of the distance to the fraction.
            expected = threshold
            for record in asked:
                assert record.threshold == pytest.approx(expected, abs=1e-4)
                expected += 0.1 * ((record.look == "core") - fraction)
            core = sum(record.look == "core" for record in asked)
            assert core == pytest.approx(
                fraction * len(asked), abs=0 if fraction == 0 else 0.06 * len(asked) + 1
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core_fraction": 1.01}, "not in 0..1"),
        ({"core_fraction": float("nan")}, "not in 0..1"),
        ({"core_fraction": -0.5}, "not in 0..1"),
        ({"catch_up": 33}, "not in 1..32"),
        ({"precision": "base", "core_fraction": 0.5}, "for precision auto"),
        ({"precision": "full", "catch_up": 4}, "for precision auto"),
    ],
)
def test_impossible_options_are_refused(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(model, **options)
