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

from mxdraft.bundle import (
    F32,
    MXFP4T,
    MXINT8T,
    TENSOR_ALIGNMENT,
    Bundle,
    Config,
    DraftConfig,
    TensorEntry,
    align,
    check_draft,
    required_draft_tensors,
    tensor_nbytes,
)
from mxdraft.checkpoint import ModelConfig
from mxdraft.files import parse_json_object, replacing
from mxdraft.mx import BLOCK, MXTensor
from mxdraft.npz import reading_npz
from mxdraft.tiles import to_tiles


@dataclass(frozen=True)
class Drafter:
    """``feature_layers``: behind how many of the target's layers it reads the residual stream; ``planes``
    and ``norms`` by name; ``draft_ids`` uint32, ascending; ``calibration``: inverse temperature and odds of
    each draft depth; ``source_sha256``: of the weights whose trained base plane it drafts for."""

    feature_layers: tuple[int, ...]
    planes: dict[str, MXTensor]
    norms: dict[str, NDArray[np.float32]]
    draft_ids: NDArray[np.uint32]
    calibration: tuple[tuple[float, float], ...]
    source_sha256: str
    meta: dict[str, Any]  # recipe and results, for people and provenance

    def tensors(self, config: Config | ModelConfig) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """Name, dtype and shape of its tensors in the order of storage."""
        return required_draft_tensors(config, len(self.feature_layers), len(self.draft_ids))


def save_drafter(path: Path, drafter: Drafter) -> None:
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


def load_drafter(path: Path, config: ModelConfig) -> Drafter:
    """Read a file of ``save_drafter`` that shall fit a target of ``config``. Raises RefusedError."""
    with reading_npz(path, "drafter of such a model") as arrays:
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
        return Drafter(layers, planes, norms, ids, calibration, header["source_sha256"], header["meta"])


def draft_sections(
    drafter: Drafter, config: Config, weights_section: int, target_crcs: tuple[int, int, int]
) -> Iterator[tuple[str, list[bytes]]]:
    """The drafter's sections of a bundle, in order: name and bytes. ``weights_section``: the number that
    ``draft.weights`` will have in the section table; ``target_crcs``: of ``bundle.DRAFT_TARGET``."""
    draft = DraftConfig(drafter.feature_layers, len(drafter.draft_ids), drafter.calibration, target_crcs)
    yield "draft.config", [draft.pack(config)]
    directory, weights, end = [], [], 0
    for name, dtype, (rows, columns) in drafter.tensors(config):
        offset, length = align(end, TENSOR_ALIGNMENT), tensor_nbytes(dtype, rows, columns)
        directory.append(TensorEntry(name, dtype, weights_section, rows, columns, offset, length).pack())
        weights += [bytes(offset - end), _tensor_bytes(drafter, name)]
        end = offset + length
    yield "draft.tensors", directory
    yield "draft.weights", weights


def draft_cost(drafter: Drafter, bundle: Bundle) -> float:
    """Bytes that a draft step reads, as share of those of a step of the target in base precision: drafter and
    head rows of the draft vocabulary against base plane and head, each at its size in the bundle."""
    config = bundle.config
    own = sum(tensor_nbytes(dtype, *shape) for _, dtype, shape in drafter.tensors(config))
    rows = tensor_nbytes(MXINT8T, len(drafter.draft_ids), config.hidden)
    head = tensor_nbytes(MXINT8T, config.vocab, config.hidden)
    return (own + rows) / (bundle.sections["target.base"].length + head)


def _tensor_bytes(drafter: Drafter, name: str) -> bytes:
    if name in drafter.planes:
        return to_tiles(drafter.planes[name]).tobytes()
    if name in drafter.norms:
        return drafter.norms[name].astype("<f4").tobytes()
    return drafter.draft_ids.astype("<u4").tobytes()


def _check_array(name: str, array: NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype.__name__} {shape}")
