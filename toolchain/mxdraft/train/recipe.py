# SPDX-License-Identifier: Apache-2.0
"""Training recipes: TOML files that say everything a run depends on but the checkpoint and the text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from mxdraft.errors import MxdraftError, UsageError
from mxdraft.files import read_toml

Kind = TypeVar("Kind", bound="TrainingSchedule")


@dataclass(frozen=True)
class TrainingSchedule:
    """What every kind of training has."""

    compute: Literal["f32", "bf16"]  # of matrix products; weights and optimizer stay f32
    steps: int
    lr: float
    norm_lr: float
    warmup: int  # steps of linear rise
    cooldown: int  # steps, at the end, over which the rates fall to zero
    beta1: float
    beta2: float
    gradient_clip: float  # largest norm of the whole gradient
    latent_clip: float  # largest magnitude of a latent
    seed: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate at 0-based ``step``: linear rise, plateau, then 1 −
        √progress (Hägele et al. 2024, arXiv 2405.18392), so that a run may be prolonged from its plateau."""
        rise = (step + 1) / (self.warmup + 1)
        cooled = max(0, step - (self.steps - self.cooldown))
        fall = 1 - math.sqrt(cooled / self.cooldown) if cooled else 1.0
        return min(rise, fall, 1.0)


@dataclass(frozen=True)
class Recipe(TrainingSchedule):
    """QAT of a target. ``lr`` is in grid units (fakequant.py), ``norm_lr`` absolute."""

    texts: list[str]  # .npz files with ``tokens``, relative to the recipe
    context: int  # tokens a window
    held_out: int  # windows at the end of each text that never train
    max_repetition: float  # windows whose share of repeated 4-grams is larger do not train
    start: Literal["round", "compensate"]
    smoothing: int  # windows that smooth the weights (mxdraft.checkpoint.smooth); 0: none do
    calibration: int  # windows that ``compensate`` looks at
    int8_activations: bool
    compile: bool  # layers and loss become machine code at the first step (torch.compile, a C++ compiler)
    batch: int  # windows a step, over all processes
    reach: float  # how far an element may lie from its weight (start.within_reach); 0: to latent_clip
    # Share of the way to its grid value that a latent is pulled each step, times the rate's share.
    dampen: float


@dataclass(frozen=True)
class DraftRecipe(TrainingSchedule):
    """Training of a drafter. ``lr`` and ``norm_lr`` are absolute, ``quantized_lr`` is in
    grid units."""

    target: Literal["base", "full"]  # the precision whose streams are read and whose words are foreseen
    target_lr: float  # in grid units, of a base plane that trains along (cotrain.py); 0: it is frozen
    # Weight of the drafter's loss in that base plane's, where its divergence from the teacher has weight 1.
    draft_weight: float
    reach: float  # of that base plane, as in ``Recipe``
    texts: list[str]  # corpora (mxdraft.train.corpus), relative to the recipe
    share: float  # of the documents that may train, how many do: 1 is all, the first ones are taken
    held_out: int  # documents, the last of each corpus, that never train; they calibrate the confidence
    feature_layers: list[int]  # layers of the target after which its residual stream is read
    vocab: int  # tokens of the static draft vocabulary
    ridge: int  # documents from which the input maps are computed before training
    unroll_at: list[int]  # training steps from which on the loss has 1, 2, … draft steps; the first is 0
    unroll_decay: float  # weight of a draft step's loss relative to the step before
    batch: int  # tokens a step, padding included, over all processes
    quantize_at: int  # step at which the weights begin to be read through MXFP4; ``steps``: never
    quantized_lr: float
    weight_decay: float


def read_recipe(path: Path, kind: type[Kind]) -> Kind:
    """Read and check a recipe of a kind. Raises UsageError that names the file and the key at fault."""
    try:
        values = read_toml(path, "recipe")
    except MxdraftError as error:
        raise UsageError(f"recipe {error}") from error
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise UsageError(f"recipe {path}: unknown key '{name}'; known are {', '.join(hints)}")
    for field in fields(kind):
        if field.name not in values:
            raise UsageError(f"recipe {path}: key '{field.name}' is missing")
        value, wanted = values[field.name], hints[field.name]
        if wanted is float and type(value) is int:
            values[field.name] = value = float(value)
        if get_origin(wanted) is list:
            (item,) = get_args(wanted)
            if type(value) is not list or not value or any(type(v) is not item for v in value):
                raise UsageError(f"recipe {path}: {field.name} = {value!r} is not a list of {item.__name__}")
        elif choices := get_args(wanted):
            if value not in choices:
                raise UsageError(f"recipe {path}: {field.name} = {value!r} is none of {', '.join(choices)}")
        elif type(value) is not wanted:
            raise UsageError(f"recipe {path}: {field.name} = {value!r} is not of type {wanted.__name__}")
        elif wanted in (int, float) and value < 0:
            raise UsageError(f"recipe {path}: {field.name} = {value} is negative")
    for name in ("context", "held_out", "steps", "batch", "log_every", "evaluate_every", "checkpoint_every"):
        if values.get(name) == 0:
            raise UsageError(f"recipe {path}: {name} must be at least 1")
    return kind(**values)
