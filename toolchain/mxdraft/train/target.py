# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training of a target: distillation from the teacher into the MXFP4 base plane."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxdraft.checkpoint import Checkpoint
from mxdraft.checkpoint.smooth import Smoothing, measure, smooth
from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import write_json
from mxdraft.files.npz import read_windows
from mxdraft.train.corpus import repetition
from mxdraft.train.data import TeacherStates, epoch_order
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
    trainer = Trainer(settings, recipe.parent, checkpoint, directory)
    trainer.run()
    if trainer.rank == 0:
        write_delta(delta, checkpoint, trainer.trained_base())


class Trainer(TrainingRun):
    """QAT of a target; the directory also keeps the smoothing and the teacher's states."""

    def __init__(self, recipe: Recipe, texts: Path, checkpoint: Checkpoint, directory: Path) -> None:
        """``texts``: directory to which the recipe's are relative."""
        super().__init__(recipe, directory)
        self.recipe = recipe
        if recipe.batch % self.processes:
            raise UsageError(
                f"a batch of {recipe.batch} windows does not split over {self.processes} processes"
            )
        parts = [read_windows(texts / name, recipe.context, checkpoint.config.vocab) for name in recipe.texts]
        windows = np.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts])
        self.held_out = {
            name: np.arange(max(end - recipe.held_out, 0), end)
            for name, end in zip(recipe.texts, ends, strict=True)
        }
        usable = np.setdiff1d(np.arange(len(windows)), np.concatenate(list(self.held_out.values())))
        varied = [i for i in usable if repetition(windows[i]) <= recipe.max_repetition]
        self.trained = np.array(varied, np.int64)
        if len(varied) < recipe.batch or len(usable) < max(recipe.calibration, recipe.smoothing):
            names = ", ".join(recipe.texts)
            raise UsageError(f"{names}: {len(windows)} windows, {len(varied)} of them to train, are too few")
        self.windows = windows
        # Repetitive windows too may calibrate: these inputs shall be what the model meets.
        order = epoch_order(usable, 0, recipe.seed)
        self.smoothing = self._smoothing(checkpoint, windows[order[: recipe.smoothing]])
        smoothed = smooth(checkpoint, self.smoothing)
        teacher = Llama(smoothed).to(self.device).requires_grad_(False)
        self.student = Llama(smoothed, recipe.int8_activations).to(self.device)
        self.read_head = teacher.head if recipe.compute == "f32" else teacher.head.bfloat16()
        self.teacher = TeacherStates(teacher, windows, directory / f"teacher-{self.rank}.npy", self.compute)
        self.optimizer = adamw(
            recipe,
            {"params": [m.weight for m in self.student.linears().values()], "peak": recipe.lr},
            {"params": list(self.student.norms().values()), "peak": recipe.norm_lr},
        )
        if not self.resume():
            tokens = torch.from_numpy(windows[order[-recipe.calibration :]]).to(self.device)
            start_quantized(self.student, recipe.start, tokens, reach=recipe.reach)
            self.share(self.student)
        self.bounds = latent_bounds(teacher, self.student, recipe.reach, recipe.latent_clip)
        self._clamp_latents()
        if recipe.compile:
            for layer in [*teacher.model.layers, *self.student.model.layers]:
                layer.compile(dynamic=False)

    def advance(self) -> tuple[float, float]:
        """Take one step. Returns the KL of its text and the norm of its gradient before clipping."""
        recipe = self.recipe
        index = self._batch(self.step)[self.rank :: self.processes]
        wanted = self.teacher.hidden(index).to(self.device)
        tokens = torch.from_numpy(self.windows[index]).to(self.device)
        with self.compute():
            hidden = self.student(tokens)
        given = hidden.float().flatten(0, 1)
        loss = distillation_loss(given, wanted.flatten(0, 1), self.read_head, recipe.compile)
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
    def evaluate(self) -> dict[str, StudentQuality]:
        """Compare student and teacher on the windows held out of each text."""
        found = {}
        for name, index in self.held_out.items():
            tokens = torch.from_numpy(self.windows[index]).to(self.device)
            wanted = torch.cat([self.teacher.hidden(window) for window in index[:, None]]).to(self.device)
            with self.compute():
                hidden = torch.cat([self.student(window[None]).float() for window in tokens])
            found[name] = measure_quality(hidden, wanted, self.student.head, tokens)
        return found

    def trained_base(self) -> TrainedBase:
        """Return what the student has become, with the recipe, the steps taken and the quality on the
        held-out windows."""
        held_out = {name: asdict(quality) for name, quality in self.evaluate().items()}
        meta = {"recipe": asdict(self.recipe), "steps": self.step, "held_out": held_out}
        return TrainedBase(self.student.planes(), self.student.norm_arrays(), meta, self.smoothing)

    def linears(self) -> list[MXLinear]:
        return list(self.student.linears().values())

    def results(self) -> dict[str, float]:
        return {
            f"{Path(name).stem} {measure}": value
            for name, quality in self.evaluate().items()
            for measure, value in asdict(quality).items()
        }

    def state(self) -> dict[str, Any]:
        return {"student": self.student.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.student.load_weights(state["student"], quantized=True)
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _clamp_latents(self) -> None:
        for linear, bounds in zip(self.student.linears().values(), self.bounds, strict=True):
            linear.weight.clamp_(*bounds)

    def _smoothing(self, checkpoint: Checkpoint, windows: NDArray[np.int64]) -> Smoothing | None:
        """Return the run's smoothing, kept in its directory so that a resumed run has the same."""
        if not self.recipe.smoothing:
            return None
        path = self.directory / "smoothing.json"
        if not path.exists():
            write_json(path, measure(checkpoint, windows).to_json())
        try:
            return Smoothing.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(
                f"{path} is no smoothing: {error}; remove it and the run's checkpoint"
            ) from error

    def _batch(self, step: int) -> NDArray[np.int64]:
        per_epoch = len(self.trained) // self.recipe.batch
        epoch, place = divmod(step, per_epoch)
        first = place * self.recipe.batch
        return epoch_order(self.trained, epoch, self.recipe.seed)[first : first + self.recipe.batch]
