# SPDX-License-Identifier: Apache-2.0
"""The precision consumer: which rows base precision gets wrong, and what looking again repairs.

Everything is teacher-forced: the text is given, and the question at each position is what would come next.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import FRACTIONS, Schedule, Weights
from mxdraft.measure import logistic
from mxdraft.measure.quality import LogProbabilities, Quality, log_softmax
from mxdraft.measure.speculation import in_turns
from mxdraft.runtime import CoreRule, Engine, Model, Timeline, TokenRecord

Documents = Sequence[NDArray[np.integer]]
Progress = Callable[[str], None]
Control = Literal["calibrated", "margin", "oracle", "random"]
SIGNALS = ("confidence", "attention", "history")
_MOST_MIXED = 0.2  # of the fractions measured, the largest that reads less than full precision throughout


class FlipTrace(NamedTuple):
    """Rows of base precision: signals [rows, 3], margin, and whether full precision chooses otherwise."""

    signals: NDArray[np.float64]
    margin: NDArray[np.float64]
    flip: NDArray[np.bool_]


class Outcome(NamedTuple):
    """A rule over some text, compared with full precision. ``core`` and ``due`` are shares of all rows."""

    agreement: float
    kl: float
    core: float
    due: float


def record_flips(model: Model, documents: Documents, threads: int, progress: Progress) -> FlipTrace:
    """Record signals and flips of every row that base precision computes; the doubtful fifth is looked at
    again, so that history is what it will be."""
    signals: list[list[float]] = []
    margins: list[float] = []
    flips: list[bool] = []
    ctx = max(len(document) for document in documents)
    with (
        Engine(model, ctx=ctx, threads=threads, precision="full", draft="off") as full,
        Engine(model, ctx=ctx, threads=threads, core_fraction=0.2, draft="off") as mixed,
    ):
        for number, document in enumerate(documents, 1):
            choice = _logits(full, document, None).argmax(axis=1)
            seen: dict[int, TokenRecord] = {}

            def rule(row: TokenRecord, seen: dict[int, TokenRecord] = seen) -> bool:
                seen[row.position] = row
                return row.confidence > 0.5

            _logits(mixed, document, rule)
            for position, row in seen.items():
                signals.append([getattr(row, name) for name in SIGNALS])
                margins.append(row.margin)
                flips.append(bool(row.base_token != choice[position - 1]))
            progress(f"{number}/{len(documents)} documents, {len(flips)} rows")
    return FlipTrace(np.array(signals), np.array(margins), np.array(flips))


def fit_weights(trace: FlipTrace) -> Weights:
    """Fit the blend of signals whose log-odds are those of a flip."""
    return Weights(*(float(x) for x in logistic.fit(trace.signals, trace.flip)))


def score(weights: Weights, trace: FlipTrace) -> NDArray[np.float64]:
    return np.asarray(trace.signals @ np.array(weights[:3]) + weights.bias)


def calibrated(schedule: Schedule, trace: FlipTrace) -> Schedule:
    """Return ``schedule`` with the precision consumer's weights and thresholds fitted to ``trace``."""
    weights = fit_weights(trace)
    scores = score(weights, trace)
    thresholds = tuple(float(np.quantile(scores, 1 - fraction)) for fraction in FRACTIONS)
    return dataclasses.replace(schedule, precision=weights, thresholds=thresholds)


def identification(weights: Weights, threshold: float, held_out: FlipTrace) -> dict[str, Any]:
    """Report how well the score predicts flips of text that had no part in the fit."""
    scores = score(weights, held_out)
    return {
        "rows": len(scores),
        "flips": float(held_out.flip.mean()),
        "accuracy": logistic.balanced_accuracy(scores > threshold, held_out.flip),
        "auc": logistic.auc(scores, held_out.flip),
        "auc_margin": logistic.auc(-held_out.margin, held_out.flip),
        "reliability": logistic.reliability(logistic.probability(scores), held_out.flip),
    }


def measure_rules(
    model: Model,
    documents: Documents,
    settings: Iterable[tuple[Control, float, int]],
    schedule: Schedule,
    trace: FlipTrace,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    """Compare rules with full precision on the same text: {"base": …, "rules": [{control, fraction, …}]}.

    Settings are (control, core fraction, catch-up). "calibrated" is the engine's own rule; ``trace``, of the
    same text, gives the thresholds of the margin alone. ``repaired`` is the share of base precision's
    disagreements with full precision that are gone; ``bytes`` of weights that a token reads.
    """
    ctx = max(len(document) for document in documents)
    with Engine(model, ctx=ctx, threads=threads, precision="full", draft="off") as full:
        wanted = [log_softmax(_logits(full, document, None)).astype(np.float32) for document in documents]
    with Engine(model, ctx=ctx, threads=threads, precision="base", draft="off") as base_engine:
        base = _score_all(base_engine, documents, wanted, None)
    base_bytes, full_bytes = weight_bytes(Bundle.open(Path(model.info.path)))
    results = []
    for control, fraction, catch_up in settings:
        # With larger fractions the engine takes full precision throughout; then the rule alone decides.
        with Engine(
            model,
            ctx=ctx,
            threads=threads,
            core_fraction=min(fraction, _MOST_MIXED),
            catch_up=catch_up,
            draft="off",
        ) as engine:
            rule = _rule(control, fraction, schedule, trace, wanted, 1 - base.agreement)
            outcome = _score_all(engine, documents, wanted, rule)
        read = (1 - outcome.due) * base_bytes + (outcome.core + outcome.due) * full_bytes
        result = {
            "control": control,
            "fraction": fraction,
            "catch_up": catch_up,
            **outcome._asdict(),
            "repaired": 1 - (1 - outcome.agreement) / (1 - base.agreement),
            "bytes": read,
            "bytes_of_full": read / full_bytes,
        }
        results.append(result)
        progress(
            f"{control:10} {fraction:5.0%} catch-up {catch_up:2}: agreement {outcome.agreement:6.2%}, "
            f"KL {outcome.kl:.4f}, repaired {result['repaired']:6.1%}, "
            f"{result['bytes_of_full']:.2f} of full's bytes"
        )
    return {"base": base._asdict() | {"bytes_of_full": base_bytes / full_bytes}, "rules": results}


def weight_bytes(bundle: Bundle) -> tuple[int, int]:
    """Count the bytes of weights that a pass reads at base and at full precision, which are the same without
    a residual plane."""
    names = [name for section, name in bundle.tensors if section == "target.shared"]
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    base = bundle.sections["target.base"].length + bundle.tensors["target.shared", head].length
    return base, base + (bundle.sections["target.residual"].length if "target.residual" in bundle else 0)


# ---- running text through an engine ----

# Makes the rule for one document: what full precision would choose is known to the oracle.
_Rules = Callable[[int], CoreRule]


def _logits(engine: Engine, document: NDArray[np.integer], rule: CoreRule | None) -> NDArray[np.float32]:
    with Timeline(engine) as sequence:
        sequence.decide_core_with(rule)
        return sequence.logits(document.tolist())


def _score_all(
    engine: Engine, documents: Documents, wanted: Sequence[NDArray[np.float32]], rules: _Rules | None
) -> Outcome:
    quality = Quality()
    asked = core = 0
    for number, document in enumerate(documents):
        decided: dict[int, bool] = {}
        rule = rules(number) if rules else None

        def recording(
            row: TokenRecord, rule: CoreRule | None = rule, decided: dict[int, bool] = decided
        ) -> bool:
            assert rule is not None
            decided[row.position] = rule(row)
            return decided[row.position]

        got = log_softmax(_logits(engine, document, recording if rule else None))
        expected: LogProbabilities = wanted[number].astype(np.float64)
        quality.add(expected, got)
        asked += len(decided)
        core += sum(decided.values())
    rows = quality.positions
    due = (rows - asked) / rows if rules else 0.0
    return Outcome(quality.agreement, quality.kl, core / rows, due)


def _rule(
    control: Control,
    fraction: float,
    schedule: Schedule,
    trace: FlipTrace,
    wanted: Sequence[NDArray[np.float32]],
    flips: float,
) -> _Rules:
    if control == "oracle":  # the rows that differ, as many of them as the fraction allows, by chance
        choices = [w.argmax(axis=1) for w in wanted]
        return lambda number: (
            lambda row: (
                row.base_token != choices[number][row.position - 1]
                and _uniform(number, row.position) * flips < fraction
            )
        )
    if control == "random":
        return lambda number: lambda row: _uniform(number, row.position) < fraction
    if control == "margin":
        doubt = float(np.quantile(trace.signals[:, 0], 1 - fraction))
        return lambda _: lambda row: row.confidence > doubt
    if fraction <= _MOST_MIXED:
        return lambda _: lambda row: row.look == "core"  # what the engine would do
    least = float(np.quantile(score(schedule.precision, trace), 1 - fraction)) if fraction < 1 else -np.inf
    return lambda _: lambda row: row.score > least


def _uniform(number: int, position: int) -> float:
    digest = hashlib.sha256(f"{number} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


# ---- speed ----


def measure_precision_speed(
    model: Model,
    prompts: Sequence[str],
    settings: dict[str, dict[str, Any]],
    tokens: int,
    threads: int,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Measure decode tok/s by setting: median over prompts, every prompt through every setting in turns.

    ``settings``: options of ``Engine`` by name. The names "full" and "full, drafting" are what others are
    compared with, at equal drafting: ``of_full`` is the median of the ratios prompt by prompt.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(model, ctx=512, threads=threads, **chosen))
            for name, chosen in settings.items()
        }
        for engine in engines.values():
            engine.measure_costs()
        for number, made in enumerate(in_turns(model, engines, prompts, tokens), 1):
            for name, (_, stats) in made.items():
                runs[name].append(stats)
            progress(f"{number}/{len(prompts)} prompts")
    result = {}
    for name, of_name in runs.items():
        rival = runs["full, drafting" if name.endswith("drafting") else "full"]
        speed = [s["decode_tok_per_s"] for s in of_name]
        result[name] = {
            "tok_per_s": float(np.median(speed)),
            "of_full": float(
                np.median([s / r["decode_tok_per_s"] for s, r in zip(speed, rival, strict=True)])
            ),
            "tokens_per_step": float(np.mean([s["tokens_per_step"] for s in of_name])),
            "core": float(np.mean([s["core_fraction"]["precision"] for s in of_name])),
            "bytes_per_token": sum(s["bytes_read"] for s in of_name)
            / sum(s["generated_tokens"] - 1 for s in of_name),
        }
    return result
