# SPDX-License-Identifier: Apache-2.0
"""Where features meet: steps of two passes, full contexts, prompts while a row waits, costs for many.

Each test fails on a runtime that derives a capacity from one feature alone, or forgets more or less than it
is told to. ``fuzz/api.c`` looks for more of the kind.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from clib import REPOSITORY, compile_c
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.runtime._ffi import load
from mxdraft.ship.build import sources as c_files

MIXED: dict[str, Any] = {"ctx": 256, "precision": "auto", "core_fraction": 0.25, "threads": 1}


@pytest.fixture(scope="module")
def full(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T with a drafter, an n-gram table and a schedule of its own."""
    data = bundle.read_bytes()
    config = Bundle(data).config
    documents = [np.random.default_rng(1).integers(0, config.vocab, 200).tolist(), [5, 6, 7, 8] * 15]
    schedule = dataclasses.replace(Schedule.default(config.layers), core_fraction=0.3, catch_up=7)
    data = tiny.with_schedule(tiny.with_ngrams(data, documents), schedule)
    path = tmp_path_factory.mktemp("full") / "full.mxb"
    path.write_bytes(tiny.with_drafter(data, tiny.drafter(config)))
    return path


@pytest.fixture(scope="module")
def model(full: Path) -> Iterator[Model]:
    with Model(full) as model:
        yield model


@pytest.mark.parametrize("catch_up", [16, 17, 18, 32])
def test_a_step_of_two_passes_holds_all_that_it_commits(model: Model, catch_up: int) -> None:
    """Fifteen right drafts, the first pass's own token, and the one of the catch-up: 17 in a step."""
    options: dict[str, Any] = {"precision": "auto", "core_fraction": 0.0, "ctx": 200, "catch_up": catch_up}
    sampling: dict[str, Any] = {"ignore_eos": True, "max_tokens": 120}
    with Engine(model, draft="off", **options) as engine, Timeline(engine, **sampling) as alone:
        list(alone.generate([5, 6, 7]))
        truth = alone.tokens
    with (
        Engine(model, draft="auto", draft_max=15, draft_min=15, **options) as engine,
        Timeline(engine, **sampling) as timeline,
    ):
        timeline.draft_with(lambda ids, most: truth[len(ids) : len(ids) + most])
        longest = 0
        for piece in timeline.generate([5, 6, 7]):
            longest = max(longest, len(piece.ids))
            assert [record.token for record in timeline.records] == piece.ids
            assert len(timeline.drafted) == len(piece.ids)
        assert timeline.tokens == truth
        assert longest == (17 if catch_up == 17 else 16)


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_a_full_context_stays_full(model: Model, draft: Any) -> None:
    """Truncated to its whole length it has forgotten nothing, so nothing may be written after its end."""
    with Engine(model, ctx=64, max_seqs=2, precision="base", draft=draft) as engine:
        first, other = Timeline(engine, ignore_eos=True), Timeline(engine, ignore_eos=True, max_tokens=5)
        list(other.generate([9, 9, 9]))
        kept = other.tokens
        list(first.generate([5] * 60))
        assert (first.stop, len(first.tokens)) == ("context", 64)
        first.truncate(64)
        assert first.stop == "context"
        for _ in range(5):
            engine.step([first])
        assert len(first.tokens) == 64
        assert other.tokens == kept
        first.truncate(63)
        assert first.stop == "none"


def test_a_limit_that_is_reached_drafts_no_more(model: Model) -> None:
    """The count of tokens outlives a stop that a truncation clears."""
    with (
        Engine(model, ctx=100, precision="base", draft_max=15, draft_min=15) as engine,
        Timeline(engine, ignore_eos=True, max_tokens=3) as timeline,
    ):
        list(timeline.generate([5, 6, 7]))
        timeline.draft_with(lambda _, most: [1] * most)
        timeline.truncate(len(timeline.tokens))
        engine.step([timeline])
        assert (timeline.stop, len(timeline.output), timeline.drafts) == ("limit", 1, [])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5])
def test_the_base_plane_drafts_within_the_engines_rows(model: Model, max_rows: int) -> None:
    """Costs come from a file: by these, a draft of the base plane costs nearly nothing."""
    with Engine(model, ctx=128, precision="full", max_rows=max_rows, draft_max=15, threads=1) as engine:
        ffi, lib = load().ffi, load().lib
        costs = ffi.new("mxd_costs *", {"step": [0.0] + [1e-3] * 16, "base": 1e-5})
        lib.mxd_engine_set_costs(engine._pointer, costs)
        with Timeline(engine, ignore_eos=True, max_tokens=60) as timeline:
            sources = set()
            for _ in timeline.generate([5 + i % 4 for i in range(40)]):
                sources |= {record.source for record in timeline.drafts}
            made = timeline.tokens
            assert "base" in sources
    with (
        Engine(model, ctx=128, precision="full", draft="off", threads=1) as engine,
        Timeline(engine, ignore_eos=True, max_tokens=60) as alone,
    ):
        list(alone.generate([5 + i % 4 for i in range(40)]))
        assert alone.tokens == made


def _after(engine: Engine, timeline: Timeline, length: int) -> tuple[list[int], list[float]]:
    """Tokens and thresholds that a timeline goes on with, up to a length."""
    thresholds = []
    while len(timeline.tokens) < length:
        engine.step([timeline])
        thresholds += [record.threshold for record in timeline.records]
    return timeline.tokens[:length], thresholds[: length - 40]


def test_a_prompt_that_comes_while_a_row_waits_changes_nothing(model: Model) -> None:
    """The row was not decided yet: it is one of the prompt's, as it would be without the neighbour."""
    waited = 0
    with (
        Engine(model, max_seqs=2, draft="off", **MIXED) as engine,
        Engine(model, draft="off", **MIXED) as own,
    ):
        for seed in range(60):
            sampled: dict[str, Any] = {"ignore_eos": True, "temperature": 1, "seed": seed}
            with (
                Timeline(engine, **sampled) as timeline,
                Timeline(engine, ignore_eos=True) as neighbour,
                Timeline(own, **sampled) as alone,
            ):
                timeline.prompt([seed, 7, 9])
                neighbour.prompt([4, 5])
                engine.step([timeline, neighbour])
                for _ in range(40):
                    before = len(timeline.tokens)
                    engine.step([timeline, neighbour])
                    if len(timeline.tokens) == before:
                        break
                else:
                    continue
                waited += 1
                alone.prompt([seed, 7, 9])
                while len(alone.tokens) < len(timeline.tokens):
                    own.step([alone])
                assert alone.tokens == timeline.tokens
                for each in (timeline, alone):
                    each.prompt([11, 12, 13])
                assert _after(engine, timeline, 100) == _after(own, alone, 100)
    assert waited > 20


def test_truncation_forgets_thresholds_exactly(model: Model) -> None:
    """A timeline that went on and came back decides as one that never went on."""
    rng = random.Random(3)
    with Engine(model, max_seqs=2, draft="off", **MIXED) as engine:
        for seed in range(12):
            sampled: dict[str, Any] = {"ignore_eos": True, "temperature": 1, "seed": seed}
            with Timeline(engine, **sampled) as timeline, Timeline(engine, **sampled) as plain:
                for each, length in ((plain, 30), (timeline, 30 + rng.randrange(1, 60))):
                    each.prompt([seed, 7, 9])
                    _after(engine, each, length)
                kept = rng.randrange(10, 30)
                assert timeline.tokens[:kept] == plain.tokens[:kept]
                for each in (plain, timeline):
                    each.truncate(kept)
                    each.prompt([3, 4])
                assert _after(engine, timeline, 120) == _after(engine, plain, 120)


def test_truncation_to_the_whole_length_is_none(model: Model) -> None:
    with Engine(model, max_seqs=2, **MIXED) as engine:
        for seed in range(8):
            sampled: dict[str, Any] = {"ignore_eos": True, "temperature": 1, "seed": seed, "stop": ["zzz"]}
            with Timeline(engine, **sampled) as timeline, Timeline(engine, **sampled) as plain:
                for each in (timeline, plain):
                    each.prompt([seed, 7, 9])
                    _after(engine, each, 40)
                timeline.truncate(len(timeline.tokens))
                assert _after(engine, timeline, 120)[0] == _after(engine, plain, 120)[0]


def test_calls_from_a_callback_are_refused(model: Model) -> None:
    """The engine is in a step: whatever a drafter asks of it then is an error, not a crash."""
    refused = []

    def meddle(_: list[int], most: int) -> list[int]:
        calls: list[Any] = [
            lambda: engine.step([timeline]),
            lambda: timeline.prompt([5]),
            lambda: timeline.truncate(1),
            lambda: timeline.logits([5]),
            lambda: Timeline(engine),
            lambda: Timeline(engine, copy_of=timeline),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="in a call already"):
                call()
            refused.append(1)
        return [1] * most

    with (
        Engine(model, ctx=100, max_seqs=3, precision="base", draft_min=2) as engine,
        Timeline(engine, ignore_eos=True, max_tokens=4) as timeline,
    ):
        timeline.draft_with(meddle)
        list(timeline.generate([5, 6, 7]))
        assert len(timeline.tokens) == 7
    assert len(refused) >= 6


def test_costs_of_many_sequences_use_a_cache_of_each(full: Path, tmp_path: Path) -> None:
    """Under ThreadSanitizer: two threads never write one place of the drafter's cache."""
    program = compile_c(
        ["gcc", "-g", "-fsanitize=thread", "-Wno-tsan"],
        tmp_path / "measure",
        "tests/c/measure.c",
        *c_files("library"),
        "-lm",
    )
    done = _run([str(program), str(full)])
    assert done == (0, "done\n")


def _run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8", check=False, timeout=300
    )
    return done.returncode, done.stdout + done.stderr
