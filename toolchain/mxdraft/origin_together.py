"""Precision, compute and memory, each alone and all at once: by the length of the context and the number of
sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mxdraft.errors import CapacityError
from mxdraft.origin_compute import Batch, Tally
from mxdraft.runtime import Engine, Model
from mxdraft.runtime import Sequence as Timeline

_CORE = {"core_fraction": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"precision": "full", "draft": "off"},
    "compute": {"precision": "full", "draft": "auto"},
    "precision": {**_CORE, "draft": "off"},
    "memory": {"precision": "full", "draft": "off", "kv": "tiered"},
    "all": {**_CORE, "draft": "auto", "kv": "tiered"},
}
_SHORT = 2048  # contexts beyond take minutes to read: one round
_ALONE = 4  # prompts, one behind the other, where one sequence runs at a time
_ROWS = 512  # of a step, so that all questions are read before the first answer ends


@contextmanager
def having_read(engine: Engine, ids: Sequence[int]) -> Iterator[Timeline]:
    """A sequence that has processed these ids, drafters included, to go on from or to copy."""
    with Timeline(engine, max_tokens=1, ignore_eos=True) as sequence:
        for _ in sequence.generate(ids):
            pass
        sequence.truncate(len(ids))
        yield sequence


def measure(
    model: Model,
    text: Sequence[int],
    questions: Sequence[list[int]],
    contexts: Sequence[int] = (512, 2048, 8192),
    concurrencies: Sequence[int] = (1, 8, 48),
    tokens: int = 32,
    rounds: int = 2,
    threads: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """By context, number of sequences and setting: decode ``tok_per_s``, its ratio to full precision without
    drafts (``of_full``), ``tokens_per_step`` of a sequence, ``acceptance`` of verified drafts; medians of
    rounds, in which every setting has its turn (contexts above 2,048 have one).

    Every sequence reads as much of ``text`` as leaves room in the context for its own question and ``tokens``
    of an answer; the text is processed once an engine and copied. Only steps in which all sequences generate
    count. A context for which the text is too short, or memory, is left out, and ``progress`` told so.
    """
    results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for ctx in contexts:
        length = ctx - max(map(len, questions)) - tokens
        if not 0 < length <= len(text):
            progress(f"context {ctx} left out: the text has {len(text)} tokens, {length} were needed")
            continue
        count = rounds if ctx <= _SHORT else 1
        found: dict[int, dict[str, list[dict[str, Any]]]] = {
            places: {name: [] for name in SETTINGS} for places in concurrencies
        }
        try:
            for index in range(count):
                for name, options in SETTINGS.items():
                    for places, report in _run(
                        model, text[:length], questions, ctx, concurrencies, tokens, threads, options
                    ):
                        found[places][name].append(report)
                    progress(f"all together, context {ctx}: round {index + 1}/{count}, {name}")
        except CapacityError as error:
            progress(f"context {ctx} left out: {error}")
            continue
        results[str(ctx)] = {str(places): _summary(by_name) for places, by_name in found.items()}
    return results


def _run(
    model: Model,
    text: Sequence[int],
    questions: Sequence[list[int]],
    ctx: int,
    concurrencies: Sequence[int],
    tokens: int,
    threads: int,
    options: dict[str, Any],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """One engine: what its steps are like by the number of sequences."""
    most = max(concurrencies)
    with Engine(model, ctx, threads, max_seqs=1 + most, max_rows=_ROWS, **options) as engine:
        if options["draft"] != "off":
            engine.measure_costs()
        with having_read(engine, text) as shared:
            for places in concurrencies:
                tally = Tally()
                asked = questions[: max(places, _ALONE)]
                Batch(engine, asked, places, tokens, tally, begin=shared).run()
                yield places, tally.report()


def _summary(by_name: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    speed = {name: np.array([r["busy_tok_per_s"] for r in reports]) for name, reports in by_name.items()}
    return {
        name: {
            "tok_per_s": float(np.median(speed[name])),
            "of_full": float(np.median(speed[name] / speed["full"])),
            "tokens_per_step": float(np.median([r["tokens_per_step"] for r in reports])),
            "acceptance": reports[0]["acceptance"],
        }
        for name, reports in by_name.items()
    }
