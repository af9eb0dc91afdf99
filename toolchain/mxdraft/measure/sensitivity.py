# SPDX-License-Identifier: Apache-2.0
"""Which weights suffer from MXFP4: divergence from the teacher when only one group of them reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxdraft import mx
from mxdraft.bundle.format import MXFP4T, MXINT8T, tensor_nbytes
from mxdraft.checkpoint import Checkpoint, expected_tensors
from mxdraft.train.loss import StudentQuality, measure_quality
from mxdraft.train.model import Llama
from mxdraft.train.start import Start, start_quantized


@dataclass(frozen=True)
class Sensitivity:
    """What a group of weights costs when it is read through MXFP4 and all others are as in the teacher."""

    group: str
    mxfp4_bytes: int  # in a bundle
    mxint8_bytes: int
    quality: StudentQuality

    @property
    def kl_per_mib(self) -> float:
        """Divergence (nat) that 8 bits for this group would spare, by the MiB that they would cost."""
        return self.quality.kl / (self.mxint8_bytes - self.mxfp4_bytes) * 2**20


def groups(checkpoint: Checkpoint, groupings: Sequence[Callable[[str], str]]) -> dict[str, list[str]]:
    """List weights by group: the linear layers as each of ``groupings`` calls them, all of them, and
    embedding and head, which a model may have in one tensor but reads apart."""
    found: dict[str, list[str]] = {}
    linears = [
        name
        for name, shape in expected_tensors(checkpoint.config).items()
        if ".layers." in name and len(shape) == 2
    ]
    for group in groupings:
        for name in linears:
            found.setdefault(group(name), []).append(name)
    embedding = "model.embed_tokens.weight"
    head = embedding if checkpoint.config.tied else "lm_head.weight"
    return found | {"all layers": linears, "embedding": [embedding], "head": [head]}


@torch.no_grad()
def sensitivity(
    checkpoint: Checkpoint, tokens: Tensor, start: Start, groups: dict[str, list[str]]
) -> Iterator[Sensitivity]:
    """Measure what each of ``groups`` loses on ``tokens`` [B, T].

    The layers' weights are rounded, or compensated for these tokens (``start``); embedding and head, which
    the teacher has in MXINT8, are rounded. Activations stay f32.
    """
    teacher, student = Llama(checkpoint), Llama(checkpoint)
    wanted = teacher(tokens)
    for group, names in groups.items():
        if group == "embedding":
            student.embedding = _through_mxfp4(checkpoint, names)
        elif group != "head":
            start_quantized(student, start, tokens, names)
        head = _through_mxfp4(checkpoint, names) if group == "head" else None
        quality = measure_quality(student(tokens), wanted, teacher.head, tokens, head)
        student.embedding = teacher.embedding
        for linear, original in zip(student.linears().values(), teacher.linears().values(), strict=True):
            linear.weight.copy_(original.weight)
            linear.scale = None
        shapes = [checkpoint.tensors[name].shape for name in names]
        mxfp4, mxint8 = (
            sum(tensor_nbytes(dtype, rows, columns) for rows, columns in shapes)
            for dtype in (MXFP4T, MXINT8T)
        )
        yield Sensitivity(group, mxfp4, mxint8, quality)


def by_layer(name: str) -> str:
    """Return ``layers.3`` for ``model.layers.3.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[1:3])


def by_kind(name: str) -> str:
    """Return ``mlp.up_proj`` for ``model.layers.3.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[3:-1])


def _through_mxfp4(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    (name,) = names
    return torch.from_numpy(mx.dequantize(mx.quantize(checkpoint.tensors[name], "mxfp4", "search")))
