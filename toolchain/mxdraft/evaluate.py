"""How close a bundle is to its teacher: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Forward = Callable[[NDArray[np.int64]], Logits]


@dataclass
class Quality:
    """Sums over scored positions; ``kl`` in nat, of the student from the teacher."""

    kl_sum: float = 0.0
    agreements: int = 0
    positions: int = 0
    nll_sum: float = 0.0
    predictions: int = 0

    def add(self, teacher: Logits, student: Logits, targets: NDArray[np.int64]) -> None:
        """Score one window: logits [n, vocab] of both, and the n−1 tokens that really followed."""
        p, q = _log_softmax(teacher), _log_softmax(student)
        self.kl_sum += float((np.exp(p) * (p - q)).sum())
        self.agreements += int((teacher.argmax(axis=1) == student.argmax(axis=1)).sum())
        self.positions += len(teacher)
        self.nll_sum -= float(q[np.arange(len(targets)), targets].sum())
        self.predictions += len(targets)

    def report(self) -> dict[str, float]:
        return {
            "kl": self.kl_sum / self.positions,
            "agreement": self.agreements / self.positions,
            "perplexity": float(np.exp(self.nll_sum / self.predictions)),
            "positions": self.positions,
        }


def compare(
    teacher: Forward, students: Mapping[str, Forward], tokens: NDArray[np.int64], ctx: int
) -> Iterator[dict[str, Quality]]:
    """Run teacher and students over windows of ``ctx`` tokens, each from an empty cache.

    Yields the running sums after every window, so that long evaluations show progress; the last is the
    result. The teacher is scored against itself under the name ``teacher`` (its perplexity).
    """
    sums = {name: Quality() for name in ["teacher", *students]}
    for start in range(0, len(tokens), ctx):
        window = tokens[start : start + ctx]
        expected = teacher(window)
        sums["teacher"].add(expected, expected, window[1:])
        for name, student in students.items():
            sums[name].add(expected, student(window), window[1:])
        yield sums


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalized: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized
