# SPDX-License-Identifier: Apache-2.0
"""Runs an exported graph on a stock onnxruntime, by the function bodies of the domain ``mxdraft``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from mxdraft.export.graph import Metadata


class OnnxRunner:
    """One graph on the CPU, one sequence at a time; no state is kept between calls.

    Weights stay packed and are dequantized in each pass, which costs as much as some 200 rows: ask for many
    rows at once. Constants folded while loading would take eight times the memory.
    """

    def __init__(self, model: Path, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "65536")
        options.log_severity_level = 3  # it warns of every weight not folded
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
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
        past = cache[0].shape[2]
        positions = np.arange(past, past + len(ids))[np.newaxis]
        names = [value.name for value in self._session.get_inputs()]
        inputs = dict(zip(names, [np.array([ids], np.int64), positions, *cache], strict=True))
        logits, *present = self._session.run(None, inputs)
        return logits[0], present

    def _empty_cache(self) -> list[NDArray[np.float32]]:
        shape = (1, self.config.kv_heads, 0, self.config.head_dim)
        return [np.empty(shape, np.float32) for _ in range(2 * self.config.layers)]
