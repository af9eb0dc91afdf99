"""The distance between what teacher and student say next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_CHUNK = 128  # positions whose logits are held at once: 128 x 49152 floats stay inside a large cache


class _Distill(torch.autograd.Function):
    """Mean KL divergence; the logits are never kept, for their gradient is known as soon as they are."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        total = student.new_zeros(())
        gradient = torch.empty_like(student)
        for first in range(0, len(student), _CHUNK):
            rows = slice(first, first + _CHUNK)
            wanted = torch.log_softmax(teacher[rows] @ head.T, -1)
            given = torch.log_softmax(student[rows] @ head.T, -1)
            probability = wanted.exp()
            total += (probability * wanted.sub_(given)).sum()
            gradient[rows] = given.exp_().sub_(probability) @ head
        ctx.save_for_backward(gradient.div_(len(student)))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


def distillation_loss(student: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
    """Return the mean over positions of KL(teacher ‖ student) in nat.

    ``student``, ``teacher``: final hidden states [n, hidden]; ``head`` [vocab, hidden] turns both into
    logits. Only the student receives a gradient.
    """
    return cast(Tensor, _Distill.apply(student, teacher, head))


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
