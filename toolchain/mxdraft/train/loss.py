# SPDX-License-Identifier: Apache-2.0
"""The distance between what teacher and student say next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Chunk: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_CHUNK = 128  # positions whose logits are held at once: 128 x 49152 floats stay inside a large cache


def _chunk(student: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed KL(teacher ‖ student) of some positions and its gradient with respect to
    ``student``."""
    wanted = torch.log_softmax((teacher @ head.T).float(), -1)
    given = torch.log_softmax((student @ head.T).float(), -1)
    probability = wanted.exp()
    divergence = (probability * (wanted - given)).sum()
    return divergence, ((given.exp() - probability).to(head.dtype) @ head).float()


class _Distill(torch.autograd.Function):
    """Mean KL divergence; the logits are never kept, for their gradient is known as soon as they are."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Tensor, chunk: Chunk) -> Tensor:
        total = student.new_zeros(())
        gradient = torch.empty_like(student)
        for first in range(0, len(student), _CHUNK):
            rows = slice(first, first + _CHUNK)
            divergence, gradient[rows] = chunk(
                student[rows].to(head.dtype), teacher[rows].to(head.dtype), head
            )
            total += divergence
        ctx.save_for_backward(gradient.div_(len(student)))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None


def distillation_loss(student: Tensor, teacher: Tensor, head: Tensor, compiled: bool = False) -> Tensor:
    """Return the mean over positions of KL(teacher ‖ student) in nat.

    ``student``, ``teacher``: final hidden states [n, hidden]; ``head`` [vocab, hidden] turns both into
    logits, by products in its own type. Only the student receives a gradient.
    """
    chunk = cast(Chunk, torch.compile(_chunk, dynamic=False)) if compiled else _chunk
    return cast(Tensor, _Distill.apply(student, teacher, head, chunk))


@dataclass(frozen=True)
class StudentQuality:
    """How far a student is from its teacher on some text: ``mxdraft.measure.quality``, in torch."""

    kl: float  # mean KL(teacher ‖ student), nat
    agreement: float  # share of positions whose likeliest token is the same
    perplexity: float  # of the student
    teacher_perplexity: float


@torch.no_grad()
def measure_quality(
    student: Tensor, teacher: Tensor, head: Tensor, tokens: Tensor, student_head: Tensor | None = None
) -> StudentQuality:
    """Compare final hidden states [B, T, hidden] over int64 tokens [B, T]; both are read by ``head`` [vocab,
    hidden], unless the student has its own.

    Every position counts for KL and agreement, all but the last of each sequence for perplexity.
    """
    own_head = head if student_head is None else student_head
    kl = agreement = nll = teacher_nll = 0.0
    for s, t, ids in zip(student, teacher, tokens, strict=True):
        given, wanted = torch.log_softmax(s @ own_head.T, -1), torch.log_softmax(t @ head.T, -1)
        kl += float((wanted.exp() * (wanted - given)).sum())
        agreement += float((given.argmax(-1) == wanted.argmax(-1)).sum())
        nll -= float(given[:-1].gather(-1, ids[1:, None]).sum())
        teacher_nll -= float(wanted[:-1].gather(-1, ids[1:, None]).sum())
    positions, predicted = tokens.numel(), tokens[:, 1:].numel()
    mean = torch.tensor([nll, teacher_nll], dtype=torch.float64).div(predicted).exp().tolist()
    return StudentQuality(kl / positions, agreement / positions, mean[0], mean[1])
