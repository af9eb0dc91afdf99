"""Quantization-aware training of a target: distillation from the teacher into the MXFP4 base plane."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed
from torch.utils.tensorboard import SummaryWriter

from mxdraft.checkpoint import Checkpoint
from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import replacing
from mxdraft.qat.data import Teacher, epoch_order, read_windows, repetition
from mxdraft.qat.export import trained_base
from mxdraft.qat.fakequant import round_e2m1
from mxdraft.qat.loss import Quality, distillation_loss, measure_quality
from mxdraft.qat.model import Llama
from mxdraft.qat.recipe import Recipe, read_recipe
from mxdraft.qat.start import start_quantized, within_reach
from mxdraft.qat_delta import TrainedBase, write_delta

CHECKPOINT = "checkpoint.pt"


def train_target(recipe: Path, checkpoint: Checkpoint, directory: Path, delta: Path) -> None:
    """Train by the file ``recipe``, from where ``directory`` stands, and write the result to ``delta``."""
    settings = read_recipe(recipe)
    trainer = Trainer(settings, recipe.parent / settings.text, checkpoint, directory)
    trainer.run()
    if trainer.rank == 0:
        write_delta(delta, checkpoint, trainer.trained_base())


class Trainer:
    """A run in ``directory``: teacher cache, checkpoint, TensorBoard log.

    Everything a step depends on is in the checkpoint or a function of the recipe and the step, so a resumed
    run has the same weights as an uninterrupted one. Under torchrun each process takes its share of a batch.
    """

    def __init__(self, recipe: Recipe, text: Path, checkpoint: Checkpoint, directory: Path) -> None:
        self.recipe = recipe
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.rank, self.processes = _join_processes()
        if recipe.batch % self.processes:
            raise UsageError(
                f"a batch of {recipe.batch} windows does not split over {self.processes} processes"
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        self.teacher = Teacher(teacher, windows, directory / f"teacher-{self.rank}.npy")
        self.student = Llama(checkpoint, recipe.int8_activations).to(self.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [m.weight for m in self.student.linears().values()], "peak": recipe.lr},
                {"params": list(self.student.norms().values()), "peak": recipe.norm_lr},
            ],
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=0.0,
            fused=True,
        )
        self.step = 0
        self.codes: list[list[Tensor]] = []
        if (directory / CHECKPOINT).exists():
            self._load()
        else:
            # Repetitive windows too may calibrate: these inputs shall be what the model meets.
            order = epoch_order(np.arange(len(windows) - recipe.held_out), 0, recipe.seed)
            tokens = torch.from_numpy(windows[order[-recipe.calibration :]]).to(self.device)
            start_quantized(self.student, recipe.start, tokens)
            if self.processes > 1:  # unlike machines may compensate unlike
                for tensor in self.student.state_dict().values():
                    distributed.broadcast(tensor, 0)
        self.bounds = self._bounds(teacher)
        self._clamp_latents()

    def run(self) -> None:
        """Train to the recipe's last step; log, evaluate and keep checkpoints on the way."""
        recipe = self.recipe
        log = SummaryWriter(str(self.directory / "log"), purge_step=self.step) if self.rank == 0 else None
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), disable=self.rank != 0) as progress:
            task = progress.add_task("", total=recipe.steps, completed=self.step)
            while self.step < recipe.steps:
                loss, gradient = self.advance()
                progress.update(task, completed=self.step, description=f"KL {loss:.4f}")
                if log is None:
                    continue
                last = self.step == recipe.steps
                log.add_scalar("train/kl", loss, self.step)
                log.add_scalar("train/gradient_norm", gradient, self.step)
                log.add_scalar("train/rate", recipe.rate(self.step - 1), self.step)
                if self.step % recipe.log_every == 0:
                    for name, value in self.weight_statistics().items():
                        log.add_scalar(f"weights/{name}", value, self.step)
                if last or self.step % recipe.evaluate_every == 0:
                    quality = self.evaluate()
                    for name, value in asdict(quality).items():
                        log.add_scalar(f"held_out/{name}", value, self.step)
                    progress.print(f"step {self.step}: held out {quality}")
                if last or self.step % recipe.checkpoint_every == 0:
                    self.save()
        if log is not None:
            log.close()

    def advance(self) -> tuple[float, float]:
        """One step. Returns the KL of its text and the norm of its gradient before clipping."""
        recipe = self.recipe
        index = self._batch(self.step)[self.rank :: self.processes]
        wanted = self.teacher.hidden(index).to(self.device)
        tokens = torch.from_numpy(self.windows[index]).to(self.device)
        with self._compute():
            hidden = self.student(tokens)
        loss = distillation_loss(hidden.float().flatten(0, 1), wanted.flatten(0, 1), self.student.head)
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if self.processes > 1:
            for tensor in (loss, *(p.grad for p in self.student.parameters() if p.grad is not None)):
                distributed.all_reduce(tensor)
                tensor /= self.processes
        norm = torch.nn.utils.clip_grad_norm_(
            self.student.parameters(), recipe.gradient_clip, error_if_nonfinite=True
        )
        rate = recipe.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        self.optimizer.step()
        if recipe.dampen:
            with torch.no_grad():
                for linear in self.student.linears().values():
                    linear.weight.lerp_(round_e2m1(linear.weight), rate * recipe.dampen)
        self._clamp_latents()
        self.step += 1
        return float(loss), float(norm)

    @torch.no_grad()
    def evaluate(self) -> Quality:
        """Student against teacher on the windows held out."""
        tokens = torch.from_numpy(self.windows[self.held_out]).to(self.device)
        wanted = self.teacher.hidden(self.held_out).to(self.device)
        hidden = torch.cat([self.student(window[None]) for window in tokens])
        return measure_quality(hidden, wanted, self.student.head, tokens)

    def trained_base(self) -> TrainedBase:
        """What the student has become, with the recipe, the steps taken and the quality on the held-out
        windows."""
        meta = {"recipe": asdict(self.recipe), "steps": self.step, "held_out": asdict(self.evaluate())}
        return trained_base(self.student, meta)

    @torch.no_grad()
    def weight_statistics(self) -> dict[str, float]:
        """Shares of all linear weights: beyond the largest element; whose code changed since the last call;
        whose code changed, but only to return to what it was two calls ago (oscillation)."""
        linears = self.student.linears().values()
        self.codes.append([round_e2m1(m.weight).mul_(2).to(torch.int8) for m in linears])
        count = sum(m.weight.numel() for m in linears)
        shares = {"clipped": sum(int((m.weight.abs() > 7).sum()) for m in linears) / count}
        if len(self.codes) > 1:
            shares["changed"] = (
                sum(int((a != b).sum()) for a, b in zip(*self.codes[-2:], strict=True)) / count
            )
        if len(self.codes) > 2:
            triples = zip(*self.codes, strict=True)
            shares["oscillating"] = sum(int(((a == c) & (a != b)).sum()) for a, b, c in triples) / count
            del self.codes[0]
        return shares

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with replacing(self.directory / CHECKPOINT) as file:
            torch.save(state, file)

    def _load(self) -> None:
        path = self.directory / CHECKPOINT
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            load_student(self.student, state["student"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise RefusedError(
                f"{path} does not continue this run: {error}; remove it to start anew"
            ) from error

    @torch.no_grad()
    def _bounds(self, teacher: Llama) -> list[tuple[float, float] | tuple[Tensor, Tensor]]:
        """Least and largest latents of each linear layer."""
        if not self.recipe.reach:
            return [(-self.recipe.latent_clip, self.recipe.latent_clip)] * len(teacher.linears())
        pairs = zip(teacher.linears().values(), self.student.linears().values(), strict=True)
        return [within_reach(t.weight, cast(Tensor, s.scale), self.recipe.reach) for t, s in pairs]

    @torch.no_grad()
    def _clamp_latents(self) -> None:
        for linear, bounds in zip(self.student.linears().values(), self.bounds, strict=True):
            linear.weight.clamp_(*bounds)

    def _batch(self, step: int) -> NDArray[np.int64]:
        per_epoch = len(self.trained) // self.recipe.batch
        epoch, place = divmod(step, per_epoch)
        first = place * self.recipe.batch
        return epoch_order(self.trained, epoch, self.recipe.seed)[first : first + self.recipe.batch]

    def _compute(self) -> AbstractContextManager[Any]:
        if self.recipe.compute == "f32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def load_student(student: Llama, state: dict[str, Tensor]) -> None:
    """Put a checkpoint's latents, scales and norms into a freshly made model."""
    for name, linear in student.linears().items():
        linear.scale = state[name.removesuffix("weight") + "scale"]
    student.load_state_dict(state)


def _join_processes() -> tuple[int, int]:
    """(rank, number) of the processes that torchrun started, or (0, 1)."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return distributed.get_rank(), distributed.get_world_size()
