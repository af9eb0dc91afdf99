# SPDX-License-Identifier: Apache-2.0
"""What a frozen target knows at each position of a text, computed once and kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mxdraft.bundle import Bundle
from mxdraft.checkpoint import ModelConfig, ModelWeights
from mxdraft.errors import UsageError
from mxdraft.mx import MXTensor, dequantize
from mxdraft.train.data import open_array
from mxdraft.train.model import Llama

_BATCH_TOKENS = 2048  # padding included


def bundle_target(bundle: Bundle, precision: Literal["base", "full"]) -> Llama:
    """Build the frozen target as the runtime computes it: with int8 activations, and of the MXFP4 planes base
    alone or, in full precision, base and residual.

    Raises UsageError if the bundle has no residual plane but is asked for full precision.
    """
    if precision == "full" and "target.residual" not in bundle.sections:
        raise UsageError("this bundle has base precision only")
    tensors: dict[str, NDArray[np.float32]] = {}
    for section, name in bundle.tensors:  # the residual plane is the last of the three
        if section in ("target.shared", "target.base", "target.residual"):
            tensor = bundle.get(section, name)
            values = dequantize(tensor) if isinstance(tensor, MXTensor) else tensor.astype(np.float32)
            values = values[0] if len(values) == 1 else values
            if section != "target.residual":
                tensors[name] = values
            elif precision == "full":  # its norms replace those of base
                tensors[name] = values if values.ndim == 1 else tensors[name] + values
    tied = "lm_head.weight" not in tensors
    config = ModelConfig(**vars(bundle.config), rope_theta=1.0, tied=tied)
    target = Llama(ModelWeights(config, tensors), int8_activations=True).requires_grad_(False)
    target.cos, target.sin = (torch.from_numpy(tensors[name]) for name in ("rope.cos", "rope.sin"))
    return target


class Features:
    """Residual streams of ``target`` after ``layers`` for documents, float16 [tokens, layers, hidden] in the
    file ``cache``, where they are found again.

    The last layer's stream also tells the target's distribution, by its norm and head.
    """

    def __init__(
        self, target: Llama, layers: Sequence[int], documents: Sequence[NDArray[np.uint16]], cache: Path
    ) -> None:
        self.target = target
        self.layers = tuple(layers)
        self.documents = documents
        self.starts = np.cumsum([0, *map(len, documents)])
        shape = (int(self.starts[-1]), len(layers), target.head.shape[1])
        self.states = open_array(cache, shape, np.float16)
        self._known = open_array(cache.with_suffix(".known.npy"), (len(documents),), np.bool_)

    def of(self, number: int) -> Tensor:
        """Return float32 [tokens, layers, hidden] of a document that ``compute`` has seen."""
        states = self.states[self.starts[number] : self.starts[number + 1]]
        return torch.from_numpy(states.astype(np.float32))

    def compute(
        self, progress: Callable[[int], None] | None = None, numbers: Sequence[int] | None = None
    ) -> None:
        """Fill the file for documents ``numbers`` (all), in no order; ``progress`` gets the number of tokens
        after each batch."""
        skip = self._known.copy()
        if numbers is not None:
            skip |= ~np.isin(np.arange(len(self.documents)), numbers)
        groups = batches([len(d) for d in self.documents], skip, _BATCH_TOKENS)
        for place in np.random.default_rng(0).permutation(len(groups)):
            batch = groups[place]
            tokens = pad([self.documents[i] for i in batch])
            with torch.inference_mode():
                found = self.target.residuals(tokens.to(self.target.head.device), self.layers)
            states = torch.stack(found, 2).half().cpu().numpy()
            for row, number in enumerate(batch):
                length = len(self.documents[number])
                self.states[self.starts[number] :][:length] = states[row, :length]
            self._known[batch] = True
            if progress is not None:
                progress(sum(len(self.documents[i]) for i in batch))


def batches(lengths: Sequence[int], skip: NDArray[np.bool_], most_tokens: int) -> list[list[int]]:
    """Group documents that are not skipped by like length, each group of at most ``most_tokens`` with padding
    (or of one document)."""
    groups: list[list[int]] = []
    for number in sorted(np.flatnonzero(~skip).tolist(), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[number] <= most_tokens:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def pad(documents: Sequence[NDArray[np.uint16]]) -> Tensor:
    """Return documents as int64 [B, longest], zeros after their ends."""
    tokens = np.zeros((len(documents), max(map(len, documents))), np.int64)
    for row, document in zip(tokens, documents, strict=True):
        row[: len(document)] = document
    return torch.from_numpy(tokens)
