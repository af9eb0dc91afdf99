# SPDX-License-Identifier: Apache-2.0
"""What engines and timelines are asked for, and the memory that an engine then needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import c_text, load, words

Precision = Literal["auto", "base", "full"]
Draft = Literal["auto", "off", "ngram", "model"]
KV = Literal["auto", "f16", "int8", "mxfp4", "tiered"]


class EngineOptions(TypedDict, total=False):
    """Options of an engine (mxdraft.h, ``mxd_options``); absent or None: the library's default.

    ``ctx`` positions for each of ``max_seqs`` sequences; at most ``max_rows`` rows in a step, which is the
    size of a prefill chunk. ``draft`` says who drafts for speculation, ``draft_max`` how many tokens a step
    at most, ``draft_min`` how many whether it pays or not; what is generated does not depend on them. Under
    precision ``auto``, ``core_fraction`` of the rows get full precision, and ``catch_up`` is the most rows
    from one pass at full precision to the next. ``kv`` is the format of the KV cache, ``kv_budget`` the
    mean bits a value that a tiered one may take.
    """

    ctx: int
    max_seqs: int | None
    max_rows: int | None
    threads: int
    precision: Precision
    draft: Draft
    draft_max: int
    draft_min: int
    core_fraction: float | None
    catch_up: int | None
    kv: KV
    kv_budget: float


class SamplingOptions(TypedDict, total=False):
    """Settings of a timeline (mxdraft.h, ``mxd_sampling``); absent: the library's default, which is greedy.

    ``max_tokens`` 0 means until the context is full; ``stop`` has texts before which generation stops.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    seed: int
    max_tokens: int
    ignore_eos: bool
    stop: Iterable[str | bytes]


def engine_struct(options: EngineOptions) -> Any:
    """``mxd_options *``. Raises UsageError on an unknown word, TypeError on an unknown name."""
    struct = load().ffi.new("mxd_options *")
    load().lib.mxd_options_default(struct)
    _set_fields(struct, EngineOptions, {name: _number(name, value) for name, value in options.items()})
    return struct


def sampling_struct(options: SamplingOptions) -> tuple[Any, Any]:
    """``mxd_sampling *``, and what must live as long. Raises TypeError on an unknown name."""
    ffi = load().ffi
    struct = ffi.new("mxd_sampling *")
    load().lib.mxd_sampling_default(struct)
    stops = [ffi.new("char[]", c_text(text)) for text in options.get("stop", ())]
    array = ffi.new("char *[]", stops)
    pointers = {"stop": ffi.cast("const char *const *", array)}
    _set_fields(struct, SamplingOptions, {**options, **pointers})
    struct.stop_count = len(stops)
    return struct, (stops, array)


def _set_fields(struct: Any, known: type, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name not in known.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            setattr(struct, name, value)


def _number(name: str, value: Any) -> Any:
    """The C value of an engine's option."""
    if name in ("precision", "draft", "kv"):
        known = words(f"mxd_{name}")
        if value not in known:
            raise UsageError(f"{name} {value!r}: expected one of {', '.join(known)}")
        return known.index(value)
    if (
        name == "core_fraction" and value is not None and value < 0
    ):  # the library takes that for "the bundle's"
        raise UsageError(f"core_fraction {value:g} is not in 0..1")
    return value


@dataclasses.dataclass(frozen=True)
class Plan:
    """An engine's memory in bytes, and its options as resolved. ``largest_ctx`` is 0 if no context fits."""

    weights: int
    kv_cache: int
    activations: int
    sequences: int
    total: int
    available: int
    ctx: int
    threads: int
    precision: Precision
    kv: KV
    largest_ctx: int


def to_plan(struct: Any) -> Plan:
    """From an ``mxd_plan *``."""
    values = {field.name: getattr(struct, field.name) for field in dataclasses.fields(Plan)}
    names = {name: words(f"mxd_{name}")[values[name]] for name in ("precision", "kv")}
    return Plan(**values | names)
