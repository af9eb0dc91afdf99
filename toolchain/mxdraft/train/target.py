"""Quantization-aware training of a target: distillation from the teacher into the MXFP4 base plane."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxdraft.checkpoint import Checkpoint
from mxdraft.errors import UsageError
from mxdraft.train.corpus import repetition
from mxdraft.train.data import TeacherStates, epoch_order, read_windows
from mxdraft.train.delta import TrainedBase, write_delta
from mxdraft.train.fakequant import MXLinear, round_e2m1
from mxdraft.train.loss import StudentQuality, distillation_loss, measure_quality
from mxdraft.train.model import Llama
from mxdraft.train.recipe import Recipe, read_recipe
from mxdraft.train.run import TrainingRun, adamw
from mxdraft.train.start import latent_bounds, start_quantized


def train_target(recipe: Path, checkpoint: Checkpoint, directory: Path, delta: Path) -> None:
    """Train the base plane of ``checkpoint`` by the file ``recipe``, from where ``directory`` stands, and
    write the result to ``delta``."""
    settings = read_recipe(recipe, Recipe)
    trainer = Trainer(settings, recipe.parent / settings.text, checkpoint, directory)
    trainer.run()
    if trainer.rank == 0:
        write_delta(delta, checkpoint, trainer.trained_base())


class Trainer(TrainingRun):
    """QAT of a target; the directory also keeps the teacher's states."""

    def __init__(self, recipe: Recipe, text: Path, checkpoint: Checkpoint, directory: Path) -> None:
        super().__init__(recipe, directory)
        self.recipe = recipe
        if recipe.batch % self.processes:
            raise UsageError(
                f"a batch of {recipe.batch} windows does not split over {self.processes} processes"
            )
        windows = read_windows(text, recipe.context, checkpoint.config.vocab)
        self.held_out = np.arange(len(windows))[-recipe.held_out :]
        varied = [
            i for i, w in enumerate(windows[: -recipe.held_out]) if repetition(w) <= recipe.max_repetition
        ]
        self.trained = np.array(varied, np.int64)
        if len(varied) < recipe.batch or len(windows) < recipe.held_out + recipe.calibration:
            raise UsageError(f"{text}: {len(windows)} windows, {len(varied)} of them to train, are too few")
        self.windows = windows
        teacher = Llama(checkpoint).to(self.device).requires_grad_(False)
        self.teacher = TeacherStates(teacher, windows, directory / f"teacher-{self.rank}.npy")
        self.student = Llama(checkpoint, recipe.int8_activations).to(self.device)
        self.optimizer = adamw(
            recipe,
            {"params": [m.weight for m in self.student.linears().values()], "peak": recipe.lr},
            {"params": list(self.student.norms().values()), "peak": recipe.norm_lr},
        )
        if not self.resume():
            # Repetitive windows too may calibrate: these inputs shall be what the model meets.
            order = epoch_order(np.arange(len(windows) - recipe.held_out), 0, recipe.seed)
            tokens = torch.from_numpy(windows[order[-recipe.calibration :]]).to(self.device)
            start_quantized(self.student, recipe.start, tokens)
            self.share(self.student)
        self.bounds = latent_bounds(teacher, self.student, recipe.reach, recipe.latent_clip)
        self._clamp_latents()

    def advance(self) -> tuple[float, float]:
        """Take one step. Returns the KL of its text and the norm of its gradient before clipping."""
        recipe = self.recipe
        index = self._batch(self.step)[self.rank :: self.processes]
        wanted = self.teacher.hidden(index).to(self.device)
        tokens = torch.from_numpy(self.windows[index]).to(self.device)
        with self.compute():
            hidden = self.student(tokens)
        loss = distillation_loss(hidden.float().flatten(0, 1), wanted.flatten(0, 1), self.student.head)
        loss = loss / self.processes
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
        self.sum_over_processes([loss, *gradients])
        norm = self.descend(self.optimizer, self.student.parameters())
        if recipe.dampen:
            pull = recipe.rate(self.step) * recipe.dampen
            with torch.no_grad():
                for linear in self.student.linears().values():
                    linear.weight.lerp_(round_e2m1(linear.weight), pull)
        self._clamp_latents()
        self.step += 1
        return float(loss), norm

    @torch.no_grad()
    def evaluate(self) -> StudentQuality:
        """Compare student and teacher on the held-out windows."""
        tokens = torch.from_numpy(self.windows[self.held_out]).to(self.device)
        wanted = self.teacher.hidden(self.held_out).to(self.device)
        hidden = torch.cat([self.student(window[None]) for window in tokens])
        return measure_quality(hidden, wanted, self.student.head, tokens)

    def trained_base(self) -> TrainedBase:
        """Return what the student has become, with the recipe, the steps taken and the quality on the
        held-out windows."""
        meta = {"recipe": asdict(self.recipe), "steps": self.step, "held_out": asdict(self.evaluate())}
        return TrainedBase(self.student.planes(), self.student.norm_arrays(), meta)

    def linears(self) -> list[MXLinear]:
        return list(self.student.linears().values())

    def results(self) -> dict[str, float]:
        return asdict(self.evaluate())

    def state(self) -> dict[str, Any]:
        return {"student": self.student.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.student.load_weights(state["student"], quantized=True)
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _clamp_latents(self) -> None:
        for linear, bounds in zip(self.student.linears().values(), self.bounds, strict=True):
            linear.weight.clamp_(*bounds)

    def _batch(self, step: int) -> NDArray[np.int64]:
        per_epoch = len(self.trained) // self.recipe.batch
        epoch, place = divmod(step, per_epoch)
        first = place * self.recipe.batch
        return epoch_order(self.trained, epoch, self.recipe.seed)[first : first + self.recipe.batch]
