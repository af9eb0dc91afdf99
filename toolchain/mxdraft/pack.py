# SPDX-License-Identifier: Apache-2.0
"""ONNX files to bundle: checks that the graphs are the arithmetic the runtime does, then stores their
weights.

Reads what ``mxdraft.export`` writes, and the text of the n-gram table, so everything verified on the ONNX
files also holds for the bundle. The bundle depends on those files and the tools' versions only: packing twice
gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx.helper
from numpy.typing import NDArray

from mxdraft import __version__
from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.chat import chat_pieces, chat_section
from mxdraft.bundle.format import (
    F32,
    MXFP4T,
    DraftConfig,
    Shape,
    TensorEntry,
    config_section,
    golden_section,
    required_draft_tensors,
    required_tensors,
)
from mxdraft.bundle.ngrams import ngram_section, read_documents
from mxdraft.bundle.reader import Bytes, check_draft
from mxdraft.bundle.schedule import Schedule
from mxdraft.bundle.tokenizer import tokenizer_section
from mxdraft.checkpoint.huggingface import named_token, tokenizer_spec
from mxdraft.errors import RefusedError
from mxdraft.export.directory import read_manifest
from mxdraft.export.draft import DraftMetadata, build_drafter, target_initializers
from mxdraft.export.graph import (
    DATA_FILE,
    DRAFT_DATA_FILE,
    FEATURES_FILE,
    GENERATION_FILE,
    MODEL_FILES,
    STEP_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Metadata,
    Plane,
    Precision,
    build_model,
    initializer_names,
    parse_graph,
)
from mxdraft.files import as_text, file_sha256, open_regular, parse_json_object, parsing, replacing
from mxdraft.mx import BLOCK, MXTensor, Rule
from mxdraft.train.drafter import TrainedDrafter, add_drafter

Digest: TypeAlias = Callable[[Path], tuple[str, str | None]]

_GREEDY_TOKENS = 4
_Kind = TypeVar("_Kind", Metadata, DraftMetadata)
# Planes by the section they are stored in; None: neither.
_PLANES: dict[str, Plane | None] = {
    "target.shared": None,
    "target.base": "base",
    "target.residual": "residual",
}


def pack(
    onnx_directory: Path,
    path: Path,
    golden: Sequence[Sequence[int]] | None = None,
    digest: Digest | None = None,
    text: Path | None = None,
    schedule: Path | None = None,
    residual: bool = True,
) -> None:
    """Write the bundle ``path`` from the files that ``export_model`` wrote into ``onnx_directory``.

    The bundle has a drafter if the export has one, and a residual plane unless ``residual`` is false.
    ``golden``: token ids of the self-test's prompts; by default, three of 24 tokens in all. ``digest`` runs
    them: given the path of a bundle whose digests are zero, it returns the digests of base and full precision
    as 64 hex digits (None: no residual); without it they stay zero. ``text``: documents (.npz) whose n-grams
    become the table that drafting by look-up reads. ``schedule``: settings of the dynamic origin (.toml).
    Raises RefusedError if the files are missing, damaged or not what the exporter writes, TransferError if
    reading or writing fails.
    """
    export = _Export(onnx_directory)
    base = _OnnxModel(export, "base")
    models = {"target.shared": base, "target.base": base}
    if residual:
        models["target.residual"] = _OnnxModel(export, "full")
    with parsing(onnx_directory, "export of one model"):
        if residual:
            _check_same_weights(base, models["target.residual"])
        drafter, draft_files = _read_drafter(export, base) if STEP_FILE in export.digests else (None, {})
    config = base.metadata.config
    prompts = default_prompts(config.vocab) if golden is None else golden
    with replacing(path) as file:
        writer = BundleWriter(file)
        writer.add("target.config", [config_section(config)])
        writer.add_tensors(
            "target.tensors",
            {section: required_tensors(config, section, not config.tied) for section in models},
            lambda section, entry: models[section].values(entry, _PLANES[section]),
        )
        for section, data in _text_sections(base).items():
            writer.add(section, [data])
        writer.add("golden", [golden_section(prompts, _GREEDY_TOKENS, bytes(32), bytes(32))])
        if text is not None:
            writer.add("draft.ngrams", [ngram_section(read_documents(text, config.vocab))])
        if schedule is not None:
            writer.add("schedule", [Schedule.read(schedule, config.layers).pack()])
        writer.add("provenance", [_provenance(models, drafter, draft_files, text)])
        if drafter is not None:
            add_drafter(writer, drafter, config)
        writer.seal()
        temporary = Path(file.name)
        Bundle.open(temporary)
        if digest is not None:
            base_digest, full_digest = (bytes.fromhex(found or "00" * 32) for found in digest(temporary))
            writer.replace("golden", golden_section(prompts, _GREEDY_TOKENS, base_digest, full_digest))
            writer.seal()


def default_prompts(vocab: int) -> list[list[int]]:
    """Return golden prompts of 1, 7 and 16 tokens, spread over the vocabulary."""
    ids = iter(range(1, 25))
    return [[next(ids) * 7919 % vocab for _ in range(length)] for length in (1, 7, 16)]


# ---- reading the export ----


class _Export:
    """The files of an export, by name, mapped: all that its manifest lists, and as it lists them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.digests = read_manifest(directory)
        self.files = {name: self._map(name) for name in self.digests}

    def json(self, name: str) -> dict[str, Any]:
        with parsing(self.directory / name, "JSON object"):
            return parse_json_object(self.files[name].tobytes())

    def text(self, name: str) -> str:
        with parsing(self.directory / name, "UTF-8 text"):
            return self.files[name].tobytes().decode("utf-8")

    def _map(self, name: str) -> Bytes:
        path = self.directory / name
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            content = np.memmap(file, np.uint8, "r") if file.tell() else np.empty(0, np.uint8)
        if digest != self.digests[name]:
            raise RefusedError(f"{path} is not the file that was exported; export the model again")
        return content


class _OnnxFile(Generic[_Kind]):
    """A graph that this package wrote and that computes what the runtime does. Subclasses know what that is,
    and the ``rule`` of its exponents."""

    rule: Rule
    metadata: _Kind

    def __init__(self, export: _Export, name: str, kind: type[_Kind], files: Set[str]) -> None:
        """``files``: that it must list."""
        self.export = export
        self._path = export.directory / name
        with parsing(self._path, "model of this exporter"):
            if name not in export.files:
                raise RefusedError("the export does not have it; export the model again")
            self._model, self.metadata = parse_graph(export.files[name].tobytes(), kind)
            self.initializers = {tensor.name: tensor for tensor in self._model.graph.initializer}
            expected = self._expected()
            for part in ("ir_version", "opset_import", "graph", "functions"):
                if getattr(expected, part) != getattr(self._model, part):
                    raise RefusedError("its graph is not what the runtime computes; export the model again")
            if self.metadata.files.keys() != files:
                raise RefusedError("it lists other files than an export has; export the model again")
            for file, digest in self.metadata.files.items():
                if export.digests.get(file) != digest:
                    raise RefusedError(f"{file} is not the file that was exported with it; export both again")

    def _expected(self) -> onnx.ModelProto:
        """The model that it should be."""
        raise NotImplementedError

    def array(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
        """Read an initializer, which must have this type and shape."""
        with parsing(self._path, f"model of this exporter: initializer {name}"):
            tensor = self.initializers[name]
            found = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            if found != dtype or tuple(tensor.dims) != shape:
                raise ValueError(f"it is {found} {tuple(tensor.dims)}, not {dtype.__name__} {shape}")
            # The exporter leaves nothing out, and the place is that of a file whose digest was compared.
            place = {entry.key: entry.value for entry in tensor.external_data}
            offset, length, count = int(place["offset"]), int(place["length"]), math.prod(shape)
            if place["location"] not in self.metadata.files or length != count * found.itemsize or offset < 0:
                raise ValueError(f"it is said to be {length} bytes at {offset} of {place['location']}")
            return np.frombuffer(self.export.files[place["location"]], found, count, offset).reshape(shape)

    def quantized(self, name: str, plane: Plane | None, shape: Shape) -> MXTensor:
        """Read a quantized tensor [rows, columns]; ``plane`` None: MXINT8."""
        rows, columns = shape
        data_name, scale_name = initializer_names(name, plane)
        scale = self.array(scale_name, np.uint8, (rows, columns // BLOCK))
        if plane is None:
            return MXTensor("mxint8", self.array(data_name, np.int8, shape), scale, "floor")
        data = self.array(data_name, np.uint8, (rows, columns // 2))
        return MXTensor("mxfp4", data, scale, self.rule)


class _OnnxModel(_OnnxFile[Metadata]):
    """The graph of a target in one precision."""

    def __init__(self, export: _Export, precision: Precision) -> None:
        self.precision = precision
        files = {DATA_FILE, TOKENIZER_FILE, GENERATION_FILE} | ({TEMPLATE_FILE} & export.digests.keys())
        super().__init__(export, MODEL_FILES[precision], Metadata, files)
        self.rule = self.metadata.rule

    def values(self, entry: TensorEntry, plane: Plane | None) -> MXTensor | NDArray[np.float32]:
        """Return what a tensor of the bundle holds."""
        if entry.dtype != F32:
            return self.quantized(entry.name, plane, entry.shape)
        norm = entry.name.endswith("norm.weight")  # [hidden] in the graph
        return self.array(entry.name, np.float32, entry.shape[1:] if norm else entry.shape)

    def _expected(self) -> onnx.ModelProto:
        return build_model(self.metadata.config, self.precision, list(self._model.graph.initializer))


class _OnnxDrafter(_OnnxFile[DraftMetadata]):
    """One of the two graphs of a drafter."""

    rule = "search"

    def __init__(self, export: _Export, name: str) -> None:
        super().__init__(export, name, DraftMetadata, {DATA_FILE, DRAFT_DATA_FILE})

    def _expected(self) -> onnx.ModelProto:
        return build_drafter(self._path.name, self.metadata, self._model.graph.initializer)


def _read_drafter(export: _Export, base: _OnnxModel) -> tuple[TrainedDrafter, dict[str, str]]:
    """Read the drafter in the ONNX files, which must be of the target's export; returns the files' SHA-256
    too."""
    features, step = (_OnnxDrafter(export, name) for name in (FEATURES_FILE, STEP_FILE))
    metadata = step.metadata
    if features.metadata != metadata:
        raise RefusedError("the drafter's two graphs are of different exports; export them together")
    same = {name: step.initializers[name] for name in target_initializers(metadata.config)}
    if any(base.initializers.get(name) != tensor for name, tensor in same.items()):
        raise RefusedError("the drafter's graphs are of another export than the target's; export both again")
    planes, norms = {}, {}
    layers = tuple(metadata.feature_layers)
    for name, dtype, shape in required_draft_tensors(metadata.config, len(layers), metadata.vocab):
        graph = features if name.startswith("feature_") else step
        if dtype == MXFP4T:
            planes[name] = graph.quantized(name, "base", shape)
        elif dtype == F32:
            norms[name] = graph.array(name, np.float32, shape[1:])
    ids = step.array("draft_ids", np.int64, (metadata.vocab,)).astype(np.uint32)
    with parsing(export.directory / STEP_FILE, "drafter"):
        calibration = tuple((i, r) for i, r in metadata.calibration)
        check_draft(DraftConfig(layers, metadata.vocab, calibration, (0, 0, 0)), ids, metadata.config)
    files = metadata.files | {name: export.digests[name] for name in (FEATURES_FILE, STEP_FILE)}
    return TrainedDrafter(
        layers, planes, norms, ids, calibration, metadata.source_sha256, metadata.meta
    ), files


def _check_same_weights(base: _OnnxModel, full: _OnnxModel) -> None:
    """Refuse graphs of different exports: what both hold is stored once, so it must be the same."""
    if dataclasses.replace(base.metadata, precision="full") != full.metadata:
        raise RefusedError(
            "model.base.onnx and model.full.onnx are of different exports; export them together"
        )
    for name, tensor in base.initializers.items():
        if not name.endswith("norm.weight") and full.initializers.get(name) != tensor:
            raise RefusedError(f"initializer {name} differs between base and full; export them together")


# ---- sections ----


def _text_sections(model: _OnnxModel) -> dict[str, bytes]:
    export = model.export
    special = export.json(GENERATION_FILE)
    with parsing(export.directory, "directory with a tokenizer that can be read"):
        tokenizer = tokenizer_spec(export.json(TOKENIZER_FILE), special)
        if (eos := named_token(tokenizer, special.get("eos_token"), "eos_token")) is not None:
            tokenizer = tokenizer.with_end(eos, eos_token=eos)
        sections = {"tokenizer": tokenizer_section(tokenizer)}
        if TEMPLATE_FILE in export.files:
            sections["chat"] = chat_section(chat_pieces(export.text(TEMPLATE_FILE), tokenizer))
        return sections


def _provenance(
    models: dict[str, _OnnxModel],
    drafter: TrainedDrafter | None,
    draft_files: dict[str, str],
    text: Path | None,
) -> bytes:
    metadata = models["target.base"].metadata
    digests = models["target.base"].export.digests
    graphs = {name: digests[name] for name in (MODEL_FILES[model.precision] for model in models.values())}
    tools = {name: version(name) for name in ("numpy", "onnx", "onnxruntime")}
    facts: dict[str, Any] = {
        "source": metadata.source,
        "source_sha256": metadata.source_sha256,
        "rule": metadata.rule,
        "recipe": metadata.recipe,
        "smoothing": metadata.smoothing,
        "drafter": None if drafter is None else drafter.meta,
        "versions": {"mxdraft": __version__, **tools},
        "sha256": metadata.files | graphs | draft_files,
    }
    if text is not None:
        facts["ngrams_of"] = {"name": as_text(text.name), "sha256": file_sha256(text)}
    return json.dumps(facts, indent=1, sort_keys=True).encode("ascii")
