# SPDX-License-Identifier: Apache-2.0
"""Runs an exported graph on a stock onnxruntime, by the function bodies of the domain ``mxdraft``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mxdraft.export.graph import Metadata


class OnnxRunner:
    """One graph on the CPU, one sequence at a time; no state is kept between calls.

    Weights stay packed and are dequantized in each pass, which costs as much as some 200 rows: ask for many
    rows at once. Constants folded while loading would take eight times the memory.
    """

    def __init__(self, model: Path, threads: int = 1, streams: bool = False) -> None:
        """``streams``: it shall compute residual streams too, which costs memory."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "65536")
        options.log_severity_level = 3  # it warns of every weight not folded
        graph: Path | bytes = model
        if streams:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(model.parent)
            )
            graph = _with_streams(model)
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        properties = self._session.get_modelmeta().custom_metadata_map
        self.config = Metadata.from_json(properties["mxdraft"]).config

    def logits(self, ids: Sequence[int], rows: int | None = None) -> NDArray[np.float32]:
        """Return logits [len(ids), vocab] after each of the tokens, in passes of ``rows`` tokens, or in
        one."""
        rows = rows or len(ids)
        cache = self._empty_cache()
        parts = []
        for start in range(0, len(ids), rows):
            part, cache = self._step(ids[start : start + rows], cache)
            parts.append(part)
        return np.concatenate(parts)

    def streams(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the embeddings and the residual stream after each layer, [len(ids), layers + 1, hidden]."""
        found = self._session.run(_streams(self.config.layers), self._inputs(ids, self._empty_cache()))
        return np.stack([stream[0] for stream in found], axis=1)

    def generate_greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Generate ``count`` tokens after the prompt ``ids``, each the likeliest (lowest id among equals)."""
        logits, cache = self._step(ids, self._empty_cache())
        generated = [int(logits[-1].argmax())]
        while len(generated) < count:
            logits, cache = self._step(generated[-1:], cache)
            generated.append(int(logits[-1].argmax()))
        return generated

    def _step(
        self, ids: Sequence[int], cache: list[NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Run tokens after the positions of ``cache``: logits [len(ids), vocab], extended cache."""
        names = [
            "logits",
            *(value.name for value in self._session.get_outputs() if value.name.startswith("present.")),
        ]
        logits, *present = self._session.run(names, self._inputs(ids, cache))
        return logits[0], present

    def _inputs(self, ids: Sequence[int], cache: list[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
        past = cache[0].shape[2]
        positions = np.arange(past, past + len(ids))[np.newaxis]
        names = [value.name for value in self._session.get_inputs()]
        return dict(zip(names, [np.array([ids], np.int64), positions, *cache], strict=True))

    def _empty_cache(self) -> list[NDArray[np.float32]]:
        shape = (1, self.config.kv_heads, 0, self.config.head_dim)
        return [np.empty(shape, np.float32) for _ in range(2 * self.config.layers)]


def _streams(layers: int) -> list[str]:
    """Name the values that are residual streams."""
    return ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(layers))]


def _with_streams(path: Path) -> bytes:
    """Return the graph of a file with its residual streams as further outputs; its weights stay where they
    are."""
    model = onnx.load(path, load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    config = Metadata.from_json(properties["mxdraft"]).config
    axes: list[str | int | None] = ["batch", "sequence", config.hidden]
    for name in _streams(config.layers):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, axes))
    return bytes(model.SerializeToString())
