"""Training text as fixed windows, and the teacher's answer to each of them, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mxdraft.errors import RefusedError
from mxdraft.files.npz import reading_npz
from mxdraft.train.model import Llama


def read_windows(path: Path, context: int, vocab: int) -> NDArray[np.int64]:
    """Read token ids [count, context] of a teacher-text file (.npz with an array ``tokens``).

    The documents follow each other and are cut every ``context`` tokens. A window may span documents: teacher
    and student read the same, so what the student is asked for is still what the teacher says there.
    """
    with reading_npz(path, "teacher text (an .npz with an array 'tokens')") as arrays:
        tokens = arrays["tokens"].astype(np.int64)
    count = tokens.size // context
    if tokens.ndim != 1 or count == 0:
        raise RefusedError(f"{path}: {tokens.size} tokens do not fill a window of {context}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise RefusedError(
            f"{path}: token {tokens.max()} is outside the vocabulary of {vocab}; wrong tokenizer?"
        )
    return tokens[: count * context].reshape(count, context)


def epoch_order(windows: NDArray[np.int64], epoch: int, seed: int) -> NDArray[np.int64]:
    """Return ``windows`` in the order of an epoch: a function of its arguments alone, for exact resume."""
    return np.asarray(np.random.default_rng((seed, epoch)).permutation(windows))


class TeacherStates:
    """The teacher's final hidden states, kept in a file (f16) so that each window is computed once.

    Distillation needs no more: the logits are one product with the head that student and teacher share.
    """

    def __init__(self, model: Llama, windows: NDArray[np.int64], cache: Path) -> None:
        self.model = model
        self.windows = windows
        shape = (*windows.shape, model.head.shape[1])
        self.states = open_array(cache, shape, np.float16)
        self.known = open_array(cache.with_suffix(".known.npy"), (len(windows),), np.bool_)

    def hidden(self, index: NDArray[np.int64]) -> Tensor:
        """Return states [B, T, hidden] of windows ``index`` [B], rounded as the file holds them even if
        new."""
        for i in index[np.logical_not(self.known[index])]:
            with torch.no_grad():
                tokens = torch.from_numpy(self.windows[i : i + 1]).to(self.model.head.device)
                self.states[i] = self.model(tokens)[0].cpu().numpy()
            self.known[i] = True
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
