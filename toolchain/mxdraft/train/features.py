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
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.train.data import open_array
from mxdraft.train.model import Llama

_ROWS = 256  # of a pass


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
    """Residual streams after ``layers`` of the runtime that runs ``bundle`` in ``precision``, for documents,
    float16 [tokens, layers, hidden] in the file ``cache``, where they are found again.

    The last layer's stream also tells the target's distribution, by its norm and head.
    """

    def __init__(
        self,
        bundle: Path,
        precision: Literal["base", "full"],
        layers: Sequence[int],
        documents: Sequence[NDArray[np.uint16]],
        cache: Path,
    ) -> None:
        self.bundle = bundle
        self.precision = precision
        self.layers = tuple(layers)
        self.documents = documents
        self.starts = np.cumsum([0, *map(len, documents)])
        shape = (int(self.starts[-1]), len(layers), Bundle.open(bundle).config.hidden)
        self.states = open_array(cache, shape, np.float16)
        self._known = open_array(cache.with_suffix(".known.npy"), (len(documents),), np.bool_)

    def of(self, number: int) -> Tensor:
        """Return float32 [tokens, layers, hidden] of a document that ``compute`` has seen."""
        states = self.states[self.starts[number] : self.starts[number + 1]]
        return torch.from_numpy(states.astype(np.float32))

    def compute(
        self, progress: Callable[[int], None] | None = None, numbers: Sequence[int] | None = None
    ) -> None:
        """Fill the file for those of ``numbers`` that are documents (all); ``progress`` gets the number of
        tokens after each document."""
        asked = set(range(len(self.documents)) if numbers is None else numbers)
        wanted = [i for i in range(len(self.documents)) if i in asked and not self._known[i]]
        if not wanted:
            return
        ctx = max(2, *(len(self.documents[number]) for number in wanted))
        with (
            Model(self.bundle) as model,
            Engine(model, precision=self.precision, ctx=ctx, max_rows=_ROWS, draft="off") as engine,
            Timeline(engine) as timeline,
        ):
            for number in wanted:
                document = self.documents[number]
                timeline.truncate(0)
                states = timeline.streams(document.tolist(), self.layers)
                self.states[self.starts[number] : self.starts[number + 1]] = states
                self._known[number] = True
                if progress is not None:
                    progress(len(document))


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
