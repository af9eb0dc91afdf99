"""Runs bundles through the C library (libmxdraft, by cffi): the same bits as the device.

with Model("model.mxb") as model, Engine(model, ctx=512) as engine, Sequence(engine) as sequence:
    for piece in sequence.generate(model.chat([("user", "Why is the sky blue?")])):
        print(piece.text.decode("utf-8", "replace"), end="", flush=True)
"""

from mxdraft.runtime.engine import (
    Engine,
    Model,
    ModelInfo,
    Piece,
    Plan,
    Sequence,
    Verification,
    cpu_describe,
    default_threads,
    version,
)

__all__ = [
    "Engine",
    "Model",
    "ModelInfo",
    "Piece",
    "Plan",
    "Sequence",
    "Verification",
    "cpu_describe",
    "default_threads",
    "version",
]
