# SPDX-License-Identifier: Apache-2.0
"""Checkpoint to ONNX files, and running those on a stock onnxruntime.

functions.py  the operators of the domain ``mxdraft``
graph.py      weights and graphs of a target
draft.py      the same for a drafter
directory.py  all files of an export, and the manifest that makes them one
runner.py     an exported graph on onnxruntime
"""

from mxdraft.export.directory import export_drafter, export_model
from mxdraft.export.runner import OnnxRunner

__all__ = ["OnnxRunner", "export_drafter", "export_model"]
