# SPDX-License-Identifier: Apache-2.0
"""Precision, compute and memory, each alone and all at once: by the length of the context and the number of
sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from mxdraft.errors import CapacityError
from mxdraft.measure.origin.compute import Batch, Tally, having_read, run_in_turns
from mxdraft.runtime import Engine, Model

_CORE = {"core_fraction": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"precision": "full", "draft": "off"},
    "compute": {"precision": "full", "draft": "auto"},
    "precision": {**_CORE, "draft": "off"},
    "memory": {"precision": "full", "draft": "off", "kv": "tiered"},
    "all": {**_CORE, "draft": "auto", "kv": "tiered"},
}
_ALONE = 4  # prompts, one after the other, where one sequence runs at a time
_ROWS = 512  # of a step, so that all questions are read before the first answer ends


def measure_together(
    model: Model,
    text: Sequence[int],
    questions: Sequence[list[int]],
    contexts: Sequence[int] = (512, 2048, 8192),
    concurrencies: Sequence[int] = (1, 8, 48),
    tokens: int = 48,
    threads: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Measure by context, number of sequences and setting: decode ``tok_per_s``, its ratio to full precision
    without drafts (``of_full``), ``tokens_per_step`` of a sequence, ``acceptance`` of verified drafts.

    Every sequence reads as much of ``text`` as leaves room in the context for its own question and ``tokens``
    of an answer; the text is processed once an engine and copied. Only steps in which all sequences generate
    count. Settings take turns after each step if their engines fit memory together. What is too long
    for the text, the model or memory is left out, and ``progress`` told so.
    """
    results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for ctx in contexts:
        if ctx > model.info.max_positions:
            progress(f"context {ctx} left out: the model has {model.info.max_positions} positions")
            continue
        length = ctx - max(map(len, questions)) - tokens
        if not 0 < length <= len(text):
            progress(f"context {ctx} left out: the text has {len(text)} tokens, {length} were needed")
            continue
        results[str(ctx)] = {}
        for places in concurrencies:
            asked = questions[: max(places, _ALONE)]
            try:
                reports = _run(model, text[:length], asked, ctx, places, tokens, threads)
            except CapacityError as error:
                progress(f"context {ctx}, {places} sequences left out: {error}")
                continue
            results[str(ctx)][str(places)] = _compared_with_full(reports)
            progress(f"all together, context {ctx}, {places} sequences")
    return results


def _run(
    model: Model,
    text: Sequence[int],
    questions: Sequence[list[int]],
    ctx: int,
    places: int,
    tokens: int,
    threads: int,
) -> dict[str, dict[str, Any]]:
    """Run all settings; returns their reports."""
    fixed: dict[str, Any] = {"ctx": ctx, "threads": threads, "max_seqs": 1 + places, "max_rows": _ROWS}
    plans = [model.plan(**fixed, **options) for options in SETTINGS.values()]
    needed = sum(plan.total - plan.weights for plan in plans) + plans[0].weights
    names = list(SETTINGS)
    groups = [names] if needed < plans[0].available else [[name] for name in names]
    tallies = {name: Tally() for name in names}
    for group in groups:
        with ExitStack() as stack:
            batches = []
            for name in group:
                engine = stack.enter_context(Engine(model, **fixed, **SETTINGS[name]))
                if SETTINGS[name]["draft"] != "off":
                    engine.measure_costs()
                shared = stack.enter_context(having_read(engine, text))
                batches.append(Batch(engine, questions, places, tokens, tallies[name], begin=shared))
            run_in_turns(batches)
    return {name: tally.report() for name, tally in tallies.items()}


def _compared_with_full(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "tok_per_s": report["busy_tok_per_s"],
            "of_full": report["busy_tok_per_s"] / reports["full"]["busy_tok_per_s"],
            "tokens_per_step": report["tokens_per_step"],
            "acceptance": report["acceptance"],
        }
        for name, report in reports.items()
    }
