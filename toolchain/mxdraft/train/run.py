# SPDX-License-Identifier: Apache-2.0
"""What every training has in common: a directory with checkpoint and TensorBoard log, progress, exact resume,
several processes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed, nn
from torch.utils.tensorboard import SummaryWriter

from mxdraft.errors import RefusedError
from mxdraft.files import replacing
from mxdraft.train.fakequant import MXLinear, round_e2m1
from mxdraft.train.recipe import TrainingSchedule

CHECKPOINT = "checkpoint.pt"


class TrainingRun(ABC):
    """A training in ``directory``.

    Everything a step depends on is in the checkpoint or a function of the recipe and the step, so a resumed
    run has the same weights as an uninterrupted one. Under torchrun each process takes its share of a batch.
    """

    def __init__(self, recipe: TrainingSchedule, directory: Path) -> None:
        self.schedule = recipe
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.rank, self.processes = _join_processes()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.step = 0
        self.codes: list[list[Tensor]] = []

    @abstractmethod
    def advance(self) -> tuple[float, float]:
        """Take one step. Returns the loss on its text and the norm of its gradient before clipping."""

    @abstractmethod
    def results(self) -> dict[str, float]:
        """Tell how good the model is on what was held out."""

    @abstractmethod
    def linears(self) -> list[MXLinear]:
        """Return the layers that read their weights through MXFP4 by now."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides step and recipe."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""

    def run(self) -> None:
        """Train to the recipe's last step; log, evaluate and keep checkpoints on the way."""
        schedule = self.schedule
        log = SummaryWriter(str(self.directory / "log"), purge_step=self.step) if self.rank == 0 else None
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), disable=self.rank != 0) as progress:
            task = progress.add_task("", total=schedule.steps, completed=self.step)
            while self.step < schedule.steps:
                loss, gradient = self.advance()
                progress.update(task, completed=self.step, description=f"loss {loss:.4f}")
                if log is None:
                    continue
                last = self.step == schedule.steps
                log.add_scalar("train/loss", loss, self.step)
                log.add_scalar("train/gradient_norm", gradient, self.step)
                log.add_scalar("train/rate", schedule.rate(self.step - 1), self.step)
                if self.step % schedule.log_every == 0:
                    for name, value in self.weight_statistics().items():
                        log.add_scalar(f"weights/{name}", value, self.step)
                if last or self.step % schedule.evaluate_every == 0:
                    results = self.results()
                    for name, value in results.items():
                        log.add_scalar(f"held_out/{name}", value, self.step)
                    told = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
                    progress.print(f"step {self.step}: held out {told}", soft_wrap=True)
                if last or self.step % schedule.checkpoint_every == 0:
                    self.save()
        if log is not None:
            log.close()

    @torch.no_grad()
    def weight_statistics(self) -> dict[str, float]:
        """Return shares of all linear weights: beyond the largest element; whose code changed since the last
        call; whose code changed, but only to return to what it was two calls ago (oscillation)."""
        linears = self.linears()
        if not linears:
            return {}
        if self.codes and len(self.codes[-1]) != len(linears):
            self.codes.clear()
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
        state = {"step": self.step, "recipe": asdict(self.schedule)} | self.state()
        with replacing(self.directory / CHECKPOINT) as file:
            torch.save(state, file)

    def resume(self) -> bool:
        """Go on from the directory's checkpoint, if there is one. Raises RefusedError if it does not fit."""
        path = self.directory / CHECKPOINT
        if not path.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            self.load_state(state)
            self.step = state["step"]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise RefusedError(
                f"{path} does not continue this run: {error}; remove it to start anew"
            ) from error
        return True

    def descend(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> float:
        """Clip the gradient and step at the rate of the schedule; returns the norm before clipping."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=True)
        if norm > self.schedule.gradient_clip:  # else spare a pass over all of them
            torch._foreach_mul_(gradients, self.schedule.gradient_clip / (norm + 1e-6))
        rate = self.schedule.rate(self.step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        optimizer.step()
        return float(norm)

    def sum_over_processes(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.processes > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def share(self, model: nn.Module) -> None:
        """Give all processes the first one's weights, for unlike machines may start unlike."""
        if self.processes > 1:
            for tensor in model.state_dict().values():
                distributed.broadcast(tensor, 0)

    def compute(self) -> AbstractContextManager[Any]:
        """Enter the precision of the recipe's matrix products."""
        if self.schedule.compute == "f32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def adamw(recipe: TrainingSchedule, *groups: dict[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer of ``groups``: ``params`` with their ``peak`` rate, decaying where they say so."""
    return torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), weight_decay=0.0, fused=True)


def _join_processes() -> tuple[int, int]:
    """Return (rank, number) of the processes that torchrun started, or (0, 1)."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return distributed.get_rank(), distributed.get_world_size()
