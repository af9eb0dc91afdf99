# SPDX-License-Identifier: Apache-2.0
"""How many drafted tokens a target accepts, by chain decoding over text that it wrote itself.

The runtime's text does not depend on drafting, so decoding with a drafter is replayed on finished rollouts:
what a draft step would propose after each prefix is a table, and a round accepts its leading proposals that
equal the text. Drafting is a chain of K tokens a round; one more token comes from the target itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft.errors import CapacityError, RefusedError, UsageError
from mxdraft.files import parse_json_object, parsing, read_file, replacing
from mxdraft.files.npz import check_tokens, documents, reading_npz
from mxdraft.measure import logistic
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.train.corpus import VOCAB_LIMIT, check_vocabulary, repetition

LOW_REPETITION = 0.15  # share of repeated 4-grams in an answer, below which it says something
_LANES = 8
_PROMPTS_LIMIT = 64 << 20  # bytes of a file of prompts

Tokens = NDArray[np.uint16]


class Proposal(NamedTuple):
    """Proposed tokens, and how many draft steps they cost."""

    tokens: list[int]
    steps: int


class Table(NamedTuple):
    """What a drafter proposes: row i is for the first answer_start + i + 1 tokens of a rollout.

    ``tokens`` int64 [chains, depth]; ``confidence`` [chains, depth] in the likeliest token of each step.
    """

    tokens: NDArray[np.int64]
    confidence: NDArray[np.float32]


# Given i and a limit, what to draft after the first i tokens of a rollout, at most ``limit`` tokens.
Propose = Callable[[int, int], Proposal]


@dataclass(frozen=True)
class Prompt:
    task: str
    text: str


@dataclass(frozen=True)
class Rollout:
    """Prompt and answer, and what the answer was sampled with."""

    task: str
    tokens: Tokens
    answer_start: int
    temperature: float
    seed: int

    @property
    def repetition(self) -> float:
        return repetition(self.tokens[self.answer_start :])


def read_prompts(path: Path, per_task: int) -> list[Prompt]:
    """Read the first turns of a Spec-Bench file (JSON lines with ``task`` and ``turns``), evenly spread, at
    most ``per_task`` for each task (0: all). Raises RefusedError."""
    data = read_file(path, _PROMPTS_LIMIT)
    with parsing(path, "file of prompts"):
        # Not splitlines: a JSON string may hold what else Unicode counts as the end of a line.
        prompts = [_prompt(line) for line in data.split(b"\n") if line.strip()]
        if not prompts:
            raise ValueError("it is empty")
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    return [
        prompt
        for of_task in by_task.values()
        for prompt in of_task[:: max(1, len(of_task) // per_task) if per_task else 1][: per_task or None]
    ]


def _prompt(line: bytes) -> Prompt:
    fields = parse_json_object(line)
    task, turns = fields["task"], fields["turns"]
    if not isinstance(task, str) or not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError("a line has no text as 'task', or no list of texts as 'turns'")
    return Prompt(task, turns[0])


def write_rollouts(
    model: Model,
    prompts: Sequence[Prompt],
    path: Path,
    temperature: float,
    tokens: int = 128,
    ctx: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> list[Rollout]:
    """Let base precision answer each prompt with up to ``tokens`` tokens, and keep that in ``path``.

    Prompt i is sampled with seed i. A prompt that does not fit ``ctx`` is left out. If the file is there, it
    is read instead; raises RefusedError if it is of other prompts or another temperature.
    """
    check_vocabulary(model)
    ctx = min(ctx, model.info.max_positions)
    chats = [model.chat([("user", prompt.text)]) for prompt in prompts]
    fitting = [i for i, ids in enumerate(chats) if len(ids) + tokens <= ctx]
    if not fitting:
        raise CapacityError(f"no prompt leaves {tokens} of {ctx} tokens: give shorter ones, or ask for less")
    if path.exists():
        return _load(path, [(prompts[i].task, chats[i], i) for i in fitting], temperature)
    found: dict[int, Rollout] = {}
    with Engine(model, ctx=ctx, threads=1, precision="base", max_seqs=_LANES) as engine:
        waiting = iter(fitting)

        def begin(i: int) -> tuple[int, Timeline]:
            sequence = Timeline(engine, temperature=temperature, seed=i, max_tokens=tokens)
            sequence.prompt(chats[i])
            return i, sequence

        running = [begin(i) for i in islice(waiting, _LANES)]
        while running:
            engine.step(sequence for _, sequence in running)
            for i, sequence in [pair for pair in running if pair[1].stop != "none"]:
                text = np.array(sequence.tokens, np.uint16)
                found[i] = Rollout(prompts[i].task, text, len(chats[i]), temperature, i)
                sequence.close()
                running.remove((i, sequence))
                running += [begin(i) for i in islice(waiting, 1)]
                if progress is not None:
                    progress(len(found), len(fitting))
    rollouts = [found[i] for i in fitting]
    _save(path, rollouts)
    return rollouts


def _save(path: Path, rollouts: Sequence[Rollout]) -> None:
    with replacing(path) as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([r.tokens for r in rollouts]),
            offsets=np.cumsum([0, *(len(r.tokens) for r in rollouts)], dtype=np.int64),
            temperature=np.array([r.temperature for r in rollouts]),
        )


def _load(path: Path, expected: Sequence[tuple[str, list[int], int]], temperature: float) -> list[Rollout]:
    with reading_npz(path, "file of rollouts") as arrays:
        texts = [text.astype(np.uint16) for text in documents(arrays)]
        check_tokens(arrays["tokens"], VOCAB_LIMIT)
        temperatures = set(arrays["temperature"].tolist())
    same = len(texts) == len(expected) and temperatures == {temperature}
    if not same or any(t[: len(ids)].tolist() != ids for t, (_, ids, _) in zip(texts, expected, strict=True)):
        raise RefusedError(f"{path} holds rollouts of other prompts; remove it")
    return [
        Rollout(task, text, len(ids), temperature, seed)
        for text, (task, ids, seed) in zip(texts, expected, strict=True)
    ]


# ---- drafting ----


@dataclass
class Acceptance:
    """Sums over rounds; ``reached[j]``: rounds in which draft token j was looked at because those before it
    were accepted, ``accepted[j]``: rounds in which it was accepted too."""

    rounds: int = 0
    emitted: int = 0
    steps: int = 0  # of a drafter
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def alpha(self) -> list[float]:
        """Share of the reached draft tokens that is accepted, by position in the draft."""
        return [a / r if r else float("nan") for a, r in zip(self.accepted, self.reached, strict=True)]

    def decode(self, tokens: Tokens, answer_start: int, propose: Propose, most: int) -> None:
        """Replay the answer, whose first token the prompt's own step gave, with ``most`` drafts a round."""
        self.reached += [0] * (most - len(self.reached))
        self.accepted += [0] * (most - len(self.accepted))
        text = tokens.tolist()
        place = answer_start + 1
        while place < len(text):
            drafts, steps = propose(place, most)
            self.steps += steps
            agreed = 0
            for draft in drafts[: len(text) - place]:
                self.reached[agreed] += 1
                if draft != text[place + agreed]:
                    break
                self.accepted[agreed] += 1
                agreed += 1
            emitted = min(agreed + 1, len(text) - place)
            self.rounds += 1
            self.emitted += emitted
            place += emitted


def from_table(table: Table, answer_start: int) -> Propose:
    """Propose what a drafter's ``table`` says."""
    rows: list[list[int]] = table.tokens.tolist()
    return lambda place, most: Proposal(rows[place - answer_start - 1][:most], most)


def lookup(tokens: Tokens, longest: int = 3, shortest: int = 1) -> Propose:
    """Propose by prompt lookup: what followed the latest earlier occurrence of the last n tokens, n as large
    as possible from ``shortest`` to ``longest``."""
    text = tokens.tolist()
    # By n-gram, the places where it ends, in order.
    ends: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(text) + 1):
        for n in range(shortest, min(longest, place) + 1):
            ends.setdefault(tuple(text[place - n : place]), []).append(place)

    def propose(place: int, most: int) -> Proposal:
        for n in range(min(longest, place), shortest - 1, -1):
            earlier = [end for end in ends[tuple(text[place - n : place])] if end < place]
            if earlier:
                return Proposal(text[earlier[-1] : min(earlier[-1] + most, place)], 0)
        return Proposal([], 0)

    return propose


def either(first: Propose, second: Propose) -> Propose:
    """Propose what ``first`` does where it proposes anything, else what ``second`` does."""

    def propose(place: int, most: int) -> Proposal:
        draft = first(place, most)
        return draft if draft.tokens else second(place, most)

    return propose


# ---- reports ----


def groups(rollouts: Sequence[Rollout]) -> Iterator[tuple[str, list[int]]]:
    """Yield name and members of what is reported apart: all, the low-repetition subset, each task."""
    yield "all", list(range(len(rollouts)))
    yield "low repetition", [i for i, r in enumerate(rollouts) if r.repetition < LOW_REPETITION]
    for task in dict.fromkeys(r.task for r in rollouts):
        yield task, [i for i, r in enumerate(rollouts) if r.task == task]


def acceptance_report(
    rollouts: Sequence[Rollout],
    tables: Sequence[Table],
    depths: Sequence[int],
    cost: float,
) -> dict[str, dict[str, dict[str, object]]]:
    """Report acceptance by group and method (``drafter``, ``lookup``, ``union``: lookup of 2-grams and
    longer, else the drafter).

    ``tables``: of the drafter, one a rollout; ``cost``: of a draft step, as share of a step of the target.
    Each entry has rollouts, tau by depth, alpha by position at the largest depth, ``alpha_everywhere`` (the
    first proposal, at every place of the text) and the best speed-up tau / (1 + cost · draft steps a round)
    with its depth; lookup takes no draft steps.
    """
    if not rollouts:
        raise UsageError("no rollouts: every prompt was left out")
    methods: dict[str, list[Propose]] = {"drafter": [], "lookup": [], "union": []}
    for rollout, table in zip(rollouts, tables, strict=True):
        drafter = from_table(table, rollout.answer_start)
        methods["drafter"].append(drafter)
        methods["lookup"].append(lookup(rollout.tokens))
        methods["union"].append(either(lookup(rollout.tokens, 4, 2), drafter))
    return {
        name: {
            method: _measure(rollouts, members, proposals, depths, cost)
            for method, proposals in methods.items()
        }
        for name, members in groups(rollouts)
        if members
    }


def _measure(
    rollouts: Sequence[Rollout],
    members: Sequence[int],
    proposals: Sequence[Propose],
    depths: Sequence[int],
    cost: float,
) -> dict[str, object]:
    by_depth: dict[int, Acceptance] = {depth: Acceptance() for depth in depths}
    hits = places = 0
    for i in members:
        tokens, start = rollouts[i].tokens, rollouts[i].answer_start
        for depth, acceptance in by_depth.items():
            acceptance.decode(tokens, start, proposals[i], depth)
        for place in range(start + 1, len(tokens)):
            places += 1
            hits += proposals[i](place, 1).tokens == [int(tokens[place])]
    speed = {
        depth: a.tau / (1 + cost * a.steps / a.rounds) if a.rounds else float("nan")
        for depth, a in by_depth.items()
    }
    best = max(speed, key=lambda depth: speed[depth])
    return {
        "rollouts": len(members),
        "tau": {str(depth): a.tau for depth, a in by_depth.items()},
        "alpha": by_depth[max(depths)].alpha,
        "alpha_everywhere": hits / places if places else float("nan"),
        "speed_up": speed[best],
        "speed_up_depth": best,
    }


class MeanInterval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def differences(
    rollouts: Sequence[Rollout],
    tables: Sequence[Table],
    reference: Sequence[Table],
    depths: Sequence[int],
    resamples: int = 4000,
) -> dict[str, dict[str, MeanInterval]]:
    """Say what one drafter's ``tables`` gain over those of ``reference`` on the same rollouts, by group:
    ``alpha_everywhere`` and ``tau N`` as in ``acceptance_report``. Intervals: bootstrap over rollouts, the
    same ones for both drafters."""
    both = [_counts(rollouts, drafter, depths) for drafter in (tables, reference)]
    generator = np.random.default_rng(0)
    found: dict[str, dict[str, MeanInterval]] = {}
    for group, members in groups(rollouts):
        if members:
            drawn = generator.choice(members, (resamples, len(members)))
            found[group] = {
                measure: _difference(both[0][measure], both[1][measure], members, drawn)
                for measure in both[0]
            }
    return found


def _counts(
    rollouts: Sequence[Rollout], tables: Sequence[Table], depths: Sequence[int]
) -> dict[str, NDArray[np.int64]]:
    """Count numerator and denominator [rollouts, 2] of each measure."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for rollout, table in zip(rollouts, tables, strict=True):
        text = rollout.tokens[rollout.answer_start + 1 :]
        hits = int((table.tokens[: len(text), 0] == text).sum())
        counts.setdefault("alpha_everywhere", []).append((hits, len(text)))
        for depth in depths:
            acceptance = Acceptance()
            acceptance.decode(
                rollout.tokens, rollout.answer_start, from_table(table, rollout.answer_start), depth
            )
            counts.setdefault(f"tau {depth}", []).append((acceptance.emitted, acceptance.rounds))
    return {measure: np.array(pairs, np.int64) for measure, pairs in counts.items()}


def _difference(
    a: NDArray[np.int64], b: NDArray[np.int64], members: Sequence[int], drawn: NDArray[np.int64]
) -> MeanInterval:
    def ratio(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(counts[..., 0] / np.maximum(counts[..., 1], 1))

    mean = float(ratio(a[members].sum(0)) - ratio(b[members].sum(0)))
    low, high = np.quantile(ratio(a[drawn].sum(1)) - ratio(b[drawn].sum(1)), (0.025, 0.975))
    return MeanInterval(mean, float(low), float(high))


def reliability(
    rollouts: Sequence[Rollout], tables: Sequence[Table], bins: int = 10
) -> list[list[dict[str, float]]]:
    """Sort the proposals of each draft step, where all steps before it were right, by confidence into
    ``bins`` equal ranges. Each has its mean ``confidence``, the share that was ``accepted``, and ``count``;
    empty ones are left out."""
    depth = tables[0].tokens.shape[1]
    sure: list[list[float]] = [[] for _ in range(depth)]
    right: list[list[bool]] = [[] for _ in range(depth)]
    for rollout, table in zip(rollouts, tables, strict=True):
        text = rollout.tokens[rollout.answer_start + 1 :].astype(np.int64)
        for place in range(len(text)):
            for step in range(min(depth, len(text) - place)):
                sure[step].append(float(table.confidence[place, step]))
                right[step].append(bool(table.tokens[place, step] == text[place + step]))
                if not right[step][-1]:
                    break
    return [
        [
            {"confidence": confidence, "accepted": accepted, "count": count}
            for confidence, accepted, count in logistic.reliability(np.array(c), np.array(r, bool), bins)
        ]
        for c, r in zip(sure, right, strict=True)
    ]


def noise(seed: int, position: int, ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Compute −log u of tokens ``ids`` at a position (docs/arithmetic.md, "Sampling"): the least noise /
    weight wins."""
    with np.errstate(over="ignore"):
        h = _mix(
            _mix(_mix(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)) + np.uint64(position + 1))
            + ids
            + np.uint64(1)
        )
    u = ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(u)


def _mix(z: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)
