"""Checkpoint to ONNX files, and running those on a stock onnxruntime.

functions.py  the operators of the domain ``mxdraft``
graph.py      weights and graphs of a target
draft.py      the same for a drafter
runner.py     an exported graph on onnxruntime
"""

from mxdraft.export.draft import export_drafter
from mxdraft.export.graph import export_model
from mxdraft.export.runner import OnnxRunner

__all__ = ["OnnxRunner", "export_drafter", "export_model"]
