# SPDX-License-Identifier: Apache-2.0
"""Training text as fixed windows, and the teacher's answer to each of them, computed once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mxdraft.errors import RefusedError
from mxdraft.train.model import Llama


def epoch_order(windows: NDArray[np.int64], epoch: int, seed: int) -> NDArray[np.int64]:
    """Return ``windows`` in the order of an epoch: a function of its arguments alone, for exact resume."""
    return np.asarray(np.random.default_rng((seed, epoch)).permutation(windows))


class TeacherStates:
    """The teacher's final hidden states, kept in a file (f16) so that each window is computed once.

    Distillation needs no more: the logits are one product with the head that student and teacher share.
    """

    def __init__(
        self,
        model: Llama,
        windows: NDArray[np.int64],
        cache: Path,
        compute: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model = model
        self.compute = compute
        self.windows = windows
        shape = (*windows.shape, model.head.shape[1])
        self.states = open_array(cache, shape, np.float16)
        self.known = open_array(cache.with_suffix(".known.npy"), (len(windows),), np.bool_)

    def hidden(self, index: NDArray[np.int64]) -> Tensor:
        """Return states [B, T, hidden] of the distinct windows ``index`` [B], rounded as the file holds them
        even if new."""
        new = index[np.logical_not(self.known[index])]
        # All at once or one by one: compiled layers are made for each number of windows that they meet.
        for group in [new] if len(new) == len(index) else new[:, None]:
            with torch.no_grad(), self.compute():
                tokens = torch.from_numpy(self.windows[group]).to(self.model.head.device)
                self.states[group] = self.model(tokens).float().cpu().numpy()
            self.known[group] = True
        return torch.from_numpy(self.states[index].astype(np.float32))


def open_array(path: Path, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """Open a memory-mapped .npy file; it is made if it is not there. Raises RefusedError if it has another
    shape."""
    if path.exists():
        array = np.lib.format.open_memmap(path, mode="r+")
        if array.shape != shape or array.dtype != dtype:
            raise RefusedError(
                f"{path} is {array.dtype}{array.shape}, not {np.dtype(dtype)}{shape}; remove it"
            )
        return array
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
