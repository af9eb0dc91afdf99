# SPDX-License-Identifier: Apache-2.0
"""Speculation never changes the output: with every drafter, draft length and thread count, greedy or sampled,
each sequence gets the tokens, text, stop and counts of plain decoding. And it does speculate."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
from clib import compile_c, pass_in_debug_build
from drafters import PROPOSERS, VOCAB, Knowing, Node, Proposer, oracle, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import build, patch, sections_of
from mxdraft.bundle import Bundle
from mxdraft.bundle.format import F32, MXFP4T, required_draft_tensors
from mxdraft.checkpoint import Checkpoint, ModelConfig
from mxdraft.errors import NumericError, UsageError
from mxdraft.export import export_model
from mxdraft.mx import quantize
from mxdraft.pack import pack
from mxdraft.runtime import Draft, Engine, Model, Precision, Timeline, TokenRecord
from mxdraft.runtime._ffi import load
from mxdraft.ship.build import sources
from mxdraft.train.drafter import TrainedDrafter
from numpy.typing import NDArray

TOKENS = 8  # generated after each prompt of the matrix
MIXED: dict[str, Any] = {"core_fraction": 0.1, "catch_up": 4}  # under precision auto
LENGTHS = range(9)  # drafted tokens of a step; 0: as many as may pay
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "repeat_penalty": 1.1},
}


def _prompts() -> list[list[int]]:
    """Random tokens; every third prompt repeats itself, so that look-up finds something."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(52)]
    return [ids * 2 + ids[:1] if i % 3 == 0 else ids for i, ids in enumerate(prompts)]


PROMPTS = _prompts()

# ---- running ----


class Outcome(NamedTuple):
    ids: list[int]
    text: bytes
    stop: str
    generated: int


class Run(NamedTuple):
    outcomes: list[Outcome]
    drafted: int
    accepted: int
    on_branch: int  # accepted nodes that had an elder sibling; of knowing drafters only
    expected: int  # what those count as accepted
    records: list[list[TokenRecord]]  # what was known of each token


def run_together(
    model: Model,
    sampling: dict[str, float],
    draft: Draft = "off",
    length: int = 0,
    threads: int = 1,
    precision: Precision = "base",
    knowing: tuple[Proposer, list[Outcome]] | None = None,
    prompts: list[list[int]] = PROMPTS,
    tokens: int = TOKENS,
) -> Run:
    """All prompts at once, each as a sequence of one engine."""
    with Engine(
        model,
        ctx=96,
        threads=threads,
        precision=precision,
        max_seqs=len(prompts),
        max_rows=512,
        draft=draft,
        draft_min=length,
        draft_max=length,
        **MIXED if precision == "auto" else {},
    ) as engine:
        if length == 0:
            set_costs(engine, row=0.001)  # else none would pay with so many other rows
        sequences, drafters = [], []
        for seed, prompt in enumerate(prompts):
            sequences.append(Timeline(engine, max_tokens=tokens, seed=seed, **sampling))  # type: ignore[arg-type]
            sequences[-1].prompt(prompt)
            if knowing:
                drafters.append(Knowing(knowing[0], len(prompt), knowing[1][seed].ids))
                sequences[-1].draft_with(drafters[-1])
        texts = [b""] * len(prompts)
        records: list[list[TokenRecord]] = [[] for _ in prompts]
        while any(sequence.stop == "none" for sequence in sequences):
            engine.step(sequences)
            texts = [text + sequence.text for text, sequence in zip(texts, sequences, strict=True)]
            for known, sequence in zip(records, sequences, strict=True):
                known += sequence.records
        stats = [sequence.stats for sequence in sequences]
        outcomes = [
            Outcome(sequence.tokens[len(prompt) :], text, sequence.stop, numbers["generated_tokens"])
            for sequence, prompt, text, numbers in zip(sequences, prompts, texts, stats, strict=True)
        ]
    return Run(
        outcomes,
        sum(numbers["drafted"] for numbers in stats),
        sum(numbers["accepted"] for numbers in stats),
        sum(drafter.on_branch for drafter in drafters),
        sum(drafter.accepted for drafter in drafters),
        records,
    )


def set_costs(
    engine: Engine, row: float, base: float = 0.0, seconds: float = 1.0, draft: float = 0.0
) -> None:
    """Set the costs of each further row, of a step at base precision and of a pass of the trained drafter, in
    steps of one row that are said to take so many seconds. No real step takes a second, so the engine has
    nothing to correct."""
    library = load()
    costs = library.ffi.new(
        "mxd_costs *",
        {
            "step": [seconds * (1 + row * (n - 1)) for n in range(17)],
            "base": seconds * base,
            "draft": seconds * draft,
        },
    )
    library.lib.mxd_engine_set_costs(engine._pointer, costs)


Plain = Callable[[str, Precision], list[Outcome]]


@pytest.fixture(scope="module")
def drafting(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Fixture T with a drafter whose guesses are worth little, and a table of half of the answers."""
    good = bundle.read_bytes()
    with Model(bundle) as model:
        answers = [outcome.ids for outcome in run_together(model, {}).outcomes]
    documents = [
        prompt + answer for prompt, answer in list(zip(PROMPTS, answers, strict=True))[::2] for _ in range(2)
    ]
    data = tiny.with_drafter(tiny.with_ngrams(good, documents), tiny.drafter(Bundle(good).config))
    path = tmp_path_factory.mktemp("drafting") / "t.mxb"
    path.write_bytes(data)
    with Model(path) as model:
        yield model


@pytest.fixture(scope="module")
def plain(drafting: Model) -> Plain:
    """What each prompt makes without drafts."""

    @cache
    def outcomes(sampling: str, precision: Precision) -> list[Outcome]:
        run = run_together(drafting, SAMPLINGS[sampling], precision=precision)
        assert (run.drafted, run.accepted) == (0, 0)
        return run.outcomes

    return outcomes


# ---- the matrix ----

DRAFTERS = [*PROPOSERS, "ngram", "model", "auto"]


def compare(
    model: Model, plain: Plain, drafter: str, sampling: str, length: int, threads: int, precision: Precision
) -> Run:
    """Run one point of the matrix, which must equal plain decoding; return what it drafted."""
    expected = plain(sampling, precision)
    proposer = PROPOSERS.get(drafter)
    run = run_together(
        model,
        SAMPLINGS[sampling],
        "ngram" if proposer else drafter,  # type: ignore[arg-type]
        length,
        threads,
        precision,
        (proposer, expected) if proposer else None,
    )
    point = (drafter, sampling, length, threads, precision)
    assert run.outcomes == expected, point
    assert run.drafted > 0, point
    if proposer and length > 0 and precision != "auto":  # every proposal was verified whole
        assert run.accepted == run.expected, point
    return run


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing(drafting: Model, plain: Plain, drafter: str, threads: int) -> None:
    lengths = LENGTHS if threads == 1 else (1, 4, 8)
    runs = {
        (sampling, length): compare(drafting, plain, drafter, sampling, length, threads, "base")
        for sampling, length in product(SAMPLINGS, lengths)
    }
    for sampling in SAMPLINGS:
        those = [run for (name, _), run in runs.items() if name == sampling]
        accepted = sum(run.accepted for run in those)
        if drafter == "evil":
            assert accepted == 0
        elif drafter == "oracle":
            assert accepted == sum(run.drafted for run in those)
        else:
            assert accepted > {"model": 0, "ngram": 20, "auto": 20}.get(drafter, 300)
        if drafter == "tree":
            assert sum(run.on_branch for run in those) > 50


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing_at_full_precision(drafting: Model, plain: Plain, drafter: str) -> None:
    assert plain("greedy", "full") != plain("greedy", "base")
    for sampling, length in (("greedy", 0), ("greedy", 4), ("top_p", 8), ("min_p", 3)):
        compare(drafting, plain, drafter, sampling, length, 2 if length == 8 else 1, "full")


@pytest.fixture(scope="module")
def known(drafting: Model) -> Callable[[str], list[list[TokenRecord]]]:
    """What is known of each token under mixed precision without drafts."""
    return cache(lambda sampling: run_together(drafting, SAMPLINGS[sampling], precision="auto").records)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing_under_mixed_precision(
    drafting: Model, plain: Plain, known: Callable[[str], list[list[TokenRecord]]], drafter: str
) -> None:
    """Nor does it change what is known of each token, or which ones get full precision."""
    for sampling, length, threads in (
        ("greedy", 0, 1),
        ("greedy", 1, 2),
        ("greedy", 8, 1),
        ("top_p", 3, 4),
        ("min_p", 4, 1),
    ):
        run = compare(drafting, plain, drafter, sampling, length, threads, "auto")
        assert run.records == known(sampling), (sampling, length)


def test_mixed_precision_is_neither_of_the_two(
    plain: Plain, known: Callable[[str], list[list[TokenRecord]]]
) -> None:
    looks = Counter(record.look for records in known("greedy") for record in records)
    assert looks["all"] == len(PROMPTS)  # after the prompts
    assert min(looks["none"], looks["core"], looks["due"]) > 20
    mixed = plain("greedy", "auto")
    assert mixed not in (plain("greedy", "base"), plain("greedy", "full"))


def test_prompts_of_the_matrix_end_in_several_ways(plain: Plain) -> None:
    for sampling in SAMPLINGS:
        outcomes = plain(sampling, "base")
        assert {outcome.stop for outcome in outcomes} == {"eos", "limit"}
        assert len({token for outcome in outcomes for token in outcome.ids}) > 200
    assert plain("greedy", "base") != plain("top_p", "base") != plain("min_p", "base")


@pytest.mark.parametrize("draft", ["ngram", "auto"])
def test_sequences_of_all_kinds_share_steps(drafting: Model, plain: Plain, draft: Draft) -> None:
    """They join one by one while steps are short of rows: prompts in pieces, drafts cut down."""
    kinds = list(product(SAMPLINGS, [None, *PROPOSERS]))
    with Engine(
        drafting,
        ctx=64,
        threads=2,
        precision="base",
        max_seqs=len(kinds),
        max_rows=24,
        draft=draft,
        draft_min=4,
    ) as engine:
        sequences = []
        for i, (sampling, proposer) in enumerate(kinds):
            sequences.append(Timeline(engine, max_tokens=TOKENS, seed=i, **SAMPLINGS[sampling]))  # type: ignore[arg-type]
            if proposer:
                answer = plain(sampling, "base")[i].ids
                sequences[i].draft_with(Knowing(PROPOSERS[proposer], len(PROMPTS[i]), answer))
            sequences[i].prompt(PROMPTS[i])
            engine.step(sequences)
        while any(sequence.stop == "none" for sequence in sequences):
            engine.step(reversed(sequences))
        for i, (sampling, _) in enumerate(kinds):
            expected = plain(sampling, "base")[i]
            assert sequences[i].tokens[len(PROMPTS[i]) :] == expected.ids
            assert sequences[i].stop == expected.stop
        assert sum(sequence.stats["accepted"] for sequence in sequences) > 20


# ---- ends inside a draft ----

CONTEXT = 48


@pytest.fixture(scope="module")
def engines(drafting: Model) -> Iterator[tuple[Engine, Engine]]:
    """One that never drafts, and one that verifies all that is proposed."""
    options: dict[str, Any] = {"ctx": CONTEXT, "threads": 1, "precision": "base", "max_seqs": 2}
    with (
        Engine(drafting, draft="off", **options) as off,
        Engine(drafting, draft="ngram", draft_max=8, draft_min=8, **options) as on,
    ):
        yield off, on


@pytest.fixture(scope="module")
def continuation(engines: tuple[Engine, Engine]) -> Callable[[int, str], list[int]]:
    """What plain decoding writes until the context is full, by prompt number and sampling."""

    @cache
    def ids(number: int, sampling: str) -> list[int]:
        changes: dict[str, Any] = SAMPLINGS[sampling]
        with Timeline(engines[0], seed=number, ignore_eos=True, **changes) as sequence:
            leg(sequence, PROMPTS[number])
            return sequence.tokens[len(PROMPTS[number]) :]

    return ids


def leg(sequence: Timeline, ids: Sequence[int]) -> Outcome:
    """What one more prompt makes."""
    pieces = list(sequence.generate(ids))
    made = [token for piece in pieces for token in piece.ids]
    return Outcome(
        made, b"".join(piece.text for piece in pieces), sequence.stop, sequence.stats["generated_tokens"]
    )


stop_places = st.tuples(st.integers(0, 60), st.integers(1, 7), st.booleans())


@settings(max_examples=80, deadline=None)
@given(
    number=st.integers(0, len(PROMPTS) - 1),
    sampling=st.sampled_from(sorted(SAMPLINGS)),
    proposer=st.sampled_from(["oracle", "oracle", "random", "tree", "evil"]),
    length=st.integers(1, 8),
    max_tokens=st.integers(0, 24),
    ignore_eos=st.booleans(),
    places=st.lists(stop_places, max_size=2),
    more=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=4),
    cut=st.integers(0, CONTEXT - 2),
)
def test_any_end_is_that_of_plain_decoding(
    drafting: Model,
    engines: tuple[Engine, Engine],
    continuation: Callable[[int, str], list[int]],
    number: int,
    sampling: str,
    proposer: str,
    length: int,
    max_tokens: int,
    ignore_eos: bool,
    places: list[tuple[int, int, bool]],
    more: list[int],
    cut: int,
) -> None:
    """The drafter even knows what would follow the end. Afterwards the sequence continues in the same way,
    and its cache gives the same logits."""
    coming = continuation(number, sampling)
    whole = drafting.decode(token for token in coming if not drafting.is_special(token))
    stops = [whole[a % len(whole) :][:n] for a, n, _ in places]
    # Some only nearly occur.
    stops = [s[:-1] + b"!" if spoilt else s for s, (_, _, spoilt) in zip(stops, places, strict=True)]
    results = []
    for engine in engines:
        changes: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, **SAMPLINGS[sampling]}
        with Timeline(engine, seed=number, stop=[s for s in stops if b"\0" not in s], **changes) as sequence:
            start = len(PROMPTS[number])
            sequence.draft_with(Knowing(PROPOSERS[proposer], start, coming, length))
            results.append([leg(sequence, PROMPTS[number])])
            sequence.draft_with(None)
            if len(sequence.tokens) + len(more) < CONTEXT:
                results[-1].append(leg(sequence, more))
            sequence.truncate(min(cut, len(sequence.tokens) - 1))
            kept = sequence.tokens
            logits = sequence.logits([7, 300])
    assert results[0] == results[1]
    with Timeline(engines[0]) as sequence:
        assert logits.tobytes() == sequence.logits([*kept, 7, 300])[-2:].tobytes()


def test_end_of_sequence_inside_an_accepted_draft(
    engines: tuple[Engine, Engine], continuation: Callable[[int, str], list[int]]
) -> None:
    inside = 0
    for number, sampling in product(range(len(PROMPTS)), SAMPLINGS):
        coming = continuation(number, sampling)
        if not {0, 2} & set(coming[3:20]):
            continue
        changes: dict[str, Any] = {"seed": number, **SAMPLINGS[sampling]}
        with Timeline(engines[0], **changes) as sequence:
            expected = leg(sequence, PROMPTS[number])
        with Timeline(engines[1], **changes) as sequence:
            sequence.draft_with(Knowing(oracle, len(PROMPTS[number]), coming))
            assert leg(sequence, PROMPTS[number]) == expected
            inside += sequence.stop == "eos" and sequence.drafted[-1]
    assert inside > 5


def test_stop_string_over_two_tokens_of_an_accepted_draft(
    drafting: Model, engines: tuple[Engine, Engine], continuation: Callable[[int, str], list[int]]
) -> None:
    inside = 0
    for number in range(len(PROMPTS)):
        coming = continuation(number, "greedy")
        spelling = [drafting.decode([token]) for token in coming[:5]]
        stop = spelling[3][-1:] + spelling[4][:1]
        if b"\0" in stop or stop in b"".join(spelling)[: -len(spelling[4])]:
            continue
        with Timeline(engines[1], stop=[stop], ignore_eos=True) as sequence:
            sequence.draft_with(Knowing(oracle, len(PROMPTS[number]), coming))
            outcome = leg(sequence, PROMPTS[number])
            if any(drafting.is_special(token) for token in coming[:5]):
                continue
            assert outcome.ids == coming[:5]
            assert outcome.text == b"".join(spelling[:4])[:-1]
            assert (outcome.stop, outcome.generated) == ("string", 5)
            assert sequence.drafted[-2:] == [True, True]
            inside += 1
    assert inside > 30


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10, 11])
def test_limit_and_context_cut_drafts(
    engines: tuple[Engine, Engine], continuation: Callable[[int, str], list[int]], max_tokens: int
) -> None:
    for number in range(8):
        prompt, coming = PROMPTS[number], continuation(number, "greedy")
        # The second prompt leaves room for that many.
        for ids, limit, stop in ((prompt, max_tokens, "limit"), (coming, 0, "context")):
            with Timeline(engines[1], ignore_eos=True, max_tokens=limit) as sequence:
                before = ids if stop == "limit" else prompt + coming[: len(coming) - max_tokens]
                sequence.draft_with(Knowing(oracle, len(prompt), coming))
                outcome = leg(sequence, before)
                assert outcome.ids == (prompt + coming)[len(before) :][:max_tokens]
                assert (outcome.stop, outcome.generated) == (stop, max_tokens)


# ---- how much is drafted ----


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15])
def test_oracle_of_fixed_length_makes_one_token_more(drafting: Model, length: int) -> None:
    steps = 5
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "precision": "base"}
    changes: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1 + steps * (length + 1)}
    with Engine(drafting, draft="off", **options) as engine, Timeline(engine, **changes) as sequence:
        coming = leg(sequence, PROMPTS[1]).ids
    with (
        Engine(drafting, draft="ngram", draft_max=length, draft_min=length, **options) as engine,
        Timeline(engine, **changes) as sequence,
    ):
        sequence.draft_with(Knowing(oracle, len(PROMPTS[1]), coming))
        assert leg(sequence, PROMPTS[1]).ids == coming
        stats = sequence.stats
    assert stats["draft"] == "caller"
    assert (stats["steps"], stats["tokens_per_step"]) == (steps, length + 1)
    assert stats["drafted"] == stats["accepted"] == steps * length
    assert stats["acceptance_by_position"] == [1.0] * min(length, 8)


@pytest.mark.parametrize("row", [0.005, 0.02, 0.05, 0.1, 0.3, 1.0])
def test_evil_drafts_cost_little(drafting: Model, row: float) -> None:
    """What verification costs over 250 tokens, by a table in which each further row costs so many steps."""
    with (
        Engine(drafting, threads=1, precision="base", draft="ngram", draft_max=8) as engine,
        Timeline(engine, ignore_eos=True) as sequence,
    ):
        set_costs(engine, row)
        sequence.draft_with(lambda ids, most: [(ids[-1] + 1) % 3] * most)  # control tokens: hardly ever made
        made = leg(sequence, [5])
        stats = sequence.stats
    assert made.generated == 255
    assert stats["drafted"] > 0
    assert stats["accepted"] < 5
    assert row * stats["drafted"] < 0.1 * stats["steps"]
    if row >= 0.1:  # it gives up after some twelve tries, and looks again after 8, 16, 32 … steps
        assert stats["drafted"] < 60


# ---- the distribution ----


def test_drafted_tokens_follow_the_softmax(tmp_path: Path) -> None:
    """100 000 draws of a model without attention, in which the last token alone decides what may follow."""
    checkpoint = tiny.checkpoint(
        tied=False, layers=1, hidden=32, heads=1, kv_heads=1, ffn=32, vocab=272, max_positions=1024
    )
    silent = {name: np.zeros_like(t) if "_proj." in name else t for name, t in checkpoint.tensors.items()}
    export_model(dataclasses.replace(checkpoint, tensors=silent), tmp_path)
    pack(tmp_path, tmp_path / "m.mxb")
    changes: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "ignore_eos": True}
    counts = np.zeros((272, 272), np.int64)
    drafted = accepted = 0
    with Model(tmp_path / "m.mxb") as model:
        with Engine(model, threads=1, ctx=16) as engine, Timeline(engine) as sequence:
            logits = np.empty((272, 272), np.float32)
            for token in range(272):
                logits[token] = sequence.logits([token])[0]
                sequence.truncate(0)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :4]

        def likeliest(ids: list[int], most: int) -> list[Node]:
            """Both likeliest followers of the last token, and theirs."""
            first = [(int(order[ids[-1], i]), -1) for i in (0, 1)]
            nodes = first + [(int(order[token, i]), n) for n, (token, _) in enumerate(first) for i in (0, 1)]
            return nodes[:most]

        with Engine(
            model, threads=1, ctx=1024, max_seqs=64, max_rows=512, draft="ngram", draft_max=6, draft_min=6
        ) as engine:
            for batch in range(2):
                sequences = [
                    Timeline(engine, seed=64 * batch + i, max_tokens=800, **changes) for i in range(64)
                ]
                for i, sequence in enumerate(sequences):
                    sequence.prompt([64 * batch + i])
                    sequence.draft_with(likeliest)
                while any(sequence.stop == "none" for sequence in sequences):
                    engine.step(sequences)
                for sequence in sequences:
                    np.add.at(counts, (sequence.tokens[:-1], sequence.tokens[1:]), 1)
                    drafted += sequence.stats["drafted"]
                    accepted += sequence.stats["accepted"]
                    sequence.close()
    assert counts.sum() >= 100_000
    assert accepted > 50_000
    assert drafted > accepted
    weights = np.exp((np.take_along_axis(logits, order, 1) - logits.max(1, keepdims=True)) / 0.7)
    probability = (weights / weights.sum(1, keepdims=True)).astype(np.float64)
    kept = np.take_along_axis(counts, order, 1)
    assert kept.sum() == counts.sum()  # nothing else was ever chosen
    visits = kept.sum(1, keepdims=True)
    common = visits[:, 0] >= 200
    expected = (visits * probability)[common]
    statistic = ((kept[common] - expected) ** 2 / expected).sum()
    degrees = 3 * int(common.sum())
    spread = 2 / (9 * degrees)  # exceeded once in 1000 by chance (Wilson and Hilferty 1931)
    assert degrees > 60
    assert statistic < degrees * (1 - spread + 3.09 * spread**0.5) ** 3


# ---- faults of drafters and drafts ----


def set_raw_drafter(sequence: Timeline, function: Callable[..., int]) -> Any:
    """Install a C callback as it is; keep what comes back as long as the sequence."""
    library = load()
    callback = library.ffi.callback("mxd_draft_function", function)
    library.lib.mxd_seq_set_drafter(sequence._pointer, callback, library.ffi.NULL)
    return callback


def _write(
    tokens: Sequence[int], parents: Sequence[int] = (), count: int | None = None
) -> Callable[..., int]:
    def function(_arg: Any, _ids: Any, _n: int, out: Any, parent: Any, _most: int) -> int:
        for i, token in enumerate(tokens):
            out[i] = token
        for i, node in enumerate(parents):
            parent[i] = node
        return len(tokens) if count is None else count

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_write([1] * 4, count=5), "the drafter wrote 5 tokens, 4 were asked for"),
        (_write([], count=2**63), f"the drafter wrote {2**63} tokens, 4 were asked for"),
        (_write([3, VOCAB]), "token 1 is 500: the vocabulary has 500"),
        (_write([2**32 - 1]), "token 0 is 4294967295"),
        (_write([3], [0]), "drafted token 0 has parent 0"),
        (_write([3, 4, 5], [-1, 0, 2]), "drafted token 2 has parent 2"),
        (_write([3, 4], [-1, 5]), "drafted token 1 has parent 5"),
        (_write([3], [-2]), "drafted token 0 has parent -2"),
        (_write([3], [-(2**31)]), "drafted token 0 has parent -2147483648"),
    ],
)
def test_wrong_drafters_are_refused_and_forgotten(
    drafting: Model, plain: Plain, function: Callable[..., int], message: str
) -> None:
    with Engine(
        drafting, ctx=64, threads=1, precision="base", max_seqs=2, draft="auto", draft_max=4, draft_min=4
    ) as engine:
        sequences = [Timeline(engine, max_tokens=TOKENS, seed=i) for i in range(2)]
        for sequence, prompt in zip(sequences, PROMPTS, strict=False):
            sequence.prompt(prompt)
        engine.step(sequences)
        before = [sequence.tokens for sequence in sequences]
        keep = set_raw_drafter(sequences[1], function)
        for _ in range(2):
            with pytest.raises(UsageError, match=message):
                engine.step(sequences)
            assert [sequence.tokens for sequence in sequences] == before
            assert [sequence.output for sequence in sequences] == [[], []]
            assert [sequence.stats["drafted"] for sequence in sequences] == [0, 0]
        sequences[1].draft_with(None)
        del keep
        while any(sequence.stop == "none" for sequence in sequences):
            engine.step(sequences)
        for sequence, prompt, expected in zip(sequences, PROMPTS, plain("greedy", "base"), strict=False):
            assert sequence.tokens[len(prompt) :] == expected.ids


def test_drafters_do_not_run_when_drafting_is_off(drafting: Model) -> None:
    with (
        Engine(drafting, ctx=64, threads=1, draft="off") as engine,
        Timeline(engine, max_tokens=4) as sequence,
    ):
        sequence.draft_with(lambda _, most: [5] * most)
        leg(sequence, [5, 6])
        assert (sequence.stats["drafted"], sequence.stats["draft"]) == (0, "off")


LOUD = 7


def test_drafted_token_that_makes_values_overflow_is_dropped(tmp_path: Path) -> None:
    """A token whose embedding is near the largest float32. Plain decoding never meets it."""
    export_model(tiny.checkpoint(tied=False), tmp_path)
    pack(tmp_path, tmp_path / "t.mxb")
    good = (tmp_path / "t.mxb").read_bytes()
    sections, entry = sections_of(good), Bundle(good).tensors["target.shared", "model.embed_tokens.weight"]
    for block in range(entry.columns // 32):
        scale = entry.offset + 528 * block + LOUD
        sections["target.shared"] = patch(sections["target.shared"], scale, bytes([254]))
    (tmp_path / "loud.mxb").write_bytes(build(sections))

    def with_loud(propose: Proposer) -> Proposer:
        def loud(coming: list[int], most: int, rng: random.Random) -> list[Node]:
            nodes = propose(coming, most, rng)
            at = rng.randrange(len(nodes)) if nodes else 0
            return [(LOUD if i == at else token, parent) for i, (token, parent) in enumerate(nodes)]

        return loud

    with Model(tmp_path / "loud.mxb") as model:
        for sampling in ({}, SAMPLINGS["top_p"]):
            expected = run_together(model, sampling).outcomes
            assert not any(LOUD in outcome.ids[:-1] for outcome in expected)
            # When one draft is loud, those of all sequences are dropped, so let few be loud.
            for propose in (oracle, tree):
                for threads in (1, 2):
                    prompts = PROMPTS[:3]
                    run = run_together(
                        model,
                        sampling,
                        "ngram",
                        3,
                        threads,
                        knowing=(with_loud(propose), expected[:3]),
                        prompts=prompts,
                    )
                    assert run.outcomes == expected[:3]
        with (
            Engine(
                model, threads=1, precision="base", max_seqs=2, draft="ngram", draft_min=4, draft_max=4
            ) as engine,
            Timeline(engine, max_tokens=4) as sequence,
            Timeline(engine) as faulty,
        ):
            sequence.draft_with(lambda _, most: [LOUD] * most)
            sequence.prompt(PROMPTS[0])
            engine.step([sequence])
            before = sequence.tokens
            faulty.prompt([5, LOUD])
            for _ in range(2):  # a fault outside the drafts remains a fault
                with pytest.raises(NumericError, match="entering layer 0 at position 1"):
                    engine.step([sequence, faulty])
                assert (sequence.tokens, sequence.output) == (before, [])
            while sequence.stop == "none":
                engine.step([sequence])
            assert (
                sequence.tokens[len(PROMPTS[0]) :]
                == run_together(model, {}, prompts=PROMPTS[:1], tokens=4).outcomes[0].ids
            )
            assert sequence.stats["accepted"] == 0


# ---- the trained drafter ----


def _drafter(
    target: Checkpoint, ids: NDArray[np.uint32], weights: dict[str, Any], features: int = 1
) -> TrainedDrafter:
    """A drafter of ones and zeros, except ``weights`` by name, that reads after the last layers."""
    planes, norms = {}, {}
    for name, dtype, shape in required_draft_tensors(target.config, features, len(ids)):
        weight = weights.get(name, np.zeros(shape, np.float32))
        if dtype == MXFP4T:
            planes[name] = quantize(weight, "mxfp4", "search")
        elif dtype == F32:
            norms[name] = weights.get(name, np.ones(shape[1], np.float32))
    layers = tuple(range(target.config.layers + 1 - features, target.config.layers + 1))
    return TrainedDrafter(layers, planes, norms, ids, ((1.0, 1.0),), "0" * 64, {})


def _signs(config: ModelConfig) -> NDArray[np.float32]:
    """Embeddings that RMSNorm leaves as they are, and MX formats too."""
    values = np.array([-1, 1], np.float32)
    return np.random.default_rng(2).choice(values, (config.vocab, config.hidden))


def _with_drafter(folder: Path, target: Checkpoint, drafter: TrainedDrafter) -> Path:
    export_model(target, folder)
    pack(folder, folder / "plain.mxb")
    path = folder / "drafting.mxb"
    path.write_bytes(tiny.with_drafter((folder / "plain.mxb").read_bytes(), drafter))
    return path


LONG_PROMPTS = [[(37 * i * i + 11 * number + 3 * i) % 497 + 3 for i in range(30)] for number in range(16)]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A target of one layer and a drafter that is a copy of it and reads no features. The drafter lacks only
    the first token of the context, so it is nearly always right if its cache and positions are."""
    target = tiny.checkpoint(tied=False, layers=1)
    target.tensors["model.embed_tokens.weight"] = _signs(target.config)
    hidden = target.config.hidden
    passing = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1).astype(np.float32)
    weights = target.tensors | {"input_proj.weight": passing}
    drafter = _drafter(target, np.arange(496, dtype=np.uint32), weights)
    with Model(_with_drafter(tmp_path_factory.mktemp("copied"), target, drafter)) as model:
        yield model


@pytest.mark.parametrize(("sampling", "threads"), [("greedy", 1), ("greedy", 4), ("top_p", 1), ("min_p", 2)])
def test_drafter_like_its_target_is_nearly_always_right(copied: Model, sampling: str, threads: int) -> None:
    changes = SAMPLINGS[sampling] | {"repeat_penalty": 1.0}
    together: dict[str, Any] = {"prompts": LONG_PROMPTS, "tokens": 30, "threads": threads}
    expected = run_together(copied, changes, **together).outcomes
    for length in (0, 1, 4, 8):
        run = run_together(copied, changes, "model", length, **together)
        assert run.outcomes == expected
        made = sum(outcome.generated - 1 for outcome in run.outcomes)
        steps = made - run.accepted
        assert made / steps > {0: 3, 1: 1.7, 4: 3, 8: 4}[length], (length, made / steps)


def test_drafter_follows_second_prompts_and_truncation(copied: Model) -> None:
    with (
        Engine(copied, threads=1, precision="base", draft="model", draft_max=4, draft_min=4) as engine,
        Timeline(engine, ignore_eos=True, max_tokens=41) as sequence,
    ):
        for prompt in LONG_PROMPTS[:3]:
            leg(sequence, prompt)
            assert sequence.stats["tokens_per_step"] > 2.5
            sequence.truncate(len(sequence.tokens) - 10)
            leg(sequence, prompt[:5])
            assert sequence.stats["tokens_per_step"] > 2.5


@pytest.mark.parametrize("pays", [True, False])
def test_drafter_whose_steps_take_longer_than_plain_ones_pauses(copied: Model, pays: bool) -> None:
    """However often it is right: if every step takes longer than a plain one is said to take, it pauses after
    its trial of 32 steps, and the text stays that of plain decoding."""
    prompt, tokens = LONG_PROMPTS[0], 200
    with (
        Engine(copied, ctx=256, threads=1, precision="base") as plain,
        Engine(copied, ctx=256, threads=1, precision="base", draft="model", draft_max=2) as engine,
        Timeline(plain, ignore_eos=True, max_tokens=tokens) as expected,
        Timeline(engine, ignore_eos=True, max_tokens=tokens) as sequence,
    ):
        set_costs(engine, row=0.001, seconds=1000 if pays else 1e-9)
        drafted = []
        sequence.prompt(prompt)
        while sequence.stop == "none":
            engine.step([sequence])
            drafted.append(sequence.stats["drafted"])
        assert leg(expected, prompt).ids == sequence.tokens[len(prompt) :]
    last = 1 + max(step for step, (a, b) in enumerate(pairwise(drafted)) if b > a)
    if pays:
        assert last > len(drafted) - 4
    else:
        assert 30 <= last <= 34
        assert len(drafted) > 100


def _repeating(tmp_path: Path) -> Path:
    """A bundle whose texts repeat their last token, which its drafter knows from the residual stream only."""
    target = tiny.checkpoint(layers=2)
    for name, tensor in target.tensors.items():
        if "_proj." in name:
            tensor[:] = 0
        elif name.endswith("norm.weight"):
            tensor[:] = 1
    target.tensors["model.embed_tokens.weight"] = _signs(target.config)
    unit, zero = (
        np.eye(target.config.hidden, dtype=np.float32),
        np.zeros((target.config.hidden,) * 2, np.float32),
    )
    weights = {
        "feature_proj.weight": np.concatenate([zero, unit], axis=1),
        "input_proj.weight": np.concatenate([zero, unit], axis=1),
    }
    drafter = _drafter(target, np.arange(0, 480, 10, dtype=np.uint32), weights, features=2)
    return _with_drafter(tmp_path, target, drafter)


def test_drafter_that_paused_drafts_again(tmp_path: Path) -> None:
    """It skips what was written meanwhile. Its guesses are right again, even after a truncation."""
    with (
        Model(_repeating(tmp_path)) as model,
        Engine(model, threads=1, max_seqs=2, draft="model", draft_max=2) as engine,
        Timeline(engine, ignore_eos=True) as sequence,
        Timeline(engine, ignore_eos=True, max_tokens=130) as other,
    ):

        def write(tokens: int) -> tuple[int, int]:
            """Write some tokens or a few more; return how many were drafted, and how many were right."""
            before, until = sequence.stats, len(sequence.tokens) + tokens
            while len(sequence.tokens) < until:
                engine.step([sequence])
            after = sequence.stats
            return after["drafted"] - before["drafted"], after["accepted"] - before["accepted"]

        set_costs(engine, row=0.001, seconds=1e-9)
        sequence.prompt([23])
        assert write(95)[1] > 50
        assert write(15) == (0, 0)
        for _ in range(2):
            leg(other, [11])
            other.truncate(0)
        set_costs(engine, row=0.001, seconds=1000)
        assert write(40)[1] > 20
        sequence.truncate(len(sequence.tokens) - 1)
        sequence.prompt([23])
        assert write(40)[1] > 20
        assert set(sequence.tokens) == {23}


def test_the_expected_gain_counts_what_drafting_costs(copied: Model) -> None:
    gains = []
    for draft in (0.0, 0.5):
        with (
            Engine(
                copied, ctx=128, threads=1, precision="base", draft="model", draft_max=4, draft_min=4
            ) as engine,
            Timeline(engine, ignore_eos=True, max_tokens=60) as sequence,
        ):
            set_costs(engine, row=0, draft=draft)
            leg(sequence, LONG_PROMPTS[0])
            gains.append(sequence.stats["expected_gain"])
    assert gains[0] > 2
    assert gains[1] == pytest.approx(gains[0] / 3, rel=0.05)  # a step and four passes of half a step


def test_drafter_reads_the_features_of_its_own_rows(tmp_path: Path) -> None:
    """Each sequence repeats a token of its own."""
    with (
        Model(_repeating(tmp_path)) as model,
        Engine(model, threads=2, max_seqs=8, max_rows=64, draft="model", draft_max=4, draft_min=4) as engine,
    ):
        sequences = [Timeline(engine, max_tokens=21) for _ in range(8)]
        tokens = [
            10 * i + (3 if i % 2 else 0) for i in range(1, 9)
        ]  # half are drafted from the context alone
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            sequence.prompt([499] * i + [token])
        while any(sequence.stop == "none" for sequence in sequences):
            engine.step(sequences)
        for sequence, token in zip(sequences, tokens, strict=True):
            assert sequence.tokens[-21:] == [token] * 21
            assert sequence.stats["tokens_per_step"] == 5


def test_drafter_of_infinities_proposes_nothing(bundle: Path, plain: Plain, tmp_path: Path) -> None:
    good = bundle.read_bytes()
    drafter = tiny.drafter(Bundle(good).config)
    drafter.norms["model.norm.weight"][5] = np.inf
    (tmp_path / "t.mxb").write_bytes(tiny.with_drafter(good, drafter))
    with Model(tmp_path / "t.mxb") as model:
        for sampling in SAMPLINGS:
            run = run_together(model, SAMPLINGS[sampling], "model", 4)
            assert run.outcomes == plain(sampling, "base")
            assert run.drafted == 0


# ---- base precision drafts for full ----


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_base_precision_change_nothing(drafting: Model, plain: Plain, sampling: str) -> None:
    """Only a sequence that is alone gets them."""
    accepted = {0.0: 0, 0.01: 0}
    for base, (number, prompt) in product(accepted, enumerate(PROMPTS[:20])):
        changes: dict[str, Any] = {"seed": number, "max_tokens": TOKENS, **SAMPLINGS[sampling]}
        with (
            Engine(drafting, ctx=32, threads=1, precision="full", draft="auto") as engine,
            Timeline(engine, **changes) as sequence,
        ):
            set_costs(engine, row=0.01, base=base)
            assert leg(sequence, prompt) == plain(sampling, "full")[number]
            accepted[base] += sequence.stats["accepted"]
            kept = sequence.tokens[:-1]
            sequence.truncate(len(kept))
            logits = sequence.logits([7])
            sequence.truncate(0)
            assert logits.tobytes() == sequence.logits([*kept, 7])[-1:].tobytes()
    assert accepted[0.01] > accepted[0.0] + 10


# ---- what steps cost ----


def test_costs_are_measured_once_for_each_kind_of_engine(drafting: Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ctx": 128, "threads": 1, "precision": "base", "draft": "auto"}
    others: list[dict[str, Any]] = [
        {"threads": 2},
        {"precision": "full"},
        {"draft": "ngram"},
        {"max_rows": 4},
        {"ctx": 64},
    ]
    with Engine(drafting, **options) as engine:
        assert engine.step_costs == pytest.approx([1 + 0.1 * n for n in range(16)])
        assert not engine.load_costs(tmp_path)
        engine.measure_costs(tmp_path)
        measured = engine.step_costs
    assert all(0 < a <= b < 10 for a, b in pairwise(measured))
    (file,) = tmp_path.iterdir()
    for changes in others:
        with Engine(drafting, **options | changes) as engine:
            assert not engine.load_costs(tmp_path), changes
    with Engine(drafting, **options) as engine:
        assert engine.load_costs(tmp_path)
        assert engine.step_costs == pytest.approx(measured, abs=1e-9)
        with Timeline(engine) as sequence:
            leg(sequence, [5])
            with pytest.raises(UsageError, match="before a sequence opens"):
                engine.measure_costs(tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_costs_of_a_busy_machine_are_measured_again(drafting: Model, tmp_path: Path) -> None:
    with Engine(drafting, ctx=64, threads=1, draft="auto") as engine:
        engine.measure_costs(tmp_path)
        (file,) = tmp_path.iterdir()
        numbers = [float(number) for number in file.read_text(encoding="ascii").split()]
        for slower, good in ((1, True), (1000, False)):
            text = " ".join(f"{slower * number:.3f}" for number in numbers) + "\n"
            file.write_text(text, encoding="ascii")
            assert engine.load_costs(tmp_path) == good
        with Timeline(engine) as sequence:  # the steps that tell would overwrite its rows
            leg(sequence, PROMPTS[0])
            assert engine.load_costs(tmp_path)


def test_costs_can_be_measured_without_a_place_for_them(
    drafting: Model, plain: Plain, tmp_path: Path
) -> None:
    with Engine(drafting, ctx=64, threads=1, precision="base", draft="auto") as engine:
        for directory in (None, tmp_path / "none", tmp_path / "none" / ("long" * 2000)):
            engine.measure_costs(directory)
            assert engine.step_costs[0] < 1
        assert not engine.load_costs(tmp_path / "none")
        with Timeline(engine, max_tokens=TOKENS) as sequence:
            assert leg(sequence, PROMPTS[0]) == plain("greedy", "base")[0]
    assert list(tmp_path.iterdir()) == []


def test_damaged_costs_are_not_taken(drafting: Model, tmp_path: Path) -> None:
    with Engine(drafting, ctx=64, threads=1, draft="auto") as engine:
        engine.measure_costs(tmp_path)
        before = engine.step_costs
        (file,) = tmp_path.iterdir()
        good = file.read_bytes()
        numbers = good.split()
        assert (len(numbers), good.count(b"\n"), good[-1:]) == (18, 1, b"\n")

        def with_number(place: int, value: bytes) -> bytes:
            return b" ".join([*numbers[:place], value, *numbers[place + 1 :]]) + b"\n"

        bad = [good[:length] for length in range(len(good))]
        bad += [
            with_number(3, value) for value in (b"x", b"nan", b"inf", b"-1", b"0", b"1e30", b"\0", b"\xff")
        ]
        bad += [with_number(place, value) for place in (16, 17) for value in (b"x", b"nan", b"-1", b"1e30")]
        bad += [with_number(7, b"%f" % (float(numbers[6]) / 2)), good + b"1", bytes(1000), b"9" * 100_000]
        for data in bad:
            file.write_bytes(data)
            assert not engine.load_costs(tmp_path), data[:80]
        assert engine.step_costs == before
        file.unlink()
        file.mkdir()
        assert not engine.load_costs(tmp_path)
        file.rmdir()
        file.write_bytes(b" ".join(b"%d.000" % (10 + n) for n in range(18)) + b"\n")
        assert engine.load_costs(tmp_path)
        assert engine.step_costs == pytest.approx([1e-6 * (10 + n) for n in range(16)])


# ---- other builds ----


def test_nothing_reads_what_rejected_rows_left(tmp_path: Path) -> None:
    """Some of the tests above run in a debug build."""
    chosen = "change_nothing and -1 and (tree or auto) or any_end or nearly_always or share_steps or mixed"
    pass_in_debug_build(__file__, chosen, tmp_path)


@pytest.mark.slow
def test_verifying_trees_has_no_data_race(drafting: Model, tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc and its sanitizers are missing")
    program = compile_c([gcc, "-fsanitize=thread"], tmp_path / "mxdraft", "-g", "-O1", *sources("cli"), "-lm")
    (tmp_path / "cache").mkdir()
    options = ["-p", "The boat The boat", "-n", "16", "-t", "4", "--ignore-eos", "--stats", "json"]
    command = [program, "generate", "-m", drafting.info.path, *options, "--draft", "auto"]
    for _ in range(2):  # the first run measures; by the costs that the second finds, all drafts pay
        done = subprocess.run(
            command,
            env=os.environ | {"MXDRAFT_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            timeout=300,
            check=False,
        )
        report = done.stderr.decode("utf-8", "replace")
        assert (done.returncode, "ThreadSanitizer" in report) == (0, False), report
        for file in (tmp_path / "cache").iterdir():
            file.write_text("100000000 " * 16 + "0.1 0\n", encoding="ascii")
    assert json.loads(report.splitlines()[-1])["drafted"] > 8
