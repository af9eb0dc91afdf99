# SPDX-License-Identifier: Apache-2.0
"""The whole: what ``mxdraft evaluate origin`` and ``mxdraft calibrate`` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle.ngrams import read_documents
from mxdraft.bundle.schedule import FRACTIONS, Schedule
from mxdraft.errors import RefusedError
from mxdraft.files import read_file
from mxdraft.measure import logistic
from mxdraft.measure.origin.compute import identify, measure_drafting
from mxdraft.measure.origin.memory import measure_cache_speed, measure_caches
from mxdraft.measure.origin.precision import (
    Control,
    FlipTrace,
    Progress,
    calibrated,
    identification,
    measure_precision_speed,
    measure_rules,
    record_flips,
    score,
)
from mxdraft.measure.origin.together import measure_together
from mxdraft.measure.prompts import PROMPTS
from mxdraft.runtime import Engine, Model, Timeline

Document = NDArray[np.int64]

_WINDOW = 384
_TEXT_LIMIT = 1 << 30  # bytes of a file
_LONGEST = 8192  # tokens that the longest context needs
_QUICK_TOGETHER: dict[str, Any] = {"contexts": (512,), "concurrencies": (1, 48), "tokens": 16}
_QUICK_CACHE: dict[str, Any] = {"contexts": (512,), "most_tokens": 512, "only": ("int8", "tiered", "recency")}


def own_text(model: Model, prompts: Sequence[str], tokens: int, threads: int) -> list[Document]:
    """Write questions and the answers that full precision gives: what the model is really asked to write."""
    documents = []
    with Engine(model, ctx=_WINDOW, threads=threads, precision="full") as engine:
        for prompt in prompts:
            ids = model.chat([("user", prompt)])
            with Timeline(engine, max_tokens=tokens) as sequence:
                for _ in sequence.generate(ids[: _WINDOW - 1]):
                    pass
                documents.append(np.array(sequence.tokens, np.int64))
    return documents


def read_text(model: Model, path: Path, tokens: int) -> list[Document]:
    """Read windows of a UTF-8 text, or the documents of a training text (.npz); ``tokens`` in all, at most.

    Raises RefusedError if there is nothing in it, TransferError if it cannot be read.
    """
    if path.suffix == ".npz":
        documents = [ids.astype(np.int64)[:_WINDOW] for ids in read_documents(path, model.info.vocab)]
        order = np.random.default_rng(0).permutation(len(documents))
        chosen = [documents[i] for i in order]
    else:
        ids = np.array(model.encode(read_file(path, _TEXT_LIMIT)), np.int64)
        chosen = [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
    kept: list[Document] = []
    while len(kept) < len(chosen) and sum(map(len, kept)) < tokens:
        kept.append(chosen[len(kept)])
    if not kept:
        raise RefusedError(f"{path}: no text in it")
    return kept


def calibrate(
    model: Model, documents: Sequence[Document], schedule: Schedule, threads: int, progress: Progress
) -> tuple[Schedule, dict[str, Any], FlipTrace]:
    """Fit the precision consumer to two thirds of the documents; returns the schedule, how well it does on
    the others, and what it was fitted to."""
    if len(documents) < 3:
        raise RefusedError("too little text: three documents at least, one of them to check the fit with")
    held_out = documents[2::3]
    fitted = [document for i, document in enumerate(documents) if i % 3 != 2]
    trace = record_flips(model, fitted, threads, progress)
    unseen = record_flips(model, held_out, threads, progress)
    if trace.flip.all() or not trace.flip.any():
        raise RefusedError("base and full precision never differ in this text, or always: nothing to fit")
    result = calibrated(schedule, trace)
    threshold = logistic.best_threshold(score(result.precision, trace), trace.flip)
    return result, identification(result.precision, threshold, unseen), trace


def rule_settings(quick: bool) -> list[tuple[Control, float, int]]:
    """List the rules to measure: controls at equal fractions, the calibrated one by fraction and catch-up."""
    if quick:
        return [("calibrated", 0.2, 16), ("random", 0.2, 16)]
    fractions = (0.05, 0.1, 0.2, 0.5)
    controls: tuple[Control, ...] = ("margin", "random", "oracle")
    return [
        *(
            ("calibrated", fraction, catch_up)
            for catch_up in (16, 8, 32)
            for fraction in (0.0, *fractions, 1.0)
        ),
        *((control, fraction, 16) for control in controls for fraction in fractions),
    ]


def speed_settings(fractions: Sequence[float]) -> dict[str, dict[str, Any]]:
    """List the engines to compare: base, full and mixed, each plain and drafting."""
    settings: dict[str, dict[str, Any]] = {}
    for drafting, draft in (("", "off"), (", drafting", "auto")):
        settings[f"full{drafting}"] = {"precision": "full", "draft": draft}
        settings[f"base{drafting}"] = {"precision": "base", "draft": draft}
        for fraction in fractions:
            settings[f"auto {fraction:.0%}{drafting}"] = {"core_fraction": fraction, "draft": draft}
    return settings


def evaluate_precision(
    model: Model,
    documents: Sequence[Document],
    schedule: Schedule,
    quick: bool,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    """Measure repair, bytes and speed of mixed precision with the bundle's schedule, and how well flips are
    foretold."""
    trace = record_flips(model, documents, threads, progress)
    half = np.arange(len(trace.flip)) < len(trace.flip) // 2  # settles above which score a flip is foretold
    threshold = logistic.best_threshold(score(schedule.precision, trace)[half], trace.flip[half])
    predicted = identification(
        schedule.precision, threshold, FlipTrace(trace.signals[~half], trace.margin[~half], trace.flip[~half])
    )
    rules = measure_rules(model, documents, rule_settings(quick), schedule, trace, threads, progress)
    at_20 = next(
        r for r in rules["rules"] if (r["control"], r["fraction"], r["catch_up"]) == ("calibrated", 0.2, 16)
    )
    prompts, tokens = (PROMPTS[:2], 32) if quick else (PROMPTS[:12], 96)
    fractions = (0.2,) if quick else (0.0, 0.05, 0.1, 0.2)
    speed = measure_precision_speed(model, prompts, speed_settings(fractions), tokens, threads, progress)
    return {
        "repaired_at_20pct": at_20["repaired"],
        "bytes_of_full_at_20pct": at_20["bytes_of_full"],
        "speed_of_full_at_20pct": speed["auto 20%"]["of_full"],
        "speed_of_full_at_20pct_drafting": speed["auto 20%, drafting"]["of_full"],
        **rules,
        "speed": speed,
        "identification": predicted,
        "fractions": FRACTIONS,
    }


def evaluate_compute(
    model: Model, prompts: Sequence[list[int]], quick: bool, threads: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure drafting by number of sequences, and how well acceptance is foretold."""
    concurrencies, tokens = ((1, 48), 24) if quick else ((1, 8, 48), 96)
    compute = measure_drafting(
        model, prompts, tokens, 512, threads, concurrencies=concurrencies, rounds=1, progress=progress
    )
    progress("drafts judged")
    found = identify(model, prompts, tokens, 512, threads)
    return compute, found


def evaluate_origin(
    model: Model,
    schedule: Schedule,
    text: Path | None,
    tokens: int,
    quick: bool,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    """Measure everything that ``mxdraft evaluate origin`` reports (keys: docs/cli.md).

    Raises RefusedError if the bundle has no residual plane.
    """
    if not model.info.has_residual:
        raise RefusedError(f"{model.info.path} has no residual plane: there is no precision to give")
    if text is None:
        progress("text: the model's own answers")
        documents = own_text(model, PROMPTS[: 8 if quick else 24], 160, threads)
    else:
        documents = read_text(model, text, min(tokens, 1536) if quick else tokens)
    precision = evaluate_precision(model, documents, schedule, quick, threads, progress)
    flips = precision.pop("identification")
    prompts = [model.chat([("user", prompt)]) for prompt in PROMPTS]
    compute, acceptance = evaluate_compute(model, prompts, quick, threads, progress)
    if text is not None:
        documents = read_text(model, text, _LONGEST)
    ids = [token for document in documents for token in document.tolist()]
    together = measure_together(
        model,
        ids,
        prompts,
        **_QUICK_TOGETHER if quick else {},
        threads=threads,
        progress=progress,
    )
    cache = measure_caches(
        Path(model.info.path),
        ids,
        **_QUICK_CACHE if quick else {},
        threads=threads,
        report=lambda ctx, name, row: progress(f"KV {name} at {ctx}: KL {row['kl']:.4f}"),
    )
    cache_speed = measure_cache_speed(model, ids, (512,) if quick else (512, 2048, 8192), threads=threads)
    tiers = [by_setting["tiered"] for by_setting in cache.values()]
    many = compute["48"]
    fixed = max(many[name]["busy_tok_per_s"] for name in many if name.startswith("fixed"))
    return {
        "precision": precision,
        "batch48": {
            "acceptance": many["auto"]["acceptance"],
            "of_none": many["auto"]["busy_tok_per_s"] / many["off"]["busy_tok_per_s"],
            "of_fixed": many["auto"]["busy_tok_per_s"] / fixed,
        },
        "memory": {
            "tiered_bits_per_value": tiers[-1]["bits_per_value"] if tiers else None,
            "tiered_kl": tiers[-1]["kl"] if tiers else None,
            "contexts": cache,
            "speed": cache_speed,
        },
        "identification": {
            **{key: acceptance[key] for key in ("accuracy", "auc", "us_per_step", "reliability", "examples")},
            "flips": flips,
        },
        "compute": compute,
        "together": together,
    }
