# SPDX-License-Identifier: Apache-2.0
"""What engines learn while they run: no snapshot of the policy is reused while somebody reads it, engines
that share a tuner learn from each other, and no race changes what they write."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
from clib import REPOSITORY, RUNTIME, compile_c
from malformed import build, sections_of
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule, Weights
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.runtime._ffi import load
from mxdraft.ship.build import sources

GCC = shutil.which("gcc")
DRIVERS = REPOSITORY / "tests" / "c"
SOURCE = RUNTIME / "src"

# ---- the protocol, every interleaving ----

READERS, SNAPSHOTS, PUBLICATIONS = 2, 3, 5
NONE = 99  # seen by a reader that reads nothing
FREE, CURRENT = -1, -2


class Reader(NamedTuple):
    at: int = 0
    seen: int = NONE
    number: int = 0  # of publications, as loaded
    holds: int = -1


class World(NamedTuple):
    readers: tuple[Reader, ...] = (Reader(),) * READERS
    at: int = 0  # the writer's next action
    least: int = NONE
    chosen: int = -1
    current: int = 0
    publications: int = 0
    replaced: tuple[int, ...] = (CURRENT, *(FREE,) * (SNAPSHOTS - 1))


def reader_step(r: Reader, w: World, fault: str) -> Reader:
    """mxd_tuner_begin, the step, mxd_tuner_end: one access to shared memory at a time."""
    actions: list[Callable[[], Reader]] = [
        lambda: r._replace(number=w.publications),
        lambda: r._replace(seen=r.number if fault != "begins unseen" else r.seen),
        lambda: r._replace(holds=w.current),
        lambda: r._replace(holds=-1),  # until here it may read
        lambda: r._replace(seen=NONE),
    ]
    if fault == "loads first":
        actions[0], actions[1], actions[2] = actions[2], actions[0], actions[1]
    return actions[r.at]()._replace(at=(r.at + 1) % len(actions))


def writer_step(w: World, fault: str) -> World | None:
    """fold(): looks at one reader after the other, takes a snapshot, writes it, publishes. None: not now."""
    if w.at < READERS:
        seen = NONE if fault == "ignores readers" else w.readers[w.at].seen
        return w._replace(at=w.at + 1, least=min(w.least, seen))
    at = w.at - READERS
    if at == 0:
        if w.publications == PUBLICATIONS:
            return None
        free = [i for i, r in enumerate(w.replaced) if r == FREE or 0 < r <= w.least]
        if not free:
            return w._replace(at=0, least=NONE)
        return w._replace(at=w.at + 1, chosen=free[-1])  # and writes it
    swap, count = (1, 2) if fault != "counts first" else (2, 1)
    if at == swap:
        replaced = list(w.replaced)
        replaced[w.current] = w.publications + (1 if swap == 1 else 0)
        replaced[w.chosen] = CURRENT
        w = w._replace(current=w.chosen, chosen=-1, replaced=tuple(replaced))
    elif at == count:
        w = w._replace(publications=w.publications + 1)
    return w._replace(at=w.at + 1) if at == 1 else w._replace(at=0, least=NONE)


def explore(fault: str = "") -> tuple[int, int, bool]:
    """Number of reachable states, the most publications; and True at the first state in which a snapshot is
    written while it is read."""
    todo, known = [World()], {World()}
    while todo:
        w = todo.pop()
        if any(r.holds == w.chosen != -1 for r in w.readers):
            return len(known), w.publications, True
        following = [writer_step(w, fault)]
        for i, r in enumerate(w.readers):
            readers = [*w.readers]
            readers[i] = reader_step(r, w, fault)
            following.append(w._replace(readers=tuple(readers)))
        for state in following:
            if state is not None and state not in known:
                known.add(state)
                todo.append(state)
    return len(known), max(w.publications for w in known), False


def test_no_interleaving_writes_a_snapshot_that_is_read() -> None:
    states, publications, bad = explore()
    assert states > 10_000
    assert publications == PUBLICATIONS
    assert not bad


@pytest.mark.parametrize("fault", ["ignores readers", "begins unseen", "loads first", "counts first"])
def test_every_part_of_the_protocol_is_needed(fault: str) -> None:
    assert explore(fault)[2]


# ---- the code ----


def compile_stress(folder: Path, *flags: str, fault: tuple[str, str] | None = None) -> Path:
    """The stress program, with one piece of tuner.c replaced."""
    if GCC is None:
        pytest.skip("gcc and its sanitizers are missing")
    code = (SOURCE / "tuner.c").read_text(encoding="utf-8").replace('"tuner.h"', f'"{SOURCE / "tuner.h"}"')
    if fault:
        assert code.count(fault[0]) == 1
        code = code.replace(*fault)
    (folder / "tuner.c").write_text(code, encoding="utf-8")
    return compile_c(
        [GCC, "-g", "-O1", "-DMXD_DEBUG", *flags],
        folder / "stress",
        *(folder / "tuner.c", SOURCE / "draft_policy.c", DRIVERS / "tuner_stress.c"),
        "-lm",
    )


def stress(program: Path, readers: int, steps: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(readers), str(steps)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)


def test_snapshots_stay_whole_while_they_are_read(tmp_path: Path) -> None:
    program = compile_stress(tmp_path, "-fsanitize=thread")
    for readers in (1, 3, 6):
        done = stress(program, readers, 4000)
        words = done.stdout.split()
        assert (done.returncode, done.stderr, words[:2]) == (0, "", ["wrong", "0"])
        assert int(words[3]) > 500  # publications that readers met
        assert words[4:] == ["tried", "1"]


@pytest.mark.parametrize(
    "fault",
    [
        ("    return least;", "    return READS_NONE;"),
        ("atomic_store(&r->tuner->places[r->place].seen, atomic_load(&r->tuner->publications));", ""),
    ],
    ids=["the writer ignores readers", "readers do not say so"],
)
def test_stress_finds_snapshots_that_are_used_too_soon(tmp_path: Path, fault: tuple[str, str]) -> None:
    done = stress(compile_stress(tmp_path, fault=fault), 3, 20_000)
    assert done.returncode == 1
    assert int(done.stdout.split()[1]) > 0


def test_engines_that_share_have_no_data_race(bundle: Path, tmp_path: Path) -> None:
    """They write what plain decoding writes, while one of them closes and opens again."""
    if GCC is None:
        pytest.skip("gcc and its sanitizers are missing")
    program = compile_c(
        [GCC, "-fsanitize=thread"],
        tmp_path / "engines",
        *("-g", "-O1", "-lm"),
        DRIVERS / "tuner_engines.c",
        *sources("library"),
    )
    done = subprocess.run([program, bundle], capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout == b"drafted 1 1 different 0\n"


# ---- engines ----

OPTIONS: dict[str, Any] = {"ctx": 128, "threads": 1, "precision": "base", "draft": "ngram"}


def evil(ids: list[int], most: int) -> list[int]:
    """Control tokens, which are hardly ever generated."""
    return [(ids[-1] + 1) % 3] * most


def drafted(engine: Engine, tokens: int) -> int:
    """Return how many tokens of an always wrong drafter a sequence verifies."""
    with Timeline(engine, max_tokens=tokens, ignore_eos=True) as sequence:
        sequence.draft_with(evil)
        for _ in sequence.generate([5]):
            pass
        return int(sequence.stats["drafted"])


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as model:
        yield model


def test_engines_learn_from_each_other(model: Model) -> None:
    with Engine(model, **OPTIONS) as teacher, Engine(model, **OPTIONS) as alone:
        drafted(teacher, 100)
        assert drafted(alone, 12) > 5
        with Engine(model, **OPTIONS) as pupil:
            pupil.share_tuner(teacher)
            assert drafted(pupil, 12) <= 2
            with Engine(model, **OPTIONS) as third:
                third.share_tuner(pupil)
                teacher.close()  # in any order
                assert drafted(third, 12) <= 2
            assert drafted(pupil, 12) <= 2


def test_costs_are_shared(model: Model) -> None:
    with Engine(model, **OPTIONS) as first, Engine(model, **OPTIONS) as second:
        first.measure_costs()
        second.share_tuner(first)
        assert second.step_costs == first.step_costs
        second.measure_costs()
        assert second.step_costs == first.step_costs


def test_engines_of_other_kinds_and_too_many_are_refused(model: Model) -> None:
    with Engine(model, **OPTIONS) as engine:
        for change in ({"threads": 2}, {"precision": "full"}, {"max_rows": 4}):
            with (
                Engine(model, **OPTIONS | change) as other,
                pytest.raises(UsageError, match="of different kinds cannot share a tuner"),
            ):
                other.share_tuner(engine)
        with (
            Engine(model, **OPTIONS) as other,
            Timeline(other),
            pytest.raises(UsageError, match="before a sequence opens"),
        ):
            other.share_tuner(engine)
        engine.share_tuner(engine)
        more = [Engine(model, **OPTIONS) for _ in range(8)]
        for other in more[:7]:
            other.share_tuner(engine)
        with pytest.raises(UsageError, match="8 engines share this tuner already"):
            more[7].share_tuner(engine)
        more[0].close()
        more[7].share_tuner(engine)


# ---- identify and schedule ----


def with_weights(bundle: Path, path: Path, weights: Weights) -> Path:
    schedule = Schedule.default(Bundle(bundle.read_bytes()).config.layers)
    section = dataclasses.replace(schedule, compute=weights).pack()
    path.write_bytes(build(sections_of(bundle.read_bytes()) | {"schedule": section}))
    return path


def test_weights_of_the_bundle_make_the_chance(bundle: Path, tmp_path: Path) -> None:
    """The logistic of alpha * logit(confidence) + gamma * logit(history) + bias; without one, no place."""
    costs = load().ffi.new("mxd_costs *", {"step": [1 + 0.01 * n for n in range(17)]})
    repeated = [(7 * i) % 50 + 3 for i in range(12)] * 3
    seen: dict[Weights, list[Any]] = {}
    texts = set()
    for weights in (Weights(0, 0, 1, 0), Weights(0.5, 0, 0.25, 1), Weights(0, 0, 1, -30)):
        path = with_weights(bundle, tmp_path / "weighted.mxb", weights)
        records = []
        with (
            Model(path) as model,
            Engine(model, **OPTIONS) as engine,
            Timeline(engine, max_tokens=40, ignore_eos=True) as sequence,
        ):
            load().lib.mxd_engine_set_costs(engine._pointer, costs)
            sequence.prompt(repeated)
            while sequence.stop == "none":
                engine.step([sequence])
                records.append(sequence.drafts)
            texts.add(tuple(sequence.tokens))
        seen[weights] = records
        for record in (r for step in records for r in step if r.parent < 0):
            odds = weights.bias
            for weight, p in ((weights.alpha, record.confidence), (weights.gamma, record.history)):
                odds += weight * log_odds(p)
            assert record.chance == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-3)
    assert len(texts) == 1
    places = {w: sum(r.verified for step in steps for r in step) for w, steps in seen.items()}
    assert places[Weights(0, 0, 1, 0)] > 6
    assert places[Weights(0, 0, 1, -30)] <= 3  # now and then one is tried anyway
    assert sum(len(step) for step in seen[Weights(0, 0, 1, -30)]) > 20  # they are proposed


def log_odds(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))


def test_records_say_what_became_of_each_draft(model: Model) -> None:
    with (
        Engine(model, **OPTIONS | {"draft_max": 4, "draft_min": 3}) as engine,
        Timeline(engine, max_tokens=30, ignore_eos=True) as plain,
    ):
        coming = [token for piece in plain.generate([5, 6]) for token in piece.ids]
        plain.close()
        sequence = Timeline(engine, max_tokens=30, ignore_eos=True)
        wrong = (coming[1] + 1) % 500
        nodes = [(coming[1], -1), (wrong, -1), (coming[2], 0), (9, 1)]
        sequence.prompt([5, 6])
        engine.step([sequence])
        assert sequence.drafts == []
        sequence.draft_with(lambda _ids, _most: nodes)
        engine.step([sequence])
        records = sequence.drafts
        assert [(r.token, r.parent, r.depth, r.source) for r in records] == [
            (coming[1], -1, 0, "caller"),
            (wrong, -1, 0, "caller"),
            (coming[2], 0, 1, "caller"),
            (9, 1, 1, "caller"),
        ]
        assert [r.accepted for r in records] == [True, False, True, False]
        assert sum(r.verified for r in records) >= 3
        assert all(0 < r.chance < 1 and 0 < r.history < 1 for r in records)
        assert records[2].chance < records[0].chance
        sequence.draft_with(lambda _ids, _most: [])
        engine.step([sequence])
        assert sequence.drafts == []


def test_what_has_no_place_is_learned_about(model: Model) -> None:
    """A row costs more than any token is worth; the acceptance rate is learned all the same."""
    costs = load().ffi.new("mxd_costs *", {"step": [1 + 10 * max(n - 1, 0) for n in range(17)]})
    with Engine(model, **OPTIONS) as engine, Timeline(engine, max_tokens=60, ignore_eos=True) as plain:
        coming = [5, *(token for piece in plain.generate([5]) for token in piece.ids), 0]
    history: dict[bool, float] = {}
    for right in (True, False):
        with Engine(model, **OPTIONS) as engine, Timeline(engine, max_tokens=60, ignore_eos=True) as sequence:
            load().lib.mxd_engine_set_costs(engine._pointer, costs)
            sequence.draft_with(lambda ids, _: [coming[len(ids)] if right else 1])  # noqa: B023
            sequence.prompt([5])
            while sequence.stop == "none":
                engine.step([sequence])
                history[right] = sequence.drafts[0].history if sequence.drafts else history.get(right, 0.5)
            assert sequence.stats["drafted"] < 8
    assert history[True] > 0.9
    assert history[False] < 0.1


# ---- costs of wide steps ----


def test_wide_steps_are_measured_for_several_sequences(model: Model, tmp_path: Path) -> None:
    many = OPTIONS | {"max_seqs": 4, "max_rows": 48}
    with Engine(model, **OPTIONS) as engine:
        engine.measure_costs(tmp_path)
        assert engine.wide_costs == {}
    with Engine(model, **many) as engine:
        assert not engine.load_costs(tmp_path)
        assert engine.wide_costs == {}
        engine.measure_costs(tmp_path)
        measured = engine.wide_costs
        assert list(measured) == [24, 32, 48]
        assert all(a <= b for a, b in pairwise([engine.step_costs[-1], *measured.values()]))
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(len(data.split()) for data in files.values()) == [18, 23]
    with Engine(model, **many) as engine:
        assert engine.load_costs(tmp_path)
        assert engine.wide_costs == pytest.approx(measured, abs=1e-9)
        (wide,) = (path for path, data in files.items() if len(data.split()) == 23)
        numbers = files[wide].split()
        for place, value in ((19, b"0.001"), (19, b"nan"), (20, b"-1"), (18, b"x")):
            wide.write_bytes(b" ".join([*numbers[:place], value, *numbers[place + 1 :]]) + b"\n")
            assert not engine.load_costs(tmp_path), (place, value)


def test_further_rows_of_the_drafter_are_those_of_several_sequences(bundle: Path, tmp_path: Path) -> None:
    good = bundle.read_bytes()
    path = tmp_path / "drafting.mxb"
    path.write_bytes(tiny.with_drafter(good, tiny.drafter(Bundle(good).config)))
    costs = load().ffi.new("mxd_costs *")
    with Model(path) as model:
        for sequences in (1, 4):
            with Engine(model, **OPTIONS | {"draft": "auto", "max_seqs": sequences}) as engine:
                engine.measure_costs()
                load().lib.mxd_engine_get_costs(engine._pointer, costs)
            assert 0 < costs.draft < 1
            assert costs.draft_row == 0 if sequences == 1 else 0 <= costs.draft_row < 1


@pytest.mark.parametrize(("row", "pays"), [(0.002, True), (1.0, False)])
def test_wide_costs_decide_for_many_sequences(model: Model, row: float, pays: bool) -> None:
    """Up to 16 rows cost the same in both cases; the wider steps decide."""
    costs = load().ffi.new("mxd_costs *", {"step": [10 + 0.01 * n for n in range(17)]})
    costs.wide = [10.2 + row * n for n in (8, 16, 32, 48)]
    with Engine(model, **OPTIONS | {"max_seqs": 20, "max_rows": 128}) as engine:
        load().lib.mxd_engine_set_costs(engine._pointer, costs)
        sequences = [Timeline(engine, max_tokens=8, ignore_eos=True) for _ in range(20)]
        for i, sequence in enumerate(sequences):
            sequence.prompt([i + 3])
            sequence.draft_with(lambda _, most: [7] * most)
        for _ in range(2):
            engine.step(sequences)
        assert (sum(sequence.stats["drafted"] for sequence in sequences) > 10) == pays
