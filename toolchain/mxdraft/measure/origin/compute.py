# SPDX-License-Identifier: Apache-2.0
"""The compute consumer: which drafted tokens get a place in the verify batch, and what that buys.

``measure_drafting`` compares no drafting, drafts of a fixed length and the scheduler, with continuous
batching; ``identify`` says how well the score of a drafted token tells whether the target accepts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft.errors import NumericError, UsageError
from mxdraft.measure import logistic
from mxdraft.runtime import Draft, DraftRecord, Engine, Model, Precision, Timeline

CONCURRENCIES = (1, 8, 48)
_FEWEST = 20  # examples of each class without which nothing is fitted
Floats = NDArray[np.float64]


class Method(NamedTuple):
    """How an engine drafts; ``length`` 0: as many tokens as pay, else that many, paying or not."""

    draft: Draft
    length: int


METHODS = {
    "off": Method("off", 0),
    "fixed 1": Method("auto", 1),
    "fixed 2": Method("auto", 2),
    "fixed 4": Method("auto", 4),
    "auto": Method("auto", 0),
}


@dataclass
class Tally:
    """Sums over runs of one method, those of busy steps apart: steps in which every place generates and none
    reads a prompt. ``latencies``: for each token of a busy step, the step's time by its sequence's tokens."""

    seconds: float = 0.0
    tokens: int = 0
    busy_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    sequence_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    schedule_s: float = 0.0

    def add_step(self, seconds: float, made: Sequence[int], busy: bool) -> None:
        self.seconds += seconds
        self.tokens += sum(made)
        if busy:
            self.busy_seconds += seconds
            self.sequence_steps += len(made)
            self.latencies += [seconds / count for count in made for _ in range(count)]

    def add_drafts(self, drafts: Sequence[DraftRecord]) -> None:
        self.drafted += sum(draft.verified for draft in drafts)
        self.accepted += sum(draft.accepted for draft in drafts)

    def add_sequence(self, stats: dict[str, Any]) -> None:
        self.steps += stats["steps"]
        self.schedule_s += stats["schedule_s"]

    def report(self) -> dict[str, Any]:
        if not self.latencies or not self.steps:
            raise UsageError("no step had all places generating: more prompts, or more tokens for each")
        p50, p95 = np.percentile(np.array(self.latencies) * 1e3, (50, 95))
        return {
            "tok_per_s": self.tokens / self.seconds,
            "busy_tok_per_s": len(self.latencies) / self.busy_seconds,
            "tokens_per_step": len(self.latencies) / self.sequence_steps,
            "drafted_per_step": self.drafted / self.sequence_steps,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "mean_ms": float(np.mean(self.latencies)) * 1e3,
            "p50_ms": float(p50),
            "p95_ms": float(p95),
            "us_per_step": self.schedule_s / self.steps * 1e6,
        }


def open_engine(
    model: Model, method: Method, sequences: int, ctx: int, threads: int, precision: Precision, costs: Path
) -> Engine:
    """Open an engine for ``sequences`` that knows what steps cost, from ``costs`` or by measuring."""
    rows = max(64, min(512, sequences * (2 + max(m.length for m in METHODS.values()))))
    engine = Engine(
        model,
        ctx=ctx,
        threads=threads,
        precision=precision,
        max_seqs=sequences,
        max_rows=rows,
        draft=method.draft,
        draft_max=method.length,
        draft_min=method.length,
    )
    if method.draft != "off" and not engine.load_costs(costs):
        engine.measure_costs(costs)
    return engine


@contextmanager
def having_read(engine: Engine, ids: Sequence[int]) -> Iterator[Timeline]:
    """Give a sequence that has processed ``ids``, drafters included, to go on from or to copy."""
    with Timeline(engine, max_tokens=1, ignore_eos=True) as sequence:
        for _ in sequence.generate(ids):
            pass
        sequence.truncate(len(ids))
        yield sequence


@dataclass
class Batch:
    """Prompts through one engine, greedily, up to ``tokens`` tokens each, ``places`` at a time: a sequence
    that ends makes place for the next prompt. ``made``: what came of each prompt so far. ``seen`` gets the
    drafts of each step with the prompt's number. With ``begin`` every prompt follows what that sequence
    holds, and ends of sequences are ignored."""

    engine: Engine
    prompts: Sequence[list[int]]
    places: int
    tokens: int
    tally: Tally | None = None
    seen: Callable[[int, list[DraftRecord]], None] | None = None
    begin: Timeline | None = None
    made: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.made = [[] for _ in self.prompts]

    def run(self) -> list[list[int]]:
        for _ in self.steps():
            pass
        return self.made

    def steps(self) -> Iterator[None]:
        """Take one engine step at a time."""
        beginning = self._sequences()
        running = dict(next(beginning) for _ in range(min(self.places, len(self.prompts))))
        while running:
            busy = len(running) == self.places and all(self.made[i] for i in running)
            before = time.perf_counter()
            self.engine.step(running.values())
            seconds = time.perf_counter() - before
            if self.tally:
                self.tally.add_step(seconds, [len(sequence.output) for sequence in running.values()], busy)
            for i, sequence in list(running.items()):
                self._take(i, sequence, busy)
                if sequence.stop == "none":
                    continue
                sequence.close()
                del running[i]
                running |= dict([pair] if (pair := next(beginning, None)) else [])
            yield

    def _sequences(self) -> Iterator[tuple[int, Timeline]]:
        for i, ids in enumerate(self.prompts):
            sequence = Timeline(
                self.engine,
                max_tokens=self.tokens,
                ignore_eos=self.begin is not None,
                copy_of=self.begin,
            )
            sequence.prompt(ids)
            yield i, sequence

    def _take(self, i: int, sequence: Timeline, busy: bool) -> None:
        """Take in what the last step did for prompt i."""
        self.made[i] += sequence.output
        if self.seen:
            self.seen(i, sequence.drafts)
        if self.tally and busy:
            self.tally.add_drafts(sequence.drafts)
        if self.tally and sequence.stop != "none":
            self.tally.add_sequence(sequence.stats)


def run_in_turns(batches: Iterable[Batch]) -> None:
    """Take a step of each batch, again and again, so that a disturbance of the machine meets all of them."""
    under_way = [batch.steps() for batch in batches]
    while under_way:
        under_way = [run_of for run_of in under_way if next(run_of, run_of) is not run_of]
        under_way = under_way[1:] + under_way[:1]


def measure_drafting(
    model: Model,
    prompts: Sequence[list[int]],
    tokens: int = 96,
    ctx: int = 512,
    threads: int = 0,
    precision: Precision = "base",
    concurrencies: Sequence[int] = CONCURRENCIES,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run every method on the same prompts, in turns after each step; report by number of sequences and
    method.

    A round takes the next part of the prompts, at most four for one sequence. Each method reports
    ``tok_per_s`` (of all steps, prompts and the end with fewer sequences included) and, of steps in which
    every place generates and none reads a prompt, ``busy_tok_per_s``, ``tokens_per_step`` (of one sequence),
    ``drafted_per_step``, ``acceptance`` (of verified drafts), ``mean_ms``, ``p50_ms`` and ``p95_ms`` (time
    per token of a sequence); ``us_per_step``: ranking and choosing. Prompts that do not fit are left out.
    Raises NumericError if a method changes the output, UsageError if prompts are too few.
    """
    fitting = [ids for ids in prompts if len(ids) + tokens <= ctx]
    results: dict[str, Any] = {}
    for places in concurrencies:
        part = len(fitting) // rounds if places > 1 else min(len(fitting) // rounds, 4)
        if part < places:
            raise UsageError(f"{len(fitting)} prompts fit: {rounds} rounds of {places} sequences need more")
        tallies = {name: Tally() for name in METHODS}
        with TemporaryDirectory() as costs, ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    open_engine(model, method, places, ctx, threads, precision, Path(costs))
                )
                for name, method in METHODS.items()
            }
            for index in range(rounds):
                of_round = fitting[index::rounds][:part]
                batches = {
                    name: Batch(engines[name], of_round, places, tokens, tallies[name]) for name in METHODS
                }
                run_in_turns(batches.values())
                for name in METHODS:
                    if batches[name].made != batches["off"].made:
                        raise NumericError(f"drafting ({name}, {places} sequences) changed the output")
                if progress:
                    progress(f"{places} sequences: round {index + 1}/{rounds}")
        results[str(places)] = {name: tally.report() for name, tally in tallies.items()}
    return results


# ---- identification ----


def log_odds(probability: Floats) -> Floats:
    x = np.clip(probability, 1e-4, 1 - 1e-4)
    return np.log(x / (1 - x))


class Example(NamedTuple):
    """A verified draft: its signals as log-odds (confidence, history), and the engine's chance for it and all
    its ancestors."""

    prompt: int
    signals: tuple[float, float]
    chance: float
    reached: bool  # its ancestors were right
    accepted: bool


def examples(prompt: int, drafts: Sequence[DraftRecord]) -> Iterator[Example]:
    for draft in drafts:
        if draft.verified:
            signals = log_odds(np.array([draft.confidence, draft.history]))
            reached = draft.parent < 0 or drafts[draft.parent].accepted
            yield Example(prompt, (signals[0], signals[1]), draft.chance, reached, draft.accepted)


def identify(
    model: Model,
    prompts: Sequence[list[int]],
    tokens: int = 96,
    ctx: int = 512,
    threads: int = 0,
    precision: Precision = "base",
    places: int = 8,
    length: int = 4,
) -> dict[str, Any]:
    """Judge how well the score of a drafted token tells whether it is accepted, on drafts that are all
    verified.

    Every second prompt sets the threshold (and the weights), the others are judged. ``accuracy``, where
    right and wrong ones weigh the same, and ``auc``, of the chance by which the engine ranks;
    ``reliability``: bins of it (mean chance, share accepted, count); ``signals``: AUC of each signal, and of
    both by fitted ``weights``, for tokens after accepted ones; ``us_per_step``: time of ranking and
    choosing in steps of ``places`` sequences under the scheduler.
    Raises UsageError if there are too few examples.
    """
    fitting = [ids for ids in prompts if len(ids) + tokens <= ctx]
    found: list[Example] = []
    tally = Tally()
    with TemporaryDirectory() as costs:
        for method in (Method("auto", length), METHODS["auto"]):
            with open_engine(model, method, places, ctx, threads, precision, Path(costs)) as engine:
                if method.length:
                    Batch(
                        engine, fitting, places, tokens, seen=lambda i, d: found.extend(examples(i, d))
                    ).run()
                else:
                    Batch(engine, fitting, places, tokens, tally).run()
    return judge(found) | {"us_per_step": tally.report()["us_per_step"]}


def judge(found: Sequence[Example]) -> dict[str, Any]:
    """Report what ``identify`` makes of its examples."""
    train = np.array([e.prompt % 2 == 0 for e in found], bool)
    reached = np.array([e.reached for e in found], bool)
    right = np.array([e.accepted for e in found], bool)
    for part in (train & reached, ~train & reached):
        if min((right & part).sum(), (~right & part).sum()) < _FEWEST:
            raise UsageError(f"{len(found)} drafts are too few to judge by: more prompts, or more tokens")
    chance = np.array([e.chance for e in found])
    signals = np.array([e.signals for e in found])
    weights = logistic.fit(signals[train & reached], right[train & reached])
    held_out = ~train & reached
    scores = {"confidence": signals[:, 0], "history": signals[:, 1], "fitted": signals @ weights[:2]}
    threshold = logistic.best_threshold(chance[train], right[train])
    return {
        "accuracy": logistic.balanced_accuracy(chance[~train] > threshold, right[~train]),
        "auc": logistic.auc(chance[~train], right[~train]),
        "examples": int((~train).sum()),
        "reliability": logistic.reliability(chance[~train], right[~train]),
        "signals": {name: logistic.auc(score[held_out], right[held_out]) for name, score in scores.items()},
        "weights": dict(zip(("alpha", "gamma", "bias"), weights.tolist(), strict=True)) | {"beta": 0.0},
    }
