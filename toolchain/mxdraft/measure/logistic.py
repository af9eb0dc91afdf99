# SPDX-License-Identifier: Apache-2.0
"""Logistic regression, and how well scores tell two classes apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def fit(features: Floats, outcome: Bools, ridge: float = 1e-3) -> Floats:
    """Fit weights [features + 1] of the log-odds, the bias last, by Newton's method; ``ridge`` times the sum
    of their squares, bias excepted, is added to the mean loss."""
    x = np.column_stack([features, np.ones(len(features))])
    penalty = np.full(x.shape[1], ridge * len(x))
    penalty[-1] = 0
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        chance = probability(x @ weights)
        gradient = x.T @ (chance - outcome) + penalty * weights
        curvature = (x * (chance * (1 - chance))[:, None]).T @ x + np.diag(penalty + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-9:
            break
    return weights


def probability(log_odds: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(log_odds, -60, 60))))


def auc(score: Floats, outcome: Bools) -> float:
    """Return the probability that a positive scores above a negative; ties count half. NaN without both
    classes."""
    positive, negative = int(outcome.sum()), int((~outcome).sum())
    if not positive or not negative:
        return float("nan")
    _, where, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return float((rank[where][outcome].sum() - positive * (positive + 1) / 2) / (positive * negative))


def best_threshold(score: Floats, outcome: Bools) -> float:
    """Find the threshold of the highest balanced accuracy: scores above it are called positive."""
    candidates = np.quantile(score, np.linspace(0, 1, 201))
    return float(max(candidates, key=lambda t: balanced_accuracy(score > t, outcome)))


def balanced_accuracy(called: Bools, outcome: Bools) -> float:
    """Average the shares of positives and negatives that were called right."""
    return float((called[outcome].mean() + (~called[~outcome]).mean()) / 2)


def reliability(chance: Floats, outcome: Bools, bins: int = 10) -> list[tuple[float, float, int]]:
    """Return mean predicted chance, share of positives and count for each bin of equal width that is not
    empty."""
    bin_of = np.minimum((chance * bins).astype(int), bins - 1)
    rows = [(chance[bin_of == b], outcome[bin_of == b]) for b in range(bins)]
    return [(float(p.mean()), float(y.mean()), len(p)) for p, y in rows if len(p)]
