"""Checkpoint to ONNX files, and running those on a stock onnxruntime."""

from mxdraft.export.draft import export_drafter
from mxdraft.export.graph import (
    DATA_FILE,
    GENERATION_FILE,
    MODEL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Precision,
    export_model,
    initializer_names,
)
from mxdraft.export.runner import OnnxRunner

__all__ = [
    "DATA_FILE",
    "GENERATION_FILE",
    "MODEL_FILES",
    "TEMPLATE_FILE",
    "TOKENIZER_FILE",
    "OnnxRunner",
    "Precision",
    "export_drafter",
    "export_model",
    "initializer_names",
]
