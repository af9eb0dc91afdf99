# SPDX-License-Identifier: Apache-2.0
"""Acceptance is what chain decoding would accept, and the noise is the sampler's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mxdraft.errors import CapacityError, RefusedError, TransferError
from mxdraft.measure.acceptance import (
    Acceptance,
    Prompt,
    Proposal,
    Rollout,
    Table,
    acceptance_report,
    differences,
    either,
    from_table,
    lookup,
    noise,
    read_prompts,
    reliability,
    write_rollouts,
)
from mxdraft.runtime import Engine, Model, Timeline


def test_rounds_take_the_leading_proposals_that_are_right() -> None:
    tokens = np.arange(10, 30, dtype=np.uint16)  # answer: 12 … 29; the prompt's step gives 12

    def propose(place: int, most: int) -> Proposal:
        drafts = [int(t) for t in tokens[place : place + 3]]
        if place % 2 == 0 and len(drafts) > 1:
            drafts[1] = 0  # wrong, so what follows is never looked at
        return Proposal(drafts[:most], most)

    found = Acceptance()
    found.decode(tokens, 2, propose, 3)
    # Places 3, 7, 11, 15, 19: from odd places 4 tokens a round, the last one ends with the text.
    assert (found.rounds, found.emitted, found.steps) == (5, 17, 15)
    assert (found.reached, found.accepted) == ([5, 4, 4], [5, 4, 4])
    assert found.tau == 17 / 5
    never = Acceptance()
    never.decode(tokens, 2, lambda *_: Proposal([0], 1), 1)
    assert (never.rounds, never.emitted, never.alpha) == (17, 17, [0.0])


def table(tokens: np.ndarray, confidence: float = 0.5) -> Table:
    return Table(tokens, np.full(tokens.shape, confidence, np.float32))


def test_a_perfect_and_a_useless_drafter() -> None:
    tokens = np.arange(100, 160, dtype=np.uint16)
    rollout = Rollout("chat", tokens, 20, 0.0, 0)
    places = np.arange(21, 60)[:, None] + np.arange(3)
    perfect = 100 + places.astype(np.int64)
    everything = acceptance_report([rollout], [table(perfect)], [1, 3], 0.1)["all"]
    assert everything["drafter"]["alpha"] == [1, 1, 1]
    assert everything["drafter"]["tau"] == pytest.approx({"1": 39 / 20, "3": 39 / 10})
    assert everything["drafter"]["alpha_everywhere"] == 1
    assert everything["drafter"]["speed_up"] == pytest.approx(3.9 / (1 + 0.1 * 3))
    assert everything["drafter"]["speed_up_depth"] == 3
    assert everything["lookup"]["speed_up"] == 1
    assert set(acceptance_report([rollout], [table(perfect)], [1], 0.1)) == {"all", "low repetition", "chat"}
    assert acceptance_report([rollout], [table(perfect * 0)], [3], 0.1)["all"]["drafter"]["tau"] == {"3": 1}


def test_gains_are_paired() -> None:
    """One drafter is right everywhere, one in the first half, in each of 30 texts, so the gain is certain
    although texts differ in length."""
    rollouts, better, worse = [], [], []
    for number in range(30):
        tokens = np.arange(100, 122 + 2 * number, dtype=np.uint16)
        rollouts.append(Rollout("chat", tokens, 1, 0.0, 0))
        right = 100 + np.arange(2, len(tokens) + 1)[:, None].astype(np.int64)
        better.append(table(right))
        wrong = right.copy()
        wrong[len(wrong) // 2 :] = 0
        worse.append(table(wrong))
    gain = differences(rollouts, better, worse, [1])["all"]
    assert gain["alpha_everywhere"] == pytest.approx((0.5, 0.5, 0.5), abs=0.03)
    assert gain["tau 1"].mean == pytest.approx(2 - 4 / 3, rel=0.05)
    assert gain["tau 1"].low <= gain["tau 1"].mean <= gain["tau 1"].high < 0.75
    none = differences(rollouts, better, better, [1])["low repetition"]
    assert none["tau 1"] == (0, 0, 0)
    mixed = differences(rollouts, better[:15] + worse[15:], worse[:15] + better[15:], [1])["all"]
    assert mixed["alpha_everywhere"].high - mixed["alpha_everywhere"].low > 0.25  # it hangs on the draw


def test_reliability_counts_what_was_reached() -> None:
    tokens = np.arange(100, 112, dtype=np.uint16)
    rollout = Rollout("chat", tokens, 5, 0.0, 0)  # six places after the prompt's own token
    proposed = 100 + np.arange(6, 12)[:, None] + np.arange(2)
    proposed[:3, 0] = 0  # wrong at half of the places: their second step is never reached
    found = reliability([rollout], [table(proposed, 0.31)])
    assert found[0] == [{"confidence": pytest.approx(0.31), "accepted": 0.5, "count": 6}]
    assert found[1] == [{"confidence": pytest.approx(0.31), "accepted": 1.0, "count": 2}]


def test_lookup_copies_what_followed_last_time() -> None:
    tokens = np.array([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], np.uint16)
    propose = lookup(tokens, longest=2, shortest=1)
    assert propose(10, 3) == ([4, 8, 1], 0)  # after the latest 1 2
    assert propose(6, 5) == ([3, 9, 1, 2], 0)  # no further than the text goes
    assert propose(4, 3) == ([], 0)  # 9 is new
    both = either(propose, from_table(table(np.array([[5, 6], [7, 8]])), 2))
    assert both(4, 2) == ([7, 8], 2)
    assert both(6, 2) == ([3, 9], 0)


def test_noise_is_the_samplers(bundle: Path) -> None:
    """Redo the runtime's draws from its own logits: the least noise / weight wins."""
    with Model(bundle) as model, Engine(model, precision="base", max_seqs=2) as engine:
        with Timeline(engine, temperature=0.9, seed=11, max_tokens=20) as sequence:
            prompt = model.chat([("user", "Whose boat is it?")])
            for _ in sequence.generate(prompt):
                pass
            tokens = sequence.tokens
        with Timeline(engine) as again:
            logits = again.logits(tokens)
    ids = np.arange(500, dtype=np.uint64)
    for place in range(len(prompt), len(tokens)):
        race = logits[place - 1] / 0.9 - np.log(noise(11, place, ids))
        assert int(race.argmax()) == tokens[place]


def test_rollouts_are_kept_and_belong_to_their_prompts(bundle: Path, tmp_path: Path) -> None:
    lines = [{"task": f"t{i % 2}", "turns": [f"Question {i}?", "more"]} for i in range(6)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    prompts = read_prompts(path, 2)
    assert [p.text for p in prompts] == ["Question 0?", "Question 2?", "Question 1?", "Question 3?"]
    assert len(read_prompts(path, 0)) == 6
    kept = tmp_path / "kept.npz"
    with Model(bundle) as model:
        first = write_rollouts(model, prompts, kept, 0.5, tokens=10, ctx=128)
        again = write_rollouts(model, prompts, kept, 0.5, tokens=10, ctx=128)
        with pytest.raises(RefusedError, match="of other prompts"):
            write_rollouts(model, prompts[:3], kept, 0.5, tokens=10, ctx=128)
        with pytest.raises(RefusedError, match="of other prompts"):
            write_rollouts(model, prompts, kept, 0.7, tokens=10, ctx=128)
    assert [r.task for r in first] == ["t0", "t0", "t1", "t1"]
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert (a.answer_start, a.seed, a.task) == (b.answer_start, b.seed, b.task)
    path.write_text('{"turns": []}', encoding="utf-8")
    with pytest.raises(RefusedError, match="not a file of prompts"):
        read_prompts(path, 0)


GOOD_LINE = '{"task": "chat", "turns": ["Hello", "more"], "id": 7}'


def test_prompts_may_hold_any_text(tmp_path: Path) -> None:
    """What JSON leaves as it is within a line: other line ends of Unicode, and a blank line at the end."""
    path = tmp_path / "prompts.jsonl"
    texts = [f"x{end}y" for end in "\u2028\u2029\x85"]
    lines = [json.dumps({"task": "a", "turns": [text]}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join([*lines, GOOD_LINE, "", ""]), encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path, 0)] == [*texts, "Hello"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"task": "a", "turns": ' + b"[" * 80 + b'"x"' + b"]" * 80 + b"}",
        b'{"task": "a"}',
        b'{"task": "a", "turns": []}',
        b'{"task": "a", "turns": "Hello"}',
        b'{"task": "a", "turns": {"0": "Hello"}}',
        b'{"task": "a", "turns": [1]}',
        b'{"task": ["a"], "turns": ["x"]}',
        b'{"task": "a", "turns": ["half \\ud800 a pair"]}',
        b'{"task": "a", "task": "b", "turns": ["x"]}',
        GOOD_LINE.encode() + b"\n" + GOOD_LINE.encode()[:-5],
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text)
    with pytest.raises(RefusedError, match=r"prompts\.jsonl is not a file of prompts: "):
        read_prompts(path, 0)


def test_prompts_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no such file"):
        read_prompts(tmp_path / "none", 0)
    with pytest.raises(TransferError, match="not a regular file"):
        read_prompts(Path("/dev/zero"), 0)


def test_prompts_that_leave_no_room_are_refused(bundle: Path, tmp_path: Path) -> None:
    with Model(bundle) as model, pytest.raises(CapacityError, match="no prompt leaves 250 of 256 tokens"):
        write_rollouts(model, [Prompt("a", "Hello")], tmp_path / "r.npz", 0.0, tokens=250)
    assert list(tmp_path.iterdir()) == []
