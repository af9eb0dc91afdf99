"""ONNX files to bundle: checks that the graphs are the arithmetic the runtime does, then stores their
weights.

Reads what ``mxdraft.export`` writes, and the text of the n-gram table, so everything verified on the ONNX
files also holds for the bundle. The bundle depends on those files and the tools' versions only: packing twice
gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference
from numpy.typing import NDArray

from mxdraft import __version__
from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.chat import chat_pieces, chat_section
from mxdraft.bundle.format import (
    F32,
    MXFP4T,
    Shape,
    TensorEntry,
    config_section,
    golden_section,
    required_draft_tensors,
    required_tensors,
)
from mxdraft.bundle.ngrams import ngram_section, read_documents
from mxdraft.bundle.schedule import Schedule
from mxdraft.bundle.tokenizer import tokenizer_section
from mxdraft.checkpoint import check_config
from mxdraft.checkpoint.huggingface import tokenizer_spec
from mxdraft.errors import RefusedError, TransferError
from mxdraft.export.draft import DraftMetadata, build_drafter, target_initializers
from mxdraft.export.graph import (
    DATA_FILE,
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
)
from mxdraft.files import file_sha256, replacing
from mxdraft.mx import BLOCK, MXTensor, Rule
from mxdraft.train.drafter import TrainedDrafter, add_drafter

Digest: TypeAlias = Callable[[Path], tuple[str, str | None]]

_GREEDY_TOKENS = 4
_INVALID_ONNX = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
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
) -> None:
    """Write the bundle ``path`` from the files that ``export_model`` wrote into ``onnx_directory``.

    Without ``model.full.onnx`` there, the bundle has no residual plane; without ``draft.step.onnx``, no
    drafter. ``golden``: token ids of the self-test's prompts; by default, three of 24 tokens in all.
    ``digest`` runs them: given the path of a bundle whose digests are zero, it returns the digests of base
    and full precision as 64 hex digits (None: no residual); without it they stay zero. ``text``:
    documents (.npz) whose n-grams become the table that drafting by look-up reads. ``schedule``: settings of
    the dynamic origin (.toml). Raises RefusedError if the files are missing, damaged or not what the exporter
    writes, TransferError if reading or writing fails.
    """
    base = _OnnxModel(onnx_directory, "base")
    models = {"target.shared": base, "target.base": base}
    if (onnx_directory / MODEL_FILES["full"]).exists():
        models["target.residual"] = _OnnxModel(onnx_directory, "full")
        _check_same_weights(base, models["target.residual"])
    drafter, draft_files = (
        _read_drafter(onnx_directory, base) if (onnx_directory / STEP_FILE).exists() else (None, {})
    )
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


class _OnnxFile:
    """A graph that this package wrote: valid ONNX, its other files unaltered. Subclasses know what it must
    compute."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._path = self.file(name)
        self.sha256 = _sha256(self._path)
        try:
            onnx.checker.check_model(str(self._path), full_check=True)
            self._model = onnx.load_model(self._path, load_external_data=False)
            properties = {entry.key: entry.value for entry in self._model.metadata_props}
            self._files, self._rule, expected = self._expect(properties["mxdraft"])
        except (*_INVALID_ONNX, ValueError, TypeError, KeyError) as error:
            raise self._refusal(f"not a model of this exporter: {error}") from error
        if expected.graph != self._model.graph or list(expected.functions) != list(self._model.functions):
            raise self._refusal("its graph is not what the runtime computes")
        self.initializers = {tensor.name: tensor for tensor in self._model.graph.initializer}
        for tensor in self.initializers.values():
            location = {entry.value for entry in tensor.external_data if entry.key == "location"}
            if not location <= self._files.keys():
                raise self._refusal(f"initializer {tensor.name} is in {location}, which it does not list")
        for file, digest in self._files.items():
            if _sha256(self.file(file)) != digest:
                raise self._refusal(f"{file} is not the file that was exported with it")

    def _expect(self, metadata: str) -> tuple[dict[str, str], Rule, onnx.ModelProto]:
        """Return the files that it lists, the rule of its exponents, and the model that it should be."""
        raise NotImplementedError

    def file(self, name: str) -> Path:
        """Return the path of a file next to the graph. Raises RefusedError if it is not there."""
        path = self._directory / name
        if not path.is_file():
            raise RefusedError(f"{path}: no such file; export the model again")
        return path

    def text(self, name: str) -> str:
        return self.file(name).read_text(encoding="utf-8")

    def array(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
        """Read an initializer, which must have this type and shape."""
        try:
            array = onnx.numpy_helper.to_array(self.initializers[name], str(self._directory))
        except (*_INVALID_ONNX, ValueError, KeyError) as error:
            raise self._refusal(f"initializer {name} cannot be read: {error}") from error
        if array.dtype != dtype or array.shape != shape:
            raise self._refusal(
                f"initializer {name} is {array.dtype} {array.shape}, not {dtype.__name__} {shape}"
            )
        return array

    def quantized(self, name: str, plane: Plane | None, shape: Shape) -> MXTensor:
        """Read a quantized tensor [rows, columns]; ``plane`` None: MXINT8."""
        rows, columns = shape
        data_name, scale_name = initializer_names(name, plane)
        scale = self.array(scale_name, np.uint8, (rows, columns // BLOCK))
        if plane is None:
            return MXTensor("mxint8", self.array(data_name, np.int8, shape), scale, "floor")
        data = self.array(data_name, np.uint8, (rows, columns // 2))
        return MXTensor("mxfp4", data, scale, self._rule)

    def _refusal(self, message: str) -> RefusedError:
        return RefusedError(f"{self._path}: {message}; export the model again")


class _OnnxModel(_OnnxFile):
    """The graph of a target in one precision."""

    def __init__(self, directory: Path, precision: Precision) -> None:
        self.precision = precision
        super().__init__(directory, MODEL_FILES[precision])
        if self.metadata.files.keys() - {TEMPLATE_FILE} != {DATA_FILE, TOKENIZER_FILE, GENERATION_FILE}:
            raise self._refusal(f"it lists other files: {', '.join(self.metadata.files)}")

    def values(self, entry: TensorEntry, plane: Plane | None) -> MXTensor | NDArray[np.float32]:
        """Return what a tensor of the bundle holds."""
        if entry.dtype != F32:
            return self.quantized(entry.name, plane, entry.shape)
        norm = entry.name.endswith("norm.weight")  # [hidden] in the graph
        return self.array(entry.name, np.float32, entry.shape[1:] if norm else entry.shape)

    def _expect(self, metadata: str) -> tuple[dict[str, str], Rule, onnx.ModelProto]:
        self.metadata = Metadata.from_json(metadata)
        check_config(self.metadata.config)
        expected = build_model(self.metadata.config, self.precision, list(self._model.graph.initializer))
        return self.metadata.files, self.metadata.rule, expected


class _OnnxDrafter(_OnnxFile):
    """One of the two graphs of a drafter."""

    def _expect(self, metadata: str) -> tuple[dict[str, str], Rule, onnx.ModelProto]:
        self.metadata = DraftMetadata.from_json(metadata)
        check_config(self.metadata.config)
        expected = build_drafter(self._path.name, self.metadata, self._model.graph.initializer)
        return self.metadata.files, "search", expected


def _read_drafter(directory: Path, base: _OnnxModel) -> tuple[TrainedDrafter, dict[str, str]]:
    """Read the drafter in the ONNX files, which must be of the target's export; returns the files' SHA-256
    too."""
    features, step = (_OnnxDrafter(directory, name) for name in (FEATURES_FILE, STEP_FILE))
    metadata = step.metadata
    if features.metadata != metadata:
        raise RefusedError("the drafter's two graphs are of different exports; export them together")
    same = {name: step.initializers[name] for name in target_initializers(metadata.config)}
    if any(base.initializers.get(name) != tensor for name, tensor in same.items()) or (
        metadata.files[DATA_FILE] != base.metadata.files[DATA_FILE]
    ):
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
    calibration = tuple((i, r) for i, r in metadata.calibration)
    files = metadata.files | {FEATURES_FILE: features.sha256, STEP_FILE: step.sha256}
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


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error


# ---- sections ----


def _text_sections(model: _OnnxModel) -> dict[str, bytes]:
    tokenizer = tokenizer_spec(
        json.loads(model.text(TOKENIZER_FILE)), json.loads(model.text(GENERATION_FILE))
    )
    sections = {"tokenizer": tokenizer_section(tokenizer)}
    if TEMPLATE_FILE in model.metadata.files:
        sections["chat"] = chat_section(chat_pieces(model.text(TEMPLATE_FILE), tokenizer))
    return sections


def _provenance(
    models: dict[str, _OnnxModel],
    drafter: TrainedDrafter | None,
    draft_files: dict[str, str],
    text: Path | None,
) -> bytes:
    metadata = models["target.base"].metadata
    graphs = {MODEL_FILES[model.precision]: model.sha256 for model in models.values()}
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
        facts["ngrams_of"] = {"name": text.name, "sha256": _sha256(text)}
    return json.dumps(facts, indent=1, sort_keys=True).encode("ascii")
