"""Checkpoint to ONNX files, and running those on a stock onnxruntime."""

from mxdraft.export.directory import MANIFEST_FILE, complete_tokenizer, export_drafter, export_model
from mxdraft.export.graph import (
    DATA_FILE,
    FEATURES_FILE,
    GENERATION_FILE,
    MODEL_FILES,
    STEP_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Precision,
    initializer_names,
)
from mxdraft.export.session import OnnxRunner

__all__ = [
    "DATA_FILE",
    "FEATURES_FILE",
    "GENERATION_FILE",
    "MANIFEST_FILE",
    "MODEL_FILES",
    "STEP_FILE",
    "TEMPLATE_FILE",
    "TOKENIZER_FILE",
    "OnnxRunner",
    "Precision",
    "complete_tokenizer",
    "export_drafter",
    "export_model",
    "initializer_names",
]
