# SPDX-License-Identifier: Apache-2.0
"""Logistic regression, and the measures of how well scores tell two classes apart."""

from __future__ import annotations

import numpy as np
import pytest
from mxdraft.measure import logistic


def test_logistic_fit_finds_the_weights_of_its_data() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20000, 3))
    log_odds = features @ np.array([1.5, 0.0, -0.7]) - 0.5
    outcome = rng.random(20000) < logistic.probability(log_odds)
    assert logistic.fit(features, outcome, ridge=1e-6) == pytest.approx([1.5, 0, -0.7, -0.5], abs=0.1)
    for predicted, seen, count in logistic.reliability(logistic.probability(log_odds), outcome):
        assert predicted == pytest.approx(seen, abs=3 / count**0.5)


def test_auc_counts_pairs() -> None:
    rng = np.random.default_rng(1)
    score = rng.integers(0, 6, 40).astype(float)
    outcome = rng.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in score[outcome] for b in score[~outcome]]
    assert logistic.auc(score, outcome) == pytest.approx(np.mean(pairs))
    threshold = logistic.best_threshold(score, outcome)
    best = logistic.balanced_accuracy(score > threshold, outcome)
    assert best == max(logistic.balanced_accuracy(score > t, outcome) for t in np.arange(-1, 7) + 0.5)
    assert np.isnan(logistic.auc(score, np.ones(40, bool)))
