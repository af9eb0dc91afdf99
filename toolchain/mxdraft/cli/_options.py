# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, as docs/cli.md has them (its twin in C: runtime/cli/options.c)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, Unpack, get_args

import click

from mxdraft.cli._terminal import note, printable
from mxdraft.errors import TransferError
from mxdraft.files import default_cache
from mxdraft.runtime import (
    KV,
    Draft,
    Engine,
    EngineOptions,
    Model,
    Plan,
    Precision,
    default_threads,
    exit_on_bus_error,
)

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make an option type: a whole number in decimal digits, nothing around it."""

    def parse(value: str) -> int:
        if re.fullmatch(r"[0-9]{1,20}", value) and low <= int(value) <= high:
            return int(value)
        raise click.BadParameter(f"'{value}': expected a whole number from {low} to {high}")

    parse.__name__ = "N"  # what --help shows
    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """Make an option type: a decimal number; no sign, infinity, NaN or hexadecimal."""

    def parse(value: str) -> float:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", value) and low <= float(value) <= high:
            return float(value)
        raise click.BadParameter(f"'{value}': expected a number from {low:g} to {high:g}")

    parse.__name__ = "X"
    return parse


def word_option(
    name: str, words: tuple[str, ...], default: str, text: str, parameter: str | None = None
) -> Callable[[Command], Command]:
    """Make an option that takes one of a few words; ``parameter``: another name for the command."""

    def parse(value: str) -> str:
        if value in words:
            return value
        raise click.BadParameter(f"'{value}': expected one of {', '.join(words)}")

    return click.option(
        name, *filter(None, [parameter]), type=parse, metavar="|".join(words), default=default, help=text
    )


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Join several decorators into one; --help lists their options in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def find_bundle(_: click.Context, __: click.Parameter, bundle: str | None) -> str | None:
    """Let -m name a file or, as the device's CLI does, a bundle that was pulled."""
    if bundle is None or os.path.exists(bundle):  # noqa: PTH110  (Path.exists() raises for a name that is too long)
        return bundle
    from mxdraft.store.kept import find  # which needs numpy

    return find(bundle)


model_option = click.option(
    "-m",
    "bundle",
    metavar="BUNDLE",
    required=True,
    callback=find_bundle,
    help="Bundle: file (.mxb) or pulled name.",
)

threads_option = click.option(
    "-t", "threads", type=whole(0, 64), default="0", help="Threads; 0 = what the machine offers."
)

engine_options = options(
    threads_option,
    click.option("--ctx", type=whole(0, 1 << 20), default="0", help="Context; 0 = min(2048, the model's)."),
    word_option("--precision", get_args(Precision), "auto", "Weight planes; auto = full where it matters."),
    click.option(
        "--core-fraction",
        type=real(0, 1),
        help="Under auto: tokens at full precision, 0..1; unset: the bundle's.",
    ),
    click.option(
        "--catch-up",
        type=whole(1, 32),
        help="Under auto: most tokens between full passes; unset: the bundle's.",
    ),
)

cache_options = options(
    word_option("--kv", get_args(KV), "auto", "Format of the KV cache; auto = f16."),
    click.option(
        "--kv-budget",
        type=real(0, 8.25),
        default="0",
        help="Tiered: mean bits a value, context full; 0 = bundle's.",
    ),
)

text_options = options(
    click.option("-p", "text", metavar="TEXT", help="The text itself."),
    click.option("-f", "file", metavar="FILE", help="Read the text from a file. A bare - reads stdin."),
    click.argument("stdin", metavar="[-]", required=False),
)

sampling_options = options(
    click.option("--temp", type=real(0, 100), default="0", help="Temperature; 0 = greedy."),
    click.option("--top-k", type=whole(0, 1 << 20), default="0", help="Keep the k likeliest; 0 = off."),
    click.option("--top-p", type=real(0, 1), default="1", help="Keep this probability mass; 1 = off."),
    click.option(
        "--min-p",
        type=real(0, 1),
        default="0",
        help="Keep what has this share of the top probability; 0 = off.",
    ),
    click.option("--repeat-penalty", type=real(0.1, 10), default="1", help="Against repetition; 1 = off."),
    click.option(
        "--seed",
        type=whole(0, (1 << 64) - 1),
        help="Seed of the sampling noise; unset: a new one in each run.",
    ),
    click.option("--stop", metavar="TEXT", multiple=True, help="Stop before this text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after end-of-sequence tokens."),
    click.option("--json-schema", metavar="FILE", help="Answer with a document of this JSON schema."),
)

draft_options = options(
    word_option("--draft", get_args(Draft), "auto", "Who drafts; never changes the text, only the speed."),
    click.option("--draft-max", type=whole(1, 15), default="8", help="Most drafted tokens in a step."),
)


def limit_option(default: str, low: int = 0) -> Callable[[Command], Command]:
    return click.option(
        "-n",
        "limit",
        type=whole(low, 1 << 20),
        default=default,
        help="Most tokens; 0 = until context is full.",
    )


def stats_option(default: str) -> Callable[[Command], Command]:
    return word_option("--stats", ("none", "text", "json"), default, "Statistics on stderr.")


def open_engine(model: Model, **options: Unpack[EngineOptions]) -> Engine:
    """Print the memory plan on stderr, then open the engine."""
    offered, threads = default_threads(), options.get("threads", 0)
    if threads > offered:
        note(f"mxdraft: note: {threads} threads asked for, this machine offers {offered}")
    note(plan_line(model.plan(**options)))
    return Engine(model, **options)


def open_model(bundle: str) -> Model:
    """Open a bundle. If it gets shorter while it is in use, the process ends with a message and 6."""
    exit_on_bus_error(
        f"mxdraft: error: {printable(bundle)}: cannot be read any more: it was cut while in use, "
        "or its medium fails: copy it again, and replace a bundle only by renaming\n",
        TransferError.exit_code,
    )
    return Model(bundle)


def know_costs(engine: Engine) -> None:
    """Tell the engine what steps cost on this machine, from the user's cache or measured now: draft lengths
    rest on it."""
    cache = None
    with contextlib.suppress(OSError, TransferError):  # no home; what cannot be kept is measured each time
        cache = default_cache()
        cache.mkdir(parents=True, exist_ok=True)
    if cache is None or not engine.load_costs(cache):
        note("mxdraft: note: first run of this kind: measuring what steps cost")
        engine.measure_costs(cache)


def plan_line(plan: Plan) -> str:
    weights, kv, activations, sequences, total, available = (
        f"{size / 2**20:.1f}" for size in dataclasses.astuple(plan)[:6]
    )
    return (
        f"plan: weights {weights} + KV cache {kv} + activations {activations} + sequences {sequences} "
        f"= {total} MiB of {available} MiB available; ctx {plan.ctx}, threads {plan.threads}, "
        f"precision {plan.precision}, kv {plan.kv}"
    )
