# SPDX-License-Identifier: Apache-2.0
"""A drafter as ONNX files next to those of its target.

``draft.features.onnx``: ``residuals`` f32 [batch, sequence, features, hidden] to ``state``
[batch, sequence, hidden]. ``draft.step.onnx``: ``input_ids`` and ``position_ids`` int64 [batch, sequence],
``state`` and ``past_key_values.0.…`` to ``logits`` [batch, sequence, draft vocabulary], ``next_state`` and
``present.0.…``. Embedding, head and RoPE tables lie in the target's own file; the rest in
``draft.onnx.data``. What they compute: docs/arithmetic.md, "Drafter".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx import TensorProto

from mxdraft.checkpoint import ModelConfig
from mxdraft.errors import RefusedError
from mxdraft.export.functions import DOMAIN
from mxdraft.export.graph import (
    DATA_FILE,
    DRAFT_DATA_FILE,
    FEATURES_FILE,
    MODEL_FILES,
    STEP_FILE,
    DataFile,
    Graph,
    GraphMetadata,
    Metadata,
    initializer_names,
    parse_graph,
    write_graph,
)
from mxdraft.files import parsing, read_file, replacing
from mxdraft.mx import BLOCK
from mxdraft.train.drafter import TrainedDrafter


@dataclass(frozen=True)
class DraftMetadata(GraphMetadata):
    """What both graphs say about themselves; ``files``: SHA-256 of the data files, by name."""

    feature_layers: list[int]
    vocab: int
    calibration: list[list[float]]
    source_sha256: str
    meta: dict[str, Any]
    files: dict[str, str]


def write_drafter(drafter: TrainedDrafter, directory: Path) -> dict[str, str]:
    """Write both graphs next to the target's, which ``write_model`` wrote; returns the SHA-256 of each file.

    Raises RefusedError if the target there is another one than the drafter's, TransferError if a file cannot
    be read or written.
    """
    path = directory / MODEL_FILES["base"]
    data_of_base = read_file(path)
    with parsing(path, "model of this exporter"):
        base, target = parse_graph(data_of_base, Metadata)
    check_source(drafter, target.source_sha256)
    with replacing(directory / DRAFT_DATA_FILE) as file:
        data = DataFile(file, DRAFT_DATA_FILE)
        own = [data.add("draft_ids", drafter.draft_ids.astype(np.int64))]
        own += [data.add(name, norm) for name, norm in drafter.norms.items()]
        for name, plane in drafter.planes.items():
            own += data.add_quantized(name, "base", plane)
    metadata = DraftMetadata(
        config=target.config,
        feature_layers=list(drafter.feature_layers),
        vocab=len(drafter.draft_ids),
        calibration=[list(pair) for pair in drafter.calibration],
        source_sha256=drafter.source_sha256,
        meta=drafter.meta,
        files={DATA_FILE: target.files[DATA_FILE], DRAFT_DATA_FILE: data.sha256()},
    )
    shared = {tensor.name: tensor for tensor in base.graph.initializer}
    read = [shared[name] for name in target_initializers(target.config)]
    graphs: dict[str, str] = {}
    for name in (FEATURES_FILE, STEP_FILE):
        model = build_drafter(name, metadata, [*own, *read])
        onnx.helper.set_model_props(model, {"mxdraft": metadata.to_json()})
        graphs[name] = write_graph(directory / name, model)
    return graphs | {DRAFT_DATA_FILE: metadata.files[DRAFT_DATA_FILE]}


def check_source(drafter: TrainedDrafter, source_sha256: str) -> None:
    """Raise RefusedError unless a drafter was trained for the weights with this SHA-256."""
    if drafter.source_sha256 != source_sha256:
        raise RefusedError(
            f"the drafter was trained for weights with SHA-256 {drafter.source_sha256}, these have "
            f"{source_sha256}"
        )


def target_initializers(config: ModelConfig) -> list[str]:
    """The initializers of the target that the drafter reads."""
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    names = [*initializer_names("model.embed_tokens.weight", None), *initializer_names(head, None)]
    return ["rope.cos", "rope.sin", *dict.fromkeys(names)]


def build_drafter(name: str, metadata: DraftMetadata, initializers: Iterable[TensorProto]) -> onnx.ModelProto:
    """The graph of file ``name`` with those of ``initializers`` that it uses."""
    c = metadata.config
    graph = _features(metadata) if name == FEATURES_FILE else _step(c)
    used = {value for node in graph.nodes for value in node.input}
    kept = [tensor for tensor in initializers if tensor.name in used]
    if name == FEATURES_FILE:
        residuals = (TensorProto.FLOAT, [len(metadata.feature_layers), c.hidden])
        return graph.model("draft_features", {"residuals": residuals}, {"state": c.hidden}, 0, kept)
    ids = (TensorProto.INT64, list[int]())
    inputs = {"input_ids": ids, "position_ids": ids, "state": (TensorProto.FLOAT, [c.hidden])}
    return graph.model("draft_step", inputs, {"logits": metadata.vocab, "next_state": c.hidden}, 1, kept)


def _features(metadata: DraftMetadata) -> Graph:
    graph = Graph(metadata.config, "base")
    count = len(metadata.feature_layers)
    streams = [f"stream.{i}" for i in range(count)]
    split = onnx.helper.make_node("Split", ["residuals"], streams, "streams", axis=2, num_outputs=count)
    graph.nodes.append(split)
    normed = [graph.norm(stream, f"feature_norm.{i}") for i, stream in enumerate(streams)]
    joined = graph.op("Concat", normed, "features", axis=3)
    rows = graph.op("Squeeze", [joined, graph.constant("feature_axis", np.array([2]))], "features.rows")
    graph.op("Identity", [graph.linear(rows, "feature_proj", metadata.config.hidden)], "state")
    return graph


def _step(config: ModelConfig) -> Graph:
    graph = Graph(config, "base")
    embedding = initializer_names("model.embed_tokens.weight", None)
    head = embedding if config.tied else initializer_names("lm_head.weight", None)
    embedded = graph.mx_op("MXINT8Embedding", ["input_ids", *embedding], "model.embed_tokens", config.hidden)
    pair = [graph.norm(embedded, "embed_norm"), graph.norm("state", "state_norm")]
    x = graph.linear(graph.op("Concat", pair, "input", axis=2), "input_proj", config.hidden)
    graph.op("Identity", [graph.layer(x, 0)], "next_state")
    normed = graph.norm("next_state", "model.norm")
    names = ("draft_head.data", "draft_head.scale")
    rows = [graph.op("Gather", [part, "draft_ids"], name) for part, name in zip(head, names, strict=True)]
    graph.op("MXINT8MatMul", [normed, *rows], "logits", domain=DOMAIN, block_size=BLOCK)
    return graph
