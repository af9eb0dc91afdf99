# SPDX-License-Identifier: Apache-2.0
"""What a drafter would propose after every prefix of finished rollouts (acceptance.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mxdraft.measure.acceptance import Rollout, Table, noise
from mxdraft.train.draft_model import DraftModel
from mxdraft.train.draft_train import confidence, extra_rows
from mxdraft.train.features import Features
from mxdraft.train.model import Llama


def rollout_features(
    bundle: Path,
    layers: Sequence[int],
    rollouts: Sequence[Rollout],
    cache: Path,
    progress: Callable[[int], None] | None = None,
) -> Features:
    """Compute base precision's streams after ``layers`` for every rollout; they are kept in ``cache``."""
    features = Features(bundle, "base", layers, [rollout.tokens for rollout in rollouts], cache)
    features.compute(progress)
    return features


@torch.inference_mode()
def draft_tables(
    drafter: DraftModel,
    ids: Tensor,
    calibration: Sequence[tuple[float, float]],
    target: Llama,
    features: Features,
    rollouts: Sequence[Rollout],
    depth: int,
) -> list[Table]:
    """Make the table of each rollout.

    ``ids``: the draft vocabulary; ``calibration``: see mxdraft.train.drafter. A step is given the text itself
    up to its place, as it would be if all steps before it were accepted. For a sampled rollout it
    draws with the rollout's own noise. All tokens of the context have head rows here; the runtime keeps the
    latest 512.
    """
    tables = []
    for number, rollout in enumerate(rollouts):
        tokens = torch.from_numpy(rollout.tokens.astype(np.int64))[None]
        read = drafter(target, features.of(number)[None], tokens, depth)
        extra, first = extra_rows(tokens, ids)
        candidates = torch.cat([ids, extra])
        head = target.head[candidates]
        chains = torch.arange(rollout.answer_start - 1, len(rollout.tokens) - 1)
        barred = F.pad(first[0] > (chains + 1)[:, None], (len(ids), 0))
        columns, sure = [], []
        for step, hidden in enumerate(read, start=1):
            logits = (hidden[0, chains] @ head.T).masked_fill(barred, -torch.inf)
            sure.append(confidence(logits, *calibration[min(step, len(calibration)) - 1]))
            if rollout.temperature:
                logits = logits / rollout.temperature - _log_noise(rollout, candidates, chains + step + 1)
            columns.append(candidates[logits.argmax(-1)])
        tables.append(Table(torch.stack(columns, 1).numpy(), torch.stack(sure, 1).numpy()))
    return tables


def _log_noise(rollout: Rollout, candidates: Tensor, positions: Tensor) -> Tensor:
    ids = candidates.numpy().astype(np.uint64)
    rows = [noise(rollout.seed, position, ids) for position in positions.tolist()]
    return torch.from_numpy(np.log(np.stack(rows))).float()
