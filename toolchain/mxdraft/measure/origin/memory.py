# SPDX-License-Identifier: Apache-2.0
"""The memory consumer: what tiers of the KV cache cost in quality and give in speed.

``measure_caches`` (quality) compares them with uniform formats, and with other choices of the core tokens at
equal bytes; ``measure_cache_speed`` with uniform formats.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.schedule import KV_BLOCK, Schedule, Weights
from mxdraft.files import replacing
from mxdraft.measure.origin.compute import having_read
from mxdraft.measure.quality import Quality, log_softmax
from mxdraft.runtime import KV, Engine, Model, Precision, Timeline

TAIL = 256  # positions at the end of a window that are compared
DECODED = 16  # tokens whose speed is measured
FORMATS: tuple[KV, ...] = ("f16", "int8", "mxfp4", "tiered")
_CUT = 4  # acceptance is measured after every so many of the positions compared
_DRAFTED = 3  # tokens a step
_FAST_BITS, _FAR_BITS = 8.25, 4.25


class Setting(NamedTuple):
    """One way to keep the cache; ``schedule`` replaces the bundle's where it is not None."""

    name: str
    kv: KV
    budget: float = 0.0
    schedule: Schedule | None = None


def settings(schedule: Schedule, ctx: int, bits: float) -> list[Setting]:
    """List uniform formats, the bundle's own tiers, and at about ``bits`` a value: core tokens by attention,
    by chance (all scores equal), and none, with as long a window as fits instead."""
    fast = int((bits - _FAR_BITS) / (_FAST_BITS - _FAR_BITS) * ctx)
    window = max(KV_BLOCK, (fast - schedule.sinks - KV_BLOCK) // KV_BLOCK * KV_BLOCK)
    return [
        Setting("int8", "int8"),
        Setting("mxfp4", "mxfp4"),
        Setting("tiered", "tiered"),
        Setting("attention", "tiered", bits, dataclasses.replace(schedule, memory=Weights(0, 1, 0, 0))),
        Setting("random", "tiered", bits, dataclasses.replace(schedule, memory=Weights(0, 0, 0, 0))),
        Setting("recency", "tiered", 0.0, dataclasses.replace(schedule, recent=window, core_tokens=0)),
    ]


def measure_caches(
    bundle: Path,
    ids: Sequence[int],
    contexts: Sequence[int] = (1024, 2048, 8192),
    most_tokens: int = 8192,
    bits: float = 5.2,
    precision: Precision = "auto",
    threads: int = 0,
    only: Sequence[str] = (),
    report: Callable[[str, str, dict[str, Any]], None] | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure by context and setting: ``bits_per_value``; ``kl`` to f16 KV, ``kl_by_window``, ``agreement``
    with f16 and ``perplexity`` over the last ``TAIL`` positions of each window; ``acceptance`` of drafts
    after some of them, the same text for all settings, ``acceptance_less_f16`` and its standard error,
    ``acceptance_error``.

    Windows of the text ``ids`` are read whole, as many as ``most_tokens`` allow, but one at least; a context
    that is too long for the text or the model is left out. ``only``: names of settings; empty: all.
    ``report`` gets every row once it is known.
    """
    results: dict[str, dict[str, dict[str, Any]]] = {}
    parsed = Bundle.open(bundle)
    for ctx in contexts:
        if not ctx <= min(len(ids), parsed.config.max_positions):
            continue
        count = max(1, min(most_tokens, len(ids)) // ctx)
        pieces = [list(ids[i * ctx : (i + 1) * ctx]) for i in range(count)]
        rows: dict[str, dict[str, Any]] = {}
        exact: _Reading | None = None
        for setting in [Setting("f16", "f16"), *settings(parsed.schedule, ctx, bits)]:
            if only and setting.name not in (*only, "f16"):
                continue
            with _opened(bundle, parsed, setting.schedule) as model:
                found = _read(model, setting, pieces, precision, threads)
            exact = exact or found
            rows[setting.name] = _compared(found, exact, pieces)
            if report is not None:
                report(str(ctx), setting.name, rows[setting.name])
        results[str(ctx)] = rows
    return results


class _Reading(NamedTuple):
    """What a setting made of the windows: their log-probabilities, (drafted, accepted) after each cut."""

    bits: float
    log_probabilities: list[NDArray[np.float64]]
    drafts: NDArray[np.int64]


def _read(
    model: Model, setting: Setting, pieces: list[list[int]], precision: Precision, threads: int
) -> _Reading:
    found, drafts = [], []
    with Engine(
        model,
        ctx=len(pieces[0]),
        threads=threads,
        precision=precision,
        max_seqs=2,
        draft="auto",
        draft_max=_DRAFTED,
        draft_min=_DRAFTED,
        kv=setting.kv,
        kv_budget=setting.budget,
    ) as engine:
        for ids in pieces:
            with having_read(engine, ids[:-TAIL]) as sequence:
                with Timeline(engine, copy_of=sequence) as copy:
                    found.append(log_softmax(copy.logits(ids[-TAIL:])))
                    bits = copy.cache.bits_per_value
                drafts += list(_drafts(engine, sequence, ids[-TAIL:]))
    return _Reading(bits, found, np.array(drafts, np.int64))


def _drafts(engine: Engine, sequence: Timeline, ids: list[int]) -> Iterator[tuple[int, int]]:
    """Count the tokens that are drafted, and accepted, after some of ``ids``, which the sequence gets to
    read; the only token that differs with the setting is the one that is chosen after them."""
    for at in range(0, len(ids) - _CUT, _CUT):
        sequence.prompt(ids[at : at + _CUT])
        length = len(sequence.tokens)
        engine.step([sequence])
        with Timeline(engine, copy_of=sequence, ignore_eos=True) as copy:
            engine.step([copy])
            verified = [draft for draft in copy.drafts if draft.verified]
        yield len(verified), sum(draft.accepted for draft in verified)
        sequence.truncate(length)


def _compared(found: _Reading, exact: _Reading, pieces: list[list[int]]) -> dict[str, Any]:
    windows = []
    for p, q, ids in zip(exact.log_probabilities, found.log_probabilities, pieces, strict=True):
        windows.append(Quality())
        windows[-1].add(p, q, ids[1 - TAIL :])
    drafted, accepted = found.drafts.sum(0).tolist()
    share, exact_share = (r.drafts[:, 1] / np.maximum(r.drafts[:, 0], 1) for r in (found, exact))
    difference = share - exact_share
    return {
        "bits_per_value": found.bits,
        "windows": len(pieces),
        "kl": float(np.mean([window.kl for window in windows])),
        "kl_by_window": [window.kl for window in windows],
        "agreement": float(np.mean([window.agreement for window in windows])),
        "perplexity": float(np.exp(np.mean([window.nll for window in windows]))),
        "acceptance": accepted / drafted if drafted else None,
        "acceptance_less_f16": float(difference.mean()),
        "acceptance_error": float(difference.std(ddof=1) / np.sqrt(len(difference))),
    }


def measure_cache_speed(
    model: Model,
    ids: Sequence[int],
    contexts: Sequence[int] = (512, 2048, 8192),
    precision: Precision = "base",
    threads: int = 0,
    rounds: int = 5,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure by context and format: decode ``tok_per_s`` after that much text, without drafts, and its ratio
    to uniform MXINT8 (``of_int8``); medians over rounds with ``DECODED`` tokens from every format in turn.

    Base precision, where attention takes the largest share of a step, shows the differences best. A context
    that is too long for the text or the model is left out.
    """
    results: dict[str, dict[str, dict[str, float]]] = {}
    for ctx in contexts:
        length = ctx - DECODED - 2
        if len(ids) <= length or ctx > model.info.max_positions:
            continue
        speed: dict[str, list[float]] = {kv: [] for kv in FORMATS}
        with ExitStack() as stack:
            read = {}
            for kv in FORMATS:
                engine = stack.enter_context(
                    Engine(
                        model, ctx=ctx, threads=threads, precision=precision, max_seqs=2, draft="off", kv=kv
                    )
                )
                read[kv] = stack.enter_context(having_read(engine, ids[:length]))
            for _ in range(rounds):
                for kv, sequence in read.items():
                    with Timeline(
                        sequence.engine, max_tokens=DECODED + 1, ignore_eos=True, copy_of=sequence
                    ) as copy:
                        for _ in copy.generate(ids[length : length + 1]):
                            pass
                        speed[kv].append(copy.stats["decode_tok_per_s"])
        results[str(ctx)] = {
            kv: {
                "tok_per_s": float(np.median(found)),
                "of_int8": float(np.median(np.array(found) / np.array(speed["int8"]))),
            }
            for kv, found in speed.items()
        }
    return results


@contextmanager
def _opened(bundle: Path, parsed: Bundle, schedule: Schedule | None) -> Iterator[Model]:
    """Open the bundle, or a copy with another schedule. ``parsed`` is what is in the file."""
    if schedule is None:
        with Model(bundle) as model:
            yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scheduled.mxb"
        with replacing(path) as file:
            writer = BundleWriter(file)
            # In their places: the drafter counts them.
            for name in dict.fromkeys([*parsed.sections, "schedule"]):
                data = schedule.pack() if name == "schedule" else parsed.section(name).tobytes()
                writer.add(name, [data])
            writer.seal()
        with Model(path) as model:
            yield model
