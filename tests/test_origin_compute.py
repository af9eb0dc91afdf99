# SPDX-License-Identifier: Apache-2.0
"""The measurements for compute are what their names say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from mxdraft.errors import NumericError, UsageError
from mxdraft.measure.origin.compute import (
    METHODS,
    Batch,
    Example,
    examples,
    identify,
    judge,
    log_odds,
    measure_drafting,
)
from mxdraft.runtime import DraftRecord, Engine, Model

PROMPTS = [[3 + i, 40 + 2 * i, 9, 3 + i, 40 + 2 * i] for i in range(12)]


@pytest.fixture(scope="module")
def model(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Fixture T with a table of its own answers to some of the prompts."""
    with Model(bundle) as plain, Engine(plain, ctx=64, threads=1, precision="base", max_seqs=4) as engine:
        said = [p + made for p, made in zip(PROMPTS, Batch(engine, PROMPTS, 4, 24).run(), strict=True)]
    path = tmp_path_factory.mktemp("origin") / "t.mxb"
    path.write_bytes(tiny.with_ngrams(bundle.read_bytes(), [ids for ids in said[::2] for _ in range(2)]))
    with Model(path) as model:
        yield model


def test_methods_are_compared_on_the_same_outputs(model: Model) -> None:
    steps: list[str] = []
    options: dict[str, Any] = {"tokens": 20, "ctx": 64, "threads": 1, "rounds": 2}
    results = measure_drafting(model, PROMPTS, concurrencies=(1, 3), progress=steps.append, **options)
    assert list(results) == ["1", "3"]
    assert len(steps) == len(set(steps)) == 2 * 2
    for by_method in results.values():
        assert list(by_method) == list(METHODS)
        off = by_method["off"]
        assert (off["tokens_per_step"], off["drafted_per_step"]) == (1, 0)
        assert off["acceptance"] is None
        for length in (1, 2, 4):
            fixed = by_method[f"fixed {length}"]
            assert 0 < fixed["drafted_per_step"] <= length
            assert fixed["tokens_per_step"] == pytest.approx(
                1 + fixed["acceptance"] * fixed["drafted_per_step"]
            )
        for numbers in by_method.values():
            assert 0 < numbers["p50_ms"] <= numbers["p95_ms"]
            assert numbers["tok_per_s"] > 0


def test_faults_of_a_comparison_are_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="12 prompts fit: 2 rounds of 8 sequences need more"):
        measure_drafting(model, PROMPTS, 20, 64, 1, concurrencies=(8,), rounds=2)
    real, calls = Batch.steps, iter(METHODS)

    def wrong(batch: Batch) -> Iterator[None]:
        name = next(calls)
        yield from real(batch)
        batch.made[-1] += [0] if name == "fixed 2" else []

    monkeypatch.setattr(Batch, "steps", wrong)
    with pytest.raises(NumericError, match=r"drafting \(fixed 2, 1 sequences\) changed the output"):
        measure_drafting(model, PROMPTS, 20, 64, 1, concurrencies=(1,), rounds=1)


# ---- identification ----


def test_records_become_examples() -> None:
    first = DraftRecord(5, -1, 0, "model", 0.5, 0.25, 0.3, True, True)
    drafts = [
        first,
        first._replace(accepted=False, token=6),
        first._replace(parent=0, depth=1, accepted=False),
        first._replace(parent=1, depth=1, accepted=False),
        first._replace(verified=False),
    ]
    found = list(examples(7, drafts))
    assert [(e.reached, e.accepted) for e in found] == [
        (True, True),
        (True, False),
        (True, False),
        (False, False),
    ]
    assert {e.prompt for e in found} == {7}
    assert found[0].signals == pytest.approx((0, -math.log(3)))
    assert log_odds(np.array([0.0, 1.0])).tolist() == pytest.approx([-9.21, 9.21], abs=0.01)


def test_examples_are_judged_on_the_prompts_that_were_not_fitted() -> None:
    """The chance is right on even prompts and inverted on odd ones."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(4000):
        chance = float(rng.random())
        right = bool(rng.random() < (chance if i % 2 == 0 else 1 - chance))
        found.append(Example(i % 2, (float(log_odds(np.array(chance))), 0.0), chance, True, right))
    upright = judge([e._replace(prompt=i % 4 // 2) for i, e in enumerate(found[::2])])
    assert upright["accuracy"] == pytest.approx(0.75, abs=0.03)
    assert upright["auc"] == pytest.approx(5 / 6, abs=0.03)
    assert upright["signals"]["confidence"] == pytest.approx(5 / 6, abs=0.03)
    assert upright["weights"]["alpha"] == pytest.approx(1, abs=0.15)
    assert all(abs(chance - accepted) < 0.1 for chance, accepted, _ in upright["reliability"])
    assert judge(found)["auc"] < 0.25
    with pytest.raises(UsageError, match="10 drafts are too few to judge by"):
        judge(found[:10])


def test_drafts_of_a_real_model_are_judged(model: Model) -> None:
    many = [[a, b, *prompt] for prompt in PROMPTS for a in range(3, 6) for b in (7, 8)]
    result = identify(model, many, tokens=24, ctx=64, threads=1, places=4)
    assert result["auc"] > 0.6
    assert 0.5 < result["accuracy"] <= 1
    assert sum(count for _, _, count in result["reliability"]) == result["examples"] > 100
    assert 0 < result["us_per_step"] < 1e6
