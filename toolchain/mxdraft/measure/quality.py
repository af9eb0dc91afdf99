# SPDX-License-Identifier: Apache-2.0
"""How close a student is to its teacher: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
LogProbabilities = NDArray[np.float64]
Tokens = NDArray[np.int64]
Forward = Callable[[Tokens], Logits]


@dataclass
class Quality:
    """How far a student is from its teacher: sums over scored positions."""

    kl_sum: float = 0.0
    agreements: int = 0
    positions: int = 0
    nll_sum: float = 0.0
    predictions: int = 0

    @property
    def kl(self) -> float:
        """Mean KL(teacher ‖ student) in nat."""
        return self.kl_sum / self.positions

    @property
    def agreement(self) -> float:
        """Share of positions where both find the same token the likeliest."""
        return self.agreements / self.positions

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood, in nat, that the student gives the tokens that followed."""
        return self.nll_sum / self.predictions

    def add(self, p: LogProbabilities, q: LogProbabilities, targets: Sequence[int] | Tokens = ()) -> None:
        """Score one window: log-probabilities [n, vocab] of teacher and student, and the tokens that followed
        the first positions."""
        self.kl_sum += float((np.exp(p) * (p - q)).sum())
        self.agreements += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        self.positions += len(p)
        self.nll_sum -= float(q[np.arange(len(targets)), np.asarray(targets, np.int64)].sum())
        self.predictions += len(targets)

    def report(self) -> dict[str, float]:
        return {
            "kl": self.kl,
            "agreement": self.agreement,
            "perplexity": float(np.exp(self.nll)),
            "positions": self.positions,
        }


def score_windows(
    teacher: Forward, students: Mapping[str, Forward], tokens: Tokens, ctx: int
) -> Iterator[dict[str, Quality]]:
    """Run teacher and students over windows of ``ctx`` tokens, each from an empty cache.

    Yields the running sums after every window, so that long evaluations show progress; the last is the
    result. The teacher is scored against itself under the name ``teacher`` (its perplexity).
    """
    sums = {name: Quality() for name in ["teacher", *students]}
    for start in range(0, len(tokens), ctx):
        window = tokens[start : start + ctx]
        expected = log_softmax(teacher(window))
        sums["teacher"].add(expected, expected, window[1:])
        for name, student in students.items():
            sums[name].add(expected, log_softmax(student(window)), window[1:])
        yield sums


def log_softmax(logits: Logits) -> LogProbabilities:
    """Return log-probabilities of logits [n, vocab], in binary64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalized: LogProbabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized
