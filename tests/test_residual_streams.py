# SPDX-License-Identifier: Apache-2.0
"""mxd_seq_streams(): residual streams of given tokens, the same in every way of asking for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from mxdraft.errors import CapacityError, UsageError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline
from numpy.typing import NDArray

IDS = [7 * i % 500 for i in range(1, 67)]
LAYERS = tiny.checkpoint().config.layers


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as model:
        yield model


def streams(model: Model, layers: list[int], **options: Any) -> NDArray[np.float32]:
    with (
        Engine(model, **{"threads": 1, "precision": "full"} | options) as engine,
        Timeline(engine) as timeline,
    ):
        return timeline.streams(IDS, layers)


def test_a_layers_stream_is_the_last_one_of_a_model_that_ends_there(model: Model, tmp_path: Path) -> None:
    whole = tiny.checkpoint()
    every = streams(model, list(range(LAYERS + 1)))
    assert every.shape == (len(IDS), LAYERS + 1, whole.config.hidden)
    for layers in range(1, LAYERS):
        dropped = tuple(f"model.layers.{i}." for i in range(layers, LAYERS))
        tensors = {name: t for name, t in whole.tensors.items() if not name.startswith(dropped)}
        folder = tmp_path / str(layers)
        export_model(replace(whole, config=replace(whole.config, layers=layers), tensors=tensors), folder)
        pack(folder, folder / "t.mxb")
        with Model(folder / "t.mxb") as shorter:
            last = streams(shorter, [layers])
            assert np.array_equal(last[:, 0], every[:, layers])
            assert np.array_equal(streams(shorter, [0])[:, 0], every[:, 0])


@pytest.mark.parametrize("precision", ["base", "full"])
def test_ways_of_asking_do_not_matter(model: Model, precision: str) -> None:
    expected = streams(model, [0, 2, LAYERS], precision=precision)
    for options in ({"threads": 3}, {"max_rows": 1}, {"max_rows": 7, "threads": 2}):
        assert np.array_equal(streams(model, [0, 2, LAYERS], precision=precision, **options), expected)
    assert np.array_equal(streams(model, [LAYERS, 2, 2], precision=precision), expected[:, [2, 1, 1]])
    with Engine(model, threads=1, precision=precision, max_seqs=2) as engine, Timeline(engine) as timeline:  # type: ignore[arg-type]
        for part in (IDS[:5], [], IDS[5:40]):
            timeline.streams(part, [2])
        with Timeline(engine) as other:
            other.streams(IDS[:9], [1])
        timeline.truncate(20)
        assert np.array_equal(timeline.streams(IDS[20:], [0, 2, LAYERS]), expected[20:])


def test_they_are_what_logits_come_from(model: Model) -> None:
    """The last stream, normalized, times the head; the int8 steps of the head's input make the difference."""
    checkpoint = tiny.checkpoint()
    with Engine(model, threads=1, precision="full") as engine, Timeline(engine) as timeline:
        logits = timeline.logits(IDS)
    last = streams(model, [LAYERS])[:, 0].astype(np.float64)
    eps = checkpoint.config.rms_eps
    normalized = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + eps)
    head = checkpoint.tensors.get("lm_head.weight", checkpoint.tensors["model.embed_tokens.weight"])
    expected = normalized * checkpoint.tensors["model.norm.weight"] @ head.T
    assert np.std(logits - expected) < 0.03 * expected.std()


def test_text_goes_on_as_after_logits(model: Model) -> None:
    texts = []
    for ask in ("logits", "streams"):
        with (
            Engine(model, threads=1, precision="full", kv="tiered") as engine,
            Timeline(engine, max_tokens=20, ignore_eos=True) as timeline,
        ):
            if ask == "logits":
                timeline.logits(IDS)
            else:
                timeline.streams(IDS, [1])
            texts.append(([t for piece in timeline.generate([5]) for t in piece.ids], timeline.tiers))
    assert texts[0] == texts[1]


def test_what_cannot_be_is_refused(model: Model) -> None:
    with Engine(model, threads=1, ctx=16, precision="full") as engine, Timeline(engine) as timeline:
        assert timeline.streams(IDS[:3], []).shape == (3, 0, model.info.hidden)
        with pytest.raises(UsageError, match=f"stream 1 is after layer {LAYERS + 1} of {LAYERS}"):
            timeline.streams(IDS[:3], [1, LAYERS + 1])
        with pytest.raises(UsageError, match="token 0 is 500"):
            timeline.streams([500], [1])
        with pytest.raises(CapacityError, match="69 tokens, context 16"):
            timeline.streams(IDS, [1])
        assert timeline.tokens == IDS[:3]
    with (
        Engine(model, threads=1, core_fraction=0.1, catch_up=4, draft="off") as engine,
        Timeline(engine) as timeline,
        pytest.raises(UsageError, match="mixed precision has no streams"),
    ):
        timeline.streams(IDS, [1])
