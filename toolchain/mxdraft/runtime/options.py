"""What an engine is asked for, and the memory that it then needs."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import load, words

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


def to_struct(options: EngineOptions) -> Any:
    """``mxd_options *``. Raises UsageError on an unknown word, TypeError on an unknown name."""
    struct = load().ffi.new("mxd_options *")
    load().lib.mxd_options_default(struct)
    for name, value in options.items():
        if name not in EngineOptions.__annotations__:
            raise TypeError(f"an engine has no option {name!r}")
        if value is not None:
            setattr(struct, name, _number(name, value))
    return struct


def _number(name: str, value: Any) -> Any:
    if name in ("precision", "draft", "kv"):
        known = words(f"mxd_{name}")
        if value not in known:
            raise UsageError(f"{name} {value!r}: expected one of {', '.join(known)}")
        return known.index(value)
    if name == "core_fraction" and value < 0:  # what the library takes for "the bundle's"
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
