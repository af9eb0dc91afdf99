# SPDX-License-Identifier: Apache-2.0
"""Runs bundles through the C library (libmxdraft, by cffi): the same bits as the device.

with Model("model.mxb") as model, Engine(model, ctx=512) as engine, Timeline(engine) as timeline:
    for piece in timeline.generate(model.chat([("user", "Why is the sky blue?")])):
        print(piece.text.decode("utf-8", "replace"), end="", flush=True)

Model, Engine and Timeline are the three objects of mxdraft.h as context managers. Closing is safe in any
order: a parent first closes what was opened from it, everything is closed at the latest when the
interpreter exits, and an object that is used after its close raises ValueError. Errors of the library come
as the exceptions of ``mxdraft.errors``. An engine and its timelines belong to one thread at a time.

_ffi.py      the library, loaded once, and its declarations from the header
_handle.py   an object of the library with an owner
options.py   the options of an engine and of a timeline, and the plan
model.py     a bundle file: tokens, text, chat
engine.py    an arena and a thread pool: steps, costs, verification, benchmark
grammar.py   what the text of a timeline has to fit
timeline.py  a token timeline: prompt, generate, truncate, logits, records
"""

from mxdraft.runtime.engine import (
    BenchFormat,
    Engine,
    Verification,
    cpu_describe,
    default_threads,
    exit_on_bus_error,
    version,
)
from mxdraft.runtime.grammar import Grammar
from mxdraft.runtime.model import Model, ModelInfo
from mxdraft.runtime.options import KV, Draft, EngineOptions, Plan, Precision, SamplingOptions
from mxdraft.runtime.timeline import (
    CacheUse,
    CoreRule,
    Drafter,
    DraftRecord,
    Look,
    Piece,
    Source,
    Stop,
    Tier,
    Timeline,
    TokenRecord,
)

Sequence = Timeline  # its name before; collections.abc has another one

__all__ = [
    "KV",
    "BenchFormat",
    "CacheUse",
    "CoreRule",
    "Draft",
    "DraftRecord",
    "Drafter",
    "Engine",
    "EngineOptions",
    "Grammar",
    "Look",
    "Model",
    "ModelInfo",
    "Piece",
    "Plan",
    "Precision",
    "SamplingOptions",
    "Sequence",
    "Source",
    "Stop",
    "Tier",
    "Timeline",
    "TokenRecord",
    "Verification",
    "cpu_describe",
    "default_threads",
    "exit_on_bus_error",
    "version",
]
