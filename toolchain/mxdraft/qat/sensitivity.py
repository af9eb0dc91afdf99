"""Which layers suffer from MXFP4: divergence from the teacher when only one group of weights reads it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxdraft.checkpoint import Checkpoint
from mxdraft.qat.loss import distillation_loss
from mxdraft.qat.model import Llama
from mxdraft.qat.start import Start, start_quantized


@torch.no_grad()
def sensitivity(
    checkpoint: Checkpoint, tokens: Tensor, start: Start, group: Callable[[str], str]
) -> dict[str, float]:
    """Mean KL(teacher ‖ student) in nat over ``tokens`` [B, T], by group, when only that group is quantized.

    ``group`` maps a weight's name to its group: ``by_layer`` or ``by_kind``.
    """
    teacher = Llama(checkpoint)
    wanted = teacher(tokens).flatten(0, 1)
    groups: dict[str, list[str]] = {}
    for name in teacher.linears():
        groups.setdefault(group(name), []).append(name)
    divergence = {}
    for name, weights in groups.items():
        student = Llama(checkpoint)
        start_quantized(student, start, tokens, weights)
        divergence[name] = float(distillation_loss(student(tokens).flatten(0, 1), wanted, student.head))
    return divergence


def by_layer(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[:3])


def by_kind(name: str) -> str:
    """``mlp.up_proj`` of ``model.layers.3.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[3:-1])
