"""The precision consumer, measured: which rows base precision gets wrong, and what looking again repairs.

Everything is teacher-forced: the text is given, and the question at each position is what would come next.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft import logistic
from mxdraft.bundle import Bundle
from mxdraft.evaluate import LogProbabilities, log_softmax
from mxdraft.runtime import Engine, Model
from mxdraft.runtime import Sequence as RuntimeSequence
from mxdraft.runtime.engine import CoreRule, TokenRecord
from mxdraft.schedule import FRACTIONS, Schedule, Weights

Documents = Sequence[NDArray[np.integer]]
Progress = Callable[[str], None]
Control = Literal["calibrated", "margin", "oracle", "random"]
SIGNALS = ("confidence", "attention", "history")


class Trace(NamedTuple):
    """Rows of base precision: signals [rows, 3], margin, and whether full precision chooses otherwise."""

    signals: NDArray[np.float64]
    margin: NDArray[np.float64]
    flip: NDArray[np.bool_]


class Outcome(NamedTuple):
    """A rule over some text, beside full precision. ``core`` and ``due`` are shares of all rows."""

    agreement: float
    kl: float
    core: float
    due: float


def record_trace(model: Model, documents: Documents, threads: int, progress: Progress) -> Trace:
    """Signals and flips of every row that base precision computes; the doubtful fifth is looked at again, so
    that history is what it will be."""
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
    return Trace(np.array(signals), np.array(margins), np.array(flips))


def fit_weights(trace: Trace) -> Weights:
    """The blend of signals whose log-odds are those of a flip."""
    return Weights(*(float(x) for x in logistic.fit(trace.signals, trace.flip)))


def score(weights: Weights, trace: Trace) -> NDArray[np.float64]:
    return np.asarray(trace.signals @ np.array(weights[:3]) + weights.bias)


def calibrated(schedule: Schedule, trace: Trace) -> Schedule:
    """The schedule with weights and thresholds of the precision consumer from a trace."""
    weights = fit_weights(trace)
    scores = score(weights, trace)
    thresholds = tuple(float(np.quantile(scores, 1 - fraction)) for fraction in FRACTIONS)
    return dataclasses.replace(schedule, precision=weights, thresholds=thresholds)


def identification(weights: Weights, threshold: float, held_out: Trace) -> dict[str, object]:
    """How well the score predicts flips of text that had no part in the fit."""
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
    trace: Trace,
    threads: int,
    progress: Progress,
) -> dict[str, object]:
    """Rules beside full precision on the same text: {"base": …, "rules": [{control, fraction, catch_up, …}]}.

    Settings are (control, core fraction, catch-up); ``trace`` is what the schedule was calibrated with, and
    gives the thresholds of the margin alone. ``repaired`` is the share of base precision's disagreements
    with full precision that are gone; ``bytes`` of weights that a token reads.
    """
    ctx = max(len(document) for document in documents)
    with Engine(model, ctx=ctx, threads=threads, precision="full", draft="off") as full:
        wanted = [log_softmax(_logits(full, document, None)).astype(np.float32) for document in documents]
    with Engine(model, ctx=ctx, threads=threads, precision="base", draft="off") as base_engine:
        base = _score_all(base_engine, documents, wanted, None)
    base_bytes, full_bytes = weight_bytes(model)
    results = []
    for control, fraction, catch_up in settings:
        with Engine(
            model, ctx=ctx, threads=threads, core_fraction=min(fraction, 0.3), catch_up=catch_up, draft="off"
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


def weight_bytes(model: Model) -> tuple[int, int]:
    """Bytes of weights that a pass reads at base and at full precision; the same without a residual plane."""
    bundle = Bundle.open(Path(model.info.path))
    names = [name for section, name in bundle.tensors if section == "target.shared"]
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    base = bundle.sections["target.base"].length + bundle.tensors["target.shared", head].length
    return base, base + (bundle.sections["target.residual"].length if "target.residual" in bundle else 0)


# ---- running text through an engine ----

# Makes the rule for one document: what full precision would choose is known to the oracle.
_Rules = Callable[[int], CoreRule]


def _logits(engine: Engine, document: NDArray[np.integer], rule: CoreRule | None) -> NDArray[np.float32]:
    with RuntimeSequence(engine) as sequence:
        sequence.decide_core_with(rule)
        return sequence.logits(document.tolist())


def _score_all(
    engine: Engine, documents: Documents, wanted: Sequence[NDArray[np.float32]], rules: _Rules | None
) -> Outcome:
    agreed = kl = 0.0
    rows = asked = core = 0
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
        agreed += float((expected.argmax(axis=1) == got.argmax(axis=1)).sum())
        kl += float((np.exp(expected) * (expected - got)).sum())
        rows += len(document)
        asked += len(decided)
        core += sum(decided.values())
    due = (rows - asked) / rows if rules else 0.0
    return Outcome(agreed / rows, kl / rows, core / rows, due)


def _rule(
    control: Control,
    fraction: float,
    schedule: Schedule,
    trace: Trace,
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
    threshold = schedule.threshold(fraction)
    weights = schedule.precision

    def calibrated_rule(row: TokenRecord) -> bool:
        blend = weights.alpha * row.confidence + weights.beta * row.attention + weights.gamma * row.history
        return blend + weights.bias > threshold

    return lambda _: calibrated_rule


def _uniform(number: int, position: int) -> float:
    digest = hashlib.sha256(f"{number} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64
