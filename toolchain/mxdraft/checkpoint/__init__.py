# SPDX-License-Identifier: Apache-2.0
"""Weights, tokenizer and chat template of a Llama-family model, from GGUF or Hugging Face files.

fetch.py        a known model's weights (models.toml), downloaded and checked
gguf_file.py    a .gguf file
huggingface.py  a Hugging Face directory
model.py        the one form in memory, whatever file it came from
tokenizer.py    the tokenizers that mxdraft runs
reference.py    the teacher: a plain forward pass of the unquantized weights
smooth.py       factors moved between weights, by a text, so that rounding loses less
"""

from __future__ import annotations

from pathlib import Path

from mxdraft.checkpoint.model import (
    Checkpoint,
    Dimensions,
    ModelConfig,
    ModelWeights,
    check_checkpoint,
    check_config,
    check_dimensions,
    expected_tensors,
    layer_tensors,
)
from mxdraft.checkpoint.tokenizer import BYTE_ALPHABET, PreTokenizer, TokenizerSpec, tokenizer_json
from mxdraft.errors import RefusedError, TransferError

__all__ = [
    "BYTE_ALPHABET",
    "Checkpoint",
    "Dimensions",
    "ModelConfig",
    "ModelWeights",
    "PreTokenizer",
    "TokenizerSpec",
    "check_checkpoint",
    "check_config",
    "check_dimensions",
    "expected_tensors",
    "layer_tensors",
    "load_checkpoint",
    "tokenizer_json",
]


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a ``.gguf`` file or a Hugging Face model directory, whole and checked.

    Raises RefusedError if it is missing, damaged or of a kind not supported, TransferError if it cannot be
    read.
    """
    # Imported here: reading a fixture or a bundle needs neither gguf nor safetensors.
    try:
        if path.is_dir():
            from mxdraft.checkpoint.huggingface import load_huggingface

            return load_huggingface(path)
        if path.suffix == ".gguf":
            from mxdraft.checkpoint.gguf_file import load_gguf

            return load_gguf(path)
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror or error}") from error
    raise RefusedError(f"{path}: neither a .gguf file nor a directory with a Hugging Face model")
