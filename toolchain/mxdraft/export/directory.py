# SPDX-License-Identifier: Apache-2.0
"""The directory of an export: many files, and one moment at which they are there.

``export.json``, the manifest, lists every file with its SHA-256. It is removed before anything changes and
written when all is there: what was interrupted has none, and what was mixed differs from it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mxdraft.bundle.chat import with_turn_end
from mxdraft.checkpoint import Checkpoint, TokenizerSpec
from mxdraft.checkpoint.smooth import Smoothing
from mxdraft.errors import RefusedError, TransferError
from mxdraft.export.draft import check_source, write_drafter
from mxdraft.export.graph import (
    DRAFT_DATA_FILE,
    FEATURES_FILE,
    MODEL_FILES,
    STEP_FILE,
    TEMPLATE_FILE,
    Precision,
    write_model,
)
from mxdraft.files import parse_json_object, parsing, read_file, write_json
from mxdraft.mx import Rule
from mxdraft.train.delta import TrainedBase
from mxdraft.train.drafter import TrainedDrafter

MANIFEST_FILE = "export.json"


def export_model(
    checkpoint: Checkpoint,
    directory: Path,
    rule: Rule = "search",
    trained: TrainedBase | None = None,
    drafter: TrainedDrafter | None = None,
    smoothing: Smoothing | None = None,
) -> dict[Precision, Path]:
    """Write both graphs of a model and what belongs to them; returns the paths of the graphs.

    ``rule`` chooses the exponents. ``trained``: the base plane and norms that training made of this
    checkpoint; without it the base plane is the checkpoint's, rounded. The residual plane is what then lacks
    to the checkpoint's weights. ``drafter``: of these weights, written next to them; one that is there
    belongs to what is overwritten, and is removed. ``smoothing`` comes before all that; ``trained`` has its
    own. The end tokens are those of ``complete_tokenizer``.
    Raises RefusedError if a tensor cannot be quantized, the chat template be expressed, or the drafter is of
    other weights; TransferError if a file cannot be written.
    """
    checkpoint = dataclasses.replace(checkpoint, tokenizer=complete_tokenizer(checkpoint))
    if drafter is not None:
        check_source(drafter, checkpoint.source_sha256)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (MANIFEST_FILE, FEATURES_FILE, STEP_FILE, DRAFT_DATA_FILE, TEMPLATE_FILE):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise TransferError(f"cannot make {directory}: {error.strerror}") from error
    files = write_model(checkpoint, directory, rule, trained, smoothing)
    if drafter is not None:
        files |= write_drafter(drafter, directory)
    write_json(directory / MANIFEST_FILE, files)
    return {precision: directory / name for precision, name in MODEL_FILES.items()}


def export_drafter(drafter: TrainedDrafter, directory: Path) -> dict[str, Path]:
    """Write a drafter's graphs into the directory of its target's export; returns their paths by name.

    Raises RefusedError unless there is a whole export of the same target; TransferError if a file cannot be
    read or written.
    """
    files = read_manifest(directory) | write_drafter(drafter, directory)
    write_json(directory / MANIFEST_FILE, files)
    return {name: directory / name for name in (FEATURES_FILE, STEP_FILE)}


def complete_tokenizer(checkpoint: Checkpoint) -> TokenizerSpec:
    """The tokenizer of an export: generation also stops where the chat template ends an answer."""
    if checkpoint.chat_template is None:
        return checkpoint.tokenizer
    return with_turn_end(checkpoint.tokenizer, checkpoint.chat_template)


def read_manifest(directory: Path) -> dict[str, str]:
    """The SHA-256 (hexadecimal) of each file of an export. Raises RefusedError if it is not whole."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise RefusedError(f"{path}: no such file, so this is not a whole export; export the model again")
    data = read_file(path)
    with parsing(path, "manifest of an export"):
        files = parse_json_object(data)
        for name, digest in files.items():
            if "/" in name or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{name!r} has the digest {digest!r}")
        return files
