# SPDX-License-Identifier: Apache-2.0
"""A trained drafter: what it consists of, its file, and its sections of a bundle (numpy only, no torch).

The file is an .npz: ``NAME.data`` and ``NAME.scale`` of each MXFP4 weight, ``NAME`` of each norm and of
``draft_ids``, and ``header``, the rest as JSON. What the tensors compute: docs/arithmetic.md, "Drafter".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.format import (
    DRAFT_TARGET,
    F32,
    MXFP4T,
    MXINT8T,
    DraftConfig,
    TensorSpec,
    required_draft_tensors,
    tensor_nbytes,
)
from mxdraft.bundle.reader import check_draft
from mxdraft.checkpoint import Dimensions, ModelConfig
from mxdraft.files import parse_json_object, replacing
from mxdraft.files.npz import reading_npz
from mxdraft.mx import BLOCK, MXTensor


@dataclass(frozen=True)
class TrainedDrafter:
    """What training leaves of a drafter.

    ``feature_layers``: the layers of the target after which it reads the residual stream; ``planes`` and
    ``norms`` by name; ``draft_ids`` uint32, ascending; ``calibration``: inverse temperature and odds of each
    draft depth; ``source_sha256``: of the weights whose trained base plane it drafts for.
    """

    feature_layers: tuple[int, ...]
    planes: dict[str, MXTensor]
    norms: dict[str, NDArray[np.float32]]
    draft_ids: NDArray[np.uint32]
    calibration: tuple[tuple[float, float], ...]
    source_sha256: str
    meta: dict[str, Any]  # recipe and results, for people and provenance

    def tensors(self, config: Dimensions) -> Iterator[TensorSpec]:
        """List name, data type and shape of its tensors in the order of storage."""
        return required_draft_tensors(config, len(self.feature_layers), len(self.draft_ids))

    def values(self, name: str) -> MXTensor | NDArray[Any]:
        """Return what a tensor holds."""
        if name == "draft_ids":
            return self.draft_ids
        return self.planes[name] if name in self.planes else self.norms[name]


def save_drafter(path: Path, drafter: TrainedDrafter) -> None:
    """Write the file, whole or not at all; equal drafters give equal bytes."""
    arrays: dict[str, NDArray[Any]] = {"draft_ids": drafter.draft_ids, **drafter.norms}
    for name, plane in drafter.planes.items():
        arrays[f"{name}.data"], arrays[f"{name}.scale"] = plane.data, plane.scale
    header = {
        "feature_layers": drafter.feature_layers,
        "calibration": drafter.calibration,
        "source_sha256": drafter.source_sha256,
        "meta": drafter.meta,
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode("utf-8"), np.uint8)
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_drafter(path: Path, config: ModelConfig) -> TrainedDrafter:
    """Read a file of ``save_drafter`` for a target of ``config``. Raises RefusedError if it is none."""
    with reading_npz(path, "drafter for this model") as arrays:
        header = parse_json_object(arrays["header"].tobytes())
        layers = tuple(int(layer) for layer in header["feature_layers"])
        calibration = tuple((float(i), float(r)) for i, r in header["calibration"])
        if not isinstance(header["source_sha256"], str) or not isinstance(header["meta"], dict):
            raise ValueError("its header does not tell what it belongs to")
        ids = arrays["draft_ids"]
        _check_array("draft_ids", ids, np.uint32, (len(ids),))
        check_draft(DraftConfig(layers, len(ids), calibration, (0, 0, 0)), ids, config)
        planes, norms = {}, {}
        for name, dtype, (rows, columns) in required_draft_tensors(config, len(layers), len(ids)):
            if dtype == MXFP4T:
                data, scale = arrays[f"{name}.data"], arrays[f"{name}.scale"]
                _check_array(name, data, np.uint8, (rows, columns // 2))
                _check_array(name, scale, np.uint8, (rows, columns // BLOCK))
                planes[name] = MXTensor("mxfp4", data, scale, "search")
            elif dtype == F32:
                _check_array(name, arrays[name], np.float32, (columns,))
                norms[name] = arrays[name]
        return TrainedDrafter(
            layers, planes, norms, ids, calibration, header["source_sha256"], header["meta"]
        )


def add_drafter(writer: BundleWriter, drafter: TrainedDrafter, config: Dimensions) -> None:
    """Append a drafter's sections to a bundle that already has those of its target (``DRAFT_TARGET``)."""
    shared, base, tokenizer = (writer.sections[name].crc for name in DRAFT_TARGET)
    crcs = (shared, base, tokenizer)
    draft = DraftConfig(drafter.feature_layers, len(drafter.draft_ids), drafter.calibration, crcs)
    writer.add("draft.config", [draft.pack(config)])
    tensors = {"draft.weights": drafter.tensors(config)}
    writer.add_tensors("draft.tensors", tensors, lambda _, entry: drafter.values(entry.name))


def draft_cost(drafter: TrainedDrafter, bundle: Bundle) -> float:
    """Return the bytes that a draft step reads, as share of those of a base-precision step of the target:
    drafter and head rows of the draft vocabulary against base plane and head, each at its size in the
    bundle."""
    config = bundle.config
    own = sum(tensor_nbytes(dtype, *shape) for _, dtype, shape in drafter.tensors(config))
    rows = tensor_nbytes(MXINT8T, len(drafter.draft_ids), config.hidden)
    head = tensor_nbytes(MXINT8T, config.vocab, config.hidden)
    return (own + rows) / (bundle.sections["target.base"].length + head)


def _check_array(name: str, array: NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype.__name__} {shape}")
