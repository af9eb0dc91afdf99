# SPDX-License-Identifier: Apache-2.0
"""Training of a drafter and its target together: the target also learns to be foreseen.

The drafter's loss has a gradient in the streams that it reads, and so in the target's base plane; at the same
time the target descends its own divergence from the teacher. The target's word, which the drafter should
foresee, gets no gradient: else saying less would be the target's easiest way to be foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxdraft.bundle import Bundle
from mxdraft.checkpoint import Checkpoint
from mxdraft.checkpoint.smooth import Smoothing, smooth
from mxdraft.errors import RefusedError, UsageError
from mxdraft.mx import MXTensor
from mxdraft.train.corpus import Corpus
from mxdraft.train.delta import TrainedBase, write_delta
from mxdraft.train.draft_train import DraftTrainer
from mxdraft.train.drafter import save_drafter
from mxdraft.train.fakequant import MXLinear
from mxdraft.train.features import Features, bundle_target, pad
from mxdraft.train.loss import distillation_loss
from mxdraft.train.model import Llama
from mxdraft.train.recipe import DraftRecipe, read_recipe
from mxdraft.train.run import adamw
from mxdraft.train.start import latent_bounds


def train_together(
    recipe: Path, bundle: Path, checkpoint: Checkpoint, directory: Path, output: Path, delta: Path
) -> None:
    """Train the base plane of ``bundle`` and a drafter for it by the file ``recipe``, from where
    ``directory`` stands, and write both. ``checkpoint``, of which the bundle was made, is the teacher."""
    settings = read_recipe(recipe, DraftRecipe)
    if not settings.target_lr or settings.target != "base":
        raise UsageError(f'recipe {recipe}: training both asks for target = "base" and a target_lr above 0')
    opened = Bundle.open(bundle)
    if opened.provenance["source_sha256"] != checkpoint.source_sha256:
        raise RefusedError(
            f"{bundle} was made of the weights with SHA-256 {opened.provenance['source_sha256']}, "
            f"these have {checkpoint.source_sha256}"
        )
    recorded = opened.provenance.get("smoothing")
    smoothing = None if recorded is None else Smoothing.from_json(recorded)
    teacher = Llama(smooth(checkpoint, smoothing))
    trainer = CoTrainer(settings, recipe.parent, trainable_base(opened), bundle, teacher, directory)
    trainer.run()
    if trainer.rank == 0:
        save_drafter(output, trainer.trained(checkpoint.source_sha256))
        write_delta(delta, checkpoint, replace(trainer.trained_target(), smoothing=smoothing))


def trainable_base(bundle: Bundle) -> Llama:
    """Return the target in base precision with latents to be trained and frozen norms. The latents start
    where the bundle's elements are, in the middle of their roundings: nothing moves before they have left
    those."""
    target = bundle_target(bundle, "base")
    for name, linear in target.linears().items():
        plane = bundle.get("target.base", name)
        assert isinstance(plane, MXTensor)
        linear.restore(plane)
        linear.weight.requires_grad_(True)
    return target


class CoTrainer(DraftTrainer):
    """Both in training. Nothing is kept of the target's streams, for they move."""

    def __init__(
        self, recipe: DraftRecipe, texts: Path, target: Llama, bundle: Path, teacher: Llama, directory: Path
    ) -> None:
        self.latents: list[Tensor] = [linear.weight for linear in target.linears().values()]
        self.target_optimizer = adamw(recipe, {"params": self.latents, "peak": recipe.target_lr})
        super().__init__(recipe, texts, target, bundle, directory)
        self.teacher = teacher.to(self.device).requires_grad_(False)
        self.bounds = latent_bounds(self.teacher, self.target, recipe.reach, recipe.latent_clip)
        self.clamp_latents()

    def loss(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        residuals, tokens = self.padded(batch)
        read = residuals.clone()
        read.register_hook(lambda gradient: self.recipe.draft_weight * gradient)
        loss, count = self.draft_loss(batch, read, tokens)
        return loss + count * self.divergence(batch, residuals, tokens), count

    def divergence(self, batch: Sequence[int], residuals: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean KL(teacher ‖ target) in nat over the places where the drafter's first step is
        asked."""
        row, chain = self.places(batch, 1)
        given = self.target.read_by_head(residuals[:, :, -1])
        with torch.no_grad():
            wanted = self.teacher(tokens)
        asked, said = wanted[row, chain + 1], given[row, chain + 1]
        return distillation_loss(said.float(), asked.float(), self.target.head)

    @torch.no_grad()
    def results(self) -> dict[str, float]:
        """Add the target's divergence from the teacher to the drafter's results."""
        total = count = 0.0
        for batch in self.grouped(self.held_out):
            places = len(self.places(batch, 1)[0])
            total += places * float(self.divergence(batch, *self.padded(batch)))
            count += places
        return super().results() | {"target_kl": total / count}

    def trained_target(self) -> TrainedBase:
        """Return what the target has become, with the recipe, the steps taken and the results."""
        meta = {"recipe": asdict(self.recipe), "steps": self.step, "held_out": self.results()}
        return TrainedBase(self.target.planes(), self.target.norm_arrays(), meta)

    def linears(self) -> list[MXLinear]:
        return [*super().linears(), *self.target.linears().values()]

    @torch.no_grad()
    def clamp_latents(self) -> None:
        super().clamp_latents()
        for latent, bounds in zip(self.latents, self.bounds, strict=True):
            latent.clamp_(*bounds)

    def optimizers(self) -> list[tuple[torch.optim.Optimizer, list[Tensor]]]:
        return [*super().optimizers(), (self.target_optimizer, self.latents)]

    def state(self) -> dict[str, Any]:
        target = {"target": self.target.state_dict(), "target_optimizer": self.target_optimizer.state_dict()}
        return super().state() | target

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.target.load_state_dict(state["target"])
        self.target_optimizer.load_state_dict(state["target_optimizer"])

    def compute_features(
        self,
        corpora: Sequence[Corpus],  # noqa: ARG002
        progress: Callable[[int, int], None] | None,  # noqa: ARG002
    ) -> list[Features]:
        return []

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            residuals, tokens = self.padded([number])
        return residuals[0], tokens[0]

    def padded(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens = pad([self.documents[number].tokens for number in batch]).to(self.device)
        streams = self.target.residuals(tokens, self.recipe.feature_layers)
        return torch.stack(streams, 2), tokens
